//! Whether ranks meet: `S16` for the same collectives in the same order, `S17` for waits that end.
//!
//! Streams are queues with communicators of their own, and a collective starts when all its members have come to it on
//! one stream, as with NCCL. Classes of ranks run
//! side by side, each task once: a class comes to a collective and waits for the others, and what they are to do
//! together must be one thing. If no class can go on and one is not done, those that wait are named, in a circle if
//! there is one.
//!
//! A call of a frame that communicates is a meeting of the streams that it uses, and of all classes that the callee lets
//! communicate; another call is one task of its stream. A call is checked once for each set of classes that runs it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::boxes;
use crate::diagnostic::{Diagnostic, Diagnostics, MAX_DIAGNOSTICS};
use crate::entity::Entity;
use crate::layout::At;
use crate::mesh::{AxisId, Mesh};
use crate::message::Parcel;
use crate::ops::table::structure::Stage;
use crate::schedule::verify::classes::{Class, Line};
use crate::schedule::verify::order::STREAMS;
use crate::schedule::verify::report::{describe, name};
use crate::schedule::{Frame, FrameId, Schedule, Stream, Streams, Task, Transfer, Work, used_streams};

/// A schedule and the ranks that run it.
#[derive(Clone, Copy, Debug)]
pub struct Party<'s> {
    /// The ranks; all of them when absent.
    pub at: Option<At>,
    /// The schedule that they run.
    pub schedule: &'s Schedule,
}

/// Adds collectives that not all their members come to, or in another order.
///
/// The schedules have one mesh and the same frames, whose content may differ.
pub(super) fn check(parties: &[Party<'_>], found: &mut Diagnostics) {
    let Some(first) = parties.first() else { return };
    let mesh = &first.schedule.space.mesh;
    let places = parties.iter().flat_map(|party| {
        let frames = party.schedule.frames.values().flat_map(Frame::stages);
        frames.chain(party.at)
    });
    let classes = match Class::all(mesh, places.collect::<BTreeSet<At>>()) {
        Ok(classes) => classes,
        Err(error) => return found.push(Diagnostic::new(error.code, error.message)),
    };
    let Some(main) = first.schedule.main() else { return };
    let of = |class: &Class| parties.iter().find(|party| class.is_at(party.at)).map(|party| party.schedule);
    let Some(schedules) = classes.iter().map(of).collect::<Option<Vec<_>>>() else {
        return found.push(Diagnostic::new("S16", "some ranks have no schedule"));
    };
    let axes = parties.iter().map(|party| axes_of_frames(party.schedule)).reduce(|mut all, other| {
        all.iter_mut().zip(other).for_each(|(all, other)| all.extend(other));
        all
    });
    let of_frames = parties.iter().map(|party| used_streams(&party.schedule.frames));
    let used = of_frames.reduce(|all, other| all.into_iter().zip(other).map(|(a, b)| a.and(b)).collect());
    let (axes, used) = (axes.unwrap_or_default(), used.unwrap_or_default());
    let ranks = Ranks { mesh, classes: &classes, schedules, axes, used };
    let mut open: VecDeque<(FrameId, Vec<usize>)> = [(main, (0..classes.len()).collect())].into();
    let mut seen: BTreeSet<(FrameId, Vec<usize>)> = BTreeSet::new();
    while let Some((frame, members)) = open.pop_front() {
        if found.len() >= MAX_DIAGNOSTICS {
            return;
        }
        if seen.insert((frame, members.clone())) {
            open.extend(ranks.run(frame, &members, found));
        }
    }
}

/// The axes along which each frame communicates, callees included.
fn axes_of_frames(schedule: &Schedule) -> Vec<BTreeSet<AxisId>> {
    let mut all: Vec<BTreeSet<AxisId>> = Vec::with_capacity(schedule.frames.len());
    for frame in schedule.frames.values() {
        let mut axes = BTreeSet::new();
        for task in &frame.tasks {
            axes.extend(task.work.exchange().into_iter().flat_map(|transfer| axes_of(schedule, transfer)));
            axes.extend(task.work.callee().into_iter().flat_map(|callee| &all[callee.index()]));
        }
        all.push(axes);
    }
    all
}

fn axes_of(schedule: &Schedule, transfer: &Transfer) -> Vec<AxisId> {
    // Several tensors are sent along the same axes.
    let Parcel { op, from, to } = transfer.first();
    boxes::axes(&schedule.space, op, from, to).to_vec()
}

/// Classes of ranks, and the tasks of each.
struct Ranks<'s> {
    mesh: &'s Mesh,
    classes: &'s [Class],
    /// For each class its schedule.
    schedules: Vec<&'s Schedule>,
    /// For each frame the axes along which it communicates.
    axes: Vec<BTreeSet<AxisId>>,
    /// For each frame the streams that it uses in some schedule.
    used: Vec<Streams>,
}

/// Where classes meet: streams share no communicator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Meeting {
    stream: Stream,
    axes: Vec<AxisId>,
    /// By number.
    members: Vec<usize>,
}

