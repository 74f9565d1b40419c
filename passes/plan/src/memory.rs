//! The memory that a schedule needs on the busiest rank.
//!
//! Parameters, inputs and states are outside the arena: those of a loop once for each of its layers, those that several
//! functions share (tied embeddings) once. Activations, outputs and wire buffers are the arena, whose size is the
//! lowering's. The largest tensors at the peak are named, for refusals.

mod lives;
mod profile;
mod scores;
mod words;

use std::collections::HashMap;

use ithaca_ir::TensorType;
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::module::Layers;
use ithaca_ir::ops::state::{OPTIMIZER, is_gradient};
use ithaca_ir::order::joined;
use ithaca_ir::schedule::{Content, Frame, Place, Schedule};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use lives::{Alive, Kind};
pub(crate) use lives::{alive_bytes, lives};
pub use profile::{Moment, Profile, profile};

/// The layers for which a frame runs, by place.
type Runs = Vec<(Layers, Option<At>)>;

/// How many of the largest tensors are named.
const NAMED: usize = 5;

/// Memory of the busiest rank, bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Parameters.
    pub parameters: u64,
    /// Gradients: states called `grad.…`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gradients: u64,
    /// Optimizer states, moments and weights in full precision: states called `optimizer.…`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub optimizer: u64,
    /// Other states.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub states: u64,
    /// States in the memory of the host, which the total leaves out: caches, and states of an optimizer.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host: u64,
    /// Activations, outputs and communication buffers: the arena.
    pub arena: u64,
    /// Wire buffers at the peak, a part of the arena.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub communication: u64,
    /// Results of the forward pass that wait for the backward pass at the peak, a part of the arena.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub saved: u64,
    /// Scores of attention, where the assumed kernel stores them: those that wait for the backward pass, and those of the
    /// attention at work.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub scores: u64,
    /// Inputs of the model.
    pub inputs: u64,
    /// Outputs of the model; they are in the arena and count there.
    pub outputs: u64,
    /// Everything that must fit on a device: the sum of the above without `communication`, `saved` and `outputs`.
    pub total: u64,
    /// Memory of a device without its reserve.
    pub usable: u64,
    /// Host memory for a rank, where the cluster limits it and the plan uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_usable: Option<u64>,
    /// The largest tensors at the peak, largest first; ties by name.
    pub largest: Vec<HeldTensor>,
}

/// A tensor, or the same one of many layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeldTensor {
    /// Its name in the file, or frame and buffer.
    pub name: String,
    /// Layers that have one.
    pub count: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Memory {
    /// Bytes that a rank lacks, on its device or else in host memory; `None` when the program fits.
    pub fn over(&self) -> Option<u64> {
        let over = self.total.saturating_sub(self.usable);
        Some(if over > 0 { over } else { self.over_on_host() }).filter(|&over| over > 0)
    }

    /// Sums up what must fit on a device.
    fn sum(&mut self) {
        let Memory { parameters, gradients, optimizer, states, arena, inputs, scores, .. } = *self;
        let parts = [parameters, gradients, optimizer, states, arena, inputs, scores];
        self.total = parts.into_iter().fold(0, u64::saturating_add);
    }

    /// Bytes that a rank lacks in host memory.
    fn over_on_host(&self) -> u64 {
        self.host_usable.map_or(0, |usable| self.host.saturating_sub(usable))
    }

    /// Whether it is host memory that is missing, and device memory is not.
    pub fn lacks_host_memory(&self) -> bool {
        self.total <= self.usable && self.over_on_host() > 0
    }
}

/// The memory of `schedule`, which the schedule verifier accepts, on devices of `cluster`; of a pipeline, of the busiest
/// stage, with the host memory of the stage that needs most of it.
pub fn of_schedule(cluster: &Cluster, schedule: &Schedule) -> Memory {
    let memory = of_places(cluster, schedule);
    let of_host = memory.iter().map(|memory| (memory.host, memory.host_usable)).max();
    let (host, host_usable) = of_host.unwrap_or_default();
    // Of equally busy ones the first.
    let stages = places(schedule).into_iter().zip(memory);
    let busiest = stages.reduce(|a, b| if b.1.total > a.1.total { b } else { a });
    let memory = busiest.map_or_else(Memory::default, |(at, memory)| at_peak_of(schedule, at, memory));
    Memory { host, host_usable, ..memory }
}

