//! The parts of a training step without stages: the seconds and the bytes of each call of the model for one micro-batch, from
//! which steps with more micro-batches and with stages are composed.

use std::collections::BTreeMap;
use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::ops::state::{OPTIMIZER, is_gradient};
use ithaca_ir::phase::Phase;
use ithaca_ir::schedule::{BufferId, Content, Frame, FrameId, Place, Schedule, Stream, Task, Work};
use ithaca_ir::{AxisId, Op};
use ithaca_layout::compile::Compiled;

use crate::cluster::Cluster;
use crate::memory;
use crate::planner::ahead::Ahead;
use crate::planner::tasks::{
    Gradient, attended, attention, casts, copied, deferred, gradients, last_tasks, peak_without_gradients,
    products,
};
use crate::simulate::{Alone, Frames, Simulation};

/// A step without stages, by the calls of the model.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// The calls, in the order of the forward pass.
    pub(super) calls: Vec<Call>,
    /// Seconds of a step beside its calls; below zero where calls overlap.
    pub(super) rest: f64,
    /// Bytes of the arena beside calls and saved tensors.
    pub(super) arena: u64,
    /// Inputs of a micro-batch, bytes.
    pub(super) inputs: u64,
    /// The part of the step in which nothing but collectives runs, without those that are to run ahead.
    pub(super) exposed: f64,
}

/// Axes of the mesh by what they do, by name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axes<'a> {
    /// Those along which ranks have the same weights and other tokens, and those of them that split the sequences of the batch.
    pub(super) replicas: &'a [String],
    pub(super) data: &'a [String],
    /// Whether the sums of gradients over these are left out.
    pub(super) leaves_sums: bool,
    /// Those over which weights are gathered before the layer that needs them.
    pub(super) prefetched: &'a [String],
    /// When states in host memory are copied.
    pub(super) copies: Copies,
}

/// When states in host memory are copied for the update of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copies {
    /// During the update.
    InLayer,
    /// During the update of the layer before.
    Ahead,
}

/// A call of the model: a loop over layers, or one function.
#[derive(Clone, Debug, Default)]
pub(super) struct Call {
    /// Layers of the loop; 1 of a function outside of loops.
    pub(super) layers: u64,
    /// Seconds of a layer, by part of the step.
    pub(super) seconds: Seconds,
    /// Additional seconds of the call, of its first and last layer: only layers of a call work for each other.
    pub(super) alone: Seconds,
    /// The gradients of the weights of a layer, for a coarse estimate.
    pub(super) gradients: Vec<Gradient>,
    /// Seconds for which messages of a layer use the links of each level, in the forward and in the backward pass.
    pub(super) links: [Vec<f64>; 2],
    /// Bytes that a layer saves for the backward pass of a micro-batch.
    pub(super) saved: u64,
    /// Bytes that the gradients of a layer's weights are computed from, where that is done after those of its arguments.
    pub(super) deferred: u64,
    /// Those of them that its backward pass computes.
    pub(super) made: u64,
    /// Bytes of the tensors that the call hands to the next one.
    pub(super) handed: u64,
    /// Bytes of the results of an attention in its forward pass.
    pub(super) attended: u64,
    /// Bytes of the largest frame of its functions.
    pub(super) frame: u64,
    /// Bytes that it has more outside of stages, of weights that are gathered for the next layer.
    pub(super) ahead: u64,
    /// Bytes of the frame of its update, which copies states from host memory.
    pub(super) update_frame: u64,
    /// Parameters and states.
    pub(super) held: Vec<StoredTensor>,
}

/// Seconds of one layer of a call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seconds {
    /// The forward pass.
    pub(super) forward: f64,
    /// What of it a backward pass that has no saved tensors computes again.
    pub(super) again: f64,
    /// Its products with weights.
    pub(super) products: f64,
    /// Its attention.
    pub(super) attention: f64,
    /// The backward pass of a micro-batch that is not the last.
    pub(super) backward: f64,
    /// What of both is exposed communication.
    pub(super) exposed: [f64; 2],
    /// What of it makes gradients f32, where micro-batches are not summed.
    pub(super) cast: f64,
    /// That of the last, which completes the gradients.
    pub(super) complete: f64,
    /// What is cleared before the step, and the update.
    pub(super) update: f64,
}

