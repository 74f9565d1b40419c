//! The order in which the stages of a pipeline run the micro-batches.
//!
//! Layers are cut into consecutive *chunks*; chunk `c` belongs to stage `c mod P`. A stage runs its own list of forward
//! and backward passes, each for one chunk and one micro-batch: a warm-up of forward passes, then forward and backward
//! passes in alternation, then the remaining backward passes. In the order ZB-H1 a backward pass computes gradients of
//! arguments only; stage `k` computes those of weights `k` micro-batches later, so that every stage holds as many
//! micro-batches as the first, and the last ones while it waits for other stages. The lists of all stages merge into one order as if every
//! pass took one tick: a pass starts in the first tick after the passes that it depends on.

use super::options::PipelineOrder;

/// The forward or backward half of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Half {
    /// The forward pass.
    Forward,
    /// The backward pass; if gradients of weights are deferred, that of arguments.
    Backward,
    /// The deferred gradients of weights.
    Weights,
}

/// One pass of one chunk of layers over one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Step {
    /// The half.
    pub half: Half,
    /// The micro-batch.
    pub micro: usize,
    /// The chunk of layers, of all stages.
    pub chunk: usize,
}

/// How a pipeline is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Stages, P.
    pub stages: usize,
    /// Chunks of layers that each stage has.
    pub chunks: usize,
    /// Micro-batches, M.
    pub micros: usize,
}

/// The passes of stage `stage`, in order.
pub fn of_stage(order: PipelineOrder, shape: Shape, stage: usize) -> Vec<Step> {
    let Shape { stages, chunks, micros } = shape;
    let n = micros * chunks;
    // The i-th forward pass of a stage: groups of P micro-batches pass through its chunks one after another.
    let place = |i: usize| {
        let (group, within) = (i / (stages * chunks), i % (stages * chunks));
        (group * stages + within % stages, within / stages)
    };
    let step = |half: Half, i: usize| match order {
        PipelineOrder::Gpipe | PipelineOrder::OneForwardOneBackward | PipelineOrder::ZbH1 => {
            Step { half, micro: i, chunk: stage }
        }
        PipelineOrder::Interleaved => {
            let (micro, local) = place(i);
            let local = if half == Half::Forward { local } else { chunks - 1 - local };
            Step { half, micro, chunk: local * stages + stage }
        }
    };
    let (forward, backward) = (|i| step(Half::Forward, i), |i| step(Half::Backward, i));
    let warm_up = match order {
        PipelineOrder::Gpipe => n,
        PipelineOrder::OneForwardOneBackward | PipelineOrder::ZbH1 => (stages - 1 - stage).min(n),
        PipelineOrder::Interleaved => ((stages - 1 - stage) * 2 + (chunks - 1) * stages).min(n),
    };
    let mut steps: Vec<Step> = (0..warm_up).map(forward).collect();
    for i in warm_up..n {
        steps.extend([forward(i), backward(i - warm_up)]);
    }
    steps.extend((n - warm_up..n).map(backward));
    if order.defers_weights() { with_weights(&steps, stage) } else { steps }
}

/// The passes of a stage with deferred gradients of weights, `delay` micro-batches after those of arguments.
fn with_weights(steps: &[Step], delay: usize) -> Vec<Step> {
    let backward = steps.iter().filter(|s| s.half == Half::Backward);
    let mut weights = backward.map(|&step| Step { half: Half::Weights, ..step });
    let mut all = Vec::with_capacity(steps.len() * 3 / 2);
    let mut n_backward = 0;
    for &step in steps {
        all.push(step);
        if step.half == Half::Backward {
            n_backward += 1;
            if n_backward > delay {
                all.extend(weights.next());
            }
        }
    }
    all.extend(weights);
    all
}

