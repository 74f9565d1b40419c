//! The goldens, a test for each and for each layout: what the library computed is computed by programs, by their ranks and
//! by their schedules.
//!
//! By default all cases run for one model and one of eight for the others; with `ITHACA_TESTS=full` for all.

mod ahead;
#[path = "../common/golden.rs"]
mod golden;
mod gradients;
mod layouts;
mod logits;
#[path = "../common/slow_links.rs"]
mod slow_links;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock};

use libtest_mimic::{Arguments, Failed, Trial};

use golden::Golden;

/// The model that every case runs on.
const ALWAYS: &str = "llama-gqa";

/// By default one of so many cases runs on the other models.
const SHARE: usize = 12;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let trials = [logits::trials(), layouts::trials(), gradients::trials(), ahead::trials()];
    libtest_mimic::run(&arguments, trials.into_iter().flatten().collect()).exit_code()
}

/// Whether a case runs: the `golden`-th model, the `way`-th way to run it.
fn is_chosen(name: &str, golden: usize, way: usize) -> bool {
    let full = std::env::var_os("ITHACA_TESTS").is_some_and(|tier| tier == "full");
    full || name == ALWAYS || (golden + way).is_multiple_of(SHARE)
}

/// A golden, opened once.
fn open(name: &str) -> Arc<Golden> {
    static OPEN: OnceLock<Mutex<BTreeMap<String, Arc<Golden>>>> = OnceLock::new();
    let mut open = OPEN.get_or_init(Mutex::default).lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    open.entry(name.to_owned()).or_insert_with(|| Arc::new(Golden::open(name))).clone()
}

/// A test of a golden.
fn trial(
    name: &str,
    title: String,
    check: impl FnOnce(&Golden) -> Result<(), String> + Send + 'static,
) -> Trial {
    let name = name.to_owned();
    Trial::test(title, move || check(&open(&name)).map_err(Failed::from))
}

/// All that is wrong, or nothing.
fn report(wrong: &[String]) -> Result<(), String> {
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}
