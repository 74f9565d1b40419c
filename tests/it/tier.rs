//! How much the tests draw and run.
//!
//! By default every kind of test runs on few cases, which are the same in every run. `ITHACA_TESTS=full` runs all cases, and
//! draws of a fresh seed. `ITHACA_SEED=7` draws with seed 7, `ITHACA_SEED=7000012..7000013` repeats one draw.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::OnceLock;
use std::time::SystemTime;

use crate::fuzz::Choices;

/// Draws of one seed: those of seed `s` are numbered from `s` times this number.
const DRAWS: u64 = 1_000_000;

/// Seeds differ from each other below this number.
const SEEDS: u64 = 1000;

/// Whether all cases run.
pub(crate) fn is_full() -> bool {
    std::env::var_os("ITHACA_TESTS").is_some_and(|tier| tier == "full")
}

/// Whether all cases run; a test of the full tier says so when they do not.
#[expect(clippy::print_stderr, reason = "a test that does nothing says why")]
pub(crate) fn is_full_or_says_so() -> bool {
    if !is_full() {
        eprintln!("skipped: ITHACA_TESTS=full runs this");
    }
    is_full()
}

/// `few` cases by default, `all` in the full tier.
pub(crate) fn count(few: u64, all: u64) -> u64 {
    if is_full() { all } else { few }
}

/// All cases in the full tier, and by default one of every `n`, evenly spread and with the first among them.
pub(crate) fn one_in<T>(n: usize, cases: impl IntoIterator<Item = T>) -> Vec<T> {
    cases.into_iter().step_by(if is_full() { 1 } else { n }).collect()
}

/// The draws that the environment asks for.
fn asked() -> Option<Result<u64, Range<u64>>> {
    let text = std::env::var("ITHACA_SEED").ok()?;
    let number = |text: &str| {
        text.trim()
            .parse::<u64>()
            .unwrap_or_else(|_| panic!("ITHACA_SEED is a number or a range, not `{text}`"))
    };
    Some(match text.split_once("..") {
        Some((from, to)) => Err(number(from)..number(to)),
        None => Ok(number(&text) % SEEDS),
    })
}

/// Whether the environment asks for draws of its own, so that shares among them mean nothing.
pub(crate) fn is_replay() -> bool {
    matches!(asked(), Some(Err(_)))
}

/// The numbers of the draws of a test: `few` by default, `all` in the full tier, or those that the environment asks for.
#[expect(clippy::print_stderr, reason = "a test that fails says which seed it had")]
pub(crate) fn draws(few: u64, all: u64) -> Range<u64> {
    static FRESH: OnceLock<u64> = OnceLock::new();
    let fresh = || {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock after 1970");
        u64::from(now.subsec_nanos()) / 1000 % SEEDS
    };
    let seed = match asked() {
        Some(Err(draws)) => return draws,
        Some(Ok(seed)) => seed,
        None if is_full() => *FRESH.get_or_init(fresh),
        None => 0,
    };
    eprintln!("ITHACA_SEED={seed}");
    seed * DRAWS..seed * DRAWS + count(few, all)
}

/// Checks a property of random choices. A failure names its draw and the plainest choices found that fail too.
#[expect(clippy::print_stderr, reason = "a test that fails says how to repeat it")]
pub(crate) fn check(few: u64, all: u64, property: impl Fn(&mut Choices)) {
    let attempt = |choices: &Choices| catch_unwind(AssertUnwindSafe(|| property(&mut choices.clone())));
    for draw in draws(few, all) {
        let mut choices = Choices::from_seed(draw);
        let Err(mut failure) = attempt(&choices) else { continue };
        eprintln!("ITHACA_SEED={draw}..{} repeats this draw; looking for plainer choices", draw + 1);
        for length in [256, 64, 16, 4] {
            for start in (0..Choices::LENGTH).step_by(length) {
                let Some(plainer) = choices.with_zeros(start..start + length) else { continue };
                if let Err(another) = attempt(&plainer) {
                    (choices, failure) = (plainer, another);
                }
            }
        }
        eprintln!("the plainest choices that fail: {choices:?}");
        resume_unwind(failure);
    }
}
