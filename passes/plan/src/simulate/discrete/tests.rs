//! Schedules timed by hand, with the arithmetic written out, and held against the closed form where that is exact.

mod models;

use ithaca_ir::layout::At;
use ithaca_ir::schedule::{Buffer, BufferId, Content, Frame, Place, Stream, Task, Transfer, Work};
use ithaca_ir::{DType, Dim, Mesh, Op, Space, TensorType, text};
use ithaca_layout::compile::compile;
use ithaca_layout::shard::{ShardOptions, parse_mesh};
use ithaca_pass::Volume;

use super::*;
use crate::simulate::simulate as closed_form;
use crate::simulate::tests::{add, fixture, near, reduce};

fn timed(cluster: &Cluster, schedule: &Schedule) -> Simulation {
    simulate(cluster, schedule, Record::Times).unwrap().last().unwrap().time.clone()
}

/// One level of links: a byte takes a nanosecond, the first one a millisecond; `sharing` devices in a row share a link.
/// Kernels take no time to start, and a byte of them takes a nanosecond as well.
fn plain(sharing: f64) -> Cluster {
    let mut cluster = Cluster::named("dgx-h100").unwrap();
    cluster.levels.truncate(1);
    let level = &mut cluster.levels[0];
    level.measured = None;
    level.devices.value = 1024;
    level.bandwidth.value = 1e9;
    level.contention.value = sharing;
    (level.latency.value, level.message_latency.value) = (1e-3, 1e-3);
    (level.ring_start, level.exchange_start) = (None, None);
    (level.ring_efficiency.value, level.exchange_efficiency.value) = (1.0, 1.0);
    cluster.accelerator.launch_seconds.value = 0.0;
    cluster.accelerator.memory_bandwidth.value = 1e9;
    cluster.accelerator.efficiency.memory.value = 1.0;
    cluster
}

/// A frame of tasks over one buffer for each type.
fn schedule(space: Space, types: &[TensorType], tasks: Vec<Task>, n_events: usize) -> Schedule {
    let mut frame = Frame { name: "main".into(), n_events, tasks, ..Frame::default() };
    for (i, ty) in types.iter().enumerate() {
        let content = Content::Tensor(ty.clone().into());
        frame.buffers.push(Buffer { name: format!("x{i}"), content, place: Place::Frame(0) });
    }
    Schedule { name: "m".into(), pipeline: Vec::new(), space, frames: [frame].into_iter().collect() }
}

/// A task from buffer `from` to buffer `to`.
fn task(stream: Stream, work: Work, from: usize, to: usize, waits: &[usize], records: Option<usize>) -> Task {
    let event = |&e: &usize| ithaca_ir::schedule::EventId::new(e);
    Task {
        stream,
        work,
        reads: vec![BufferId::new(from)],
        writes: vec![BufferId::new(to)],
        waits: waits.iter().map(event).collect(),
        records: records.as_ref().map(event),
    }
}

/// Two ranks, a link each: 10 MB go out and 10 MB come in, at once.
#[test]
fn two_ranks_and_one_link() {
    let cluster = plain(1.0);
    let mut space = Space { mesh: Mesh::new([("t", 2)]), ..Space::default() };
    let x = space.dims.push(Dim::new("x", 10_000_000));
    let axis = space.mesh.axis("t").unwrap();
    let whole = TensorType::new(DType::BF16, [x]);
    let mut part = whole.clone();
    part.layout.split[0].push(axis);
    let gather = Transfer::one(Op::AllGather { axis: axis.into(), dim: x }, part.clone(), whole.clone());
    let tasks = vec![task(Stream::Comm, Work::Exchange(gather), 0, 1, &[], None)];
    let outcome = simulate(&cluster, &schedule(space, &[part, whole], tasks, 0), Record::Times).unwrap();
    // Both do the same: 1 ms + 10 MB / 1 GB/s.
    assert_eq!((outcome.classes.len(), outcome.classes[0].ranks), (1, 2));
    near(outcome.classes[0].time.seconds, 0.001 + 0.010);
    near(outcome.classes[0].time.exposed(), 0.011);
    near(outcome.classes[0].time.occupancy(Stream::Comm), 1.0);
    near(outcome.classes[0].time.occupancy(Stream::Compute), 0.0);
}

