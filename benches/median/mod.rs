//! Times a function several times and prints the median and the least time. An argument chooses by a part of the name.

#![allow(clippy::print_stdout, reason = "the times are what a bench is for")]

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Runs at most.
const RUNS: usize = 50;

/// Enough for a median.
const FEW: usize = 5;

/// After this time there are runs enough.
const BUDGET: Duration = Duration::from_secs(5);

/// Times `run` and prints a line; the first run warms up.
pub(crate) fn report<T>(name: &str, mut run: impl FnMut() -> T) {
    // Cargo passes `--bench`.
    let asked: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    if !asked.is_empty() && !asked.iter().any(|part| name.contains(part.as_str())) {
        return;
    }
    black_box(run());
    let begun = Instant::now();
    let mut times = Vec::new();
    while times.len() < FEW || (times.len() < RUNS && begun.elapsed() < BUDGET) {
        let start = Instant::now();
        black_box(run());
        times.push(start.elapsed());
    }
    times.sort();
    println!("{name}: median {:.3?}, least {:.3?} of {}", times[times.len() / 2], times[0], times.len());
}
