//! Schedules of a few tasks, timed by hand.

use ithaca_ir::ops::{Attention, AttentionDims, Binary, Returns};
use ithaca_ir::order::Order;
use ithaca_ir::schedule::{Buffer, BufferId, Content, EventId, Place, Task, Transfer};
use ithaca_ir::{DType, Dim, Mask, Mesh, Op, Space, TensorType};

use super::*;
use crate::cost::{self, OnRank};

/// A frame of additions and all-reduces of one tensor on two ranks, and the seconds of each.
pub(super) struct Fixture {
    pub(super) cluster: Cluster,
    pub(super) schedule: Schedule,
    pub(super) add: f64,
    pub(super) reduce: f64,
    pub(super) transfer: Transfer,
}

pub(super) fn fixture(tasks: impl Fn(&Transfer) -> Vec<Task>) -> Fixture {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let mut space = Space { mesh: Mesh::new([("t", 2)]), ..Space::default() };
    let x = space.dims.push(Dim::new("x", 1 << 24));
    let axis = space.mesh.axis("t").unwrap();
    let to = TensorType::new(DType::BF16, [x]);
    let mut from = to.clone();
    from.layout.partial.push(axis);
    let transfer = Transfer::one(Op::AllReduce { axis: axis.into() }, from, to.clone());
    let add = cost::op_seconds(&cluster, &space, &Op::Binary(Binary::Add), &[&to, &to], &[&to]);
    let reduce = cluster.message_seconds(&space, transfer.parcels());
    assert!(add > 0.0 && reduce > add, "{add} {reduce}");
    let mut frame = Frame { name: "main".into(), n_events: 4, tasks: tasks(&transfer), ..Frame::default() };
    let buffer = Buffer { name: "x".into(), content: Content::Tensor(to.into()), place: Place::Frame(0) };
    frame.buffers.push(buffer);
    let schedule =
        Schedule { name: "m".into(), pipeline: Vec::new(), space, frames: [frame].into_iter().collect() };
    Fixture { cluster, schedule, add, reduce, transfer }
}

pub(super) fn event(i: usize) -> EventId {
    EventId::new(i)
}

pub(super) fn add(waits: &[usize], records: Option<usize>) -> Task {
    let x = ithaca_ir::schedule::BufferId::new(0);
    Task {
        stream: Stream::Compute,
        work: Work::Compute(Op::Binary(Binary::Add)),
        reads: vec![x, x],
        writes: vec![x],
        waits: waits.iter().map(|&e| event(e)).collect(),
        records: records.map(event),
    }
}

pub(super) fn reduce(transfer: &Transfer, waits: &[usize], records: Option<usize>) -> Task {
    Task { stream: Stream::Comm, work: Work::Exchange(transfer.clone()), ..add(waits, records) }
}

pub(super) fn near(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-12 * b.abs().max(1e-3), "{a} is not {b}");
}

#[test]
fn a_chain_adds_up_and_all_communication_is_exposed() {
    let f = fixture(|t| vec![add(&[], Some(0)), reduce(t, &[0], Some(1)), add(&[1], None)]);
    let time = simulate(&f.cluster, &f.schedule);
    near(time.seconds, 2.0 * f.add + f.reduce);
    near(time.compute, 2.0 * f.add);
    near(time.exposed(), f.reduce);
    assert_eq!(time.most_exposed().unwrap().0, &("all_reduce", "t".to_owned()));
}

#[test]
fn independent_streams_overlap() {
    let f = fixture(|t| vec![reduce(t, &[], Some(0)), add(&[], None), add(&[0], None)]);
    let time = simulate(&f.cluster, &f.schedule);
    near(time.seconds, f.reduce + f.add);
    near(time.exposed(), f.reduce - f.add);
    near(time.communication.values().map(|t| t.total).sum(), f.reduce);
    near(time.compute + time.exposed(), time.seconds);
}

#[test]
fn streams_run_in_order() {
    let f = fixture(|t| vec![reduce(t, &[], None), reduce(t, &[], Some(0)), add(&[0], None)]);
    near(simulate(&f.cluster, &f.schedule).seconds, 2.0 * f.reduce + f.add);
}

#[test]
fn a_loop_takes_its_frame_for_each_layer() {
    let mut f = fixture(|t| vec![reduce(t, &[], Some(0)), add(&[], None), add(&[0], None)]);
    let body = f.schedule.frames[FrameId::new(0)].clone();
    let call =
        Work::Call { callee: FrameId::new(0), layers: 0..80, stride: 0, scan: None, stage: None, base: 0 };
    let tasks = vec![reduce(&f.transfer, &[], None), Task { work: call, ..add(&[], None) }, add(&[], None)];
    f.schedule.frames.push(Frame { tasks, ..body });
    let time = simulate(&f.cluster, &f.schedule);
    near(time.seconds, f.reduce + 80.0 * (f.reduce + f.add) + f.add);
    near(time.exposed(), f.reduce + 80.0 * (f.reduce - f.add));
    near(time.compute, 161.0 * f.add);
}

