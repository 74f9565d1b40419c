//! The estimate of a training step: the parts of a step without stages, put together in closed form.
//!
//! With p stages and m micro-batches the busiest stage works m times, and the others fill and drain the pipeline once: whole
//! stages in the orders GPipe and 1F1B, chunks of stages in interleaved order, and in order ZB-H1 what the gradients of
//! weights do not fill. Transfers between stages count while the pipeline fills and drains.

use ithaca_differentiate::{PipelineOrder, Recompute};

use super::block::{Block, Call, Seconds};

/// Stages and micro-batches of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    pub(super) stages: u64,
    pub(super) micro_batches: u64,
    pub(super) order: PipelineOrder,
    /// Chunks of layers of a stage.
    pub(super) chunks: u64,
}

/// A step that was not compiled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    /// Seconds of the step.
    pub(super) seconds: f64,
    /// Bytes on the device of the busiest rank.
    pub(super) memory: u64,
    /// Bytes of host memory of the rank that has most there.
    pub(super) host: u64,
}

/// The calls of each chunk of layers, by number, with their layers.
pub(super) type Cut = Vec<Vec<(usize, u64)>>;

/// One stage, whatever the order of its passes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stage {
    forward: f64,
    backward: f64,
    complete: f64,
    update: f64,
    products: f64,
    /// Bytes of one micro-batch, by purpose.
    lasting: u64,
    host: u64,
    saved: u64,
    deferred: u64,
    made: u64,
    frame: u64,
    update_frame: u64,
}

impl Stage {
    fn pass(&self) -> f64 {
        self.forward + self.backward
    }
}

impl Block {
    /// The stages of a pipeline, each of which has every p-th chunk of layers.
    pub(super) fn stages(&self, cut: &Cut, p: u64) -> Vec<Stage> {
        let p = p.max(1) as usize;
        let mut stages: Vec<Stage> = Vec::with_capacity(p);
        let chunks = |stage: usize| cut.iter().skip(stage).step_by(p);
        for stage in 0..p {
            // Most stages have the same layers as the one before.
            let is_same = stage > 0 && chunks(stage).eq(chunks(stage - 1));
            let same = stages.last().copied().filter(|_| is_same);
            stages.push(same.unwrap_or_else(|| self.stage(chunks(stage).flatten().copied(), p > 1)));
        }
        stages
    }

    /// The step of a shape with these stages; `hop` are the seconds of a transfer between them.
    pub(super) fn compose(&self, stages: &[Stage], shape: Shape, hop: f64) -> Estimate {
        let memory = stages.iter().enumerate().map(|(number, stage)| self.memory_of(stage, number, shape));
        let memory = memory.max().unwrap_or(0);
        let host = stages.iter().map(|stage| stage.host).max().unwrap_or(0);
        Estimate { seconds: self.seconds_of(stages, shape, hop), memory, host }
    }

    fn stage(&self, calls: impl Iterator<Item = (usize, u64)>, is_staged: bool) -> Stage {
        let mut stage = Stage::default();
        let mut shared: Vec<usize> = Vec::new();
        for (number, layers) in calls {
            let call = &self.calls[number];
            let Call { seconds, alone, .. } = call;
            let times = layers as f64;
            stage.forward += times * seconds.forward + alone.forward;
            stage.backward += times * seconds.backward + alone.backward;
            stage.complete += times * seconds.complete + alone.complete;
            stage.update += times * seconds.update + alone.update;
            stage.products += times * seconds.products;
            stage.saved += layers * call.saved;
            stage.deferred += layers * call.deferred;
            stage.made += layers * call.made;
            stage.frame = stage.frame.max(call.frame + if is_staged { 0 } else { call.ahead });
            stage.update_frame = stage.update_frame.max(call.update_frame);
            for one in &call.held {
                let sum = if one.is_on_host { &mut stage.host } else { &mut stage.lasting };
                if one.is_per_layer {
                    *sum += layers * one.bytes;
                } else if !shared.contains(&one.name) {
                    shared.push(one.name);
                    *sum += one.bytes;
                }
            }
        }
        stage
    }

    fn seconds_of(&self, stages: &[Stage], shape: Shape, hop: f64) -> f64 {
        let m = shape.micro_batches as f64;
        let most = |f: &dyn Fn(&Stage) -> f64| stages.iter().map(f).fold(0.0, f64::max);
        let sum = |f: &dyn Fn(&Stage) -> f64| stages.iter().map(f).sum::<f64>();
        let busiest = most(&Stage::pass);
        let waits = match shape.order {
            PipelineOrder::Gpipe | PipelineOrder::OneForwardOneBackward => sum(&Stage::pass) - busiest,
            PipelineOrder::Interleaved => (sum(&Stage::pass) - busiest) / shape.chunks.max(1) as f64,
            PipelineOrder::ZbH1 => {
                let unfilled = |s: &Stage| (s.pass() - 2.0 * s.products).max(0.0);
                sum(&unfilled) - most(&unfilled)
            }
        };
        let hops = 2.0 * (stages.len() - 1) as f64 * hop;
        let completes = most(&|s| s.complete - s.backward).max(0.0);
        self.rest + m * busiest + waits + hops + completes + most(&|s| s.update)
    }