/// The memory of a schedule that repeats `times` more what the last of three shorter ones has more than the second; nothing where
/// that is not what the second has more than the first.
///
/// The gaps between buffers differ a little with their number, so the arena grows by the bytes alive at its peak.
pub(crate) fn continued(cluster: &Cluster, shorter: [&Schedule; 3], times: u64) -> Option<Memory> {
    let [first, second, third] = shorter.map(most_alive);
    let growth = third.saturating_sub(second);
    if growth != second.saturating_sub(first) {
        return None;
    }
    let [_, second, third] = shorter.map(|schedule| of_schedule(cluster, schedule));
    let longer = |part: fn(&Memory) -> u64| {
        let more = part(&third).saturating_sub(part(&second));
        part(&third).saturating_add(more.saturating_mul(times))
    };
    // The fullest moment may be another one, at which other buffers are alive.
    let at_peak = |part: fn(&Memory) -> u64| {
        let more = part(&third).saturating_sub(part(&second)).min(growth);
        part(&third).saturating_add(more.saturating_mul(times))
    };
    let mut memory = Memory {
        arena: third.arena.saturating_add(growth.saturating_mul(times)),
        communication: at_peak(|memory| memory.communication),
        saved: at_peak(|memory| memory.saved),
        scores: longer(|memory| memory.scores),
        inputs: longer(|memory| memory.inputs),
        outputs: longer(|memory| memory.outputs),
        ..third.clone()
    };
    memory.sum();
    Some(memory)
}

/// The most bytes of the arena that are alive at one time on the ranks of a place.
fn most_alive(schedule: &Schedule) -> u64 {
    let Some(main) = schedule.main() else { return 0 };
    let of_place = |at: Option<At>| {
        let whole = &schedule.frames[main];
        let own = at.map(|at| whole.only(at));
        Alive::of(schedule, own.as_ref().unwrap_or(whole)).bytes().into_iter().max()
    };
    places(schedule).into_iter().filter_map(of_place).max().unwrap_or(0)
}

/// The memory of the ranks of each stage of a pipeline, in order; without a pipeline, of every rank.
pub fn of_stages(cluster: &Cluster, schedule: &Schedule) -> Vec<(Option<At>, Memory)> {
    let stages = places(schedule).into_iter().zip(of_places(cluster, schedule));
    stages.map(|(at, memory)| (at, at_peak_of(schedule, at, memory))).collect()
}

/// The stages of a pipeline; without a pipeline, every rank.
fn places(schedule: &Schedule) -> Vec<Option<At>> {
    let stages = schedule.stages();
    if stages.is_empty() { vec![None] } else { stages.into_iter().map(Some).collect() }
}

/// The memory of the ranks of each place, but for what follows from the fullest moment.
fn of_places(cluster: &Cluster, schedule: &Schedule) -> Vec<Memory> {
    let runs = schedule.layers_by_place();
    places(schedule).into_iter().map(|at| of_place(cluster, (schedule, &runs), at)).collect()
}