/// A parameter or a state of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredTensor {
    /// The number of what is stored: several calls may hold one tensor.
    pub(super) name: usize,
    pub(super) kind: Kind,
    /// Of a layer, or of all layers that share it.
    pub(super) bytes: u64,
    pub(super) is_per_layer: bool,
    /// Whether it is in host memory.
    pub(super) is_on_host: bool,
    /// Ranks with the same weights otherwise that have different parts of it, as they do of experts that are split over them.
    pub(super) parts: u64,
}

/// A stored tensor, or a part of it.
struct Stored {
    name: String,
    window: Vec<Range<u64>>,
}

/// What memory outside the arena is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Parameters,
    Gradients,
    Optimizer,
    States,
}

impl Block {
    /// The parts of a compiled step of so many micro-batches, without stages.
    pub(super) fn of(
        cluster: &Cluster,
        (compiled, micro_batches): (&Compiled, u64),
        Axes { replicas, data, leaves_sums, prefetched, copies }: Axes<'_>,
    ) -> Option<Self> {
        let schedule = &compiled.schedule;
        let main = &schedule.frames[schedule.main()?];
        let names = |axes: &[AxisId]| -> Vec<&str> {
            axes.iter().map(|&axis| schedule.space.mesh.axes[axis].name.as_str()).collect()
        };
        let are = |among: &[String], axis: &&str| among.iter().any(|one| one == axis);
        let is_left = |frame: &Frame, task: &Task| match task.work.exchange().map(|sum| &sum.first().op) {
            Some(Op::AllReduce { axis }) if leaves_sums && frame.phase == Phase::Backward => {
                names(axis).iter().all(|axis| are(replicas, axis))
            }
            _ => false,
        };
        // Of several micro-batches each but the last is one run of a frame, and the last of another.
        let passes: Vec<Called<'_>> = main
            .tasks
            .iter()
            .filter_map(|task| Called::of(schedule, task))
            .filter(|called| micro_batches > 1 && called.has_calls())
            .collect();
        let frame = |called: Option<&Called<'_>>| called.map_or(main, |called| &schedule.frames[called.id]);
        let (other, pass) = (frame(passes.first()), frame(passes.last()));
        let of_phase = |frame, phase| calls_of(schedule, frame, phase);
        let (forward, backward) = (of_phase(other, Phase::Forward), of_phase(other, Phase::Backward));
        let (last, complete) = (of_phase(pass, Phase::Forward), of_phase(pass, Phase::Backward));
        let update = of_phase(main, Phase::Update);
        let is_loop = |called: &&Called<'_>| called.carried < usize::MAX;
        // Coarse estimates tell other policies of recomputation from one that saves everything.
        let loops = forward.iter().filter(|_| leaves_sums).filter(is_loop);
        let loops = loops.map(|called| (called.id, last_tasks(called.frame, called.carried)));
        let back = backward.iter().filter(|_| leaves_sums).map(|called| (called.id, casts(called.frame)));
        let leaves: BTreeMap<FrameId, Vec<bool>> = loops.chain(back).collect();
        let all = Frames::of(cluster, schedule, &is_left);
        let frames = all.alone(&leaves);
        let beside_weights = |(id, frame): (FrameId, &Frame)| {
            let is_pass = matches!(frame.phase, Phase::Forward | Phase::Backward);
            (is_pass && !prefetched.is_empty()).then(|| all.beside_weights(id)).flatten()
        };
        let beside_weights: Vec<Option<f64>> = schedule.frames.iter().map(beside_weights).collect();
        let whole = &frames.last()?.simulation;
        let step = whole.seconds;
        // Weights are gathered during the layer before and gradients reduced during the next, as far as messages leave time.
        let is_copy = |axis: &str| Stream::Host.name() == axis;
        // Messages of weights go along all axes of replicas, those of keys along the ones that split a sequence.
        let is_of_weights = |axes: &[&str]| {
            axes.iter().all(|axis| are(prefetched, axis))
                && (data.is_empty() || axes.iter().any(|axis| are(data, axis)))
        };
        let is_of_layer = |op: &Op| match op {
            Op::AllGather { axis, .. } | Op::ReduceScatter { axis, .. } => is_of_weights(&names(axis)),
            _ => false,
        };
        let gathering = schedule.frames.values().filter(|_| !prefetched.is_empty());
        let aheads: Vec<Ahead> =
            gathering.map(|frame| Ahead::of(cluster, schedule, frame, &is_of_layer)).collect();
        let ahead = |called: &Called<'_>| aheads.get(called.id.index()).copied().unwrap_or_default();
        let is_gather = |(kind, axis): &(&str, String)| {
            ["all_gather", "reduce_scatter"].contains(kind) && is_of_weights(&Vec::from_iter(axis.split('+')))
                || copies == Copies::Ahead && is_copy(axis)
        };
        let exposed_gathers = |frame: &Simulation| -> f64 {
            let gathers = frame.communication.iter().filter(|(key, _)| is_gather(key));
            gathers.map(|(_, time)| time.exposed).sum()
        };
        let without = |called: &Called<'_>, exposed: f64| {
            let Alone { simulation: frame, links, .. } = &frames[called.id.index()];
            let busy = frame.streams.values().chain(links).copied().fold(0.0, f64::max);
            // The last states are handed on once they have arrived.
            let handed = frame.communication.iter().filter(|((_, axis), _)| Stream::ToHost.name() == axis);
            let handed: f64 = handed.map(|(_, time)| time.exposed).sum();
            (frame.seconds - exposed).max(busy + handed).min(frame.seconds)
        };
        let exposed = (whole.exposed() - exposed_gathers(whole)).max(0.0) / step;
        // The layer before a layer gathers for it.
        let seconds = |called: &Called<'_>| {
            let frame = &frames[called.id.index()].simulation;
            if !called.has_layer() {
                return frame.seconds;
            }
            let seconds = without(called, exposed_gathers(frame));
            beside_weights[called.id.index()].map_or(seconds, |beside| seconds.max(beside))
        };
        // The first layer of a call gathers its weights during its own kernels, and the last waits for its gradients.
        let more_alone = |called: &Called<'_>| {
            let frame = &frames[called.id.index()].simulation;
            if !called.has_layer() {
                return 0.0;
            }
            let exposed = |kind: &str| -> f64 {
                let messages = frame.communication.iter();
                let messages = messages.filter(|(key, _)| key.0 == kind && is_gather(key));
                messages.map(|(_, time)| time.exposed).sum()
            };
            let gathers = exposed("all_gather");
            let late = if gathers > 0.0 { ahead(called).seconds } else { 0.0 };
            without(called, (gathers - late).max(0.0)) - without(called, exposed_gathers(frame))
        };
        let memory = memory::of_schedule(cluster, schedule);
        let (n, n_back) = (forward.len(), backward.len());
        let mut calls: Vec<Call> = Vec::new();
        // A loss in parts has its gradients from the forward pass.
        if n == 0 || last.len() != n || complete.len() != n_back || ![n, n - 1].contains(&n_back) {
            return None;
        }
        let mut names: Vec<Stored> = Vec::new();
        let mut largest = 0;
        for i in 0..n {
            let there = &last[i];
            let [back, complete] = [&backward, &complete].map(|calls| calls.get(n_back.wrapping_sub(1 + i)));
            let on = |called: Option<&Called<'_>>| called.map_or(0.0, seconds);
            let mut call = Call { layers: there.layers, ..Call::default() };
            let first = on(Some(&forward[i]));
            let exposed = |called: &Called<'_>| frames[called.id.index()].simulation.exposed();
            let without_some = |called: &Called<'_>| {
                let all = seconds(called);
                frames[called.id.index()].without.map_or(all, |some| some.min(all))
            };
            call.seconds = Seconds {
                forward: first,
                again: without_some(&forward[i]),
                products: products(cluster, schedule, there.frame),
                attention: attention(cluster, schedule, there.frame),
                backward: on(back),
                exposed: [exposed(&forward[i]), back.map_or(0.0, exposed)],
                cast: back.map_or(0.0, |back| on(Some(back)) - without_some(back)),
                complete: on(complete) + on(Some(there)) - first,
                update: 0.0,
            };
            call.gradients = back
                .and_then(|back| Some(gradients(cluster, schedule, back.frame, leaves.get(&back.id)?)))
                .unwrap_or_default();
            let links = |called: &Called<'_>| frames[called.id.index()].links.clone();
            call.links = [links(&forward[i]), back.map_or_else(Vec::new, links)];
            let on = |called: Option<&Called<'_>>| called.map_or(0.0, more_alone);
            call.alone = Seconds {
                forward: on(Some(&forward[i])),
                backward: on(back),
                complete: on(complete),
                ..Seconds::default()
            };
            let mut most = 0;
            for called in [Some(there), back, complete].into_iter().flatten() {
                let more = if called.has_layer() { ahead(called).bytes } else { 0 };
                // Coarse estimates count gradients by how many ranks sum them.
                let bytes = match leaves.get(&called.id).filter(|_| called.frame.phase == Phase::Backward) {
                    Some(casts) => peak_without_gradients(schedule, called.frame, casts),
                    None => called.frame.bytes,
                };
                call.frame = call.frame.max(bytes + if called.layers > 1 { more } else { 0 });
                most = most.max(bytes + more);
                largest = largest.max(called.frame.bytes + more);
                hold((schedule, replicas), (called.frame, 1), &mut names, &mut call.held);
            }
            call.ahead = most - call.frame;
            let is_read = |b: &BufferId, phase: Phase| {
                let reads = |task: &Task| {
                    task.reads.contains(b)
                        && Called::of(schedule, task).is_some_and(|c| c.frame.phase == phase)
                };
                pass.tasks.iter().any(reads)
            };
            let bytes = |b: &BufferId| pass.buffers[*b].bytes(&schedule.space);
            let mut saved = 0;
            for (i, result) in there.task.writes.iter().enumerate() {
                let is_handed = i < there.carried && is_read(result, Phase::Forward);
                if is_handed {
                    call.handed += bytes(result);
                }
                // The arguments of a loop's layers are saved as a stack of them.
                if is_read(result, Phase::Backward) && !(is_handed && there.layers > 1) {
                    saved += bytes(result);
                }
            }
            call.saved = saved.div_ceil(there.layers.max(1));
            call.attended = attended(schedule, there.frame);
            (call.deferred, call.made) =
                back.map_or((0, 0), |back| deferred(schedule, (back.frame, back.carried)));
            calls.push(call);
        }
        let mut of_calls = 0.0;
        let mut count = |called: &Called<'_>, times: u64| {
            of_calls += (times * called.layers) as f64 * frames[called.id.index()].simulation.seconds;
        };
        forward.iter().for_each(|called| count(called, micro_batches - 1));
        last.iter().for_each(|called| count(called, 1));
        backward.iter().for_each(|called| count(called, micro_batches - 1));
        complete.iter().for_each(|called| count(called, 1));
        for called in &update {
            let mut held: Vec<StoredTensor> = Vec::new();
            hold((schedule, replicas), (called.frame, 1), &mut names, &mut held);
            // Layers of several kinds, and layers that are calls of their own, have weights of the same name.
            let shared = |call: &Call| {
                let is_known = |one: &&StoredTensor| call.held.iter().any(|known| known.name == one.name);
                held.iter().filter(|one| one.kind != Kind::Optimizer).filter(is_known).count()
            };
            let most = calls.iter().map(shared).max().unwrap_or(0);
            if most == 0 {
                continue;
            }
            // The states of a layer are handed on while those of the next one arrive.
            let ahead = match copies {
                Copies::Ahead if called.layers > 1 => 2 * copied(schedule, called.frame),
                Copies::Ahead | Copies::InLayer => 0,
            };
            for (owner, there) in calls.iter_mut().zip(&last) {
                let layers = there.shared_layers(called);
                if layers == 0 || shared(owner) < most {
                    continue;
                }
                owner.seconds.update += seconds(called) * layers as f64 / owner.layers.max(1) as f64;
                // The first layer waits for its states.
                owner.alone.update += frames[called.id.index()].simulation.seconds - seconds(called);
                owner.update_frame = owner.update_frame.max(called.frame.bytes + ahead);
                hold((schedule, replicas), (called.frame, 1), &mut names, &mut owner.held);
                // A table that several functions read is updated once.
                if !called.has_layer() {
                    break;
                }
            }
            count(called, 1);
        }
        let mut block =
            Self { calls, rest: step - of_calls, arena: 0, inputs: memory.inputs / micro_batches, exposed };
        let saved: u64 = block.calls.iter().map(|c| c.layers * c.saved).sum();
        let update_frame = block.calls.iter().map(|c| c.update_frame).max().unwrap_or(0);
        block.arena = memory.arena.saturating_sub(update_frame.max(saved + largest));
        Some(block)
    }
}