/// Two stages of two ranks whose four devices share one link: one all-reduces 10 MB, the other 20 MB.
fn two_on_one_link(sharing: f64) -> Outcome {
    let mut space = Space { mesh: Mesh::new([("pp", 2), ("t", 2)]), ..Space::default() };
    let [pp, axis] = ["pp", "t"].map(|a| space.mesh.axis(a).unwrap());
    let sizes = [("x", 5_000_000), ("y", 10_000_000)];
    let mut types = Vec::new();
    let mut tasks = Vec::new();
    for (stage, (name, size)) in sizes.into_iter().enumerate() {
        let dim = space.dims.push(Dim::new(name, size));
        let mut to = TensorType::new(DType::BF16, [dim]);
        to.layout.at = Some(At { axis: pp, coordinate: stage as u64 });
        let mut from = to.clone();
        from.layout.partial.push(axis);
        let transfer = Transfer::one(Op::AllReduce { axis: axis.into() }, from.clone(), to.clone());
        types.extend([from, to]);
        tasks.push(task(Stream::Comm, Work::Exchange(transfer), 2 * stage, 2 * stage + 1, &[], None));
    }
    simulate(&plain(sharing), &schedule(space, &types, tasks, 0), Record::Times).unwrap()
}

#[test]
fn two_transfers_that_share_an_adapter_divide_it() {
    // Over a link of its own an all-reduce of 10 MB sends half of it twice: 10 ms, after two steps of 1 ms; one of 20 MB
    // takes 20 ms.
    let own = two_on_one_link(1.0);
    let seconds: Vec<f64> = own.classes.iter().map(|c| c.time.seconds).collect();
    near(seconds[0], 0.002 + 0.010);
    near(seconds[1], 0.002 + 0.020);
    // Where four ranks share one link each has a quarter of it: the first 10 ms of both take 40. Then the two of the
    // second stage have half of it each, and the 10 ms that are left take 20.
    let shared = two_on_one_link(4.0);
    let seconds: Vec<f64> = shared.classes.iter().map(|c| c.time.seconds).collect();
    near(seconds[0], 0.002 + 0.040);
    near(seconds[1], 0.002 + 0.040 + 0.020);
    // Where the ranks of a stage share a link the stages do not see each other.
    let pairs = two_on_one_link(2.0);
    let seconds: Vec<f64> = pairs.classes.iter().map(|c| c.time.seconds).collect();
    near(seconds[0], 0.002 + 0.020);
    near(seconds[1], 0.002 + 0.040);
}

/// Two gathers of one rank, of 10 MB and 20 MB, on two streams over one link or over a link each.
fn two_streams(mesh: Mesh, axes: [&str; 2], nodes_of: u64) -> (Cluster, Schedule) {
    let mut cluster = plain(1.0);
    let outer = cluster.levels[0].clone();
    cluster.levels[0].devices.value = nodes_of;
    cluster.levels.push(outer);
    let mut space = Space { mesh, ..Space::default() };
    let mut types = Vec::new();
    let mut tasks = Vec::new();
    for (i, (stream, axis)) in [Stream::Comm, Stream::Weights].into_iter().zip(axes).enumerate() {
        let dim = space.dims.push(Dim::new(format!("x{i}"), (i as u64 + 1) * 10_000_000));
        let axis = space.mesh.axis(axis).unwrap();
        let whole = TensorType::new(DType::BF16, [dim]);
        let mut part = whole.clone();
        part.layout.split[0].push(axis);
        let gather = Transfer::one(Op::AllGather { axis: axis.into(), dim }, part.clone(), whole.clone());
        types.extend([part, whole]);
        tasks.push(task(stream, Work::Exchange(gather), 2 * i, 2 * i + 1, &[], None));
    }
    (cluster, schedule(space, &types, tasks, 0))
}

#[test]
fn two_streams_of_a_rank_divide_its_link() {
    // One link: the first gather has half of it for 20 ms, the other all of it for the 10 ms that are left. In the planner's
    // simulation the second gather waits for the first.
    let (cluster, one) = two_streams(Mesh::new([("t", 2)]), ["t", "t"], 1024);
    let time = timed(&cluster, &one);
    near(time.streams[&Stream::Comm], 0.001 + 0.020);
    near(time.streams[&Stream::Weights], 0.001 + 0.030);
    let expected = closed_form(&cluster, &one);
    near(expected.streams[&Stream::Comm], 0.001 + 0.010);
    near(expected.streams[&Stream::Weights], 0.001 + 0.030);
    near(time.seconds, expected.seconds);
    // A link inside a node and another between nodes do not delay each other.
    let (cluster, two) = two_streams(Mesh::new([("d", 2), ("t", 2)]), ["t", "d"], 2);
    for time in [timed(&cluster, &two), closed_form(&cluster, &two)] {
        near(time.streams[&Stream::Comm], 0.001 + 0.010);
        near(time.streams[&Stream::Weights], 0.001 + 0.020);
        near(time.seconds, 0.001 + 0.020);
    }
}

