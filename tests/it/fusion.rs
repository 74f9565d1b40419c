//! Fusion changes no number: messages of several tensors, and chunks of collectives and kernels, give what whole tensors by
//! themselves do, in forward passes and training steps, per-rank programs in double precision and schedules on the runtime;
//! and what travels is as many bytes as before.

use ithaca_ir::schedule::{self, BufferId, Frame, Place, Stream, Task, Work};
use ithaca_ir::timeline::Span;
use ithaca_ir::{DimId, Module, Op, Rank, diagnostic, traffic};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Storage, compare, cpu, oracle};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::{Compiled, compile, compile_by, passes};
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::fuse::levels::{Choose, TwoLevel};
use ithaca_passes::fuse::{Fusion, Messages};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::lower::Packing;
use ithaca_passes::pass::{Unwatched, Volume};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use ithaca_passes::simulate::{simulate, timeline};
use serde_json::{Value, json};

use crate::tier;

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

/// Tensors that are packed or unpacked.
fn moved(compiled: &Compiled) -> usize {
    let of = |frame: &Frame, task: &Task| {
        let tensors = match task.work {
            Work::Pack(_) => &task.reads,
            Work::Unpack(_) => &task.writes,
            Work::Compute(_) | Work::Exchange(_) | Work::Copy | Work::Call { .. } => return 0,
        };
        let lies = |b: &BufferId| matches!(frame.buffers[*b].place, Place::Inside { .. });
        tensors.iter().filter(|b| !lies(b)).count()
    };
    let frames = compiled.schedule.frames.values();
    frames.map(|frame| frame.tasks.iter().map(|task| of(frame, task)).sum::<usize>()).sum()
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

/// Layouts of models with experts, of which something can be cut.
const EXPERTS: [(&str, &str, bool); 4] = [
    ("ep", "ep=2", true),
    ("ulysses+ep", "ulysses=2,ep=2", true),
    ("data-parallel-ep", "dp=2,ep=2", true),
    ("data-parallel+ep", "dp=4", true),
];

fn check(module: &Module, heads: &str) {
    check_layouts(module, heads, &tier::one_in(2, LAYOUTS));
}

fn check_layouts(module: &Module, heads: &str, layouts: &[(&str, &str, bool)]) {
    let random = RandomTensors::of_module(module, 7);
    let whole = oracle::step::<f64>(module, &random, &random, Storage::Wide).unwrap();
    let mut wrong = Vec::new();
    for &(strategy, mesh, can) in layouts {
        let zero = if strategy.starts_with("data-parallel") { Zero::Parameters } else { Zero::Off };
        let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
        let plain = compiled(module, &options, Fusion::NONE);
        let unfolded = |fusion: Fusion| match fusion.packing {
            Packing::Folded => compiled(module, &options, Fusion { packing: Packing::Apart, ..fusion }),
            Packing::Apart => plain.clone(),
        };
        let folded = [Messages::Alone, Messages::Packed, Messages::Chunked(2)];
        let folded = folded.map(|messages| Fusion { messages, ..Fusion::NONE }.folded());
        for fusion in [Fusion::PACK, Fusion::overlap(2)].into_iter().chain(folded) {
            let fused = compiled(module, &options, fusion);
            let mut fail = |what: String| wrong.push(format!("{heads} {strategy} {mesh} {fusion}: {what}"));
            let is_cut = joins(&fused.per_rank) > joins(&plain.per_rank);
            let cuts = matches!(fusion.messages, Messages::Chunked(_));
            if is_cut != (can && cuts) {
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
            // Where heads travel there is something to pack.
            if folded.contains(&fusion)
                && strategy.contains("ulysses")
                && !strategy.ends_with("+ep")
                && moved(&fused) >= moved(&unfolded(fusion))
            {
                fail(format!("{} tensors are packed and unpacked", moved(&fused)));
            }
            if !traffic::agree(&traffic::of_module(&fused.per_rank), &run.traffic) {
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

fn experts(training: bool) -> Module {
    let config = json!({
        "model_type": "mixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4, "vocab_size": 32, "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": false,
    });
    let workload = Workload::prefill(4, 32);
    let mode = if training { Mode::Train } else { workload.mode };
    let training = Training { recompute: Recompute::FULL, ..Training::default() };
    program(&config, "m", &Workload { mode, training, ..workload }).unwrap()
}

#[test]
fn chunks_of_experts_are_the_whole() {
    for training in [false, true] {
        check_layouts(&experts(training), &format!("experts, training {training}"), &EXPERTS);
    }
}

/// Slots are sent from where tokens were dealt to them and received where experts read them; experts of a chunk read their
/// weights, and write their results, where all of them are.
#[test]
fn nothing_is_packed_or_joined_around_experts() {
    for (strategy, mesh, _) in EXPERTS {
        for (training, messages) in
            [false, true].into_iter().flat_map(|t| [(t, Messages::Packed), (t, Messages::Chunked(2))])
        {
            let zero = if training { Zero::Parameters } else { Zero::Off };
            let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
            let fusion = Fusion { messages, ..Fusion::NONE }.folded();
            let schedule = compiled(&experts(training), &options, fusion).schedule;
            let text = schedule::print(&schedule);
            assert_eq!(schedule::parse(&text).unwrap(), schedule);
            let space = &schedule.space;
            let expert = |d: &DimId| space.dims[*d].name == "e" || space.dims[*d].name.starts_with("e_");
            let moved = |frame: &Frame, task: &Task| {
                let moves = matches!(
                    task.work,
                    Work::Pack(_) | Work::Unpack(_) | Work::Compute(Op::Take { .. } | Op::Join { .. })
                );
                let of_experts =
                    |b: &BufferId| frame.buffers[*b].tensor().is_some_and(|ty| ty.dims.iter().any(expert));
                let is_weight =
                    |b: &BufferId| frame.buffers[*b].tensor().is_some_and(|ty| ty.dims.len() == 3);
                let touched = || task.reads.iter().chain(&task.writes);
                moves && touched().any(of_experts) && !touched().any(is_weight)
            };
            for frame in schedule.frames.values() {
                let found = frame.tasks.iter().find(|task| moved(frame, task));
                assert!(found.is_none(), "{strategy} {mesh} {fusion}: `@{}`, {found:?}\n{text}", frame.name);
            }
        }
    }
}

/// Axes in two levels: which fit, and how many collectives of each kind a layer has along them.
#[test]
fn two_levels_are_the_whole() {
    let training = Training { clip: Some(0.1), ..Training::default() };
    let train = Workload { mode: Mode::Train, training, ..Workload::prefill(4, 32) };
    let layouts = [
        ("ulysses", "ulysses=4", Zero::Off),
        ("ulysses", "ulysses=8", Zero::Off),
        ("data-parallel", "dp=4", Zero::Parameters),
        ("megatron-tp", "tp=4", Zero::Off),
        ("megatron-tp-sp", "tp=4", Zero::Off),
        ("megatron-cp-allgather", "cp=4", Zero::Off),
        ("data-parallel+ulysses", "dp=2,ulysses=4", Zero::Parameters),
        ("ulysses+megatron-tp-sp", "ulysses=4,tp=2", Zero::Off),
        ("usp", "ring=2,ulysses=4", Zero::Off),
    ];
    for (name, workload) in [("forward", Workload::prefill(4, 32)), ("training", train)] {
        let module = program(&llama(16, 8), "m", &workload).unwrap();
        let random = RandomTensors::of_module(&module, 7);
        let whole = oracle::step::<f64>(&module, &random, &random, Storage::Wide).unwrap();
        for (strategy, mesh, zero) in layouts {
            let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
            let title = format!("{name} {strategy} {mesh}");
            let one = compiled(&module, &options, Fusion::NONE);
            let mut passes = passes(&Registry::default(), &options);
            passes.insert(2, Box::new(TwoLevel { inside: Some(2), ..TwoLevel::default() }));
            let two = compile_by(&passes, Packing::Apart, &module, &Volume, &mut Unwatched)
                .unwrap_or_else(|d| panic!("{title}: {}", diagnostic::render(&d, None)));
            let names: Vec<&str> = two.schedule.space.mesh.axes.values().map(|a| a.name.as_str()).collect();
            assert!(names.iter().any(|n| n.ends_with("_inside")), "{title}: {names:?} {:?}", two.notes);
            let permutes = |c: &Compiled| {
                let rows = traffic::of_module(&c.per_rank);
                rows.iter().filter(|t| t.kind == "permute").map(|t| t.count).sum::<u64>()
            };
            assert_eq!(permutes(&two), permutes(&one), "{title}: blocks change places");
            let found = oracle::step::<f64>(&two.per_rank, &random, &random, Storage::Wide).unwrap();
            let run = cpu::execute(&two.schedule, &random, &random, &cpu::Options::default()).unwrap();
            assert_eq!(run.traffic, traffic::of_module(&two.per_rank), "{title}");
            let outputs = compare::outputs(&found.outputs, &whole.outputs);
            let kept = compare::outputs(&found.kept, &whole.kept);
            for c in outputs.iter().chain(&kept) {
                assert!(c.verdict.within(EXACT), "{title}: {c:?}");
            }
            for c in compare::outputs(&run.outputs, &whole.outputs) {
                assert!(c.verdict.within(CLOSE), "{title}, schedule: {c:?}");
            }
        }
    }
}

/// Across two nodes of eight, each all-to-all of a layer becomes one across and one inside.
#[test]
fn ulysses_across_nodes_has_an_all_to_all_for_each_level() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let module = llama_3_8b(8192);
    let options = ShardOptions::new("ulysses", parse_mesh("ulysses=16").unwrap());
    let all_to_alls = |fusion| {
        let options = ShardOptions { fusion, ..options.clone() };
        let rows = traffic::of_module(&compile(&module, &options, &cluster).unwrap().per_rank);
        let rows = rows.into_iter().filter(|t| t.kind == "all_to_all");
        rows.map(|t| (t.axis, t.count)).collect::<Vec<_>>()
    };
    let of = |axis: &str, count: u64| (axis.to_owned(), count);
    assert_eq!(all_to_alls(Fusion::NONE), [of("ulysses", 4 * 32)]);
    let forced = Fusion::NONE.in_levels(Choose::Always);
    assert_eq!(all_to_alls(forced), [of("ulysses_across", 4 * 32), of("ulysses_inside", 4 * 32)]);
    // By the prices of the profile one collective uses both levels at the same time, so it is not cut.
    let priced = Fusion::NONE.in_levels(Choose::Cheaper);
    assert_eq!(all_to_alls(priced), [of("ulysses", 4 * 32)]);
}

/// Queries, keys and values travel as one message across nodes, and as one inside.
#[test]
fn a_layer_in_two_levels_has_two_all_to_alls_for_each() {
    let options = ShardOptions {
        fusion: Fusion::PACK.in_levels(Choose::Always),
        ..ShardOptions::new("ulysses", parse_mesh("ulysses=16").unwrap())
    };
    let rows = traffic::of_module(
        &compile(&llama_3_8b(8192), &options, &Cluster::named("dgx-h100").unwrap()).unwrap().per_rank,
    );
    let found: Vec<(&str, u64)> =
        rows.iter().filter(|t| t.kind == "all_to_all").map(|t| (t.axis.as_str(), t.count)).collect();
    assert_eq!(found, [("ulysses_across", 2 * 32), ("ulysses_inside", 2 * 32)]);
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
    let (plain, chunked) = (time(Fusion::NONE), time(Fusion::overlap(4)));
    // Of the queries' and the output's collectives a quarter each stays, and at most those of keys and values, of which
    // a rank has one head.
    let ratio = chunked.exposed() / plain.exposed();
    let most = (0.25 * 2.0 * 32.0 + 2.0 * 8.0) / (2.0 * 32.0 + 2.0 * 8.0);
    assert!(ratio < most, "{ratio} of the exposed time is left, not {most}");
    assert!(chunked.seconds < plain.seconds);
}

/// The program of Llama-3-8B over one sequence.
fn llama_3_8b(tokens: u64) -> Module {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llama-3-8b/config.json");
    let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    program(&config, "llama-3-8b", &Workload::prefill(1, tokens)).unwrap()
}

/// Spans of one layer of the first rank on a stream, in order of time.
fn of_layer(spans: &[Span], stream: Stream, layer: u64) -> Vec<&Span> {
    let mut found: Vec<&Span> =
        spans.iter().filter(|s| s.rank == Rank(0) && s.stream == stream && s.layer == layer).collect();
    found.sort_by(|a, b| a.start.total_cmp(&b.start));
    found.retain(|s| s.frame == "block");
    found
}

/// Seconds of a span in which none of `kernels`, which do not overlap, runs.
fn uncovered(span: &Span, kernels: &[&Span]) -> f64 {
    let covered = kernels.iter().map(|k| (k.end.min(span.end) - k.start.max(span.start)).max(0.0));
    span.end - span.start - covered.sum::<f64>()
}

/// In every layer each message other than the first in and the last out lies under kernels of that layer from its start
/// to its end.
#[test]
fn spans_of_all_chunks_but_the_first_and_the_last_are_covered() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let options = ShardOptions::new("ulysses", parse_mesh("ulysses=8").unwrap());
    for (tokens, chunks) in [(32_768, 2), (32_768, 4), (131_072, 4)] {
        let chunked = compiled(&llama_3_8b(tokens), &options, Fusion::overlap(chunks));
        let spans = timeline(&cluster, &chunked.schedule, usize::MAX).unwrap().spans;
        for layer in 0..32 {
            let [kernels, messages] =
                [Stream::Compute, Stream::Comm].map(|stream| of_layer(&spans, stream, layer));
            assert_eq!(messages.len() as u64, 2 * chunks, "{tokens} tokens, {chunks} chunks, layer {layer}");
            assert!(messages.iter().all(|m| m.kind == "all_to_all"));
            for (i, message) in messages.iter().enumerate() {
                let exposed = uncovered(message, &kernels);
                let ends = i == 0 || i + 1 == messages.len();
                assert!(
                    ends || exposed < 1e-9,
                    "{tokens} tokens, {chunks} chunks, layer {layer}: {} is exposed for {exposed} s",
                    message.name
                );
            }
        }
    }
}

/// The blocks of a ring's next steps travel while others are attended to and merged: no transfer is seen, and each has
/// arrived when its step begins.
#[test]
fn steps_of_a_ring_travel_under_attention() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let options = ShardOptions::new("ring", parse_mesh("ring=8").unwrap());
    // Keys and values of 7 others travel one by one, or together.
    for (fusion, n) in [(Fusion::NONE, 14), (Fusion::PACK, 7)] {
        let ring = compiled(&llama_3_8b(131_072), &options, fusion);
        let spans = timeline(&cluster, &ring.schedule, usize::MAX).unwrap().spans;
        for layer in 0..32 {
            let [kernels, messages] =
                [Stream::Compute, Stream::Comm].map(|stream| of_layer(&spans, stream, layer));
            let attention: Vec<&Span> =
                kernels.iter().filter(|k| k.name.starts_with("attention")).copied().collect();
            assert_eq!((attention.len(), messages.len()), (8, n), "{fusion:?}");
            for (i, message) in messages.iter().enumerate() {
                assert_eq!(message.kind, "permute");
                assert!(uncovered(message, &kernels) < 1e-9, "layer {layer}: transfer {i} is exposed");
                let needed = attention[i * 7 / n + 1];
                assert!(message.end <= needed.start + 1e-12, "layer {layer}: transfer {i} comes too late");
            }
        }
    }
}

/// Keys and values travel together: to 7 other ranks forward and again backward, their gradients together to 7 and home.
#[test]
fn a_ring_of_eight_sends_22_messages_in_a_step() {
    let train = Workload { mode: Mode::Train, ..Workload::prefill(1, 32) };
    let options = ShardOptions::new("ring", parse_mesh("ring=8").unwrap());
    for (workload, count) in [(Workload::prefill(1, 32), 7), (train, 22)] {
        let module = program(&llama(4, 2), "m", &workload).unwrap();
        let [apart, together] = [Fusion::NONE, Fusion::PACK].map(|fusion| {
            let per_rank = compiled(&module, &options, fusion).per_rank;
            let sent = traffic::of_module(&per_rank).into_iter().filter(|t| t.kind == "permute");
            sent.fold((0, 0), |(n, bytes), t| (n + t.count, bytes + t.bytes_sent_per_rank))
        });
        let layers = 2;
        assert_eq!((apart.0, together.0), (2 * count * layers, count * layers));
        assert_eq!(apart.1, together.1, "as many bytes");
    }
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
    assert_eq!((count(Fusion::NONE), count(Fusion::PACK)), (4 * 32, 2 * 32));
}

/// Rotary embeddings and the projection write queries, keys and values where they are sent from, and attention reads them
/// where they were received: nothing is packed or unpacked in front of it. With several sequences it writes its output
/// where that is sent from.
#[test]
fn nothing_is_packed_around_attention() {
    let options = ShardOptions::new("ulysses", parse_mesh("ulysses=8").unwrap());
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llama-3-8b/config.json");
    let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let module = program(&config, "llama-3-8b", &Workload::prefill(2, 8192)).unwrap();
    let folded = compiled(&module, &options, Fusion::PACK.folded()).schedule;
    let text = schedule::print(&folded);
    assert_eq!(schedule::parse(&text).unwrap(), folded);
    let block = text.split("\n\n").find(|frame| frame.starts_with("frame @block(")).unwrap();
    insta::assert_snapshot!("folded_block", block);
    let packed = compiled(&module, &options, Fusion::PACK).schedule;
    assert!(folded.arena_bytes() <= packed.arena_bytes());
    let cluster = Cluster::named("dgx-h100").unwrap();
    let seconds = [&folded, &packed].map(|schedule| simulate(&cluster, schedule).seconds);
    assert!(seconds[0] < seconds[1], "{seconds:?}");
}
