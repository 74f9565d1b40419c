//! Every strategy of the registry, forward and in training, and every way to distribute attention, as CUDA that nvcc
//! compiles.

use std::process::Command;

use ithaca_ir::mesh::Mesh;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::text;
use ithaca_ir::verify::verify;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::fuse::{Fusion, Messages};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::pipeline;
use ithaca_passes::shard::{STRATEGIES, ShardOptions, Strategy, Zero, parse_mesh};
use serde_json::{Value, json};

use super::homes;
use super::together::{self, Program};
use crate::filetests::files;
use crate::tier;

/// A small model of each kind, in bf16.
fn configs() -> Vec<Value> {
    let of = |model_type: &str, more: &[(&str, Value)]| {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "vocab_size": 64,
            "torch_dtype": "bfloat16",
        });
        for (key, value) in more {
            config[*key] = value.clone();
        }
        config
    };
    vec![
        of("llama", &[]),
        of("mistral", &[("sliding_window", json!(8))]),
        of("mixtral", &[("num_local_experts", json!(4)), ("num_experts_per_tok", json!(2))]),
    ]
}

/// The schedules of a strategy, of the first model that it suits: forward, unless only a step has stages, and in training.
fn of_strategy(strategy: &dyn Strategy, fusion: Fusion) -> Vec<(String, Schedule)> {
    let mesh = Mesh::new(strategy.axes().iter().map(|&axis| (axis, 2)));
    let options = ShardOptions { fusion, ..ShardOptions::new(strategy.name(), mesh) };
    let is_staged = strategy.name() == "pipeline";
    let training = Training {
        stages: if is_staged { 2 } else { 1 },
        micro_batches: if is_staged { 2 } else { 1 },
        ..Training::default()
    };
    let forward = Workload::prefill(4, 64);
    let training = Workload { mode: Mode::Train, training, ..forward.clone() };
    let workloads = [("forward", forward), ("training", training)];
    let first = |workload: &Workload| {
        let modules = configs().into_iter().filter_map(|config| program(&config, "model", workload).ok());
        modules.map(|module| compile(&module, &options, &Volume)).find_map(Result::ok)
    };
    let workloads = workloads.into_iter().filter(|(mode, _)| !is_staged || *mode == "training");
    workloads
        .filter_map(|(mode, workload)| {
            Some((format!("{} {mode}", strategy.name()), first(&workload)?.schedule))
        })
        .collect()
}

/// A step whose layers gather weights for the next and reduce gradients of the one before.
fn prefetched() -> Schedule {
    let training = Training { recompute: Recompute::FULL, ..Training::default() };
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(2, 64) };
    let mut config = configs().swap_remove(0);
    config["num_hidden_layers"] = json!(5);
    let options = ShardOptions {
        zero: Zero::Parameters,
        fusion: Fusion::parse("prefetch+pack").unwrap(),
        ..ShardOptions::new("ulysses", parse_mesh("ulysses=2").unwrap())
    };
    compile(&program(&config, "model", &workload).unwrap(), &options, &Volume).unwrap().schedule
}

/// The schedules of the ways to distribute attention.
fn of_files() -> Vec<(String, Schedule)> {
    let mut schedules = Vec::new();
    for (path, source) in files("passes") {
        let Some(stages) = source.lines().next().and_then(|line| line.strip_prefix("// ")) else { continue };
        let passes = pipeline::parse(stages).unwrap();
        let program = text::parse(&source).unwrap();
        let ranks = run_passes(program, &passes, &mut Context::new(&Volume), &mut Unwatched).unwrap();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        schedules.push((name, lower(verify(&ranks).unwrap()).unwrap()));
    }
    schedules
}

#[test]
fn nvcc_compiles_every_strategy_forward_and_training() {
    if !tier::is_full_or_says_so() {
        return;
    }
    let mut schedules = Vec::new();
    let of_files = of_files();
    for strategy in STRATEGIES {
        let found = of_strategy(*strategy, Fusion::NONE);
        let by_itself = of_files.iter().any(|(name, _)| name == strategy.name());
        assert!(by_itself || !found.is_empty(), "nothing has the strategy {}", strategy.name());
        schedules.extend(found);
    }
    let trained = schedules.iter().filter(|(name, _)| name.ends_with("training")).count();
    assert!(trained + 4 > STRATEGIES.len(), "only {trained} strategies in training");
    schedules.extend(of_files);
    // Tensors that lie in wires.
    for strategy in
        STRATEGIES.iter().filter(|s| ["ulysses", "usp", "megatron-cp-allgather"].contains(&s.name()))
    {
        for messages in [Messages::Packed, Messages::Chunked(2)] {
            schedules.extend(of_strategy(*strategy, Fusion { messages, ..Fusion::NONE }.folded()));
        }
    }
    schedules.push(("layers for their neighbours".to_owned(), prefetched()));
    let out = tempfile::tempdir().unwrap();
    let programs =
        schedules.iter().map(|(name, schedule)| Program { name, ranks: [schedule].into(), reference: None });
    together::write(&programs.collect::<Vec<_>>(), out.path());
    let Some((cuda, nccl)) = homes() else { return };
    let mut nvcc = Command::new(cuda.join("bin/nvcc"));
    nvcc.args([
        "-std=c++17",
        "-I.",
        "-gencode",
        "arch=compute_90a,code=sm_90a",
        "--cuda",
        "-o",
        "main.ii",
        "main.cu",
    ]);
    quietly(nvcc.arg("-I").arg(nccl.join("include")).current_dir(out.path()));
    // The host's compiler makes no code, for nobody runs it; other tests compile and link whole programs.
    let mut host = Command::new("g++");
    quietly(
        host.args(["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "main.ii"]).current_dir(out.path()),
    );
}

/// Runs a compiler, which has nothing to say.
fn quietly(compiler: &mut Command) {
    let run = compiler.output().unwrap();
    let text = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && !text.contains("warning"), "{compiler:?}: {text}");
}