/// Queries and keys `[s h d]` split along `ring`, and an attention that takes them in parts.
pub(super) fn ring(parts: u64, order: Order) -> (Space, Attention, TensorType) {
    let mut space = Space { mesh: Mesh::new([("ring", parts)]), ..Space::default() };
    let s = space.dims.push(Dim { order, ..Dim::new("s", 8192 * parts) });
    let [h, d] = [("h", 32), ("d", 128)].map(|(name, n)| space.dims.push(Dim::new(name, n)));
    let mut ty = TensorType::new(DType::BF16, [s, h, d]);
    ty.layout.split[0].push(space.mesh.axis("ring").unwrap());
    let dims = AttentionDims { heads: h, kv_heads: h, queries: s, keys: s, width: d };
    let attention = Attention { returns: Returns::Part, ..Attention::new(dims, Mask::Causal, 0.1) };
    (space, attention, ty)
}

/// A type that a step of the ring leaves on the ranks `only`.
pub(super) fn travelled(space: &Space, ty: &TensorType, by: u64, only: Option<(u64, u64)>) -> TensorType {
    let axis = space.mesh.axis("ring").unwrap();
    ty.with_layout(ty.layout.clone().moved(axis, by, space.mesh.size(axis), only))
}

/// A frame that attends to keys in the order in which they come, each step in buffers of its own: the first keys are
/// those at home, `keys[i]` come from `keys[i - 1]`, and the queries are `queries[i]`, for free.
pub(super) fn attend(
    space: &Space,
    attention: &Attention,
    queries: &[TensorType],
    keys: &[TensorType],
) -> Schedule {
    let mut frame = Frame { name: "main".into(), n_events: keys.len(), ..Frame::default() };
    let mut buffer = |name: String, ty: &TensorType| {
        frame.buffers.push(Buffer {
            name,
            content: Content::Tensor(ty.clone().into()),
            place: Place::Frame(0),
        })
    };
    let held: Vec<BufferId> = (0..keys.len()).map(|i| buffer(format!("k{i}"), &keys[i])).collect();
    let asked: Vec<BufferId> = (0..keys.len()).map(|i| buffer(format!("q{i}"), &queries[i])).collect();
    let results: Vec<BufferId> = (0..keys.len()).map(|i| buffer(format!("o{i}"), &queries[i])).collect();
    for i in 0..keys.len() {
        if i > 0 {
            let transfer = Transfer::one(Op::Permute, keys[i - 1].clone(), keys[i].clone());
            frame.tasks.push(Task {
                stream: Stream::Comm,
                work: Work::Exchange(transfer),
                reads: vec![held[i - 1]],
                writes: vec![held[i]],
                waits: Vec::new(),
                records: Some(event(i)),
            });
        }
        frame.tasks.push(Task {
            stream: Stream::Compute,
            work: Work::Compute(Op::Attention(attention.clone())),
            reads: vec![asked[i], held[i], held[i]],
            writes: vec![results[i]],
            waits: if i > 0 { vec![event(i)] } else { Vec::new() },
            records: None,
        });
    }
    let frames = [frame].into_iter().collect();
    Schedule { name: "m".into(), pipeline: Vec::new(), space: space.clone(), frames }
}

/// A whole ring: every rank sees every part of the keys.
pub(super) fn whole_ring(parts: u64, order: Order) -> (Cluster, Schedule) {
    let (space, attention, ty) = ring(parts, order);
    let keys: Vec<TensorType> = (0..parts).map(|i| travelled(&space, &ty, i, None)).collect();
    let queries = vec![ty; keys.len()];
    (Cluster::named("dgx-h100").unwrap(), attend(&space, &attention, &queries, &keys))
}

/// Counted in pairs the busiest rank of contiguous causal parts has (2P − 1)/P of the mean; zigzag and stripes have
/// the mean (FACTS of the schedules). Transfers hide behind 8192 tokens.
#[test]
fn a_contiguous_causal_ring_takes_as_long_as_its_last_rank() {
    for parts in [2, 4, 8] {
        let seconds = |order| {
            let (cluster, schedule) = whole_ring(parts, order);
            simulate(&cluster, &schedule).seconds
        };
        let contiguous = seconds(Order::Contiguous);
        let p = parts as f64;
        for balanced in [Order::Zigzag { parts }, Order::Striped { parts, block: 1 }] {
            let ratio = contiguous / seconds(balanced);
            assert!((ratio * p / (2.0 * p - 1.0) - 1.0).abs() < 0.02, "{parts}: {ratio}");
        }
    }
}