/// A class on its way through a frame.
struct Walk<'s> {
    line: Line<'s>,
    /// For each stream the numbers of its tasks that are left.
    queues: [VecDeque<usize>; STREAMS],
    /// For each stream the calls of frames that meet there and have not ended, in order, with all their streams.
    calls: [VecDeque<(usize, Streams)>; STREAMS],
    happened: Vec<bool>,
    /// Events that tasks of the line record.
    recorded: Vec<bool>,
    /// For each stream where its first task waits for others, if it has come there.
    waits: [Option<Meeting>; STREAMS],
}

impl<'s> Walk<'s> {
    fn task(&self, stream: usize) -> Option<(usize, &'s Task)> {
        self.queues[stream].front().map(|&i| (i, &self.line.frame.tasks[i]))
    }

    /// Whether the first task of a stream may start, as far as its own rank is concerned.
    fn is_ready(&self, index: usize, task: &Task) -> bool {
        // A call starts when all before it have ended on its streams, and nothing after it starts there before it has ended.
        let meets = match self.calls[task.stream as usize].front() {
            Some(&(call, used)) if call == index => {
                used.iter().all(|s| self.queues[s as usize].front().is_none_or(|&i| i >= index))
            }
            Some(&(call, _)) => call > index,
            None => true,
        };
        meets && task.waits.iter().all(|event| self.happened[event.index()] || !self.recorded[event.index()])
    }

    fn end(&mut self, stream: usize) {
        let Some(index) = self.queues[stream].pop_front() else { return };
        for calls in &mut self.calls {
            if let Ok(at) = calls.binary_search_by_key(&index, |&(call, _)| call) {
                calls.remove(at);
            }
        }
        self.waits[stream] = None;
        if let Some(event) = self.line.frame.tasks[index].records {
            self.happened[event.index()] = true;
        }
    }
}

impl<'s> Ranks<'s> {
    /// Lets classes run a frame together; gives the frames that they call, with the classes that run these.
    fn run(&self, id: FrameId, members: &[usize], found: &mut Diagnostics) -> Vec<(FrameId, Vec<usize>)> {
        let mut walks: BTreeMap<usize, Walk<'s>> = members.iter().map(|&c| (c, self.walk(id, c))).collect();
        let mut calls = BTreeSet::new();
        let mut meetings: BTreeMap<Meeting, Vec<(usize, usize)>> = BTreeMap::new();
        let mut open: VecDeque<usize> = members.iter().copied().collect();
        while let Some(class) = open.pop_front() {
            let mut progress = true;
            while progress {
                progress = false;
                for stream in 0..STREAMS {
                    let Some(walk) = walks.get_mut(&class) else { break };
                    let Some((index, task)) = walk.task(stream) else { continue };
                    if walk.waits[stream].is_some() || !walk.is_ready(index, task) {
                        continue;
                    }
                    let meeting = self.meeting(class, task);
                    if let Work::Call { callee, stage, .. } = task.work {
                        let at = stage.and_then(Stage::at);
                        let runners = members.iter().copied().filter(|&c| self.classes[c].is_at(at));
                        calls.insert((callee, runners.collect::<Vec<_>>()));
                    }
                    if meeting.members.len() <= 1 {
                        walk.end(stream);
                        progress = true;
                        continue;
                    }
                    walk.waits[stream] = Some(meeting.clone());
                    let come = meetings.entry(meeting.clone()).or_default();
                    come.push((class, stream));
                    if come.len() < meeting.members.len() {
                        continue;
                    }
                    let come = meetings.remove(&meeting).unwrap_or_default();
                    if let Some(mistake) = self.differ(&walks, &come) {
                        found.push(mistake);
                        return Vec::new();
                    }
                    for (other, stream) in come {
                        if let Some(walk) = walks.get_mut(&other) {
                            walk.end(stream);
                        }
                        if other != class {
                            open.push_back(other);
                        }
                    }
                    progress = true;
                }
            }
        }
        if let Some(mistake) = self.stuck(&walks) {
            found.push(mistake);
            return Vec::new();
        }
        calls.into_iter().collect()
    }

