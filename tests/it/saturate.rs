//! Equality saturation: every rule that comes with Ithaca is sound, fires where it should and declines where it should,
//! and what comes out computes the same.

use std::collections::BTreeMap;

use ithaca::evaluate::Oracle;
use ithaca_ir::{Module, Source, diagnostic, text};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Storage, compare, oracle};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile;
use ithaca_passes::cost;
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::fuse::saturate::{COMMUNICATION, KERNELS, Saturate, with_saturation};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::pass::{Context, Pass, Unwatched, Volume, run_passes};
use ithaca_passes::pipeline;
use ithaca_passes::registry::Registry;
use ithaca_passes::reshard::LowerReshards;
use ithaca_passes::rules::{check, parse};
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use serde_json::{Value, json};

use crate::filetests::files;
use crate::golden::EXACT;
use crate::tier;
use crate::training::sharded;

fn cluster() -> Cluster {
    Cluster::named("dgx-h100").unwrap()
}

/// The module after `passes`, and what they noted.
fn run(module: &Module, passes: &[Box<dyn Pass>]) -> (Module, Vec<String>) {
    let cluster = cluster();
    let mut cx = Context::new(&cluster);
    let after = run_passes(module.clone(), passes, &mut cx, &mut Unwatched);
    let after = after.unwrap_or_else(|d| panic!("{}", diagnostic::render(&d, None)));
    (after, cx.notes().to_vec())
}

/// Seconds of a module whose reshards have become collectives.
fn seconds(module: &Module) -> f64 {
    let (lowered, _) = run(module, &[Box::new(LowerReshards)]);
    cost::module_seconds(&cluster(), &lowered)
}

#[test]
fn rules_that_come_with_ithaca_are_sound() {
    for (name, text) in COMMUNICATION.iter().chain(KERNELS) {
        if let Err(found) = parse(text).and_then(|rules| check(rules, &Oracle)) {
            panic!("{}", diagnostic::render(&found, Some(Source { name, text })));
        }
    }
}

#[test]
fn rules_fire_and_decline_and_results_stay() {
    for (path, source) in files("saturate") {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let module = text::parse(&source).unwrap_or_else(|d| panic!("{name}: {d:?}"));
        let (after, notes) = run(&module, &[Box::new(Saturate::default())]);
        let head = source.lines().next().unwrap();
        if let Some(rules) = head.strip_prefix("// fires: ") {
            assert_eq!(notes.len(), 1, "{name}: {notes:?}");
            for rule in rules.split(", ") {
                assert!(notes[0].contains(rule), "{name}: `{rule}` did not fire: {}", notes[0]);
            }
            assert!(seconds(&after) < seconds(&module), "{name}");
        } else {
            assert!(head.starts_with("// declines: "), "{name}");
            assert!(notes.is_empty(), "{name}: {notes:?}");
            assert_eq!(after.functions, module.functions, "{name}");
        }
        let tensors = RandomTensors::of_module(&module, 3);
        let expected = oracle::step::<f64>(&module, &tensors, &tensors, Storage::Wide).unwrap();
        let found = oracle::step::<f64>(&after, &tensors, &tensors, Storage::Wide).unwrap();
        let outputs = compare::outputs(&found.outputs, &expected.outputs);
        let kept = compare::outputs(&found.kept, &expected.kept);
        for comparison in outputs.iter().chain(&kept) {
            assert!(comparison.verdict.within(EXACT), "{name}: {comparison:?}");
        }
        insta::assert_snapshot!(name, format!("{}\n{}", notes.join("\n"), text::print(&after)));
    }
}

#[test]
fn the_same_text_every_time() {
    for (path, source) in files("saturate") {
        let module = text::parse(&source).unwrap();
        let once = || run(&module, &[Box::new(Saturate::default())]);
        let (first, second) = (once(), once());
        assert_eq!(text::print(&first.0), text::print(&second.0), "{}", path.display());
        assert_eq!(first.1, second.1, "{}", path.display());
    }
}

