//! Processes that are stopped or killed at random moments: all others end, and name the rank.

use std::io::Read;
use std::process::{Child, Command, ExitStatus};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{started, text};
use crate::fuzz::Choices;
use crate::port::free_port;
use crate::tier;

/// Draws: by default, and of the full tier.
const DRAWS: [u64; 2] = [3, 200];

/// Draws at a time.
const WORKERS: u64 = 12;

const WORLD: u64 = 3;

/// Nothing here takes as long, however slow the machine: every wait ends by a timeout of two seconds.
const NEVER: Duration = Duration::from_secs(120);

/// More steps than anyone waits for: a rank is stopped as it meets the others, agrees with them, runs, or collects.
const ARGS: [&str; 14] = [
    "llama-gqa",
    "--mode",
    "train",
    "--seq",
    "24",
    "--strategy",
    "ring",
    "--mesh",
    "ring=3",
    "--steps",
    "200000",
    "--unchecked",
    "--timeout",
    "2",
];

/// The processes of a draw, which end with it.
struct Processes(Vec<Child>);

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success(), "{name}");
}

/// Waits for the end of a process; nothing where it does not come.
fn ended(child: &mut Child, limit: Instant) -> Option<ExitStatus> {
    while Instant::now() < limit {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}

/// One stop or kill.
///
/// # Errors
/// What is wrong, in words.
fn run(seed: u64) -> Result<String, String> {
    let choices = &mut Choices::from_seed(seed);
    let victim = choices.below(WORLD as usize);
    let (what, name) = choices.one_of(&[("stopped", "-STOP"), ("killed", "-KILL")]);
    let late = choices.below(2 * WORLD as usize);
    let mut millis = |most: usize| Duration::from_millis(choices.below(most) as u64);
    let (pause, moment) = (millis(600), millis(1500));
    let title = format!("ITHACA_SEED={seed}..{}: rank {victim} {what} after {moment:?}", seed + 1);

    let port = ("ITHACA_PORT", free_port());
    let mut processes = Processes(Vec::new());
    for rank in 0..WORLD {
        if late == rank as usize {
            std::thread::sleep(pause);
        }
        processes.0.push(started(rank, WORLD, port, &ARGS).spawn().unwrap());
    }
    std::thread::sleep(moment);
    signal(&processes.0[victim], name);
    let limit = Instant::now() + NEVER;
    let mut said = Vec::new();
    for (rank, child) in processes.0.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
        let status = ended(child, limit).ok_or_else(|| format!("{title}: rank {rank} waits without end"))?;
        let mut errors = Vec::new();
        child.stderr.take().expect("it is piped").read_to_end(&mut errors).unwrap();
        let errors = text(&errors);
        if status.code() != Some(2) {
            return Err(format!("{title}: rank {rank} ends with {status}: {errors}"));
        }
        said.push(errors);
    }
    let names = |said: &String| said.contains(&format!("rank {victim}"));
    if !said.iter().any(names) {
        Err(format!("{title}: nobody names it: {said:?}"))
    } else {
        Ok(said.swap_remove(0))
    }
}

#[test]
fn a_rank_that_is_stopped_or_killed_at_any_moment_ends_the_others() {
    let [few, all] = DRAWS;
    let draws = tier::draws(few, all);
    let (next, wrong) = (AtomicU64::new(draws.start), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= draws.end {
                return;
            }
            if let Err(why) = run(seed) {
                wrong.lock().unwrap().push(why);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..WORKERS.min(draws.end - draws.start) {
            scope.spawn(work);
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