    /// Bytes on the device.
    fn memory_of(&self, stage: &Stage, number: usize, shape: Shape) -> u64 {
        let &Stage { lasting, saved, deferred, made, frame, update_frame, .. } = stage;
        let (p, v, m) = (shape.stages, shape.chunks.max(1), shape.micro_batches);
        let behind = p.saturating_sub(number as u64);
        // Micro-batches whose saved tensors a stage has, in parts of a chunk.
        let (passes, of) = match shape.order {
            _ if p <= 1 => (1, 1),
            PipelineOrder::Gpipe => (m, 1),
            PipelineOrder::OneForwardOneBackward | PipelineOrder::ZbH1 => (behind.min(m), 1),
            PipelineOrder::Interleaved => ((2 * (behind - 1) + (v - 1) * p + 1).min(m * v), v),
        };
        // A stage computes the gradients of weights so many micro-batches late as there are stages before it, and those of all its
        // layers after the gradients of their arguments.
        let later = match shape.order {
            PipelineOrder::ZbH1 if p > 1 => deferred * (number as u64).min(m) + made,
            _ => 0,
        };
        let activations = (saved * passes).div_ceil(of) + later + frame;
        lasting + activations.max(update_frame) + self.arena + self.inputs * m
    }

    /// Seconds of the passes of a micro-batch without stages.
    pub(super) fn pass(&self) -> f64 {
        self.calls
            .iter()
            .map(|call| call.layers as f64 * (call.seconds.forward + call.seconds.backward))
            .sum()
    }

    /// The part of the passes of a micro-batch in which nothing but collectives runs.
    pub(super) fn exposed_of_pass(&self) -> f64 {
        let exposed = |call: &Call| call.layers as f64 * call.seconds.exposed.iter().sum::<f64>();
        self.calls.iter().map(exposed).sum::<f64>() / self.pass().max(f64::MIN_POSITIVE)
    }

    /// The part of the passes of a micro-batch that is exposed communication and that chunks may hide: a pass takes no less time than
    /// its busiest link.
    pub(super) fn hideable(&self) -> f64 {
        let of_pass = |call: &Call, pass: usize, seconds: f64| {
            let busiest = call.links[pass].iter().copied().fold(0.0, f64::max);
            call.seconds.exposed[pass].min((seconds - busiest).max(0.0))
        };
        let of_call = |call: &Call| {
            let Seconds { forward, backward, .. } = call.seconds;
            call.layers as f64 * (of_pass(call, 0, forward) + of_pass(call, 1, backward))
        };
        let of_passes = self.calls.iter().map(of_call).sum::<f64>() / self.pass().max(f64::MIN_POSITIVE);
        of_passes.min(self.exposed)
    }

    /// The step with micro-batches `times` as large, for a coarse estimate: kernels are not faster for being larger.
    pub(super) fn scaled(&self, times: u64) -> Self {
        let mut scaled = self.clone();
        let more = times as f64;
        for call in &mut scaled.calls {
            for seconds in [&mut call.seconds, &mut call.alone] {
                for part in [
                    &mut seconds.forward,
                    &mut seconds.again,
                    &mut seconds.products,
                    &mut seconds.attention,
                    &mut seconds.backward,
                    &mut seconds.cast,
                    &mut seconds.complete,
                ] {
                    *part *= more;
                }
                seconds.exposed.iter_mut().for_each(|part| *part *= more);
            }
            call.gradients.iter_mut().for_each(|gradient| gradient.adding *= more);
            call.links.iter_mut().flatten().for_each(|part| *part *= more);
            let Call { saved, deferred, made, handed, attended, frame, .. } = call;
            [saved, deferred, made, handed, attended, frame].into_iter().for_each(|bytes| *bytes *= times);
        }
        scaled.arena *= times;
        scaled.inputs *= times;
        scaled
    }

    /// The step with another policy of recomputation than it has, for a coarse estimate.
    pub(super) fn recomputing(&self, has: Recompute, policy: Recompute) -> Self {
        let mut block = self.clone();
        if has != Recompute::None || policy == Recompute::None {
            return block;
        }
        // The head keeps what it saves for its backward pass, which is the next call.
        let (_, others) = block.calls.split_last_mut().expect("a block has calls");
        for call in others.iter_mut().filter(|call| call.saved > 0) {
            let seconds = &mut call.seconds;
            // A function keeps its argument, and all else that it saves is in its frame.
            let (again, saved) = match policy {
                Recompute::None => continue,
                Recompute::Selective => (seconds.attention, call.saved.saturating_sub(call.attended)),
                Recompute::KeepAttention => {
                    ((seconds.again - seconds.attention).max(0.0), call.handed + call.attended)
                }
                Recompute::Full { .. } => (seconds.again, call.handed),
            };
            seconds.backward += again;
            seconds.complete += again;
            if policy != Recompute::Selective {
                call.frame += call.saved;
            }
            call.saved = saved.min(call.saved);
        }
        block
    }

    /// With a loss of so many parts, for a coarse estimate.
    pub(super) fn chunk_loss(&mut self, parts: u64) {
        if let Some(head) = self.calls.last_mut() {
            head.frame /= parts;
        }
    }
}