/// The passes of a plan with saturation before and behind the choice of collectives.
fn saturated(options: &ShardOptions) -> Vec<Box<dyn Pass>> {
    with_saturation(compile::passes(&Registry::default(), options))
}

#[test]
fn steps_under_every_strategy_saturated() {
    let mut wrong = Vec::new();
    for recompute in [Recompute::Selective, Recompute::Full { every: 1 }] {
        let training = Training { clip: Some(0.1), recompute, ..Training::default() };
        let module = sharded::step(&sharded::llama(4, 2, true), training);
        let random = RandomTensors::of_module(&module, 7);
        let whole = oracle::step::<f64>(&module, &random, &random, Storage::Wide).unwrap();
        for (strategy, mesh) in tier::one_in(6, sharded::LAYOUTS) {
            for zero in [Zero::Off, Zero::Parameters] {
                let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
                let mut cx = Context::new(&Volume);
                let ranks = run_passes(module.clone(), &saturated(&options), &mut cx, &mut Unwatched)
                    .unwrap_or_else(|d| panic!("{strategy} {mesh}: {}", diagnostic::render(&d, None)));
                let found = oracle::step::<f64>(&ranks, &random, &random, Storage::Wide).unwrap();
                let outputs = compare::outputs(&found.outputs, &whole.outputs);
                let kept = compare::outputs(&found.kept, &whole.kept);
                for comparison in outputs.iter().chain(&kept).filter(|c| !c.verdict.within(EXACT)) {
                    wrong.push(format!("{strategy} {mesh} {zero:?}: {comparison:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn movements_saturated_compute_the_same() {
    let mut ran = 0;
    for (path, source) in files("passes") {
        let Some(stages) = source.lines().next().and_then(|line| line.strip_prefix("// ")) else { continue };
        let name = path.display();
        let stages = stages.replace("lower-reshards", "saturate,lower-reshards,saturate");
        let passes = pipeline::parse(&stages).unwrap_or_else(|d| panic!("{name}: {d:?}"));
        let program = text::parse(&source).unwrap_or_else(|d| panic!("{name}: {d:?}"));
        let (ranks, _) = run(&program, &passes);
        let tensors = RandomTensors::of_module(&program, 5);
        let expected = oracle::run::<f64>(&program, &tensors, &tensors).unwrap();
        let found = oracle::run_ranks::<f64>(&ranks, &tensors, &tensors).unwrap();
        for comparison in compare::outputs(&found, &expected) {
            assert!(comparison.verdict.within(EXACT), "{name}: {comparison:?}");
        }
        ran += 1;
    }
    assert!(ran > 30, "only {ran} files have a pipeline");
}

/// A description of a small model with `more` fields.
fn config(model_type: &str, more: &[(&str, Value)]) -> Value {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 256,
        "torch_dtype": "bfloat16",
    });
    more.iter().for_each(|(key, value)| config[*key] = value.clone());
    config
}

/// How many operations of each name the layers of a plan have.
fn operations(
    config: &Value,
    (strategy, mesh): (&str, &str),
    fusion: Fusion,
) -> BTreeMap<&'static str, usize> {
    operations_of(config, 64, (strategy, mesh), fusion)
}

/// The same, of a sequence of so many tokens.
fn operations_of(
    config: &Value,
    tokens: u64,
    (strategy, mesh): (&str, &str),
    fusion: Fusion,
) -> BTreeMap<&'static str, usize> {
    operations_in(config, &Workload::prefill(1, tokens), (strategy, mesh), fusion)
}

/// The same, of a workload.
fn operations_in(
    config: &Value,
    workload: &Workload,
    (strategy, mesh): (&str, &str),
    fusion: Fusion,
) -> BTreeMap<&'static str, usize> {
    let module = program(config, "model", workload).unwrap();
    let options = ShardOptions { fusion, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
    counted(&compile::compile(&module, &options, &cluster()).unwrap().per_rank)
}

/// How many operations of each name the layers of a per-rank program have.
fn counted(per_rank: &Module) -> BTreeMap<&'static str, usize> {
    let mut names = BTreeMap::new();
    let layers = per_rank.functions.values().filter(|function| function.name.contains("block"));
    for node in layers.flat_map(|function| &function.nodes) {
        *names.entry(node.op.name()).or_default() += 1;
    }
    names
}

#[test]
fn products_add_their_biases_and_apply_their_activations() {
    let more = [("hidden_act", json!("gelu_pytorch_tanh")), ("use_bias", json!(true))];
    let found = operations(&config("starcoder2", &more), ("data-parallel", "dp=1"), Fusion::PACK.folded());
    // Queries, keys, values, the output and both products of the MLP; residual sums are in norms or in products.
    assert_eq!(found.get("bias_product"), Some(&6), "{found:?}");
    for none in ["einsum", "gelu_tanh"] {
        assert_eq!(found.get(none), None, "{found:?}");
    }
}

#[test]
fn gates_within_bounds_are_one_kernel_in_both_passes() {
    let more = [("num_local_experts", json!(4)), ("num_experts_per_tok", json!(2)), ("head_dim", json!(8))];
    let config = config("gpt_oss", &more);
    let found = operations(&config, ("data-parallel", "dp=1"), Fusion::PACK.folded());
    // A layer with a window and one without.
    assert_eq!(found.get("gated"), Some(&2), "{found:?}");
    let training = Training { recompute: Recompute::KeepAttention, ..Training::default() };
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(1, 64) };
    let step = operations_in(&config, &workload, ("data-parallel", "dp=1"), Fusion::PACK.folded());
    // The forward pass, and again in the backward pass.
    assert_eq!((step.get("gated"), step.get("gated_backward")), (Some(&4), Some(&2)), "{step:?}");
    for none in ["clamp", "clamp_backward", "quick_gelu", "unary_backward", "mul"] {
        assert_eq!((found.get(none), step.get(none)), (None, None), "{found:?} {step:?}");
    }
}

