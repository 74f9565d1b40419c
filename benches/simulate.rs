//! How long a step of thousands of ranks takes to simulate.

mod example;
mod median;

use std::hint::black_box;

use ithaca::ir::schedule::Schedule;
use ithaca::passes::cluster::Cluster;
use ithaca::passes::compile::compile;
use ithaca::passes::differentiate::{Recompute, Training};
use ithaca::passes::import::{Mode, Workload, program};
use ithaca::passes::shard::{ShardOptions, parse_mesh};
use ithaca::passes::simulate::discrete;

/// A training step of Llama-3.1-405B on 16 384 GPUs, in 16 stages and 32 micro-batches.
fn schedule(cluster: &Cluster) -> Schedule {
    let config = example::config("llama-3.1-405b");
    let training = Training {
        stages: 16,
        micro_batches: 32,
        recompute: Recompute::Full { every: 1 },
        ..Training::default()
    };
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(16 * 32, 8192) };
    let module = program(&config, "llama-3.1-405b", &workload).expect("imports");
    let mesh = parse_mesh("dp=16,pp=16,ulysses=8,tp=8").expect("a mesh");
    let options = ShardOptions::new("data-parallel+pipeline+ulysses+megatron-tp-sp", mesh);
    compile(&module, &options, cluster).expect("compiles").schedule
}

fn main() {
    for name in ["dgx-h100", "dgx-a100-80gb"] {
        let cluster = Cluster::named(name).expect("a built-in profile");
        let schedule = schedule(&cluster);
        median::report(&format!("simulate llama-3.1-405b on 16384 ranks, {name}"), || {
            let times = discrete::Record::Times;
            discrete::simulate(&cluster, black_box(&schedule), times).expect("few ranks differ")
        });
    }
}
