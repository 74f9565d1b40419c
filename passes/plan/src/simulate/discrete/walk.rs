//! A class on its way through frames: how far each of its streams is, and the record of what it ran.

use ithaca_ir::Rank;
use ithaca_ir::schedule::{Stream, Streams};

use super::alike::on;
use super::detail::{Detail, Run, Writer};
use super::overlap::Recorder;
use super::program::{Does, Loop, Program};

/// A class and one of its streams.
pub(super) type Lane = (usize, usize);

/// The run of a class.
pub(super) struct Ran {
    pub(super) end: f64,
    /// How long each stream was at its tasks.
    pub(super) busy: [f64; Stream::COUNT],
    /// For each frame and task that communicates, its time.
    pub(super) tasks: Vec<Vec<Time>>,
    /// Runs of tasks, if they are recorded.
    pub(super) writer: Option<Writer>,
    /// The compute stream while collectives run, if it is recorded.
    pub(super) overlaps: Option<Recorder>,
}

/// The time of all runs of a task that communicates.
#[derive(Clone, Copy, Default)]
pub(super) struct Time {
    pub(super) count: u64,
    pub(super) total: f64,
    pub(super) exposed: f64,
}

/// A frame that a class is in.
pub(super) struct Inside {
    pub(super) call: Loop,
    /// Layers that are done.
    pub(super) done: u64,
    /// The number of its first task among all runs of tasks.
    pub(super) base: u64,
    /// How far each stream is.
    pub(super) next: [usize; Stream::COUNT],
    /// Events that have yet to happen.
    pub(super) pending: Vec<bool>,
    /// Whether its runs are listed, as far as its callers say.
    pub(super) is_listed: bool,
}

/// A class on its way.
pub(super) struct Walk {
    pub(super) frames: Vec<Inside>,
    /// Since when each stream is at its task.
    pub(super) busy: [Option<f64>; Stream::COUNT],
    /// The message of each stream.
    pub(super) message: [Option<Message>; Stream::COUNT],
    /// Until when times are accounted for.
    pub(super) accounted: f64,
    /// How often each frame was called, if runs are recorded.
    pub(super) called: Vec<u64>,
    pub(super) ran: Ran,
}

/// A collective on a rank, from when it is ready until it ends.
pub(super) struct Message {
    pub(super) number: u64,
    pub(super) frame: usize,
    pub(super) task: usize,
    /// Peers that are not ready; once it has started, peers that are not done.
    pub(super) missing: usize,
    /// When the links that it has to itself have carried it.
    pub(super) own_end: f64,
    pub(super) stage: Phase,
}

/// How far a message is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Waits,
    Travels,
    /// Its own part is done.
    Carried,
}

impl Walk {
    /// Whether the runs of the innermost frame are listed.
    pub(super) fn is_listed(&self, detail: Detail) -> bool {
        let listed =
            |inside: &Inside| inside.is_listed && detail.shows_layer(inside.done, inside.call.layers);
        self.frames.iter().all(listed)
    }

    /// The task of `main` at which a stream is, or the call that it is in.
    pub(super) fn within(&self, program: &Program, class: usize, stream: usize) -> usize {
        let Some(main) = self.frames.first() else { return 0 };
        let lanes = &program.frames[main.call.callee].lanes[class];
        let at = |stream: usize| lanes[stream].get(main.next[stream]).copied();
        at(stream).or_else(|| at(Stream::Compute as usize)).unwrap_or(0)
    }

    /// The frame in which a stream is: the innermost that uses it.
    pub(super) fn inside(&self, program: &Program, stream: usize) -> Option<&Inside> {
        self.frames.iter().rev().find(|inside| inside.has(program, stream))
    }

    /// Whether a task may run beside those of other streams: where streams take turns, only alone and in order of issue.
    pub(super) fn may_run(&self, program: &Program, (class, stream): Lane, task: usize) -> bool {
        let Some(innermost) = self.frames.last().filter(|_| program.in_turn) else { return true };
        let lanes = program.frames[innermost.call.callee].lanes[class].iter();
        let is_first =
            |(lane, &next): (&Vec<usize>, &usize)| lane.get(next).is_none_or(|&other| other >= task);
        innermost.has(program, stream)
            && self.busy.iter().all(Option::is_none)
            && lanes.zip(&innermost.next).all(is_first)
    }

    /// The frame in which a stream is, and the task there that it runs or waits to run; none at the end of the frame.
    pub(super) fn next(
        &self,
        program: &Program,
        class: usize,
        stream: usize,
    ) -> Option<(usize, Option<usize>)> {
        let inside = self.inside(program, stream)?;
        let frame = inside.call.callee;
        Some((frame, program.frames[frame].lanes[class][stream].get(inside.next[stream]).copied()))
    }
}

impl Inside {
    pub(super) fn enter(program: &Program, call: Loop, base: u64, class: usize, is_listed: bool) -> Self {
        let pending = program.frames[call.callee].pending[class].clone();
        Self { call, done: 0, base, next: [0; Stream::COUNT], pending, is_listed }
    }

    /// Whether a stream is in this frame.
    pub(super) fn has(&self, program: &Program, stream: usize) -> bool {
        program.frames[self.call.callee].streams.has(Stream::ALL[stream])
    }

    pub(super) fn is_ready(&self, program: &Program, task: usize) -> bool {
        program.frames[self.call.callee].waits[task].iter().all(|&event| !self.pending[event])
    }

    /// The streams that met at the call are past it.
    pub(super) fn pass_call(&mut self, program: &Program, class: usize, streams: Streams) {
        let frame = &program.frames[self.call.callee];
        let task = frame.lanes[class][0][self.next[0]];
        if let Some(event) = frame.records[task] {
            self.pending[event] = false;
        }
        streams.iter().for_each(|stream| self.next[stream as usize] += 1);
    }
}

/// Writes runs of tasks; of a call that only computes the tasks inside.
pub(super) struct Inner<'a> {
    pub(super) program: &'a Program,
    pub(super) class: usize,
    pub(super) rank: Rank,
    pub(super) detail: Detail,
    pub(super) called: &'a mut [u64],
    pub(super) writer: &'a mut Writer,
}

impl Inner<'_> {
    pub(super) fn write(&mut self, stream: Stream, run: Run, is_listed: bool) {
        let Some(call) = self.program.frames[run.frame].inside[run.task] else {
            self.writer.write(self.rank, stream, run, is_listed);
            return;
        };
        let tasks = &self.program.frames[call.callee];
        let is_listed = is_listed && self.detail.shows_call(self.called[call.callee]);
        self.called[call.callee] += 1;
        let mut at = run.start;
        for done in 0..call.layers {
            let is_listed = is_listed && self.detail.shows_layer(done, call.layers);
            for lane in &tasks.lanes[self.class] {
                for (position, &task) in lane.iter().enumerate() {
                    let Does::Takes(seconds) = &tasks.work[task] else { continue };
                    let (start, end) = (at, at + on(seconds, self.class));
                    let layer = call.layer(done);
                    let inner = Run { within: run.within, frame: call.callee, task, layer, start, end };
                    if end > start {
                        let is_listed = is_listed && self.detail.shows_task(position, lane.len());
                        self.write(stream, inner, is_listed);
                    }
                    at = end;
                }
            }
        }
    }
}