#[test]
fn products_of_one_operand_are_a_pair_where_neither_is_written_to_a_wire_buffer() {
    let llama = config("llama", &[]);
    let pairs = |layout, fusion| operations(&llama, layout, fusion).get("product_pair").copied().unwrap_or(0);
    let folded = Fusion::PACK.folded();
    for layout in [("data-parallel", "dp=1"), ("megatron-tp", "tp=2"), ("ring", "ring=2")] {
        assert_eq!(pairs(layout, folded), 2, "{layout:?}: keys and values, gate and input");
    }
    let workload = Workload { mode: Mode::Train, training: Training::default(), ..Workload::prefill(2, 64) };
    let step = |zero| {
        let module = program(&llama, "model", &workload).unwrap();
        let options = ShardOptions {
            fusion: folded,
            zero,
            ..ShardOptions::new("data-parallel", parse_mesh("dp=2").unwrap())
        };
        counted(&compile::compile(&module, &options, &cluster()).unwrap().per_rank)
    };
    assert!(step(Zero::Gradients).contains_key("product_pair"));
    assert!(!step(Zero::Parameters).contains_key("product_pair"), "a pair waits for both weights");
    // Of a large model a kernel that packs values takes longer than the pair saves.
    let sizes = [("hidden_size", 4096), ("intermediate_size", 14_336), ("num_attention_heads", 32)];
    let sizes = sizes.map(|(name, size)| (name, json!(size)));
    let large = config("llama", &[&sizes[..], &[("num_key_value_heads", json!(8))]].concat());
    let found = operations_of(&large, 131_072, ("ulysses", "ulysses=8"), folded);
    assert_eq!(found.get("product_pair"), Some(&1), "values are written to the wire buffer: {found:?}");
}