#[test]
fn a_kernel_hides_a_transfer() {
    let hidden = fixture(|t| vec![reduce(t, &[], Some(0)), add(&[], None), add(&[], None), add(&[0], None)]);
    let time = timed(&hidden.cluster, &hidden.schedule);
    // The stream of kernels waits for what two of them leave of the transfer.
    let waits = (hidden.reduce - 2.0 * hidden.add).max(0.0);
    near(time.seconds, 3.0 * hidden.add + waits);
    near(time.exposed(), waits);
    near(time.communication.values().map(|t| t.total).sum(), hidden.reduce);
    let chain = fixture(|t| vec![add(&[], Some(0)), reduce(t, &[0], Some(1)), add(&[1], None)]);
    near(timed(&chain.cluster, &chain.schedule).exposed(), chain.reduce);
}

/// Of a transfer the kernels beside it are known, and the task that waits for the rest.
#[test]
fn an_exposed_transfer_has_a_reason() {
    let overlaps = |cluster: &Cluster, schedule: &Schedule| {
        simulate(cluster, schedule, Record::Overlaps).unwrap().last().unwrap().overlaps.clone()
    };
    let beside = fixture(|t| vec![reduce(t, &[], Some(0)), add(&[], None), add(&[], None), add(&[0], None)]);
    let [one] = overlaps(&beside.cluster, &beside.schedule).try_into().unwrap();
    let at = |task| TaskAt { frame: one.collective.frame, task };
    assert_eq!(one.collective, at(0));
    let mut kernels = one.beside.clone();
    kernels.sort_by_key(|(kernel, _)| *kernel);
    assert_eq!(kernels.iter().map(|(kernel, _)| *kernel).collect::<Vec<_>>(), [at(1), at(2)]);
    kernels.iter().for_each(|(_, seconds)| near(*seconds, beside.add));
    let [(exposure, seconds)] = one.exposed[..] else { panic!("{:?}", one.exposed) };
    assert_eq!(exposure, Exposure { at: WaitPoint::Task(at(3)), obstacle: Obstacle::Transfer });
    near(seconds, beside.reduce - 2.0 * beside.add);
    // The last kernel waits for the second of two transfers.
    let queue = fixture(|t| vec![reduce(t, &[], None), reduce(t, &[], Some(0)), add(&[0], None)]);
    let [first, second] = overlaps(&queue.cluster, &queue.schedule).try_into().unwrap();
    let obstacle = |overlap: &Overlap| overlap.exposed[0].0.obstacle;
    assert_eq!((obstacle(&first), obstacle(&second)), (Obstacle::Queued(at(1)), Obstacle::Transfer));
}

/// Rank 0 of a ring of four has twice as much to compute as the others before each of two steps.
#[test]
fn a_slow_rank_delays_a_ring_step_by_step() {
    let cluster = plain(1.0);
    let mut space = Space { mesh: Mesh::new([("ring", 4)]), ..Space::default() };
    let axis = space.mesh.axis("ring").unwrap();
    // 2, 1, 1 and 1 million elements, 2 bytes each; and a block of one element that travels.
    let s = space.dims.push(Dim { uneven: true, ..Dim::new("s", 5) });
    let m = space.dims.push(Dim::new("m", 1_000_000));
    let b = space.dims.push(Dim::new("b", 4));
    let mut x = TensorType::new(DType::BF16, [s, m]);
    x.layout.split[0].push(axis);
    let mut home = TensorType::new(DType::BF16, [b]);
    home.layout.split[0].push(axis);
    let moved = |by| home.with_layout(home.layout.clone().moved(axis, by, 4, None));
    let types = [x, home.clone(), moved(1), moved(2)];
    let scale = || Work::Compute(Op::Scale { factor: 2.0 });
    let permute = |from: usize| {
        Work::Exchange(Transfer::one(Op::Permute, types[from].clone(), types[from + 1].clone()))
    };
    let tasks = vec![
        task(Stream::Compute, scale(), 0, 0, &[], Some(0)),
        task(Stream::Comm, permute(1), 1, 2, &[0], Some(1)),
        task(Stream::Compute, scale(), 0, 0, &[1], Some(2)),
        task(Stream::Comm, permute(2), 2, 3, &[2], None),
    ];
    let outcome = simulate(&cluster, &schedule(space, &types, tasks, 3), Record::Times).unwrap();
    // A million elements read and written are 4 MB, 4 ms; rank 0 takes 8. A step takes hop = 1 ms and 2 ns, once both
    // neighbours are there.
    let (t, hop) = (0.004, 0.001 + 2e-9);
    // After the first step: ranks 0, 1 and 3 meet rank 0 at 2t, rank 2 meets its neighbours at t.
    // Then all compute again, and meet: rank 0 is there at 2t + hop + 2t, rank 2's neighbours at 2t + hop + t.
    let expected = [4.0 * t + 2.0 * hop, 4.0 * t + 2.0 * hop, 3.0 * t + 2.0 * hop, 4.0 * t + 2.0 * hop];
    assert_eq!(outcome.classes.iter().map(|c| c.ranks).sum::<u64>(), 4);
    for class in &outcome.classes {
        near(class.time.seconds, expected[class.rank.0 as usize]);
    }
}

