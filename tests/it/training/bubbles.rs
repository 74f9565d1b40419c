//! The time in which stages of a pipeline wait: exactly the bubble of the order where links cost nothing, and little more on the
//! links of a cluster.

use ithaca_ir::ops::Op;
use ithaca_ir::schedule::{FrameId, Schedule, Work};
use ithaca_ir::{diagnostic, schedule};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{PipelineOrder, Training};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::lower;
use ithaca_passes::simulate::{discrete, simulate_ranks};
use serde_json::json;

use super::pipeline::{llama, options, staged};
use super::sharded::per_rank;
use crate::tier;

/// The frames of a layer's forward pass, its backward pass (of arguments, if gradients of weights are deferred), and its
/// deferred gradients of weights.
const PASSES: [&[&str]; 3] = [
    &["block"],
    &["block.backward", "block.backward.complete", "block.backward.inputs", "block.backward.inputs.complete"],
    &["block.backward.weights", "block.backward.weights.complete"],
];

/// The time in which a stage waits, from the times of its passes over one micro-batch.
fn bubble(order: PipelineOrder, (p, v): (u64, u64), [forward, backward, weights]: [f64; 3]) -> f64 {
    (p - 1) as f64
        * match order {
            PipelineOrder::Gpipe | PipelineOrder::OneForwardOneBackward => forward + backward,
            PipelineOrder::Interleaved => (forward + backward) / v as f64,
            PipelineOrder::ZbH1 => forward + backward - weights,
        }
}

/// Leaves the work of a pipeline: the passes of layers and the transfers between stages, with the parts that are sent. The embedding, the head, the loss and
/// the update are not spread over stages.
fn keep_layers_only(schedule: &mut Schedule) {
    let is_layer = |name: &str| PASSES.concat().contains(&name);
    let others = schedule.frames.iter().filter(|(_, f)| f.name != "main" && !is_layer(&f.name));
    let others: Vec<FrameId> = others.map(|(id, _)| id).collect();
    others.into_iter().for_each(|id| schedule.frames[id].tasks.clear());
    let main = schedule.main().unwrap();
    let tasks = &mut schedule.frames[main].tasks;
    tasks.retain(|task| match &task.work {
        Work::Compute(op) => matches!(op, Op::Slice { .. }),
        _ => true,
    });
}

/// Makes the links of these levels free.
fn free(cluster: &mut Cluster, from_level: usize) {
    for level in &mut cluster.levels[from_level..] {
        level.measured = None;
        (level.latency.value, level.message_latency.value) = (0.0, 0.0);
        (level.ring_start, level.exchange_start) = (None, None);
        (level.bandwidth.value, level.contention.value) = (1e30, 1.0);
    }
}

