//! Several steps of emitted programs on the host: outputs of the last one, and state, against the oracle.

use ithaca_ir::Module;
use ithaca_ir::ops::AdamW;
use ithaca_ir::verify::verify;
use ithaca_kernels::store::{Layered, RandomTensors, TensorSource, Tensors};
use ithaca_kernels::{Outputs, Storage, oracle};
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{ADAMW, Offload, Recompute, Training};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::lower::lower;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};

use super::together::{self, Case, Sources};
use super::{can_run, can_run_in_full};
use crate::slow_links::SlowLinks;
use crate::steps::cases;
use crate::training::sharded::{deep_llama, per_rank, step};

const STEPS: usize = 3;

/// Of weights and inputs.
const SEED: u64 = 11;

#[test]
fn loops_with_stacks_and_states_over_steps() {
    if !can_run() {
        return;
    }
    // Gradients that are rounding alone make no whole steps.
    let optimizer = Some(AdamW { eps: 1e-2, ..ADAMW });
    let training = Training { offload: Offload::Optimizer, optimizer, ..Training::default() };
    let whole = step(&deep_llama(2), training);
    let options = ShardOptions {
        zero: Zero::Gradients,
        ..ShardOptions::new("data-parallel", parse_mesh("dp=2").unwrap())
    };
    let ranks = per_rank(&whole, &options).unwrap();
    let offloaded = ("offloaded".to_owned(), whole, ranks);
    check(&cases().into_iter().chain([offloaded]).collect::<Vec<_>>());
}

#[test]
fn groups_of_layers_and_parts_of_the_loss_over_steps() {
    if !can_run_in_full() {
        return;
    }
    let training =
        Training { recompute: Recompute::Full { every: 2 }, loss_chunks: 2, ..Training::default() };
    let whole = step(&deep_llama(5), training);
    let options = ShardOptions::new("ulysses", parse_mesh("ulysses=2").unwrap());
    let ranks = per_rank(&whole, &options).unwrap();
    check(&[("groups_and_parts".to_owned(), whole, ranks)]);
}

#[test]
fn layers_that_work_for_their_neighbours_over_steps() {
    if !can_run_in_full() {
        return;
    }
    let training = Training { recompute: Recompute::FULL, micro_batches: 2, ..Training::default() };
    let whole = step(&deep_llama(4), training);
    let options = ShardOptions {
        zero: Zero::Parameters,
        fusion: Fusion::parse("prefetch+pack").unwrap(),
        ..ShardOptions::new("ulysses", parse_mesh("ulysses=2").unwrap())
    };
    let ranks = compile(&whole, &options, &SlowLinks).unwrap().per_rank.into_module();
    for name in ["block.backward.ahead.turn", "block.backward.assign", "block.shards"] {
        assert!(ranks.function(name).is_some(), "there is no @{name}");
    }
    check(&[("neighbours".to_owned(), whole, ranks)]);
}

/// Whether the emitted programs of per-rank modules, each behind the whole one, make its steps.
fn check(modules: &[(String, Module, Module)]) {
    let cases = modules.iter().map(|(name, whole, ranks)| {
        let sources = RandomTensors::of_module(whole, SEED);
        let [whole, ranks] = [whole, ranks].map(|module| lower(verify(module).unwrap()).unwrap());
        let name = name.clone();
        Case { name, schedule: ranks, reference: Some(whole), sources: Sources::of(&sources), steps: STEPS }
    });
    let (_out, found) = together::run(&cases.collect::<Vec<_>>());
    for ((name, whole, _), found) in modules.iter().zip(&found) {
        // Sums over steps grow, and their rounding errors with them.
        for (output, expected) in &expected(whole) {
            let found = found.read(output).unwrap();
            assert_eq!(found.shape, expected.shape, "{name}: {output}");
            let fits = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
            let close = found.data.iter().zip(&expected.data).all(fits);
            assert!(close, "{name}: {output} is {found:?}, not {expected:?}");
        }
    }
}

/// The results of several steps of `whole`.
fn expected(whole: &Module) -> Outputs<f64> {
    let sources = RandomTensors::of_module(whole, SEED);
    let (mut kept, mut outputs) = (Tensors::new(), Outputs::new());
    for _ in 0..STEPS {
        let source = Layered::new(&kept, &sources);
        let results = oracle::step::<f64>(whole, &source, &sources, Storage::Wide).unwrap();
        kept = Tensors::from(&results.kept);
        outputs = results.outputs;
        outputs.extend(results.kept);
    }
    outputs
}
