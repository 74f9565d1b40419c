//! `prefetch` changes no number and no byte: layers that gather the weights of the next and reduce the gradients of the one
//! before compute what they compute by themselves. On a cluster what they do for others lies under kernels.

use std::collections::BTreeMap;

use ithaca_ir::phase::Phase;
use ithaca_ir::schedule::Stream;
use ithaca_ir::timeline::Span;
use ithaca_ir::{Module, Rank, diagnostic, traffic};
use ithaca_kernels::compare::Comparison;
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Storage, compare, cpu, oracle};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::{Compiled, compile};
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::memory;
use ithaca_passes::pass::{Prices, Volume};
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use ithaca_passes::simulate::{simulate, timeline};
use serde_json::{Value, json};

use crate::slow_links::SlowLinks;
use crate::tier;

/// What double precision leaves of the order of summation.
const EXACT: f64 = 1e-9;

/// What single precision leaves of a loss.
const CLOSE: f64 = 1e-4;

/// What it leaves of gradients and of what a step makes of them.
const KEPT: f64 = 1e-3;

fn llama(layers: u64) -> Value {
    json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": false,
    })
}

fn step(config: &Value, training: Training) -> Module {
    let batch = 4 * training.micro_batches;
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(batch, 32) };
    program(config, "m", &workload).unwrap()
}

fn options(strategy: &str, mesh: &str, fusion: &str) -> ShardOptions {
    ShardOptions {
        zero: Zero::Parameters,
        fusion: Fusion::parse(fusion).unwrap(),
        ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
    }
}

fn compiled(module: &Module, options: &ShardOptions, prices: &dyn Prices) -> Compiled {
    compile(module, options, prices)
        .unwrap_or_else(|d| panic!("{} {}: {}", options.strategy, options.mesh, diagnostic::render(&d, None)))
}

/// What is different in the step of `module` from the same without prefetching, and from the whole one; with ZeRO stage 3.
fn differences(module: &Module, layout: (&str, &str), fusion: &str, prices: &dyn Prices) -> Vec<String> {
    differences_with(module, layout, (fusion, Zero::Parameters), prices)
}

/// The same with a stage of ZeRO.
fn differences_with(
    module: &Module,
    (strategy, mesh): (&str, &str),
    (fusion, zero): (&str, Zero),
    prices: &dyn Prices,
) -> Vec<String> {
    let random = RandomTensors::of_module(module, 7);
    let whole = oracle::step::<f64>(module, &random, &random, Storage::Wide).unwrap();
    let behind = fusion.split_once('+').map_or("pack", |(_, rest)| rest);
    let of = |fusion| compiled(module, &ShardOptions { zero, ..options(strategy, mesh, fusion) }, prices);
    let (plain, ahead) = (of(behind), of(fusion));
    let found = oracle::step::<f64>(&ahead.per_rank, &random, &random, Storage::Wide).unwrap();
    let run = cpu::execute(&ahead.schedule, &random, &random, &cpu::Options::default()).unwrap();
    let mut wrong = Vec::new();
    let outputs = compare::outputs(&found.outputs, &whole.outputs);
    let kept = compare::outputs(&found.kept, &whole.kept);
    wrong.extend(outputs.iter().chain(&kept).filter(|c| !c.verdict.within(EXACT)).map(|c| format!("{c:?}")));
    let losses = compare::outputs(&run.outputs, &whole.outputs);
    let kept = compare::outputs(&run.kept, &whole.kept);
    let far = |close: f64| move |c: &&Comparison| !c.verdict.within(close);
    let far = losses.iter().filter(far(CLOSE)).chain(kept.iter().filter(far(KEPT)));
    wrong.extend(far.map(|c| format!("schedule: {c:?}")));
    let (keeps, kept): (Vec<&String>, Vec<&String>) =
        (run.kept.keys().collect(), whole.kept.keys().collect());
    if keeps != kept {
        wrong.push(format!("the schedule keeps {keeps:?}, the step {kept:?}"));
    }
    if !traffic::agree(&traffic::of_module(&plain.per_rank), &run.traffic) {
        wrong.push("something else was sent".to_owned());
    }
    let layers = ahead.per_rank.layers_of_functions();
    let idle = ahead.per_rank.functions.values().zip(&layers).filter(|(_, layers)| layers.is_empty());
    wrong.extend(idle.map(|(function, _)| format!("nobody calls `@{}`", function.name)));
    wrong.iter().map(|what| format!("{strategy} {mesh} {fusion} zero={zero}: {what}")).collect()
}

