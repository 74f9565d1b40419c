//! Folds repeated steps, such as those of a ring, into a loop.

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
        let bodies = (1..=longest).map(|n| (n, times(rest, n)));
        // The shortest body among equals.
        let best = bodies
            .filter(|&(n, times)| times > 1 && is_worth(&rest[..n]))
            .max_by_key(|&(n, times)| (n * times, usize::MAX - n));
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
