//! Folds repeated steps, such as those of a ring, into a loop; of a long diagram also those of micro-batches and stages.

use std::collections::BTreeSet;

use super::step::{Phase, Step};

/// The most steps of a loop's body.
const LONGEST_BODY: usize = 24;

/// `steps` with adjacent repetitions folded: at each position, the body that covers most.
///
/// Calls are left as they are.
pub(super) fn folded(steps: Vec<(Phase, Step)>) -> Vec<(Phase, Step)> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < steps.len() {
        let rest = &steps[at..];
        let longest = LONGEST_BODY.min(rest.len() / 2);
        // Few are worth it, and comparing what repeats takes longest.
        let bodies = (1..=longest).filter(|&n| is_worth(&rest[..n])).map(|n| (n, times(rest, n)));
        // The shortest body among equals.
        let best =
            bodies.filter(|&(_, times)| times > 1).max_by_key(|&(n, times)| (n * times, usize::MAX - n));
        match best {
            Some((n, times)) => {
                let phase = rest[0].0;
                out.push((phase, Step::Again { times: times as u64, steps: rest[..n].to_vec() }));
                at += n * times;
            }
            None => {
                out.push(rest[0].clone());
                at += 1;
            }
        }
    }
    out
}

/// `steps` for a diagram that would be too long: equal steps are drawn where they first occur, with their number, and the body of a
/// function by the first call only.
pub(super) fn once(steps: Vec<(Phase, Step)>) -> Vec<(Phase, Step)> {
    without_bodies(alike(steps), &mut BTreeSet::new())
}

/// Equal steps once, as loops.
fn alike(steps: Vec<(Phase, Step)>) -> Vec<(Phase, Step)> {
    let mut kinds: Vec<((Phase, Step), u64)> = Vec::new();
    for (phase, step) in steps {
        let (step, times) = match step {
            Step::Again { times, steps } => (Step::Again { times: 1, steps: alike(steps) }, times),
            Step::Call { name, over, stage, layers, phase, steps } => {
                (Step::Call { name, over, stage, layers, phase, steps: alike(steps) }, 1)
            }
            Step::Local { .. } | Step::Exchange { .. } => (step, 1),
        };
        match kinds.iter_mut().find(|(known, _)| *known == (phase, step.clone())) {
            Some((_, n)) => *n += times,
            None => kinds.push(((phase, step), times)),
        }
    }
    let loops = |((phase, step), times): ((Phase, Step), u64)| match (step, times) {
        (step, 1) => (phase, step),
        (Step::Again { times: _, steps }, times) => (phase, Step::Again { times, steps }),
        (step, times) => (phase, Step::Again { times, steps: vec![(phase, step)] }),
    };
    kinds.into_iter().map(loops).collect()
}

/// Calls of functions that are drawn already without their steps.
fn without_bodies(steps: Vec<(Phase, Step)>, drawn: &mut BTreeSet<String>) -> Vec<(Phase, Step)> {
    let mut shorter = Vec::with_capacity(steps.len());
    for (of, step) in steps {
        let step = match step {
            Step::Call { name, over, stage, layers, phase, steps } => {
                let is_new = drawn.insert(name.clone());
                let steps = if is_new { without_bodies(steps, drawn) } else { Vec::new() };
                Step::Call { name, over, stage, layers, phase, steps }
            }
            Step::Again { times, steps } => Step::Again { times, steps: without_bodies(steps, drawn) },
            Step::Local { .. } | Step::Exchange { .. } => step,
        };
        shorter.push((of, step));
    }
    shorter
}

/// The number of adjacent repetitions of the first `n` steps.
fn times(steps: &[(Phase, Step)], n: usize) -> usize {
    steps.chunks_exact(n).take_while(|chunk| **chunk == steps[..n]).count()
}

/// Whether a body is drawn as a loop: it communicates, and is in one phase.
fn is_worth(body: &[(Phase, Step)]) -> bool {
    let sends = body.iter().any(|(_, step)| matches!(step, Step::Exchange { .. }));
    let calls = body.iter().any(|(_, step)| matches!(step, Step::Call { .. }));
    sends && !calls && body.iter().all(|(phase, _)| *phase == body[0].0)
}