const LAYOUTS: [(&str, &str); 5] = [
    ("data-parallel", "dp=4"),
    ("ulysses", "ulysses=2"),
    ("ring", "ring=4"),
    ("data-parallel+ulysses", "dp=2,ulysses=2"),
    ("data-parallel+megatron-tp-sp", "dp=2,tp=2"),
];

#[test]
fn a_step_is_the_whole_step() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let recomputes = [
        Recompute::None,
        Recompute::Selective,
        Recompute::FULL,
        Recompute::Full { every: 2 },
        Recompute::KeepAttention,
    ];
    let mut wrong = Vec::new();
    for (n, recompute) in recomputes.into_iter().enumerate() {
        for micro_batches in [1, 2] {
            let training = Training { recompute, micro_batches, clip: Some(0.1), ..Training::default() };
            let layers = [2, 5, 3, 4, 7][(n + micro_batches as usize) % 5];
            let module = step(&llama(layers), training);
            let layouts = LAYOUTS.into_iter().enumerate();
            let chosen = |(i, _): &(usize, _)| tier::is_full() || (n + i) % 5 == micro_batches as usize;
            for (i, layout) in layouts.filter(chosen) {
                let prices: &dyn Prices = if (i + n).is_multiple_of(2) { &cluster } else { &SlowLinks };
                let found = differences(&module, layout, "prefetch+pack", prices);
                wrong.extend(
                    found.iter().map(|f| format!("{recompute:?} × {micro_batches}, {layers} layers, {f}")),
                );
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A model whose layers have these windows; a layer without one is `full`.
fn windowed(full: &[bool]) -> Value {
    let kinds: Vec<&str> =
        full.iter().map(|&full| if full { "full_attention" } else { "sliding_attention" }).collect();
    json!({
        "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": full.len(),
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": false, "layer_types": kinds, "sliding_window": 8, "use_sliding_window": true,
    })
}

/// Layers of two kinds, by turns, in loops beside single ones, and in loops alone, work for each other.
#[test]
fn layers_that_differ_work_for_each_other() {
    const FULL: bool = true;
    const WINDOW: bool = false;
    let orders: [&[bool]; 5] = [
        &[WINDOW, FULL, WINDOW, FULL],
        &[FULL, WINDOW, WINDOW, WINDOW, FULL, WINDOW, WINDOW, WINDOW],
        &[WINDOW, WINDOW, FULL, FULL, FULL],
        &[WINDOW, FULL],
        &[FULL, WINDOW, FULL, FULL, WINDOW, WINDOW, WINDOW, WINDOW, FULL],
    ];
    let recomputes = [Recompute::None, Recompute::FULL, Recompute::KeepAttention, Recompute::Selective];
    let mut wrong = Vec::new();
    for (n, order) in orders.into_iter().enumerate() {
        for (i, layout) in tier::one_in(3, LAYOUTS.into_iter().chain([STAGED[0]]).enumerate()) {
            let recompute = recomputes[(n + i) % 4];
            let stages = if layout.0.starts_with("pipeline") { 2 } else { 1 };
            if order.len() < 4 && stages > 1 {
                continue;
            }
            let micro_batches = stages * (1 + (n + i) as u64 % 2);
            let training =
                Training { recompute, micro_batches, stages, clip: Some(0.1), ..Training::default() };
            let module = step(&windowed(order), training);
            let fusion = ["prefetch+pack", "prefetch+fold+pack", "prefetch+none"][(n + i) % 3];
            let found = differences(&module, layout, fusion, &SlowLinks);
            wrong.extend(found.iter().map(|f| format!("{recompute:?} × {micro_batches}, {order:?}, {f}")));
        }
    }
    let module = step(&windowed(orders[0]), Training { recompute: Recompute::FULL, ..Training::default() });
    let ranks = compiled(&module, &options("data-parallel", "dp=2", "prefetch+pack"), &SlowLinks).per_rank;
    let names: Vec<&str> = ranks.functions.values().map(|f| f.name.as_str()).collect();
    for name in [
        "block_window.after_block_full.gather",
        "block_window.after_block_full.before_block_full",
        "block_full.after_block_window.last",
        "block_full.backward.after_block_window.first_before_block_window",
        "block_full.backward.after_block_window.before_block_window.turn",
    ] {
        assert!(names.contains(&name), "there is no @{name}: {names:?}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Stages 1 and 2 split no weights; a layer still reduces gradients of the one above: of each micro-batch, or of their sum.
#[test]
fn gradients_alone_are_reduced_by_the_next_layer() {
    let mut wrong = Vec::new();
    for (zero, reducing) in
        [(Zero::Optimizer, "block.backward.complete.ahead"), (Zero::Gradients, "block.backward.ahead")]
    {
        for (strategy, mesh) in [LAYOUTS[0], LAYOUTS[4]] {
            let training = Training { micro_batches: 2, clip: Some(0.1), ..Training::default() };
            let module = step(&llama(4), training);
            let fusion = "prefetch+fold+pack";
            wrong.extend(differences_with(&module, (strategy, mesh), (fusion, zero), &SlowLinks));
            let options = ShardOptions { zero, ..options(strategy, mesh, fusion) };
            let found = compiled(&module, &options, &SlowLinks);
            assert!(found.per_rank.function(reducing).is_some(), "there is no @{reducing}");
            assert!(!found.notes.iter().any(|note| note.contains("no effect")), "{:?}", found.notes);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A layer between two others gathers for one and reduces for the other, and both in front of the first and behind the last
/// nothing is left over.
#[test]
fn layers_work_for_both_neighbours() {
    let module = step(&llama(3), Training { recompute: Recompute::FULL, ..Training::default() });
    let ranks = compiled(&module, &options("data-parallel", "dp=2", "prefetch+pack"), &SlowLinks).per_rank;
    for name in
        ["block.shards", "block.first", "block.last", "block.backward.assign", "block.backward.ahead.turn"]
    {
        assert!(ranks.function(name).is_some(), "there is no @{name}");
    }
    assert!(ranks.function("block").is_none() && ranks.function("block.backward").is_none());
}

#[test]
fn other_messages_travel_ahead_alike() {
    let module = step(&llama(3), Training { recompute: Recompute::FULL, ..Training::default() });
    let mut wrong = Vec::new();
    for fusion in ["prefetch+none", "prefetch+overlap(chunks=2)", "prefetch(layers=0)+pack"] {
        wrong.extend(differences(&module, ("data-parallel+ulysses", "dp=2,ulysses=2"), fusion, &SlowLinks));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Weights that are whole are not gathered, and the others of the layer are gathered ahead as before.
#[test]
fn weights_beside_persistent_ones_travel_ahead_alike() {
    let mut wrong = Vec::new();
    for micro_batches in [1, 2] {
        let module =
            step(&llama(4), Training { micro_batches, recompute: Recompute::FULL, ..Training::default() });
        for zero in [0, 16 * 16].map(Zero::ParametersAbove) {
            for layout in [LAYOUTS[0], LAYOUTS[3]] {
                wrong.extend(differences_with(&module, layout, ("prefetch+fold+pack", zero), &SlowLinks));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Stages of a pipeline, of several layers and of so few that there is none between the first and the last, in every order
/// of micro-batches.
#[test]
fn stages_of_a_pipeline_work_for_neighbours() {
    let all = ["prefetch+pack", "prefetch+fold+pack", "prefetch+none", "prefetch+overlap(chunks=2)"];
    let mut wrong = Vec::new();
    for (n, pipeline) in tier::one_in(2, PipelineOrder::ALL.into_iter().enumerate().rev()) {
        for (i, layout) in tier::one_in(2, STAGED.into_iter().enumerate()) {
            let recompute = [Recompute::FULL, Recompute::None, Recompute::Selective][(n + i) % 3];
            let training =
                Training { stages: 2, micro_batches: 4, pipeline, recompute, ..Training::default() };
            let layers = [6, 5, 8, 10][(n + i) % 4];
            let module = step(&llama(layers), training);
            let cases: Vec<(&str, Zero)> = if tier::is_full() {
                // One pair of four; each meets others of the orders and layouts.
                let pairs = all.iter().enumerate().flat_map(|(f, &fusion)| {
                    Zero::ALL.into_iter().enumerate().map(move |(z, zero)| (f + z, (fusion, zero)))
                });
                pairs.filter(|(at, _)| (at + n + i).is_multiple_of(4)).map(|(_, case)| case).collect()
            } else {
                vec![(all[(n + i) % 4], [Zero::Parameters, Zero::ALL[n % 3]][i % 2])]
            };
            for case in cases {
                let found = differences_with(&module, layout, case, &SlowLinks);
                wrong.extend(found.iter().map(|f| format!("{pipeline:?}, {layers} layers, {f}")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Layouts of pipelines.
const STAGED: [(&str, &str); 3] = [
    ("pipeline+data-parallel", "pp=2,dp=2"),
    ("pipeline+ulysses", "pp=2,ulysses=2"),
    ("pipeline+data-parallel+megatron-tp-sp", "pp=2,dp=2,tp=2"),
];

/// A layer that hands on is called where there is one between the first and the last, and named nowhere else: what lasts is
/// told by who runs what.
#[test]
fn nothing_is_kept_of_layers_that_nobody_runs() {
    let mut wrong = Vec::new();
    for recompute in [Recompute::FULL, Recompute::None] {
        let module = step(&llama(2), Training { recompute, ..Training::default() });
        wrong.extend(differences(&module, ("data-parallel", "dp=2"), "prefetch+pack", &SlowLinks));
        let ranks =
            compiled(&module, &options("data-parallel", "dp=2", "prefetch+pack"), &SlowLinks).per_rank;
        assert!(ranks.function("block.backward.first").is_some());
        assert!(ranks.function("block.ahead.backward").is_none());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// In a pipeline of two stages over a node, gradients and weights of layers lie under kernels as well.
#[test]
fn stages_are_faster_than_without() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    for pipeline in PipelineOrder::ALL {
        let module = llama_3_8b(Training { stages: 2, micro_batches: 4, pipeline, ..Training::default() });
        let of =
            |fusion| compiled(&module, &options("pipeline+data-parallel", "pp=2,dp=4", fusion), &cluster);
        let [plain, ahead] = ["pack", "prefetch+pack"].map(|fusion| of(fusion).schedule);
        let [before, after] = [&plain, &ahead].map(|schedule| simulate(&cluster, schedule));
        assert!(after.seconds < before.seconds, "{pipeline:?}: {} s of {}", after.seconds, before.seconds);
        assert!(
            after.exposed() < before.exposed(),
            "{pipeline:?}: {} s of {}",
            after.exposed(),
            before.exposed()
        );
        // The weights of one more layer, 218 million elements of two bytes, and a rank's part of them, a quarter.
        let [before, after] = [&plain, &ahead].map(|schedule| memory::of_schedule(&cluster, schedule).total);
        assert!(after <= before + (520 << 20), "{pipeline:?}: {after} bytes instead of {before}");
    }
}

/// A forward pass whose weights are split, over layers that stack nothing.
#[test]
fn a_forward_pass_is_the_whole() {
    let module = program(&llama(5), "m", &Workload::prefill(4, 32)).unwrap();
    assert_eq!(
        differences(&module, ("data-parallel", "dp=4"), "prefetch+pack", &SlowLinks),
        Vec::<String>::new()
    );
}

#[test]
fn without_split_weights_there_is_a_note() {
    let module = step(&llama(3), Training::default());
    let options = ShardOptions { zero: Zero::Off, ..options("data-parallel", "dp=2", "prefetch") };
    let notes = compiled(&module, &options, &Volume).notes;
    assert!(notes.iter().any(|n| n.contains("`prefetch` has no effect")), "{notes:?}");
}

/// A training step of Llama-3-8B on a node, ZeRO stage 3.
fn llama_3_8b(training: Training) -> Module {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llama-3-8b/config.json");
    let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let batch = 8 * training.micro_batches;
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(batch, 8192) };
    program(&config, "llama-3-8b", &workload).unwrap()
}

/// Weights and gradients are sent on a stream of their own at every stage of ZeRO, wherever `prefetch` puts them, and
/// activations on another.
#[test]
fn weights_and_activations_have_a_stream_each() {
    let training = Training { micro_batches: 2, ..Training::default() };
    let module = step(&llama(3), training);
    for (zero, fusion) in [
        (Zero::Off, "pack"),
        (Zero::Optimizer, "pack"),
        (Zero::Gradients, "pack"),
        (Zero::Parameters, "pack"),
        (Zero::Parameters, "prefetch+fold+pack"),
    ] {
        let options = ShardOptions { zero, ..options("data-parallel+megatron-tp", "dp=2,tp=2", fusion) };
        let schedule = compiled(&module, &options, &SlowLinks).schedule;
        let mut counts = BTreeMap::new();
        for frame in schedule.frames.values() {
            for task in &frame.tasks {
                let Some(transfer) = task.work.exchange() else { continue };
                let elements: u64 =
                    transfer.parcels().iter().map(|p| schedule.space.max_local_elements(&p.from)).sum();
                let axis = traffic::axis(&schedule.space, transfer.parcels()).unwrap();
                // Scalars are the loss, its labels and the norm of gradients.
                if elements > 1 && frame.phase != Phase::Update {
                    *counts.entry((axis, task.stream)).or_insert(0) += 1;
                }
            }
        }
        let streams: Vec<(&str, Stream)> =
            counts.keys().map(|(axis, stream)| (axis.as_str(), *stream)).collect();
        assert_eq!(streams, [("dp", Stream::Weights), ("tp", Stream::Comm)], "{zero:?} {fusion}: {counts:?}");
    }
}

/// Seconds of a span in which none of `kernels`, which do not overlap, runs.
fn uncovered(span: &Span, kernels: &[&Span]) -> f64 {
    let covered = kernels.iter().map(|k| (k.end.min(span.end) - k.start.max(span.start)).max(0.0));
    span.end - span.start - covered.sum::<f64>()
}

/// With a sequence for each of eight ranks no gather and no reduction of a layer is seen, from its start to its end, but
/// those of the first layer of a pass, which nothing comes before.
#[test]
fn weights_and_gradients_of_layers_travel_under_kernels() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    for recompute in [Recompute::FULL, Recompute::Selective] {
        let module = llama_3_8b(Training { recompute, ..Training::default() });
        let of = |fusion| compiled(&module, &options("data-parallel", "dp=8", fusion), &cluster).schedule;
        let [plain, ahead] = ["pack", "prefetch+pack"].map(of);
        let spans = timeline(&cluster, &ahead, usize::MAX).unwrap().spans;
        let on = |stream| spans.iter().filter(move |s| s.rank == Rank(0) && s.stream == stream);
        let kernels: Vec<&Span> = on(Stream::Compute).collect();
        let of_layers: Vec<&Span> = on(Stream::Weights)
            .filter(|s| s.frame.starts_with("block") && !s.frame.contains("gather"))
            .collect();
        assert!(of_layers.len() > 32 * 16, "{} messages", of_layers.len());
        let seen: f64 = of_layers.iter().map(|s| uncovered(s, &kernels)).sum();
        let all: f64 = of_layers.iter().map(|s| s.end - s.start).sum();
        assert!(seen < 0.02 * all, "{recompute:?}: {seen} of {all} s of layers are exposed");
        let [before, after] = [&plain, &ahead].map(|schedule| simulate(&cluster, schedule));
        assert!(after.exposed() < 0.5 * before.exposed(), "{} of {}", after.exposed(), before.exposed());
        assert!(after.seconds < before.seconds);
        // At most the weights of one more layer are held: 218 million elements of two bytes.
        let [before, after] = [&plain, &ahead].map(|schedule| memory::of_schedule(&cluster, schedule).total);
        assert!(after <= before + (450 << 20), "{after} bytes instead of {before}");
    }
}
