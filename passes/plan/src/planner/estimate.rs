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

/// One stage.
#[derive(Clone, Copy, Debug, Default)]
struct Stage {
    forward: f64,
    backward: f64,
    complete: f64,
    update: f64,
    products: f64,
}

impl Stage {
    fn pass(&self) -> f64 {
        self.forward + self.backward
    }
}

impl Block {
    /// The step of a shape; `hop` are the seconds of a transfer between stages.
    pub(super) fn compose(&self, cut: &Cut, shape: Shape, hop: f64) -> Estimate {
        let p = shape.stages.max(1) as usize;
        let calls = |stage: usize| {
            cut.iter()
                .enumerate()
                .filter(move |(c, _)| c % p == stage)
                .flat_map(|(_, calls)| calls.iter().copied())
        };
        let stages: Vec<Stage> = (0..p).map(|stage| self.stage(calls(stage), p > 1)).collect();
        let memory = (0..p).map(|stage| self.memory_of(&calls(stage).collect::<Vec<_>>(), stage, shape));
        let (memory, host) = memory.fold((0, 0), |most, one| (most.0.max(one.0), most.1.max(one.1)));
        Estimate { seconds: self.seconds_of(&stages, shape, hop), memory, host }
    }

    fn stage(&self, calls: impl Iterator<Item = (usize, u64)>, is_staged: bool) -> Stage {
        let mut stage = Stage::default();
        for (call, layers) in calls {
            let Call { seconds, alone, .. } = &self.calls[call];
            let (layers, alone) = (layers as f64, if is_staged { *alone } else { Seconds::default() });
            stage.forward += layers * seconds.forward + alone.forward;
            stage.backward += layers * seconds.backward + alone.backward;
            stage.complete += layers * seconds.complete + alone.complete;
            stage.update += layers * seconds.update;
            stage.products += layers * seconds.products;
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

    /// Bytes on the device, and in host memory.
    fn memory_of(&self, calls: &[(usize, u64)], stage: usize, shape: Shape) -> (u64, u64) {
        let mut shared: Vec<usize> = Vec::new();
        let (mut lasting, mut host) = (0, 0);
        let (mut saved, mut deferred, mut made, mut frame, mut update_frame) = (0, 0, 0, 0, 0);
        for &(number, layers) in calls {
            let call = &self.calls[number];
            saved += layers * call.saved;
            deferred += layers * call.deferred;
            made += layers * call.made;
            frame = frame.max(call.frame + if shape.stages > 1 { 0 } else { call.ahead });
            update_frame = update_frame.max(call.update_frame);
            for one in &call.held {
                let sum = if one.is_on_host { &mut host } else { &mut lasting };
                if one.is_per_layer {
                    *sum += layers * one.bytes;
                } else if !shared.contains(&one.name) {
                    shared.push(one.name);
                    *sum += one.bytes;
                }
            }
        }
        let (p, v, m) = (shape.stages, shape.chunks.max(1), shape.micro_batches);
        let behind = p.saturating_sub(stage as u64);
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
            PipelineOrder::ZbH1 if p > 1 => deferred * (stage as u64).min(m) + made,
            _ => 0,
        };
        let activations = (saved * passes).div_ceil(of) + later + frame;
        (lasting + activations.max(update_frame) + self.arena + self.inputs * m, host)
    }

    /// Seconds of the passes of a micro-batch without stages.
    pub(super) fn pass(&self) -> f64 {
        self.calls
            .iter()
            .map(|call| call.layers as f64 * (call.seconds.forward + call.seconds.backward))
            .sum()
    }

    /// The step with micro-batches `times` as large, for a first look: kernels are not faster for being larger.
    pub(super) fn scaled(&self, times: u64) -> Self {
        let mut scaled = self.clone();
        let more = times as f64;
        for call in &mut scaled.calls {
            for seconds in [&mut call.seconds, &mut call.alone] {
                for part in [
                    &mut seconds.forward,
                    &mut seconds.products,
                    &mut seconds.attention,
                    &mut seconds.backward,
                    &mut seconds.complete,
                ] {
                    *part *= more;
                }
            }
            let Call { saved, deferred, made, handed, attended, frame, .. } = call;
            [saved, deferred, made, handed, attended, frame].into_iter().for_each(|bytes| *bytes *= times);
        }
        scaled.arena *= times;
        scaled.inputs *= times;
        scaled
    }

    /// The step with another policy of recomputation than it has, for a first look.
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
                    ((seconds.forward - seconds.attention).max(0.0), call.handed + call.attended)
                }
                Recompute::Full { .. } => (seconds.forward, call.handed),
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

    /// With a loss of so many parts, for a first look.
    pub(super) fn chunk_loss(&mut self, parts: u64) {
        if let Some(head) = self.calls.last_mut() {
            head.frame /= parts;
        }
    }
}
