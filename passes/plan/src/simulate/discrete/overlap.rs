//! Communication beside kernels: which kernels run while a collective does, and why the compute stream waits for the rest.

use std::collections::BTreeMap;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{EventId, FrameId, Schedule};

/// A task: its frame, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TaskAt {
    /// The frame.
    pub frame: FrameId,
    /// The number of the task.
    pub task: usize,
}

/// All runs of a collective on one rank, and the compute stream meanwhile.
#[derive(Clone, Debug, PartialEq)]
pub struct Overlap {
    /// The collective.
    pub collective: TaskAt,
    /// Its runs.
    pub count: u64,
    /// Seconds in all, from when the rank is ready.
    pub seconds: f64,
    /// The kernels that run beside it, with the seconds in which they do; the longest first.
    pub beside: Vec<(TaskAt, f64)>,
    /// The reasons for which the compute stream waits, with the seconds in which it does; the longest first.
    pub exposed: Vec<(Exposure, f64)>,
}

/// Why the compute stream does nothing while a collective runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Exposure {
    /// The task that cannot start; at the end of a frame none.
    pub at: WaitPoint,
    /// The obstacle.
    pub obstacle: Obstacle,
}

/// The position at which the compute stream waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitPoint {
    /// Before this task.
    Task(TaskAt),
    /// At the end of this frame, at which its streams meet.
    End(FrameId),
}

/// The reason for which the compute stream waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// The collective itself.
    Transfer,
    /// A later collective of the same stream, which is queued behind this one.
    Queued(TaskAt),
    /// Another rank, which is not ready for the collective.
    Rank(Rank),
}

/// By frame and task of a collective, the seconds beside each kernel and of each reason.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    collectives: BTreeMap<(usize, usize), Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    beside: Seconds<(usize, usize)>,
    exposed: Seconds<Waiting>,
}

type Seconds<K> = BTreeMap<K, f64>;

/// The frame and the task that cannot start, none at the end of the frame; and the class that is not ready for the collective.
pub(super) type Waiting = ((usize, Option<usize>), Option<usize>);

impl Recorder {
    /// `collective` has run for `seconds` more beside a kernel.
    pub(super) fn beside(&mut self, collective: (usize, usize), kernel: (usize, usize), seconds: f64) {
        *self.collectives.entry(collective).or_default().beside.entry(kernel).or_default() += seconds;
    }

    /// The compute stream has waited for `seconds` more while `collective` ran.
    pub(super) fn exposed(&mut self, collective: (usize, usize), waiting: Waiting, seconds: f64) {
        *self.collectives.entry(collective).or_default().exposed.entry(waiting).or_default() += seconds;
    }

    /// The overlaps of a schedule, by frame and task; `times` are the runs and seconds of each, `ranks` the first of each
    /// class.
    pub(super) fn finish(
        self,
        schedule: &Schedule,
        ranks: &[Rank],
        times: impl Fn(usize, usize) -> (u64, f64),
    ) -> Vec<Overlap> {
        let at = |(frame, task): (usize, usize)| TaskAt { frame: FrameId::new(frame), task };
        let one = |(collective, Recorded { beside, exposed }): ((usize, usize), Recorded)| {
            let (count, seconds) = times(collective.0, collective.1);
            let collective = at(collective);
            let reason = |((held, late), seconds): (Waiting, f64)| {
                let held_at = match held {
                    (frame, Some(task)) => WaitPoint::Task(at((frame, task))),
                    (frame, None) => WaitPoint::End(FrameId::new(frame)),
                };
                let obstacle = match late {
                    Some(class) => Obstacle::Rank(ranks[class]),
                    None => queued_before(schedule, collective, held_at)
                        .map_or(Obstacle::Transfer, Obstacle::Queued),
                };
                (Exposure { at: held_at, obstacle }, seconds)
            };
            Overlap {
                collective,
                count,
                seconds,
                beside: longest_first(beside.into_iter().map(|(kernel, seconds)| (at(kernel), seconds))),
                exposed: longest_first(exposed.into_iter().map(reason)),
            }
        };
        self.collectives.into_iter().map(one).collect()
    }
}

fn longest_first<K>(items: impl Iterator<Item = (K, f64)>) -> Vec<(K, f64)> {
    let mut items: Vec<(K, f64)> = items.collect();
    items.sort_by(|a, b| b.1.total_cmp(&a.1));
    items
}

/// The later collective that `held` waits for, where it does not wait for `collective` itself.
fn queued_before(schedule: &Schedule, collective: TaskAt, held: WaitPoint) -> Option<TaskAt> {
    let WaitPoint::Task(held) = held else { return None };
    if held.frame != collective.frame {
        return None;
    }
    let tasks = &schedule.frames[held.frame].tasks;
    let waits: &[EventId] = &tasks[held.task].waits;
    let is_awaited = |task: usize| tasks[task].records.is_some_and(|event| waits.contains(&event));
    if is_awaited(collective.task) {
        return None;
    }
    let stream = tasks[collective.task].stream;
    let behind = (collective.task + 1..tasks.len()).find(|&i| tasks[i].stream == stream && is_awaited(i))?;
    Some(TaskAt { frame: held.frame, task: behind })
}