/// Where links and memory cost nothing and stages are equal, a step takes exactly as much longer than its work as the order's
/// bubble says, by both simulations.
#[test]
fn bubbles_are_exactly_those_of_the_orders() {
    let mut cluster = Cluster::named("dgx-h100").unwrap();
    free(&mut cluster, 0);
    cluster.accelerator.launch_seconds.value = 0.0;
    cluster.accelerator.memory_bandwidth.value = 1e30;
    // Kernels take what their FLOPs take.
    let efficiency = &mut cluster.accelerator.efficiency;
    (efficiency.matmul_terms, efficiency.matmul_results) = (None, None);
    for kernel in &mut cluster.accelerator.attention {
        (kernel.forward.columns, kernel.forward.keys) = (None, None);
        kernel.backward = kernel.forward.clone();
    }
    let mut cases = vec![(PipelineOrder::OneForwardOneBackward, 3, 2, 1, "pipeline", "")];
    for (p, m, v) in [(2, 4, 2), (3, 6, 2), (4, 4, 2), (4, 8, 3), (5, 10, 2)] {
        for (i, order) in PipelineOrder::ALL.into_iter().enumerate() {
            let v = if order == PipelineOrder::Interleaved { v } else { 1 };
            let both = [("pipeline", ""), ("pipeline+megatron-tp", ",tp=2")];
            let some = if tier::is_full() { &both[..] } else { &both[(p as usize + i) % 2..][..1] };
            cases.extend(some.iter().map(|&(strategy, mesh)| (order, p, m, v, strategy, mesh)));
        }
    }
    for (order, p, m, v, strategy, mesh) in cases {
        let training = Training { chunks: v, ..staged(p, order, m) };
        let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(m * 2, 16) };
        let whole = program(&llama(p * v, false), "m", &workload).unwrap();
        let ranks_of = per_rank(&whole, &options(strategy, &format!("pp={p}{mesh}"))).unwrap();
        let mut lowered = lower::lower(ithaca_ir::verify::verify(&ranks_of).unwrap()).unwrap();
        schedule::verify(&lowered).unwrap_or_else(|d| panic!("{}", diagnostic::render(&d, None)));
        keep_layers_only(&mut lowered);
        let outcome =
            discrete::simulate(&cluster, &lowered, discrete::Record::Spans { most: usize::MAX }).unwrap();
        let seconds = PASSES.map(|names| {
            let first = outcome.classes[0].rank;
            let spans = outcome.spans.iter().filter(|s| s.rank == first && s.kind == "compute");
            let spans = spans.filter(|s| names.contains(&s.frame.as_str()));
            spans.map(|s| s.end - s.start).sum::<f64>() / m as f64
        });
        let work = m as f64 * seconds.iter().sum::<f64>();
        let expected = 1.0 + bubble(order, (p, v), seconds) / work;
        let exactly = outcome.classes.iter().map(|c| (c.time.seconds, c.time.compute));
        let coarsely = simulate_ranks(&cluster, &lowered);
        let coarsely = coarsely.iter().map(|(_, t)| (t.seconds, t.compute));
        for (kind, times) in [("events", exactly.collect::<Vec<_>>()), ("steps", coarsely.collect())] {
            let last = times.iter().map(|(seconds, _)| *seconds).fold(0.0, f64::max);
            for (_, compute) in times {
                let found = last / compute;
                assert!(
                    (found - expected).abs() < 1e-9,
                    "{order:?} p={p} m={m} v={v} {strategy} by {kind}: {found}, not {expected}"
                );
            }
        }
    }
}

/// Transfers between stages over the network of a cluster take little of a step of layers: they run while stages compute.
/// Ranks that hold the same send parts of it.
#[test]
fn links_between_stages_cost_little() {
    if !tier::is_full_or_says_so() {
        return;
    }
    let cluster = Cluster::named("dgx-h100").unwrap();
    // Stages are on nodes of their own, so only their transfers use the links between nodes.
    let mut unlinked = cluster.clone();
    free(&mut unlinked, 1);
    let sharded = PipelineOrder::ALL.map(|order| ("pipeline+megatron-tp-sp", order, 3, 1.01));
    let whole = [3, 6].map(|v| ("pipeline+megatron-tp", PipelineOrder::Interleaved, v, 1.02));
    for (strategy, order, v, limit) in sharded.into_iter().chain(whole) {
        let v = if order == PipelineOrder::Interleaved { v } else { 1 };
        let training = Training { chunks: v, clip: None, ..staged(8, order, 16) };
        let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(16, 2048) };
        // GPT-3 175B.
        let config = json!({
            "model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048,
            "n_ctx": 2048, "vocab_size": 51200, "activation_function": "gelu_new", "torch_dtype": "bfloat16",
        });
        let program = program(&config, "m", &workload).unwrap();
        let mut lowered = compile(&program, &options(strategy, "pp=8,tp=8"), &cluster).unwrap().schedule;
        keep_layers_only(&mut lowered);
        let [linked, unlinked] = [&cluster, &unlinked].map(|cluster| {
            let outcome = discrete::simulate(cluster, &lowered, discrete::Record::Times).unwrap();
            outcome.last().unwrap().time.seconds
        });
        assert!(
            linked < limit * unlinked,
            "{strategy}, {order:?}, v={v}: {linked} s, {unlinked} s without links"
        );
    }
}
