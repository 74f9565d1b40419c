//! Fusion changes no number: messages of several tensors, and chunks of collectives and kernels, give what whole tensors by
//! themselves do, in forward passes and training steps, per-rank programs in double precision and schedules on the runtime;
//! and what travels is as many bytes as before.

use ithaca_ir::{Module, Op, diagnostic, traffic};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Storage, compare, cpu, oracle};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::{Compiled, compile};
use ithaca_passes::differentiate::Training;
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use ithaca_passes::simulate::simulate;
use serde_json::{Value, json};

/// What double precision leaves of the order of summation.
const EXACT: f64 = 1e-9;

/// What single precision leaves.
const CLOSE: f64 = 1e-4;

fn llama(heads: u64, kv_heads: u64) -> Value {
    json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": false,
    })
}

/// The program on ranks.
fn compiled(module: &Module, options: &ShardOptions, fusion: Fusion) -> Compiled {
    let options = &ShardOptions { fusion, ..options.clone() };
    let compiled = compile(module, options, &Volume);
    compiled
        .unwrap_or_else(|d| panic!("{} {}: {}", options.strategy, options.mesh, diagnostic::render(&d, None)))
}

fn joins(module: &Module) -> usize {
    module.functions.values().flat_map(|f| &f.nodes).filter(|n| matches!(n.op, Op::Join { .. })).count()
}

/// Bytes that a rank sends.
fn sum(module: &Module) -> u64 {
    traffic::of_module(module).iter().map(|t| t.bytes_sent_per_rank).sum()
}

/// Layouts, and whether something in them can be cut.
const LAYOUTS: [(&str, &str, bool); 12] = [
    ("data-parallel", "dp=2", false),
    ("ulysses", "ulysses=2", true),
    ("ulysses", "ulysses=4", true),
    ("ulysses", "ulysses=8", true),
    ("ring", "ring=4", false),
    ("usp", "ring=2,ulysses=2", true),
    ("megatron-tp", "tp=2", true),
    ("megatron-tp-sp", "tp=4", true),
    ("megatron-cp-allgather", "cp=2", true),
    ("ulysses+megatron-tp-sp", "ulysses=2,tp=2", true),
    ("data-parallel+ulysses", "dp=2,ulysses=2", true),
    ("loongtrain", "outer=2,ring=2,ulysses=2", true),
];

fn check(module: &Module, heads: &str) {
    let random = RandomTensors::of_module(module, 7);
    let whole = oracle::step::<f64>(module, &random, &random, Storage::Wide).unwrap();
    let mut wrong = Vec::new();
    for (strategy, mesh, can) in LAYOUTS {
        let zero = if strategy.starts_with("data-parallel+") { Zero::Parameters } else { Zero::Off };
        let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
        let plain = compiled(module, &options, Fusion::None);
        for fusion in [Fusion::Pack, Fusion::Overlap(2)] {
            let fused = compiled(module, &options, fusion);
            let mut fail = |what: String| wrong.push(format!("{heads} {strategy} {mesh} {fusion}: {what}"));
            let is_cut = joins(&fused.per_rank) > joins(&plain.per_rank);
            if is_cut != (can && fusion == Fusion::Overlap(2)) {
                fail(format!("{} joins", joins(&fused.per_rank)));
            }
            let found = oracle::step::<f64>(&fused.per_rank, &random, &random, Storage::Wide).unwrap();
            let outputs = compare::outputs(&found.outputs, &whole.outputs);
            let kept = compare::outputs(&found.kept, &whole.kept);
            for c in outputs.iter().chain(&kept).filter(|c| !c.verdict.within(EXACT)) {
                fail(format!("per-rank program: {c:?}"));
            }
            let run = cpu::execute(&fused.schedule, &random, &random, &cpu::Options::default()).unwrap();
            let outputs = compare::outputs(&run.outputs, &whole.outputs);
            for c in outputs.iter().filter(|c| !c.verdict.within(CLOSE)) {
                fail(format!("schedule: {c:?}"));
            }
            if run.traffic != traffic::of_module(&fused.per_rank) {
                fail("the runtime sent something else".to_owned());
            }
            let (sent, before) = (sum(&fused.per_rank), sum(&plain.per_rank));
            if sent != before {
                fail(format!("{sent} bytes instead of {before}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn chunks_of_a_forward_pass_are_the_whole() {
    for (heads, kv_heads) in [(16, 16), (16, 8), (16, 2)] {
        let module = program(&llama(heads, kv_heads), "m", &Workload::prefill(2, 32)).unwrap();
        check(&module, &format!("{heads}/{kv_heads}"));
    }
}

#[test]
fn chunks_of_a_training_step_are_the_whole() {
    let training = Training { clip: Some(0.1), ..Training::default() };
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(2, 32) };
    let module = program(&llama(16, 8), "m", &workload).unwrap();
    check(&module, "16/8");
}

/// On a node of H100s only the first and the last chunk of the all-to-alls around attention are exposed.
#[test]
fn all_chunks_but_the_first_and_the_last_are_hidden() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llama-3-8b/config.json");
    let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let module = program(&config, "llama-3-8b", &Workload::prefill(1, 65_536)).unwrap();
    let options = ShardOptions::new("ulysses", parse_mesh("ulysses=8").unwrap());
    let cluster = Cluster::named("dgx-h100").unwrap();
    let time = |fusion| simulate(&cluster, &compiled(&module, &options, fusion).schedule);
    let (plain, chunked) = (time(Fusion::None), time(Fusion::Overlap(4)));
    // Of the queries' and the output's collectives a quarter each stays, and at most those of keys and values, of which
    // a rank has one head.
    let ratio = chunked.exposed() / plain.exposed();
    let most = (0.25 * 2.0 * 32.0 + 2.0 * 8.0) / (2.0 * 32.0 + 2.0 * 8.0);
    assert!(ratio < most, "{ratio} of the exposed time is left, not {most}");
    assert!(chunked.seconds < plain.seconds);
}

/// Queries, keys and values travel as one message in, the output as one message out.
#[test]
fn a_layer_of_ulysses_has_two_all_to_alls() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llama-3-8b/config.json");
    let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let module = program(&config, "llama-3-8b", &Workload::prefill(1, 8192)).unwrap();
    let options = ShardOptions::new("ulysses", parse_mesh("ulysses=8").unwrap());
    let count = |fusion| {
        let sent = traffic::of_module(&compiled(&module, &options, fusion).per_rank);
        sent.iter().filter(|t| t.kind == "all_to_all").map(|t| t.count).sum::<u64>()
    };
    assert_eq!((count(Fusion::None), count(Fusion::Pack)), (4 * 32, 2 * 32));
}
