//! A schedule by classes of ranks: for each frame and class the tasks of each stream, in order.

use ithaca_ir::entity::Entity;
use ithaca_ir::ops::ScanOrder;
use ithaca_ir::schedule::{self, Frame, FrameId, Schedule, Stream, Streams, Work, used_streams};
use ithaca_ir::{Rank, Space};

use super::alike::{Alike, FrameSeconds, on, sharers};
use crate::cluster::{Cluster, Load, Way};

/// The schedule of all classes.
pub(super) struct Program {
    /// For each frame of the schedule.
    pub(super) frames: Vec<Tasks>,
    /// For each class, and each level whose links are shared, the classes that share its link and how many devices of
    /// each do.
    pub(super) sharers: Vec<Vec<Vec<(usize, f64)>>>,
    /// Devices that share a link of each level, at most.
    pub(super) contention: Vec<f64>,
    /// Whether the streams of a rank take turns, in order of issue, on cores of which none is idle.
    pub(super) in_turn: bool,
}

/// A frame.
pub(super) struct Tasks {
    /// The kind of each task.
    pub(super) work: Vec<Does>,
    /// For each class and stream the tasks that it runs, in order; calls at which streams meet are in the lists of all these.
    pub(super) lanes: Vec<[Vec<usize>; Stream::COUNT]>,
    /// The streams that it uses, callees included.
    pub(super) streams: Streams,
    /// For each class the events that have yet to happen when it enters.
    pub(super) pending: Vec<Vec<bool>>,
    /// The events for which each task waits.
    pub(super) waits: Vec<Vec<usize>>,
    /// The event that happens when it ends.
    pub(super) records: Vec<Option<usize>>,
    /// The loop that it is, where it is one that only computes.
    pub(super) inside: Vec<Option<Loop>>,
    /// Classes that run it.
    pub(super) runners: Vec<usize>,
    /// Tasks of one run, those of callees included.
    pub(super) size: u64,
    /// The number of each task among them.
    pub(super) at: Vec<u64>,
}

/// A task.
pub(super) enum Does {
    /// Takes so many seconds on each class, or as many on all.
    Takes(Vec<f64>),
    /// Runs a frame that communicates: the streams that it uses meet.
    Runs(Loop),
    /// Communicates; the part of each class.
    Exchanges(Vec<Meeting>),
}

/// A call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loop {
    pub(super) callee: usize,
    pub(super) first: u64,
    pub(super) layers: u64,
    pub(super) order: ScanOrder,
}

impl Loop {
    /// The layer that is run after `done` others.
    pub(super) fn layer(&self, done: u64) -> u64 {
        match self.order {
            ScanOrder::Ascending => self.first + done,
            ScanOrder::Descending => self.first + self.layers - 1 - done,
        }
    }
}

/// The part of a class in a collective.
#[derive(Clone, Debug, Default)]
pub(super) struct Meeting {
    /// The classes for which it waits.
    pub(super) with: Vec<usize>,
    pub(super) latency: f64,
    /// Seconds on links that it has to itself: that no other device uses, and no other stream.
    pub(super) own: f64,
    /// Its loads on shared links.
    pub(super) shared: Vec<Shared>,
    /// Whether it is done only when all for which it waits are.
    pub(super) together: bool,
}

/// A load on a shared link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared {
    pub(super) level: usize,
    pub(super) way: Way,
    pub(super) seconds: f64,
    pub(super) far: Option<usize>,
    /// How far the rank at the other end is, of a link that only these two have, and how far this rank is from there.
    pub(super) own: Option<[u64; 2]>,
}

impl Program {
    pub(super) fn of(
        cluster: &Cluster,
        schedule: &Schedule,
        alike: &Alike,
        seconds: &[FrameSeconds],
    ) -> Self {
        let mut frames: Vec<Tasks> = Vec::new();
        let used = used_streams(&schedule.frames);
        let all = used.iter().copied().fold(Streams::default(), Streams::and);
        let shares = all.iter().filter(|&stream| stream != Stream::Compute).count() > 1;
        for ((id, frame), seconds) in schedule.frames.iter().zip(seconds) {
            let compiler = Compiler { cluster, schedule, alike, used: &used, shares, done: &frames };
            let tasks = compiler.frame(id, frame, seconds);
            frames.push(tasks);
        }
        let contention: Vec<f64> = cluster.levels.iter().map(|level| level.contention.value).collect();
        let sharing = |&rank: &_| {
            let level = |level| {
                let mut found: Vec<(usize, f64)> = Vec::new();
                for other in sharers(cluster, &schedule.space, level, rank) {
                    let class = alike.class(other);
                    match found.iter_mut().find(|(known, _)| *known == class) {
                        Some((_, n)) => *n += 1.0,
                        None => found.push((class, 1.0)),
                    }
                }
                found
            };
            (0..contention.len()).map(level).collect()
        };
        let in_turn = cluster.has_no_idle_core(schedule.space.mesh.ranks());
        Self { sharers: alike.ranks.iter().map(sharing).collect(), frames, contention, in_turn }
    }
}