/// The memory of the ranks of a place, or of every rank without a place.
fn of_place(cluster: &Cluster, (schedule, runs): (&Schedule, &[Runs]), at: Option<At>) -> Memory {
    let space = &schedule.space;
    let arena = at.map_or_else(|| schedule.arena_bytes(), |at| schedule.arena_bytes_at(at));
    let mut memory = Memory { arena, usable: cluster.usable_bytes(), ..Memory::default() };
    for (place, ty, layers) in loaded(schedule, runs, at) {
        let (sum, binding) = match place {
            Place::Weight(binding) => (&mut memory.parameters, binding),
            Place::Input(binding) => (&mut memory.inputs, binding),
            Place::State(binding) if binding.host => (&mut memory.host, binding),
            Place::State(binding) if is_gradient(&binding.name) => (&mut memory.gradients, binding),
            Place::State(binding) if binding.name.starts_with(OPTIMIZER) => (&mut memory.optimizer, binding),
            Place::State(binding) => (&mut memory.states, binding),
            Place::Frame(_) | Place::Inside { .. } | Place::Argument(_) | Place::Result(_) => continue,
        };
        // A per-layer tensor of a frame that is run without layers is read once, as layer 0.
        let n_layers = || joined(layers).iter().map(|l| l.end - l.start).sum::<u64>().max(1);
        let count = if binding.is_per_layer() { n_layers() } else { 1 };
        let bytes = space.max_local_bytes(&ty).saturating_mul(count);
        *sum = sum.saturating_add(bytes);
        if !binding.host {
            memory.largest.push(HeldTensor { name: binding.name.clone(), count, bytes });
        }
    }
    if memory.host > 0 {
        memory.host_usable = cluster.host_bytes(space.mesh.ranks());
    }
    memory.scores = scores::most(cluster, schedule, at);
    if memory.scores > 0 {
        let name = "scores of attention".to_owned();
        memory.largest.push(HeldTensor { name, count: 1, bytes: memory.scores });
    }
    memory.sum();
    memory
}

/// Adds what the ranks of a place hold when their arena is fullest.
fn at_peak_of(schedule: &Schedule, at: Option<At>, mut memory: Memory) -> Memory {
    if let Some(main) = schedule.main() {
        let whole = &schedule.frames[main];
        let own = at.map(|at| whole.only(at));
        let frame = own.as_ref().unwrap_or(whole);
        memory.outputs = frame.outputs.iter().map(|o| frame.buffers[o.buffer].bytes(&schedule.space)).sum();
        at_peak(schedule, frame, &mut memory);
    }
    memory.largest.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    memory.largest.truncate(NAMED);
    memory
}

/// Distinct loaded tensors of the ranks of a place, with the layers that need them.
fn loaded<'a>(
    schedule: &'a Schedule,
    runs: &[Runs],
    at: Option<At>,
) -> Vec<(&'a Place, TensorType, Vec<Layers>)> {
    let mut found: Vec<(&Place, TensorType, Vec<Layers>)> = Vec::new();
    let mut known: HashMap<(&Place, TensorType), usize> = HashMap::new();
    for (id, frame) in schedule.frames.iter() {
        let here =
            runs[id.index()].iter().filter(|(_, there)| there.is_none() || at.is_none() || *there == at);
        let layers: Vec<Layers> = here.map(|(layers, _)| layers.clone()).collect();
        if layers.is_empty() {
            continue;
        }
        for buffer in frame.buffers.values() {
            let (Place::Weight(_) | Place::Input(_) | Place::State(_)) = &buffer.place else { continue };
            let Content::Tensor(ty) = &buffer.content else { continue };
            if ty.layout.at.is_some_and(|there| at.is_some_and(|at| there != at)) {
                continue;
            }
            // The layer that it belongs to has it too.
            if buffer.place_is_of_next_layer() {
                continue;
            }
            let ty = ty.located(None);
            let at = *known.entry((&buffer.place, ty)).or_insert_with_key(|(place, ty)| {
                found.push((place, ty.clone(), Vec::new()));
                found.len() - 1
            });
            found[at].2.extend(layers.iter().cloned());
        }
    }
    found
}

