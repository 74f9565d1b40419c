//! The collectives of a step: the kernels that hide each of them, and the reasons for which the rest is exposed.
//!
//! Collectives of one function that communicate along the same axis, beside the same kind of kernel and with the same obstacle
//! are one row, whatever the number of layers.

use std::collections::BTreeMap;
use std::fmt::Write;

use ithaca_ir::message::Parcel;
use ithaca_ir::schedule::{Schedule, Work};
use ithaca_ir::timeline;
use ithaca_ir::traffic;
use ithaca_ir::units::seconds;
use ithaca_passes::simulate::discrete::{Exposure, Obstacle, Overlap, TaskAt, WaitPoint};
use serde::Serialize;

/// The most rows.
const ROWS: usize = 10;
/// The most kernels and the most reasons of a row.
const ITEMS: usize = 2;

/// The rows of `overlaps` as text, the most exposed first, then the longest.
pub(super) fn text(schedule: &Schedule, overlaps: &[Overlap]) -> String {
    let rows = rows(schedule, overlaps);
    let mut out = String::new();
    rows.iter().take(ROWS).for_each(|row| row.write(&mut out));
    if let Some(rest) = rows.get(ROWS..).filter(|rest| !rest.is_empty()) {
        let sum = |of: fn(&Row) -> f64| seconds(rest.iter().map(of).sum());
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "  exposed {} of {}: {} others",
            sum(|g| g.exposed),
            sum(|g| g.seconds),
            rest.len()
        );
    }
    out
}

/// Seconds in which the rank of `overlaps` waits for other stages of a pipeline.
pub(super) fn bubble(schedule: &Schedule, overlaps: &[Overlap]) -> f64 {
    let between = overlaps.iter().filter(|overlap| is_between_stages(schedule, overlap.collective));
    let waits = between.flat_map(|overlap| &overlap.exposed);
    waits.filter(|(exposure, _)| matches!(exposure.obstacle, Obstacle::Rank(_))).map(|(_, time)| time).sum()
}

/// Whether a collective takes a value from one stage of a pipeline to others.
fn is_between_stages(schedule: &Schedule, at: TaskAt) -> bool {
    let transfer = schedule.frames[at.frame].tasks[at.task].work.exchange();
    let parcel = transfer.map(|transfer| transfer.first());
    parcel.is_some_and(|Parcel { from, to, .. }| from.layout.at != to.layout.at)
}

/// The rows of `overlaps`, the most exposed first, then the longest.
pub(crate) fn rows(schedule: &Schedule, overlaps: &[Overlap]) -> Vec<Row> {
    let mut rows: BTreeMap<Vec<String>, Row> = BTreeMap::new();
    for overlap in overlaps.iter().filter(|overlap| overlap.seconds > 0.0) {
        rows.entry(key(schedule, overlap)).or_default().add(schedule, overlap);
    }
    let mut rows: Vec<Row> = rows.into_values().collect();
    rows.sort_by(|a, b| {
        (b.exposed, b.seconds).partial_cmp(&(a.exposed, a.seconds)).expect("times are numbers")
    });
    rows
}

/// Equal for the collectives of one row.
fn key(schedule: &Schedule, overlap: &Overlap) -> Vec<String> {
    let collective = overlap.collective;
    let kind = |at: TaskAt| schedule.frames[at.frame].tasks[at.task].work.name().to_owned();
    let beside = overlap.beside.first().map_or(String::new(), |&(kernel, _)| kind(kernel));
    let reason = overlap.exposed.first().map_or(String::new(), |(Exposure { at, obstacle }, _)| {
        let held = match *at {
            WaitPoint::Task(task) => kind(task),
            WaitPoint::End(_) => "end".to_owned(),
        };
        let obstacle = match obstacle {
            Obstacle::Transfer => "transfer",
            Obstacle::Queued(_) => "queued",
            Obstacle::Rank(_) => "rank",
        };
        format!("{held} {obstacle}")
    });
    vec![schedule.frames[collective.frame].name.clone(), described(schedule, collective), beside, reason]
}

/// `all_to_all over ulysses`; of a message between stages of a pipeline also where it goes; of a copy its stream.
fn described(schedule: &Schedule, at: TaskAt) -> String {
    let task = &schedule.frames[at.frame].tasks[at.task];
    let Work::Exchange(transfer) = &task.work else {
        return format!("{} over {}", task.work.name(), task.stream);
    };
    let space = &schedule.space;
    let first = transfer.first();
    let kind = first.op.name();
    match (first.from.layout.at, first.to.layout.at) {
        (Some(from), Some(to)) if from != to => {
            let axis = &space.mesh.axes[from.axis].name;
            format!("{kind} from {axis}={} to {axis}={}", from.coordinate, to.coordinate)
        }
        _ => match traffic::axis(space, transfer.parcels()) {
            Some(axis) => format!("{kind} over {axis}"),
            None => kind.to_owned(),
        },
    }
}

