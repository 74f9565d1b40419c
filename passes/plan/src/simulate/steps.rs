//! The time of each task of a frame on each simulated rank, and the ranks that it waits for.

use std::rc::Rc;

use ithaca_ir::message::Parcel;
use ithaca_ir::ops::Unit;
use ithaca_ir::schedule::{BufferId, Frame, Schedule, Stream, Streams, Task, Work, used_streams};
use ithaca_ir::{Op, Rank, Space, TensorType, boxes, traffic};

use super::classes::Classes;
use super::shared::Loads;
use crate::cluster::{Cluster, Load};
use crate::cost::OnRank;

/// A task.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// The kind and the axes of its communication.
    pub(super) key: (&'static str, String),
    /// The part of each rank; one where all do the same.
    pub(super) parts: Rc<[Part]>,
}

/// A rank's part in a task.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    /// Seconds, once everyone is ready.
    pub(super) seconds: f64,
    /// The ranks that it waits for.
    pub(super) with: Vec<usize>,
    /// Its loads, where other streams may use the same links.
    pub(super) loads: Loads,
}

/// The steps of every frame, one for each task.
pub(super) fn steps(cluster: &Cluster, schedule: &Schedule, classes: &Classes) -> Vec<Vec<Step>> {
    let space = &schedule.space;
    let on_rank = OnRank::of(cluster, schedule);
    let used = used_streams(&schedule.frames).into_iter().fold(Streams::default(), Streams::and);
    let shares = used.iter().filter(|&stream| stream != Stream::Compute).count() > 1;
    let mut pricing = Pricing { cluster, space, classes, on_rank, shares, messages: Vec::new() };
    schedule.frames.values().map(|frame| pricing.frame(frame)).collect()
}

struct Pricing<'a> {
    cluster: &'a Cluster,
    space: &'a Space,
    classes: &'a Classes,
    on_rank: OnRank<'a>,
    /// Whether several streams communicate.
    shares: bool,
    /// Messages that were priced, those of rings from home: all steps of a ring are alike, and micro-batches of a pipeline.
    messages: Vec<(Vec<Parcel>, Rc<[Part]>)>,
}

impl Pricing<'_> {
    fn frame(&mut self, frame: &Frame) -> Vec<Step> {
        let step = |task| Step { key: key(self.space, task), parts: self.parts(frame, task) };
        frame.tasks.iter().map(step).collect()
    }

    fn parts(&mut self, frame: &Frame, task: &Task) -> Rc<[Part]> {
        if let Work::Exchange(transfer) = &task.work {
            let hop: Option<Vec<Parcel>> = transfer.parcels().iter().map(|p| self.hop_of(p)).collect();
            let message = hop.unwrap_or_else(|| transfer.parcels().to_vec());
            if let Some((_, parts)) = self.messages.iter().find(|(known, _)| *known == message) {
                return parts.clone();
            }
            let parts: Rc<[Part]> = self.exchange(&message).into();
            self.messages.push((message, parts.clone()));
            return parts;
        }
        let ranks = self.classes.ranks();
        let seconds = kernel_seconds(self.cluster, &mut self.on_rank, self.space, (frame, task), ranks);
        seconds.into_iter().map(|seconds| Part { seconds, ..Part::default() }).collect()
    }

    /// The step of a ring that sends as much to the same peers, from where every part is at home; `None` for all others.
    fn hop_of(&self, Parcel { op, from, to }: &Parcel) -> Option<Parcel> {
        let is_ring = *op == Op::Permute
            && (&from.dims, &from.layout.split) == (&to.dims, &to.layout.split)
            && [from, to].iter().all(|ty| self.space.is_even(ty));
        if !is_ring {
            return None;
        }
        let mesh = &self.space.mesh;
        let by = |ty: &TensorType, axis| ty.layout.moved_along(axis).map_or(0, |m| m.by);
        let home = from.layout.clone().at_home();
        let moves = from.layout.moved.iter().chain(&to.layout.moved).map(|m| m.axis);
        let there = moves.fold(home.clone(), |layout, axis| {
            let n = mesh.size(axis);
            layout.moved(axis, by(to, axis) + n - by(from, axis), n, None)
        });
        Some(Parcel { op: op.clone(), from: from.with_layout(home), to: to.with_layout(there) })
    }

    fn exchange(&self, parcels: &[Parcel]) -> Vec<Part> {
        let (cluster, space, classes) = (self.cluster, self.space, self.classes);
        // A sample may miss the hop that leaves the node, so all its ranks take the longest time.
        let alike = !classes.is_exact() || classes.ranks().is_empty();
        let on = |c: usize| cluster.message_on(space, parcels, classes.ranks()[c]);
        let longest = if alike || on(0).is_none() { cluster.message_seconds(space, parcels) } else { 0.0 };
        let Parcel { op, from, to } = &parcels[0];
        let axes = boxes::axes(space, op, from, to);
        let part = |c: usize| match on(c) {
            Some(mine) => {
                let mut with: Vec<usize> =
                    mine.peers.iter().map(|&peer| classes.standing_for(peer, c)).collect();
                with.sort_unstable();
                with.dedup();
                let seconds = if alike && !mine.peers.is_empty() { longest } else { mine.time.seconds() };
                Part { seconds, with, loads: self.loads(parcels, c, seconds) }
            }
            None => {
                let loads = self.loads(parcels, c, longest);
                Part { seconds: longest, with: classes.group(c, &axes), loads }
            }
        };
        (0..classes.ranks().len()).map(part).collect()
    }

    /// The loads of a message of so many seconds on the links of a rank, which its neighbours use at the same time.
    fn loads(&self, parcels: &[Parcel], c: usize, seconds: f64) -> Loads {
        if !self.shares {
            return Loads::default();
        }
        let part = self.cluster.part(self.space, parcels, self.classes.ranks()[c]);
        let link = |load: Load| {
            let contention = self.cluster.levels[load.level].contention.value.max(1.0);
            let to = load.far.filter(|_| self.cluster.levels[load.level].has_own_links());
            ((load.level, load.way, to), (load.seconds * contention).min(seconds))
        };
        let links: Vec<_> = part.loads.into_iter().map(link).collect();
        let transfer = links.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
        Loads { latency: seconds - transfer, links }
    }
}

