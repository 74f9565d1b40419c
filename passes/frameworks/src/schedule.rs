//! The order of a pipeline as rows of torch.distributed.pipelining: a row for each rank, a cell for each pass.

use ithaca_differentiate::order::{Half, Shape, Step, of_stage};

use crate::layout::Layout;

/// The rows, each cell `STAGE PASS MICROBATCH`, as `0F3`: forward `F`, backward `B`, gradients of inputs `I`, of weights `W`.
pub(crate) fn rows(layout: &Layout) -> String {
    let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let shape = Shape {
        stages: number(layout.stages()),
        chunks: number(layout.chunks()),
        micros: number(layout.micro_batches()),
    };
    let row = |stage: usize| {
        let steps = of_stage(layout.training.pipeline, shape, stage);
        let defers = steps.iter().any(|step| step.half == Half::Weights);
        let cell = |Step { half, micro, chunk }: &Step| {
            let pass = match (half, defers) {
                (Half::Forward, _) => 'F',
                (Half::Backward, true) => 'I',
                (Half::Backward, false) => 'B',
                (Half::Weights, _) => 'W',
            };
            format!("{chunk}{pass}{micro}")
        };
        steps.iter().map(cell).collect::<Vec<_>>().join(",") + "\n"
    };
    (0..shape.stages).map(row).collect()
}
