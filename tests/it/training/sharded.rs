//! Sharding commutes with differentiation: loss, gradients, moments and new weights of a step on virtual ranks are those of
//! the whole step, in double precision, under every strategy.

use ithaca_ir::{Module, diagnostic};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Storage, compare, oracle};
use ithaca_passes::compile::passes;
use ithaca_passes::differentiate::{Offload, Recompute, Training};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::{HeadSplit, SequenceFit, ShardOptions, Zero, parse_mesh};
use serde_json::{Value, json};

/// What double precision leaves of the order of summation.
const EXACT: f64 = 1e-9;

/// A model of the llama family, with `heads` query heads over `kv_heads`.
pub(crate) fn llama(heads: u64, kv_heads: u64, tied: bool) -> Value {
    json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": tied,
    })
}

/// The same with so many layers, and a vocabulary beside which they are small.
pub(crate) fn deep_llama(layers: u64) -> Value {
    let mut config = llama(4, 2, false);
    config["num_hidden_layers"] = json!(layers);
    config["vocab_size"] = json!(128);
    config
}

/// A training step on four sequences of 16 tokens.
pub(crate) fn step(config: &Value, training: Training) -> Module {
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(4, 16) };
    program(config, "m", &workload).unwrap_or_else(|d| panic!("{}", diagnostic::render(&d, None)))
}

/// What every rank runs.
pub(crate) fn per_rank(module: &Module, options: &ShardOptions) -> Result<Module, String> {
    let mut cx = Context::new(&Volume);
    run_passes(module.clone(), &passes(&Registry::default(), options), &mut cx, &mut Unwatched)
        .map_err(|d| diagnostic::render(&d, None))
}

/// What of a step differs from the whole one.
fn differences(module: &Module, options: &ShardOptions) -> Vec<String> {
    let named = |what: String| format!("{} {} zero={}: {what}", options.strategy, options.mesh, options.zero);
    let ranks = match per_rank(module, options) {
        Ok(ranks) => ranks,
        Err(refusal) => return vec![named(refusal)],
    };
    let random = RandomTensors::of_module(module, 7);
    let whole = oracle::step::<f64>(module, &random, &random, Storage::Wide).unwrap();
    let found = match oracle::step::<f64>(&ranks, &random, &random, Storage::Wide) {
        Ok(found) => found,
        Err(error) => return vec![named(error.to_string())],
    };
    assert!(whole.kept.len() > 8, "a step keeps gradients");
    let outputs = compare::outputs(&found.outputs, &whole.outputs);
    let kept = compare::outputs(&found.kept, &whole.kept);
    let wrong = outputs.iter().chain(&kept).filter(|c| !c.verdict.within(EXACT));
    wrong.map(|c| named(format!("{c:?}"))).collect()
}

fn options(strategy: &str, mesh: &str, zero: Zero) -> ShardOptions {
    ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) }
}

/// Strategies with meshes of at most eight ranks.
pub(crate) const LAYOUTS: [(&str, &str); 18] = [
    ("data-parallel", "dp=2"),
    ("ulysses", "ulysses=2"),
    ("ulysses", "ulysses=4"),
    ("ring", "ring=4"),
    ("usp", "ring=2,ulysses=2"),
    ("usp", "ring=2,ulysses=4"),
    ("megatron-tp", "tp=2"),
    ("megatron-tp", "tp=4"),
    ("megatron-tp-sp", "tp=2"),
    ("megatron-tp-sp", "tp=4"),
    ("megatron-cp-allgather", "cp=4"),
    ("rsa", "ring=2"),
    ("dist-flash", "ring=4"),
    ("pass-q", "ring=2"),
    ("ulysses+megatron-tp", "tp=2,ulysses=2"),
    ("ulysses+megatron-tp-sp", "ulysses=2,tp=2"),
    ("data-parallel+ulysses", "dp=2,ulysses=2"),
    ("data-parallel+ring+megatron-tp-sp", "dp=2,ring=2,tp=2"),
];

#[test]
fn a_step_is_the_whole_step_under_every_strategy() {
    let module = step(&llama(4, 2, true), Training { clip: Some(0.1), ..Training::default() });
    let mut wrong = Vec::new();
    for (strategy, mesh) in LAYOUTS {
        wrong.extend(differences(&module, &options(strategy, mesh, Zero::Off)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_stage_of_zero_makes_the_same_step() {
    let offload = Offload::Optimizer;
    let module = step(&llama(4, 4, false), Training { clip: Some(0.1), offload, ..Training::default() });
    let mut wrong = Vec::new();
    for zero in Zero::ALL.into_iter().chain([0, 16 * 16].map(Zero::ParametersAbove)) {
        for (strategy, mesh) in [
            ("data-parallel", "dp=4"),
            ("data-parallel+ulysses", "dp=2,ulysses=2"),
            ("ring+megatron-tp-sp", "ring=2,tp=2"),
            ("data-parallel+ulysses+megatron-tp", "dp=2,ulysses=2,tp=2"),
        ] {
            wrong.extend(differences(&module, &options(strategy, mesh, zero)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_is_computed_again_and_micro_batches_lay_out_too() {
    let mut wrong = Vec::new();
    for recompute in Recompute::ALL {
        for micro_batches in [1, 2] {
            let training = Training { recompute, micro_batches, ..Training::default() };
            let module = step(&llama(4, 2, false), training);
            for (strategy, mesh) in
                [("data-parallel+ulysses", "dp=2,ulysses=4"), ("ring", "ring=2"), ("megatron-tp-sp", "tp=2")]
            {
                wrong.extend(differences(&module, &options(strategy, mesh, Zero::Parameters)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn padding_uneven_heads_and_layers_of_their_own_make_the_same_step() {
    let mut wrong = Vec::new();
    let short = Workload { mode: Mode::Train, ..Workload::prefill(2, 13) };
    let module = program(&llama(4, 2, false), "m", &short).unwrap();
    for (strategy, mesh) in [("ulysses", "ulysses=2"), ("ring", "ring=2"), ("megatron-tp-sp", "tp=2")] {
        let padded = ShardOptions { sequence: SequenceFit::Pad, ..options(strategy, mesh, Zero::Gradients) };
        wrong.extend(differences(&module, &padded));
    }
    let module = step(&llama(6, 3, false), Training::default());
    for heads in [HeadSplit::Uneven, HeadSplit::Pad] {
        for (strategy, mesh) in [("ulysses", "ulysses=2"), ("megatron-tp", "tp=2")] {
            let split = ShardOptions { heads, ..options(strategy, mesh, Zero::Parameters) };
            wrong.extend(differences(&module, &split));
        }
    }
    let own = ShardOptions {
        layers: vec![("block".to_owned(), "ulysses".to_owned())],
        ..options("ring", "ring=3", Zero::Off)
    };
    let workload = Workload { mode: Mode::Train, ..Workload::prefill(2, 12) };
    wrong.extend(differences(&program(&llama(6, 3, false), "m", &workload).unwrap(), &own));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