/// Seconds that a task takes on each of these ranks, or one number where it takes all of them as long: kernels and copies,
/// zero for exchanges and calls, which are timed elsewhere.
pub(super) fn kernel_seconds(
    cluster: &Cluster,
    on_rank: &mut OnRank<'_>,
    space: &Space,
    (frame, task): (&Frame, &Task),
    ranks: &[Rank],
) -> Vec<f64> {
    let copied = |name: &str, bytes: u64| vec![cluster.copy_seconds(name, 2.0 * bytes as f64)];
    let mut flops = 0.0;
    let seconds = match &task.work {
        Work::Compute(op) => {
            let types = |buffers: &[_]| -> Option<Vec<&TensorType>> {
                buffers.iter().map(|&b| frame.buffers[b].tensor()).collect()
            };
            let (reads, writes) = (types(&task.reads), types(&task.writes));
            let (reads, writes) = reads.zip(writes).expect("the schedule verifier gives kernels tensors");
            if cluster.accelerator.shared_cores.is_some() && op.info().unit != Unit::Vector {
                flops = op.cost(space, &reads, &writes).flops as f64;
            }
            on_rank.op_seconds(op, &reads, &writes, ranks)
        }
        Work::Pack(_) => copied("pack", copied_bytes(space, frame, task)),
        Work::Unpack(_) => copied("unpack", copied_bytes(space, frame, task)),
        Work::Copy if task.stream == Stream::ToHost => {
            vec![cluster.host_seconds(copied_bytes(space, frame, task))]
        }
        Work::Copy => copied("copy", copied_bytes(space, frame, task)),
        Work::Exchange(_) | Work::Call { .. } => vec![0.0],
    };
    match &cluster.accelerator.shared_cores {
        Some(shared) => {
            let factor = shared.factor(space.mesh.ranks(), flops);
            seconds.into_iter().map(|seconds| factor * seconds).collect()
        }
        None => seconds,
    }
}

/// Bytes that a task copies: blocks to or from the wire, except tensors that are placed in it.
pub(crate) fn copied_bytes(space: &Space, frame: &Frame, task: &Task) -> u64 {
    let bytes = |buffers: &[_]| -> u64 { buffers.iter().map(|&b| frame.buffers[b].bytes(space)).sum() };
    match &task.work {
        Work::Pack(_) => bytes(&task.writes) - lying(frame, space, &task.writes, &task.reads),
        Work::Unpack(_) => bytes(&task.reads) - lying(frame, space, &task.reads, &task.writes),
        Work::Copy => bytes(&task.writes),
        Work::Compute(_) | Work::Exchange(_) | Work::Call { .. } => 0,
    }
}

/// Bytes of those tensors of a message that are placed in its wire.
fn lying(frame: &Frame, space: &Space, wire: &[BufferId], tensors: &[BufferId]) -> u64 {
    let lies = |b: &&BufferId| !wire.contains(b) && wire.contains(&frame.holder(**b));
    tensors.iter().filter(lies).map(|&b| frame.buffers[b].bytes(space)).sum()
}

pub(super) fn key(space: &Space, task: &Task) -> (&'static str, String) {
    match &task.work {
        Work::Pack(t) | Work::Exchange(t) | Work::Unpack(t) => {
            let axis = traffic::axis(space, t.parcels());
            (t.first().op.name(), axis.unwrap_or_else(|| "mesh".to_owned()))
        }
        Work::Compute(op) if task.stream == Stream::Host => (op.name(), Stream::Host.to_string()),
        Work::Compute(op) => (op.name(), String::new()),
        Work::Copy if task.stream == Stream::ToHost => ("copy", Stream::ToHost.to_string()),
        Work::Copy => ("copy", String::new()),
        Work::Call { .. } => ("call", String::new()),
    }
}