/// A task for a reader: `attention $o`, or `@block` for a call.
fn name(schedule: &Schedule, at: TaskAt) -> String {
    let frame = &schedule.frames[at.frame];
    match &frame.tasks[at.task].work {
        Work::Call { callee, .. } => format!("@{}", schedule.frames[*callee].name),
        Work::Pack(_) => "pack".to_owned(),
        Work::Unpack(_) => "unpack".to_owned(),
        Work::Compute(_) | Work::Exchange(_) | Work::Copy => timeline::title(frame, at.task).0,
    }
}

/// One row.
#[derive(Default, Serialize)]
pub(crate) struct Row {
    frame: String,
    collective: String,
    /// Collectives of the function.
    members: u64,
    /// Runs of all of them.
    count: u64,
    seconds: f64,
    exposed: f64,
    beside: BTreeMap<String, f64>,
    reasons: BTreeMap<String, f64>,
}

impl Row {
    fn add(&mut self, schedule: &Schedule, overlap: &Overlap) {
        self.frame.clone_from(&schedule.frames[overlap.collective.frame].name);
        self.collective = described(schedule, overlap.collective);
        self.members += 1;
        self.count += overlap.count;
        self.seconds += overlap.seconds;
        for &(kernel, time) in &overlap.beside {
            *self.beside.entry(name(schedule, kernel)).or_default() += time;
        }
        for &(exposure, time) in &overlap.exposed {
            self.exposed += time;
            *self.reasons.entry(reason(schedule, overlap, exposure, time)).or_default() += time;
        }
    }

    fn write(&self, out: &mut String) {
        let Self { frame, collective, members, count, seconds: all, exposed, .. } = self;
        let times = if *count == 1 { String::new() } else { format!("{count} times ") };
        let apart =
            if *members > 1 && *members < *count { format!(" ({members} a layer)") } else { String::new() };
        let _ = writeln!(
            out,
            "  exposed {} of {}: {times}{collective} in @{frame}{apart}",
            seconds(*exposed),
            seconds(*all)
        );
        let beside = longest(&self.beside);
        if !beside.is_empty() {
            let named =
                beside.iter().take(ITEMS).map(|(kernel, time)| format!("{kernel} {}", seconds(*time)));
            let mut named = named.collect::<Vec<_>>().join(", ");
            if beside.len() > ITEMS {
                let _ = write!(named, ", {} others", beside.len() - ITEMS);
            }
            let _ = writeln!(out, "    beside {named}");
        }
        for (reason, time) in longest(&self.reasons).iter().take(ITEMS) {
            let of = if self.reasons.len() > 1 { format!("{}: ", seconds(*time)) } else { String::new() };
            let _ = writeln!(out, "    {of}{reason}");
        }
    }
}

fn longest(items: &BTreeMap<String, f64>) -> Vec<(&str, f64)> {
    let mut items: Vec<(&str, f64)> = items.iter().map(|(name, &time)| (name.as_str(), time)).collect();
    items.sort_by(|a, b| b.1.total_cmp(&a.1));
    items
}

/// Why `exposed` seconds of all runs of a collective are exposed.
fn reason(schedule: &Schedule, overlap: &Overlap, exposure: Exposure, exposed: f64) -> String {
    let held = match exposure.at {
        WaitPoint::Task(task) => format!("{} reads it", name(schedule, task)),
        WaitPoint::End(frame) => format!("@{} ends with it", schedule.frames[frame].name),
    };
    match exposure.obstacle {
        Obstacle::Rank(rank) if is_between_stages(schedule, overlap.collective) => {
            format!("waits for rank {rank} of another stage (bubble)")
        }
        Obstacle::Rank(rank) => format!("waits for rank {rank}"),
        Obstacle::Queued(behind) => {
            let reader = held.trim_end_matches(" reads it");
            format!("the link is busy: {reader} waits for {} behind it", name(schedule, behind))
        }
        Obstacle::Transfer => match overlap.beside.first() {
            None => format!("nothing to compute beside it: {held}"),
            Some(&(kernel, _)) => {
                let each = seconds(exposed / overlap.count as f64);
                format!("longer than {} beside it by {each}: {held}", name(schedule, kernel))
            }
        },
    }
}