struct Compiler<'a> {
    cluster: &'a Cluster,
    schedule: &'a Schedule,
    alike: &'a Alike,
    /// The streams that each frame uses.
    used: &'a [Streams],
    /// Whether several streams communicate, so that messages of one rank may share a link.
    shares: bool,
    /// The frames before.
    done: &'a [Tasks],
}

impl Compiler<'_> {
    fn frame(&self, id: FrameId, frame: &Frame, seconds: &FrameSeconds) -> Tasks {
        let space = &self.schedule.space;
        let n = self.alike.ranks.len();
        let mut tasks = Tasks {
            work: Vec::new(),
            lanes: vec![Default::default(); n],
            streams: self.used[id.index()],
            pending: vec![vec![false; frame.n_events]; n],
            waits: frame.tasks.iter().map(|t| t.waits.iter().map(|e| e.index()).collect()).collect(),
            records: frame.tasks.iter().map(|t| t.records.map(Entity::index)).collect(),
            inside: vec![None; frame.tasks.len()],
            runners: vec![0; frame.tasks.len()],
            size: 0,
            at: Vec::new(),
        };
        for (i, (task, seconds)) in frame.tasks.iter().zip(seconds).enumerate() {
            tasks.at.push(tasks.size);
            tasks.size += 1;
            let mut meets = Streams::default();
            let does = match &task.work {
                Work::Call { callee, layers, scan, .. } => {
                    let order = scan.map_or(ScanOrder::Ascending, |scan| scan.order);
                    let (callee, first) = (callee.index(), layers.start);
                    let call = Loop { callee, first, layers: layers.end - first, order };
                    tasks.size += call.layers * self.done[call.callee].size;
                    let used = self.used[callee];
                    if used.communicates() && call.layers > 0 {
                        meets = used;
                        Does::Runs(call)
                    } else {
                        tasks.inside[i] = Some(call);
                        let inside = |class| call.layers as f64 * self.inside(call.callee, class);
                        Does::Takes((0..n).map(inside).collect())
                    }
                }
                Work::Exchange(transfer) => Does::Exchanges(self.meetings(space, transfer)),
                Work::Compute(_) | Work::Pack(_) | Work::Unpack(_) | Work::Copy => {
                    Does::Takes(seconds.clone())
                }
            };
            for (class, &rank) in self.alike.ranks.iter().enumerate() {
                if frame.runs(space, task, rank) {
                    tasks.runners[i] += 1;
                    for stream in Stream::ALL {
                        if meets.has(stream) || stream == task.stream {
                            tasks.lanes[class][stream as usize].push(i);
                        }
                    }
                    if let Some(event) = task.records {
                        tasks.pending[class][event.index()] = true;
                    }
                }
            }
            tasks.work.push(does);
        }
        assert!(id.index() == self.done.len(), "callees stand before their callers");
        tasks
    }

    /// Seconds of one run of a frame that does not communicate.
    fn inside(&self, frame: usize, class: usize) -> f64 {
        let tasks = &self.done[frame];
        let seconds = |&i: &usize| match &tasks.work[i] {
            Does::Takes(seconds) => on(seconds, class),
            Does::Runs(_) | Does::Exchanges(_) => 0.0,
        };
        tasks.lanes[class].iter().flatten().map(seconds).sum()
    }

    fn meetings(&self, space: &Space, transfer: &schedule::Transfer) -> Vec<Meeting> {
        let alike = self.alike;
        let mut meetings: Vec<Meeting> = Vec::new();
        for (class, &rank) in alike.ranks.iter().enumerate() {
            let part = self.cluster.part(space, transfer.parcels(), rank);
            let mut meeting =
                Meeting { latency: part.latency, together: part.together, ..Meeting::default() };
            meeting.with = part.peers.iter().map(|&peer| alike.class(peer)).filter(|&c| c != class).collect();
            meeting.with.sort_unstable();
            meeting.with.dedup();
            for load in part.loads {
                let Load { level, way, seconds, far } = load;
                if self.shares || self.cluster.levels[level].contention.value > 1.0 {
                    let n = space.mesh.ranks();
                    let apart = |from: Rank, to: Rank| (to.0 + n - from.0) % n;
                    let own = far.filter(|_| self.cluster.levels[level].has_own_links());
                    let own = own.map(|far| [apart(rank, far), apart(far, rank)]);
                    let far = far.map(|far| alike.class(far));
                    meeting.shared.push(Shared { level, way, seconds, far, own });
                } else {
                    meeting.own = meeting.own.max(seconds);
                }
            }
            meetings.push(meeting);
        }
        meetings
    }
}
