//! A step that a search may choose: how long it is compiled for, and its flags.

use ithaca_differentiate::{PipelineOrder, Recompute, Training};
use ithaca_layout::shard::{ShardOptions, Zero};

use crate::plan::{Choice, Step};
use crate::planner::estimate::Shape;

/// A step that the search may choose.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chosen {
    pub(super) options: ShardOptions,
    pub(super) training: Training,
}

/// Calls of `main` that are compiled for a step, half of them in its forward pass.
pub(super) fn n_calls(Shape { stages, micro_batches, chunks, .. }: Shape) -> u64 {
    2 * stages * Step::n_compiled(stages, micro_batches) * chunks
}

/// What a search chose of a step beside its layout, as flags.
pub(super) fn flags(open: &[Choice], Chosen { options, training }: &Chosen) -> String {
    let is_staged = training.stages > 1;
    let flag = |choice: &Choice| match choice {
        // Of several micro-batches `3` chooses persistent weights.
        Choice::Zero if options.zero == Zero::Parameters && training.micro_batches > 1 => {
            Some("--zero 3:none".to_owned())
        }
        Choice::Zero => (options.zero != Zero::Off).then(|| format!("--zero {}", options.zero)),
        Choice::Persistent => {
            (options.zero != options.zero.without_persistent()).then(|| format!("--zero {}", options.zero))
        }
        Choice::Recompute => {
            (training.recompute != Recompute::None).then(|| format!("--recompute {}", training.recompute))
        }
        Choice::MicroBatches => {
            (training.micro_batches > 1).then(|| format!("--micro-batches {}", training.micro_batches))
        }
        Choice::LossChunks => {
            (training.loss_chunks > 1).then(|| format!("--loss-chunks {}", training.loss_chunks))
        }
        Choice::Pipeline if is_staged && training.pipeline == PipelineOrder::Interleaved => {
            Some(format!("--pipeline {} --train chunks={}", training.pipeline.name(), training.chunks))
        }
        Choice::Pipeline => is_staged.then(|| format!("--pipeline {}", training.pipeline.name())),
    };
    open.iter().filter_map(flag).collect::<Vec<_>>().join(" ")
}