/// Ranks of a contiguous causal ring have the more to do the later their tokens are, and none outlasts the simulation.
#[test]
fn ranks_of_a_contiguous_ring_end_one_after_another() {
    let (cluster, schedule) = whole_ring(4, Order::Contiguous);
    let times = simulate_ranks(&cluster, &schedule);
    let compute: Vec<f64> = times.iter().map(|(_, time)| time.compute).collect();
    assert!(compute.windows(2).all(|w| w[0] < w[1]), "{compute:?}");
    for (rank, time) in &times {
        near(time.compute + time.exposed(), time.seconds);
        assert!(time.seconds <= simulate(&cluster, &schedule).seconds, "{rank}");
    }
}

/// DistFlashAttn: where a part of the ranks computes its own block, the idle ones compute blocks of the late ranks.
#[test]
fn tasks_of_complementary_ranks_take_the_time_of_one() {
    let (space, attention, ty) = ring(8, Order::Contiguous);
    let cluster = Cluster::named("dgx-h100").unwrap();
    // Ranks 3 to 7 attend to the keys of 3 ranks before; ranks 0 to 2 hold queries of ranks 5 to 7 meanwhile.
    let late = travelled(&space, &ty, 5, Some((3, 8)));
    let helped = travelled(&space, &ty, 5, Some((0, 3)));
    let own = travelled(&space, &ty, 0, Some((3, 8)));
    let at_home = travelled(&space, &ty, 0, Some((0, 3)));
    let task = |q: &TensorType, k: &TensorType| {
        attend(&space, &attention, std::slice::from_ref(q), std::slice::from_ref(k))
    };
    let (first, second) = (task(&own, &late), task(&helped, &at_home));
    let mut both = first.clone();
    let other = second.frames[FrameId::new(0)].clone();
    let main = &mut both.frames[FrameId::new(0)];
    let ids: Vec<BufferId> = other.buffers.values().map(|b| main.buffers.push(b.clone())).collect();
    let moved = |old: &[BufferId]| old.iter().map(|b| ids[b.index()]).collect();
    for task in &other.tasks {
        main.tasks.push(Task { reads: moved(&task.reads), writes: moved(&task.writes), ..task.clone() });
    }
    let [first, second, both] = [first, second, both].map(|s| simulate(&cluster, &s).seconds);
    assert!(first > 0.0);
    near(first, second);
    near(both, first);
}

/// Pairs in parts add up, whoever computes them, and an empty tile costs its results only.
#[test]
fn prices_on_ranks_are_those_of_their_pairs() {
    let (space, attention, ty) = ring(4, Order::Striped { parts: 4, block: 2 });
    let cluster = Cluster::named("dgx-h100").unwrap();
    let mut on_rank = OnRank::new(&cluster, &space);
    let mut total = 0;
    for by in 0..4 {
        let k = travelled(&space, &ty, by, None);
        for rank in space.mesh.iter_ranks() {
            let pairs = on_rank.pairs(&attention, &ty, &k, rank);
            assert_eq!(pairs, attention.pairs(&space, &ty, &k, rank));
            total += pairs;
        }
    }
    let n = u128::from(space.size(ty.dims[0]));
    assert_eq!(total, n * (n + 1) / 2);
    let (space, attention, ty) = ring(4, Order::Contiguous);
    let mut on_rank = OnRank::new(&cluster, &space);
    let next = travelled(&space, &ty, 1, None);
    let op = Op::Attention(attention);
    let empty = on_rank.op_seconds(&op, &[&ty, &next, &next], &[&ty], &[Rank(0)])[0];
    let bytes = 8192.0 * 32.0 * 128.0 * 2.0;
    near(empty, cluster.accelerator.launch_seconds.value + cluster.stream_seconds(bytes));
}

#[test]
fn a_loop_goes_on_until_its_ranks_keep_their_distance() {
    // In each layer ranks attend, then wait for their neighbours: the last rank is the slowest, and 3 layers later it
    // holds up all.
    let (cluster, mut schedule) = whole_ring(4, Order::Contiguous);
    let body = schedule.frames[FrameId::new(0)].clone();
    let call = |layers| Task {
        work: Work::Call { callee: FrameId::new(0), layers, stride: 0, scan: None, stage: None, base: 0 },
        stream: Stream::Compute,
        reads: Vec::new(),
        writes: Vec::new(),
        waits: Vec::new(),
        records: None,
    };
    let mut main = Frame { tasks: vec![call(0..40)], n_events: 0, ..body };
    main.buffers = Default::default();
    let looped = schedule.clone();
    schedule.frames.push(main.clone());
    let whole = simulate(&cluster, &schedule).seconds;
    // The same loop in two pieces, so that nothing is repeated over the seam.
    let mut pieces = looped;
    main.tasks = vec![call(0..20), call(20..40)];
    pieces.frames.push(main);
    near(whole, simulate(&cluster, &pieces).seconds);
    let once = simulate_ranks(
        &cluster,
        &Schedule { frames: schedule.frames.values().take(1).cloned().collect(), ..schedule },
    );
    let slowest = once.iter().map(|(_, t)| t.seconds).fold(0.0, f64::max);
    assert!(whole >= 39.0 * slowest && whole <= 40.0 * slowest * (1.0 + 1e-9), "{whole} {slowest}");
}