/// Adds the buffers that are alive when the frame is fullest, following the call that fills it.
fn at_peak(schedule: &Schedule, frame: &Frame, memory: &mut Memory) {
    let alive = Alive::of(schedule, frame);
    let held = alive.bytes();
    let Some(peak) = (0..held.len()).max_by_key(|&task| (held[task], usize::MAX - task)) else { return };
    for id in alive.at(peak) {
        let buffer = &frame.buffers[id];
        let name = format!("@{}.${}", frame.name, buffer.name);
        let bytes = buffer.bytes(&schedule.space);
        memory.largest.push(HeldTensor { name, count: 1, bytes });
        match alive.kind(id) {
            Kind::Communication => memory.communication += bytes,
            Kind::Saved => memory.saved += bytes,
            Kind::Other => {}
        }
    }
    if let Some(callee) = alive.callee(peak) {
        at_peak(schedule, callee, memory);
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use ithaca_ir::boxes::Side;
    use ithaca_ir::ops::Binding;
    use ithaca_ir::schedule::{Buffer, BufferId, FrameId, FrameOutput, Stream, Task, Transfer, Work};
    use ithaca_ir::{DType, Dim, Mesh, Op, Space, message};

    use super::*;

    fn buffer(name: &str, ty: &TensorType, place: Place) -> Buffer {
        Buffer { name: name.into(), content: Content::Tensor(ty.clone().into()), place }
    }

    fn task(work: Work, reads: &[usize], writes: &[usize]) -> Task {
        let ids = |ids: &[usize]| ids.iter().map(|&i| BufferId::new(i)).collect();
        let (reads, writes) = (ids(reads), ids(writes));
        Task { stream: Stream::Compute, work, reads, writes, waits: Vec::new(), records: None }
    }

    fn add() -> Work {
        Work::Compute(Op::Binary(ithaca_ir::ops::Binary::Add))
    }

    fn space() -> (Space, TensorType) {
        let mut space = Space { mesh: Mesh::new([("t", 4)]), ..Space::default() };
        let x = space.dims.push(Dim::new("x", 4096));
        let mut ty = TensorType::new(DType::BF16, [x]);
        ty.layout.split[0].push(space.mesh.axis("t").unwrap());
        (space, ty)
    }

    fn cluster() -> Cluster {
        Cluster::named("dgx-h100").unwrap()
    }

    fn schedule() -> Schedule {
        let (space, ty) = space();
        let named = |n: &str| Binding::named(n);
        let mut block = Frame { name: "block".into(), bytes: 4096, ..Frame::default() };
        block.buffers.push(buffer("w", &ty, Place::Weight(named("layers.{layer}.w"))));
        block.buffers.push(buffer("tied", &ty, Place::Weight(named("embed"))));
        block.buffers.push(buffer("hidden", &ty, Place::Frame(0)));
        block.tasks.push(task(add(), &[0, 1], &[2]));
        let mut main = Frame { name: "main".into(), bytes: 8192, ..Frame::default() };
        main.buffers.push(buffer("tied", &ty, Place::Weight(named("embed"))));
        main.buffers.push(buffer("ids", &ty, Place::Input(named("ids"))));
        main.buffers.push(buffer("logits", &ty, Place::Frame(0)));
        let call = |layers| Work::Call {
            callee: FrameId::new(0),
            layers,
            stride: 0,
            scan: None,
            stage: None,
            base: 4096,
        };
        main.tasks.push(task(add(), &[0, 1], &[2]));
        main.tasks.push(task(call(0..10), &[2], &[2]));
        main.tasks.push(task(call(10..30), &[2], &[2]));
        main.outputs.push(FrameOutput { name: Some("logits".into()), buffer: BufferId::new(2) });
        let frames = [block, main].into_iter().collect();
        Schedule { name: "m".into(), pipeline: Vec::new(), space, frames }
    }

    #[test]
    fn layers_count_and_tied_tensors_count_once() {
        let memory = of_schedule(&cluster(), &schedule());
        let local = 2 * 1024;
        assert_eq!(memory.parameters, 30 * local + local);
        assert_eq!(memory.inputs, local);
        assert_eq!(memory.outputs, local);
        assert_eq!(memory.arena, 8192);
        assert_eq!(memory.total, 32 * local + 8192);
        assert_eq!(
            memory.largest[0],
            HeldTensor { name: "layers.{layer}.w".into(), count: 30, bytes: 30 * local }
        );
        assert!(memory.largest.iter().any(|h| h.name == "@block.$hidden"), "{:?}", memory.largest);
    }

    #[test]
    fn states_are_counted_by_what_they_are() {
        let mut schedule = schedule();
        let ty = space().1;
        let block = &mut schedule.frames[FrameId::new(0)];
        let state = |name: &str| Place::State(Binding::named(name));
        for (i, name) in
            ["grad.layers.{layer}.w", "optimizer.exp_avg.layers.{layer}.w", "seen"].iter().enumerate()
        {
            block.buffers.push(buffer(&format!("s{i}"), &ty, state(name)));
        }
        // Main clears what the blocks add to.
        schedule.frames[FrameId::new(1)].buffers.push(buffer("seen", &ty, state("seen")));
        let memory = of_schedule(&cluster(), &schedule);
        let local = 2 * 1024;
        assert_eq!((memory.gradients, memory.optimizer, memory.states), (30 * local, 30 * local, local));
        assert_eq!(memory.total, (32 + 61) * local + 8192);
        let named: Vec<&str> = memory.largest.iter().map(|held| held.name.as_str()).collect();
        assert_eq!(named[..2], ["grad.layers.{layer}.w", "layers.{layer}.w"]);
    }

    #[test]
    fn several_results_fetched_tokens_and_wires_are_alive_together() {
        let (mut space, ty) = space();
        let x = ty.dims[0];
        // Rank 2 fetches twice its own tokens, the others theirs.
        let own = |i: u64| i * 1024..(i + 1) * 1024;
        let parts = vec![vec![own(0)], vec![own(1)], vec![1024..3 * 1024], vec![own(3)]];
        let fetched = ithaca_ir::dim::Fetched::new(x, parts);
        let f = space.dims.push(Dim { fetched: Some(fetched), ..Dim::new("f", 5 * 1024) });
        let mut keys = ty.clone();
        keys.dims[0] = f;
        let op = Op::Fetch { to: f };
        let transfer = Transfer::one(op, ty.clone(), keys.clone());
        let sent = message::wire_elements(&space, transfer.parcels(), Side::Sent);
        let received = message::wire_elements(&space, transfer.parcels(), Side::Received);
        assert_eq!((sent, received), (2 * 1024, 2 * 1024));
        let wire = |name: &str, elements| Buffer {
            name: name.into(),
            content: Content::Wire { dtype: DType::BF16, elements },
            place: Place::Frame(0),
        };
        let mut main = Frame { name: "main".into(), bytes: 1 << 20, ..Frame::default() };
        main.buffers.push(buffer("x", &ty, Place::Frame(0)));
        main.buffers.push(wire("send", sent));
        main.buffers.push(wire("recv", received));
        main.buffers.push(buffer("fetched", &keys, Place::Frame(0)));
        main.buffers.push(buffer("o", &ty, Place::Frame(0)));
        main.buffers.push(buffer("lse", &ty, Place::Frame(0)));
        main.tasks.push(task(Work::Pack(transfer.clone()), &[0], &[1]));
        main.tasks.push(task(Work::Exchange(transfer.clone()), &[1], &[2]));
        main.tasks.push(task(Work::Unpack(transfer), &[2], &[3]));
        main.tasks.push(task(add(), &[0, 3], &[4, 5]));
        main.tasks.push(task(add(), &[4, 5], &[5]));
        main.outputs.push(FrameOutput { name: Some("lse".into()), buffer: BufferId::new(5) });
        let names = |lives: Vec<(BufferId, Range<usize>)>| -> Vec<Range<usize>> {
            lives.into_iter().map(|(_, tasks)| tasks).collect()
        };
        assert_eq!(names(lives(&main)), [0..4, 0..2, 1..3, 2..4, 3..5, 3..5]);
        let frames = [main].into_iter().collect();
        let memory =
            of_schedule(&cluster(), &Schedule { name: "m".into(), pipeline: Vec::new(), space, frames });
        // At the peak x, both wires or both results are held beside what was fetched, on the busiest rank.
        let held = |name: &str, elements: u64| HeldTensor {
            name: format!("@main.${name}"),
            count: 1,
            bytes: 2 * elements,
        };
        assert_eq!(
            memory.largest,
            [held("recv", 2048), held("send", 2048), held("x", 1024)],
            "the first of equal peaks"
        );
    }

    #[test]
    fn what_is_over_is_counted_from_what_the_reserve_leaves() {
        let mut cluster = cluster();
        cluster.accelerator.reserve_fraction.value = 0.5;
        let needed = 32 * 2 * 1024 + 8192;
        for (missing, over) in [(0, None), (9, Some(9))] {
            cluster.accelerator.memory_bytes.value = 2 * (needed - missing);
            assert_eq!(of_schedule(&cluster, &schedule()).over(), over);
        }
    }
}