/// A task of `main` that calls a frame.
struct Called<'a> {
    task: &'a Task,
    id: FrameId,
    frame: &'a Frame,
    first: u64,
    layers: u64,
    carried: usize,
}

impl<'a> Called<'a> {
    fn of(schedule: &'a Schedule, task: &'a Task) -> Option<Self> {
        let Work::Call { callee, layers, scan, .. } = &task.work else { return None };
        let carried = scan.map_or(usize::MAX, |scan| scan.carried);
        Some(Self {
            task,
            id: *callee,
            frame: &schedule.frames[*callee],
            first: layers.start,
            layers: layers.end - layers.start,
            carried,
        })
    }

    /// Whether its function has the weights of a layer.
    fn has_layer(&self) -> bool {
        self.frame.buffers.values().any(|buffer| match &buffer.place {
            Place::Weight(binding) | Place::State(binding) => binding.is_per_layer(),
            _ => false,
        })
    }

    /// Layers that both run; of a function outside of loops, one.
    fn shared_layers(&self, other: &Self) -> u64 {
        let end = self.first.saturating_add(self.layers).min(other.first.saturating_add(other.layers));
        end.saturating_sub(self.first.max(other.first))
    }

    fn has_calls(&self) -> bool {
        self.frame.tasks.iter().any(|task| task.work.callee().is_some())
    }
}

