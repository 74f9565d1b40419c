//! How long the checks of a schedule take: training steps of a large model on many ranks, and frames of many tasks.

mod example;
mod median;

use std::hint::black_box;

use ithaca::ir::schedule::{self, Schedule};
use ithaca::ir::verify;
use ithaca::passes::cluster::Cluster;
use ithaca::passes::compile::compile;
use ithaca::passes::differentiate::Training;
use ithaca::passes::import::{Mode, Workload, program};
use ithaca::passes::shard::{ShardOptions, Zero, parse_mesh};

/// Llama-3.1-405B, a training step, on up to 16 384 ranks.
fn models() {
    let config = example::config("llama-3.1-405b");
    let cluster = Cluster::named("dgx-h100").expect("a built-in profile");
    for (strategy, mesh, stages, micro_batches) in [
        ("data-parallel+ulysses+megatron-tp-sp", "dp=8,ulysses=16,tp=8", 1, 1),
        ("data-parallel+ring+megatron-tp-sp", "dp=16,ring=64,tp=8", 1, 1),
        ("data-parallel+ulysses+megatron-tp-sp", "dp=128,ulysses=16,tp=8", 1, 1),
        ("data-parallel+pipeline+megatron-tp-sp", "dp=128,pp=16,tp=8", 16, 32),
    ] {
        let training = Training { stages, micro_batches, ..Training::default() };
        let batch = 128 * micro_batches;
        let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(batch, 131_072) };
        let module = program(&config, "llama-3.1-405b", &workload).expect("imports");
        let options = ShardOptions {
            zero: Zero::Parameters,
            ..ShardOptions::new(strategy, parse_mesh(mesh).expect("a mesh"))
        };
        let compiled = match compile(&module, &options, &cluster) {
            Ok(compiled) => compiled,
            Err(refusal) => panic!("{strategy} {mesh}: {}", refusal[0]),
        };
        let tasks: usize = compiled.schedule.frames.values().map(|frame| frame.tasks.len()).sum();
        let program = verify::verify(&compiled.per_rank).expect("compiled programs are sound");
        median::report(&format!("verify llama-3.1-405b training, {mesh}, {tasks} tasks"), || {
            schedule::verify(black_box(&compiled.schedule)).expect("sound");
            schedule::verify_meaning(&compiled.schedule, program).expect("the same");
        });
    }
}

/// Frames in which kernels and collectives take turns.
fn frames() {
    for n in [1_000, 10_000, 100_000] {
        let schedule = frame(n);
        median::report(&format!("verify {n} tasks"), || {
            schedule::verify(black_box(&schedule)).expect("sound");
        });
    }
}

/// A frame of `n` tasks in threes: a kernel, a gather of what it made, and a kernel on what was gathered, over sixteen
/// places in memory, on 16 384 ranks.
fn frame(n: usize) -> Schedule {
    let (part, whole) = ("f32[s@x]", "f32[s]");
    let (mut buffers, mut tasks) = (String::new(), String::new());
    for i in 0..n / 3 {
        let at = i % 16 * 8192;
        let (made, gathered) = (2 * i, 2 * i + 1);
        buffers += &format!("buffer $a{i} : {part} at {at}\nbuffer $b{i} : {whole} at {}\n", at + 2048);
        buffers += &format!("buffer $c{i} : {whole} at {}\n", at + 4096);
        tasks += &format!("compute: scale $x -> $a{i} {{factor=0.5}} record(e{made})\n");
        tasks +=
            &format!("comm: exchange $a{i} -> $b{i} all_gather {{axis=x, dim=s}} from {part} to {whole} ");
        tasks += &format!("wait(e{made}) record(e{gathered})\n");
        tasks += &format!("compute: scale $b{i} -> $c{i} {{factor=0.5}} wait(e{gathered})\n");
    }
    let (last, n_events) = (n / 3 - 1, n / 3 * 2);
    let text = format!(
        "ithaca 1 schedule\nmodel \"threes\"\nmesh dp=2048,x=8\ndim s = 512\n\n\
         frame @main(0) bytes {} events {n_events} {{\nbuffer $x : {part} input {{name=\"x\"}}\n{buffers}{tasks}\
         return y = $c{last}\n}}\n",
        16 * 8192
    );
    schedule::parse(&text).expect("a schedule")
}

fn main() {
    models();
    frames();
}
