//! The time of one run of a schedule.

use std::collections::BTreeMap;

use ithaca_ir::Rank;
use ithaca_ir::schedule::{Frame, Stream};
use ithaca_ir::timeline::{self, Span};

/// The time of one run of a schedule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Simulation {
    /// The whole step, seconds.
    pub seconds: f64,
    /// The compute stream at work, seconds.
    pub compute: f64,
    /// Each other stream that has tasks, at work or waiting for other ranks, seconds.
    pub streams: BTreeMap<Stream, f64>,
    /// The other streams at work, by kind of collective and mesh axis.
    pub communication: BTreeMap<(&'static str, String), CommTime>,
}

/// Time of collectives of one kind along one axis, waiting for the other ranks included.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CommTime {
    /// In all, seconds.
    pub total: f64,
    /// While the compute stream stood still, seconds; of several streams on the first.
    pub exposed: f64,
}

impl Simulation {
    /// Seconds in which no kernel runs.
    pub fn exposed(&self) -> f64 {
        self.communication.values().map(|t| t.exposed).sum()
    }

    /// The kind and axis with the most exposed time, if any is.
    pub fn most_exposed(&self) -> Option<(&(&'static str, String), CommTime)> {
        let rows = self.communication.iter().filter(|(_, t)| t.exposed > 0.0);
        rows.max_by(|a, b| a.1.exposed.total_cmp(&b.1.exposed)).map(|(key, &time)| (key, time))
    }

    /// The part of the step in which a stream is at a task; of a collective, from when its rank is ready.
    pub fn occupancy(&self, stream: Stream) -> f64 {
        let busy = match stream {
            Stream::Compute => self.compute,
            other => self.streams.get(&other).copied().unwrap_or(0.0),
        };
        if self.seconds > 0.0 { busy / self.seconds } else { 0.0 }
    }

    pub(super) fn add(&mut self, other: &Simulation, times: f64) {
        self.seconds += times * other.seconds;
        self.compute += times * other.compute;
        for (&stream, seconds) in &other.streams {
            *self.streams.entry(stream).or_default() += times * seconds;
        }
        for (key, time) in &other.communication {
            let sum = self.communication.entry(key.clone()).or_default();
            sum.total += times * time.total;
            sum.exposed += times * time.exposed;
        }
    }
}

/// The run of a task in a timeline.
pub(super) fn span(frame: &Frame, task: usize, rank: Rank, layer: u64, (start, end): (f64, f64)) -> Span {
    let (name, kind) = timeline::title(frame, task);
    let (stream, frame) = (frame.tasks[task].stream, frame.name.clone());
    Span { rank, stream, frame, layer, task, name, kind, start, end }
}
