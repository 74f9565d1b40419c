//! Prompts under one layout and tokens under another: where caches are, and how they move.
//!
//! Both may be on the same ranks. Where these have the same parts of every cache, only numbered otherwise, nothing moves: a process
//! is rank `r` of prompts and rank `places[r]` of tokens (Shift Parallelism, arXiv 2509.16495). Or prompts have a pool of ranks of
//! their own, which send caches to those of tokens. What a rank has follows from the types of the caches alone.

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::handover::Handover;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::units;
use ithaca_kernels::{RunError, handover};

use crate::error::Result;

/// How caches go from one schedule to another, on the same ranks or from a pool of ranks to another, as where they are not equally
/// many.
///
/// # Errors
/// `C04` with this help for caches that are not the same.
pub(super) fn between(schedules: [&Schedule; 2], two_pools: bool, help: &str) -> Result<Handover> {
    let refused = |error: RunError| {
        Diagnostic::new("C04", format!("prompts and tokens have no caches in common: {error}")).help(help)
    };
    Ok(handover::between(schedules, two_pools).map_err(refused)?)
}

/// Of caches that are not the same, where sizes are stated by plans.
pub(super) const SAME_CACHES: &str = "give both the same pages and types of caches";

/// The note for users.
pub(super) fn text(handover: &Handover, layouts: [&str; 2]) -> String {
    let [prompts, token] = layouts;
    let [senders, receivers] = &handover.processes;
    if handover.is_empty() {
        let shown = if senders == receivers {
            String::new()
        } else {
            let places: Vec<String> = senders.iter().map(u64::to_string).collect();
            format!("; ranks 0, 1, … of prompts are ranks {} of tokens", places.join(", "))
        };
        return format!(
            "note: prompts under {prompts}, tokens under {token}: caches stay where they are{shown}\n"
        );
    }
    let bytes = handover.bytes();
    let sent = |sender| bytes.iter().filter(move |((from, _), _)| *from == sender).map(|(_, n)| n).sum();
    let most: u64 = senders.iter().map(|&sender| sent(sender)).max().unwrap_or(0);
    let on = |processes: &[u64]| match (processes.first(), processes.last()) {
        (Some(first), Some(last)) if senders != receivers && first == last => format!(" on rank {first}"),
        (Some(first), Some(last)) if senders != receivers => format!(" on ranks {first} to {last}"),
        _ => String::new(),
    };
    format!(
        "note: prompts under {prompts}{}, tokens under {token}{}: {} of caches move in {}, {} of them from the busiest rank\n",
        on(senders),
        on(receivers),
        units::bytes(bytes.values().sum()),
        counted(bytes.len() as u64, "message"),
        units::bytes(most),
    )
}