/// Adds the parameters and states that a frame, which runs for so many layers, and those that it calls read or write.
fn hold(
    (schedule, replicas): (&Schedule, &[String]),
    (frame, layers): (&Frame, u64),
    names: &mut Vec<Stored>,
    held: &mut Vec<StoredTensor>,
) {
    for buffer in frame.buffers.values() {
        let Content::Tensor(ty) = &buffer.content else { continue };
        let (binding, kind) = match &buffer.place {
            Place::Weight(binding) => (binding, Kind::Parameters),
            Place::State(binding) if is_gradient(&binding.name) => (binding, Kind::Gradients),
            Place::State(binding) if binding.name.starts_with(OPTIMIZER) => (binding, Kind::Optimizer),
            Place::State(binding) => (binding, Kind::States),
            Place::Input(_)
            | Place::Frame(_)
            | Place::Inside { .. }
            | Place::Argument(_)
            | Place::Result(_) => continue,
        };
        let is_per_layer = binding.is_per_layer();
        let bytes = schedule.space.max_local_bytes(ty) * if is_per_layer { layers } else { 1 };
        let mesh = &schedule.space.mesh;
        let among = ty.layout.axes().filter(|axis| replicas.contains(&mesh.axes[*axis].name));
        let parts = among.map(|axis| mesh.size(axis)).product();
        // Several tensors may be parts of one that is stored.
        let is = |known: &Stored| known.name == binding.name && known.window == binding.window;
        let name = names.iter().position(is).unwrap_or_else(|| {
            names.push(Stored { name: binding.name.clone(), window: binding.window.clone() });
            names.len() - 1
        });
        match held.iter_mut().find(|one| one.name == name) {
            Some(one) => one.bytes = one.bytes.max(bytes),
            None => {
                held.push(StoredTensor { name, kind, bytes, is_per_layer, is_on_host: binding.host, parts })
            }
        }
    }
    for called in frame.tasks.iter().filter_map(|task| Called::of(schedule, task)) {
        hold((schedule, replicas), (called.frame, layers * called.layers), names, held);
    }
}

/// The calls in a frame of functions of a phase.
fn calls_of<'a>(schedule: &'a Schedule, frame: &'a Frame, phase: Phase) -> Vec<Called<'a>> {
    let called = frame.tasks.iter().filter_map(|task| Called::of(schedule, task));
    called.filter(|called| called.frame.phase == phase).collect()
}