    fn walk(&self, id: FrameId, class: usize) -> Walk<'s> {
        let frame = &self.schedules[class].frames[id];
        let line = Line::of(frame, &self.classes[class]);
        let mut queues: [VecDeque<usize>; STREAMS] = Default::default();
        let mut calls: [VecDeque<(usize, Streams)>; STREAMS] = Default::default();
        let mut recorded = vec![false; frame.n_events];
        for &i in &line.tasks {
            let task = &frame.tasks[i];
            queues[task.stream as usize].push_back(i);
            if let Some(event) = task.records {
                recorded[event.index()] = true;
            }
            let used = task.work.callee().map(|callee| self.used[callee.index()]);
            if let Some(used) = used.filter(|used| used.communicates()) {
                let used = used.and(Streams::only(task.stream));
                used.iter().for_each(|stream| calls[stream as usize].push_back((i, used)));
            }
        }
        Walk {
            line,
            queues,
            calls,
            happened: vec![false; frame.n_events],
            recorded,
            waits: Default::default(),
        }
    }

    /// The classes that must meet for a task that `class` runs.
    fn meeting(&self, class: usize, task: &Task) -> Meeting {
        let (axes, at) = match &task.work {
            Work::Exchange(transfer) => {
                let Parcel { from, to, .. } = transfer.first();
                let at = (from.layout.at != to.layout.at).then_some([from.layout.at, to.layout.at]);
                (axes_of(self.schedules[class], transfer), at)
            }
            Work::Call { callee, stage, .. } => {
                let axes = self.axes.get(callee.index()).into_iter().flatten().copied().collect();
                (axes, stage.and_then(Stage::at).map(|at| [Some(at); 2]))
            }
            Work::Compute(_) | Work::Pack(_) | Work::Unpack(_) | Work::Copy => {
                return Meeting { stream: task.stream, axes: Vec::new(), members: vec![class] };
            }
        };
        let mine = &self.classes[class];
        let is_member = |&other: &usize| {
            let other = &self.classes[other];
            mine.differs_along(other, &axes)
                && at.is_none_or(|places| places.iter().any(|&place| other.is_at(place)))
        };
        let members = (0..self.classes.len()).filter(is_member).collect();
        Meeting { stream: task.stream, axes, members }
    }

    /// The mistake where classes that meet are to do different work.
    fn differ(&self, walks: &BTreeMap<usize, Walk<'_>>, come: &[(usize, usize)]) -> Option<Diagnostic> {
        let task = |&(class, stream): &(usize, usize)| {
            let walk = walks.get(&class)?;
            walk.task(stream).map(|(i, task)| (class, walk.line.frame, i, task))
        };
        let (class, frame, i, first) = task(come.first()?)?;
        // Two collectives of one kind may be neighbours, so their operands matter.
        let of = |frame: &Frame, task: &Task| -> Vec<String> {
            task.reads.iter().chain(&task.writes).map(|&b| name(frame, b).to_owned()).collect()
        };
        let differs = |(_, there, _, other): &(usize, &Frame, usize, &Task)| {
            !is_one(&first.work, &other.work) || of(frame, first) != of(there, other)
        };
        let (other_class, other_frame, j, _) = come.iter().filter_map(task).find(differs)?;
        let (here, there) = (self.describe(class), self.describe(other_class));
        let message = format!(
            "frame `@{}`, {} on {here}: on {there} it meets {}, which is another",
            frame.name,
            describe(frame, i),
            describe(other_frame, j)
        );
        Some(Diagnostic::new("S16", message))
    }

    /// The classes that wait for each other, if there are any.
    fn stuck(&self, walks: &BTreeMap<usize, Walk<'_>>) -> Option<Diagnostic> {
        let waits = |walk: &Walk<'_>| {
            walk.waits.iter().enumerate().find_map(|(stream, meeting)| {
                let meeting = meeting.clone()?;
                walk.task(stream).map(|(i, _)| (i, meeting))
            })
        };
        // A class waits only for others: events lead back to earlier tasks, and so to one that waits for others.
        let (mut class, _) = walks.iter().find(|(_, walk)| waits(walk).is_some())?;
        let mut passed: Vec<usize> = Vec::new();
        let mut said = String::new();
        loop {
            let walk = &walks[class];
            let frame = walk.line.frame;
            let Some((i, meeting)) = waits(walk) else {
                said.push_str(", which end without it");
                break;
            };
            let task = format!("{} on {}", describe(frame, i), self.describe(*class));
            if passed.is_empty() {
                said = format!("frame `@{}`, {task} waits for ", frame.name);
            } else {
                said.push_str(&format!(", which wait in {}", describe(frame, i)));
                said.push_str(" for ");
            }
            if passed.contains(class) {
                said.truncate(said.len() - " for ".len());
                said.push_str(", in a circle");
                break;
            }
            passed.push(*class);
            let is_there = |other: usize| {
                walks.get(&other).is_some_and(|walk| walk.waits.iter().flatten().any(|m| *m == meeting))
            };
            let missing = meeting.members.iter().find(|&&other| !is_there(other))?;
            said.push_str(&self.describe(*missing));
            match walks.get_key_value(missing) {
                Some((next, _)) => class = next,
                None => {
                    said.push_str(", which do not run this frame with them");
                    break;
                }
            }
        }
        Some(Diagnostic::new("S17", said))
    }

    fn describe(&self, class: usize) -> String {
        self.classes[class].describe(self.mesh)
    }
}

/// Whether two classes of ranks do one thing together.
fn is_one(a: &Work, b: &Work) -> bool {
    match (a, b) {
        (Work::Exchange(a), Work::Exchange(b)) => a == b,
        (
            Work::Call { callee, layers, stride, scan, stage, base: _ },
            Work::Call { callee: other, layers: of, stride: by, scan: as_, stage: at, base: _ },
        ) => callee == other && layers == of && stride == by && scan == as_ && stage == at,
        (_, _) => false,
    }
}