/// Calls of `@layer` in the order of 1F1B on four stages: in each line a stage and a value that it makes of another.
fn one_forward_one_backward(stages: usize, micro_batches: usize) -> Vec<(usize, String, String)> {
    let mut orders: Vec<Vec<(usize, bool)>> = Vec::new();
    for stage in 0..stages {
        let ahead = (stages - 1 - stage).min(micro_batches);
        let mut order: Vec<(usize, bool)> = (0..ahead).map(|m| (m, true)).collect();
        for m in 0..micro_batches {
            order.extend((m + ahead < micro_batches).then_some((m + ahead, true)));
            order.push((m, false));
        }
        orders.push(order);
    }
    let mut made: Vec<String> = (0..micro_batches).map(|m| format!("f{m}_0")).collect();
    let mut lines = Vec::new();
    let mut next = vec![0; stages];
    while next.iter().zip(&orders).any(|(next, order)| *next < order.len()) {
        for stage in 0..stages {
            let Some(&(m, forward)) = orders[stage].get(next[stage]) else { continue };
            let (from, to) = if forward {
                (format!("f{m}_{stage}"), format!("f{m}_{}", stage + 1))
            } else if stage + 1 == stages {
                (format!("f{m}_{stages}"), format!("b{m}_{stage}"))
            } else {
                (format!("b{m}_{}", stage + 1), format!("b{m}_{stage}"))
            };
            if made.contains(&from) {
                made.push(to.clone());
                lines.push((stage, from, to));
                next[stage] += 1;
            }
        }
    }
    lines
}

/// With messages that take no time, a pipeline stands still for (p − 1)/(m + p − 1) of the step.
#[test]
fn the_bubble_of_a_pipeline_is_that_of_the_formula() {
    let mut cluster = plain(1.0);
    cluster.levels[0].bandwidth.value = 1e30;
    (cluster.levels[0].latency.value, cluster.levels[0].message_latency.value) = (0.0, 0.0);
    for (p, m) in [(2, 1), (4, 4), (4, 8), (3, 7)] {
        let mut source = String::from(
            "ithaca 1 program\nmodel \"m\"\ndim t = 512\ndim m = 512\ndim n = 2048\n\n\
             func @layer(%x: bf16[t m]) {\n  %up = param {name=\"{layer}.up\"} : bf16[n m]\n  \
             %down = param {name=\"{layer}.down\"} : bf16[m n]\n  %y = einsum %x, %up : bf16[t n]\n  \
             %z = einsum %y, %down : bf16[t m]\n  return %z\n}\n\nfunc @main() {\n",
        );
        for micro in 0..m {
            source += &format!("  %f{micro}_0 = input {{name=\"x{micro}\"}} : bf16[t m]\n");
        }
        for (stage, from, to) in one_forward_one_backward(p, m) {
            source += &format!(
                "  %{to} = call %{from} {{callee=@layer, layers={stage}..{}, stage={stage}}} : bf16[t m]\n",
                stage + 1
            );
        }
        source += "  return y = %b0_0\n}\n";
        let module = text::parse(&source).unwrap_or_else(|d| panic!("{d:?}"));
        let options = ShardOptions::new("pipeline", parse_mesh(&format!("pp={p}")).unwrap());
        let schedule = compile(&module, &options, &Volume).unwrap_or_else(|d| panic!("{d:?}")).schedule;
        let outcome = simulate(&cluster, &schedule, Record::Times).unwrap();
        assert_eq!(outcome.classes.len(), p);
        let last = outcome.last().unwrap().time.seconds;
        for class in &outcome.classes {
            let idle = 1.0 - class.time.compute / last;
            let expected = (p - 1) as f64 / (m + p - 1) as f64;
            assert!((idle - expected).abs() < 1e-9, "{p} stages, {m}: {idle} is not {expected}");
        }
    }
}