/// The passes of all stages, in one order that respects each stage's own.
pub(super) fn all(order: PipelineOrder, shape: Shape) -> Vec<Step> {
    let lists: Vec<Vec<Step>> = (0..shape.stages).map(|stage| of_stage(order, shape, stage)).collect();
    let last = shape.stages * shape.chunks - 1;
    let mut done: std::collections::BTreeSet<Step> = std::collections::BTreeSet::new();
    let mut next = vec![0; shape.stages];
    let mut steps = Vec::new();
    while steps.len() < lists.iter().map(Vec::len).sum() {
        let ready = |step: &Step| match (step.half, step.chunk) {
            (Half::Forward, 0) => true,
            (Half::Forward, chunk) => done.contains(&Step { chunk: chunk - 1, ..*step }),
            (Half::Backward, chunk) if chunk == last => done.contains(&Step { half: Half::Forward, ..*step }),
            (Half::Backward, chunk) => done.contains(&Step { chunk: chunk + 1, ..*step }),
            (Half::Weights, _) => done.contains(&Step { half: Half::Backward, ..*step }),
        };
        let tick: Vec<(usize, Step)> = lists
            .iter()
            .zip(&next)
            .enumerate()
            .filter_map(|(stage, (list, &i))| Some((stage, *list.get(i)?)))
            .filter(|(_, step)| ready(step))
            .collect();
        assert!(!tick.is_empty(), "at least one stage is ready, unless the lists contradict each other");
        for (stage, step) in tick {
            next[stage] += 1;
            done.insert(step);
            steps.push(step);
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(steps: &[Step]) -> String {
        let one = |s: &Step| match s.half {
            Half::Forward => format!("F{}", s.micro),
            Half::Backward => format!("B{}", s.micro),
            Half::Weights => format!("W{}", s.micro),
        };
        steps.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn orders_are_those_of_the_papers() {
        let shape = Shape { stages: 4, chunks: 1, micros: 6 };
        let of = |order, stage| show(&of_stage(order, shape, stage));
        assert_eq!(of(PipelineOrder::Gpipe, 1), "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5");
        assert_eq!(of(PipelineOrder::OneForwardOneBackward, 0), "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
        assert_eq!(of(PipelineOrder::OneForwardOneBackward, 2), "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5");
        assert_eq!(of(PipelineOrder::OneForwardOneBackward, 3), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
        let last = "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5";
        assert_eq!(of(PipelineOrder::ZbH1, 3), last);
        assert_eq!(of(PipelineOrder::ZbH1, 0), "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5");
    }

    #[test]
    fn interleaving_goes_through_chunks_in_groups_of_micro_batches() {
        let shape = Shape { stages: 2, chunks: 2, micros: 4 };
        let chunks = |stage| {
            let steps = of_stage(PipelineOrder::Interleaved, shape, stage);
            steps.iter().map(|s| (s.half == Half::Forward, s.micro, s.chunk)).collect::<Vec<_>>()
        };
        // Warm-up of (P − 1 − k) · 2 + (v − 1) · P passes.
        let first = [(true, 0, 0), (true, 1, 0), (true, 0, 2), (true, 1, 2), (true, 2, 0), (false, 0, 2)];
        assert_eq!(chunks(0)[..6], first);
        let first = [(true, 0, 1), (true, 1, 1), (true, 0, 3), (false, 0, 3), (true, 1, 3), (false, 1, 3)];
        assert_eq!(chunks(1)[..6], first);
    }

    #[test]
    fn one_order_serves_all_stages() {
        for order in PipelineOrder::ALL {
            for (stages, chunks, micros) in [(1, 1, 1), (2, 1, 1), (2, 1, 5), (4, 1, 8), (2, 2, 4), (4, 3, 8)]
            {
                let chunks = if order == PipelineOrder::Interleaved { chunks } else { 1 };
                let shape = Shape { stages, chunks, micros };
                let steps = all(order, shape);
                let n_halves = if order.defers_weights() { 3 } else { 2 };
                assert_eq!(steps.len(), n_halves * stages * chunks * micros, "{order:?} {shape:?}");
                for stage in 0..stages {
                    let own: Vec<Step> =
                        steps.iter().copied().filter(|s| s.chunk % stages == stage).collect();
                    assert_eq!(own, of_stage(order, shape, stage), "{order:?} {shape:?} stage {stage}");
                }
            }
        }
    }
}
