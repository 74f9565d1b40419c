//! Verifies schedules: structure, work, order, memory, blocks and ranks, in this order; each trusts the checks before it, which came
//! before. Against the program that it was made of, a schedule is compared value by value.
//!
//! A schedule has no source text of its own, so diagnostics name the frame and the task. The invariants are listed in
//! [`crate::codes::SCHEDULE`].

mod blocks;
mod bytes;
mod classes;
mod homes;
mod inside;
mod lasting;
mod meaning;
mod memory;
mod order;
mod partner;
mod ranks;
mod report;
mod structure;
mod wires;
mod work;

pub use meaning::verify_meaning;
pub use ranks::Party;

use blocks::Checked;
use classes::{Class, Line};
use lasting::Lasting;
use order::Order;
use rayon::prelude::*;

use crate::diagnostic::{Diagnostic, Diagnostics, MAX_DIAGNOSTICS};
use crate::schedule::verify::report::in_frame;
use crate::schedule::{Frame, Schedule, Streams, used_streams};
use crate::verify::check_space;

/// Proof that a schedule was verified.
#[derive(Clone, Copy, Debug)]
pub struct Verified<'a> {
    schedule: &'a Schedule,
}

impl<'a> Verified<'a> {
    /// The schedule.
    pub fn schedule(self) -> &'a Schedule {
        self.schedule
    }
}

/// Checks a schedule: that tasks fit their buffers, that streams and events order what must be ordered, that memory
/// holds the values that are read from it, that collectives give every rank the elements of its types, and that ranks meet.
///
/// Time is near `n log n` in tasks, for each class of ranks that run different ones; each collective is looked at once,
/// on ranks that represent all.
///
/// # Errors
/// `S` diagnostics; `V22` and `V23` for the space; at most 64.
pub fn verify(schedule: &Schedule) -> Result<Verified<'_>, Diagnostics> {
    verify_together(&[Party { at: None, schedule }]).map(|()| Verified { schedule })
}

/// Checks schedules that different ranks run side by side: each as [`verify`] does, and that their ranks meet.
///
/// # Errors
/// As [`verify`].
pub fn verify_together(parties: &[Party<'_>]) -> Result<(), Diagnostics> {
    let mut found = Diagnostics::new();
    for party in parties {
        found.extend(check_alone(party.schedule));
    }
    let frames = |party: &Party<'_>| -> Vec<String> {
        party.schedule.frames.values().map(|frame| frame.name.clone()).collect()
    };
    let alike = |a: &Party<'_>, b: &Party<'_>| {
        std::ptr::eq(a.schedule, b.schedule)
            || (a.schedule.space == b.schedule.space && frames(a) == frames(b))
    };
    if found.is_empty() && !parties.windows(2).all(|pair| alike(&pair[0], &pair[1])) {
        found.push(Diagnostic::new("S16", "schedules of different frames or meshes run side by side"));
    }
    if found.is_empty() {
        ranks::check(parties, &mut found);
    }
    found.truncate(MAX_DIAGNOSTICS);
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// The mistakes in a schedule on each rank alone.
fn check_alone(schedule: &Schedule) -> Diagnostics {
    let mut found = check_space(&schedule.space);
    if found.is_empty() {
        structure::check_frames(schedule, &mut found);
        for id in schedule.frames.ids() {
            structure::check_frame(schedule, id, &mut found);
            if found.len() >= MAX_DIAGNOSTICS {
                break;
            }
        }
    }
    if found.is_empty() {
        lasting::check(schedule, &mut found);
        let lasting = Lasting::of(schedule);
        let used = used_streams(&schedule.frames);
        let mut collectives = Checked::default();
        for frame in schedule.frames.values() {
            let before = found.len();
            work::check(schedule, frame, &mut found);
            if found.len() == before {
                inside::check(schedule, frame, &mut found);
            }
            order::check_events(frame, &mut found);
            if found.len() == before {
                wires::check(&schedule.space, frame, &mut collectives, &mut found);
                check_memory(schedule, frame, (&lasting, &used), &mut found);
            }
            if found.len() >= MAX_DIAGNOSTICS {
                break;
            }
        }
    }
    found
}

/// Checks the memory of a frame for each class of ranks: each has an order and a memory of its own.
fn check_memory(
    schedule: &Schedule,
    frame: &Frame,
    (lasting, used): (&Lasting<'_>, &[Streams]),
    found: &mut Diagnostics,
) {
    let classes = match Class::all(&schedule.space.mesh, frame.stages()) {
        Ok(classes) => classes,
        Err(error) => return found.push(in_frame(frame, error)),
    };
    let check = |class: &Class| {
        let line = Line::of(frame, class);
        let mut found = Diagnostics::new();
        memory::check(schedule, &line, lasting, &Order::of(&line, used), &mut found);
        found
    };
    // The errors of other classes would mostly repeat those of the first.
    let all: Vec<Diagnostics> = classes.par_iter().map(check).collect();
    found.extend(all.into_iter().find(|of_class| !of_class.is_empty()).unwrap_or_default());
}
