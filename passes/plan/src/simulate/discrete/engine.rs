//! The loop over events.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use ithaca_ir::Rank;
use ithaca_ir::schedule::{Schedule, Stream, Streams};

use super::alike::on;
use super::detail::{Detail, Run, Writer};
use super::links::Links;
use super::overlap::Recorder;
use super::program::{Does, Loop, Meeting, Program};
use super::walk::{Inner, Inside, Lane, Message, Phase, Ran, Time, Walk};

/// Classes whose runs are written at most; of more, every second one, or third.
const LISTED: usize = 64;

/// Whether the runs of tasks are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Times only.
    Times,
    /// Runs of tasks on the first rank of each class, about so many at most; of more than 64 classes, on some of them.
    Spans {
        /// Runs that are listed; the others are folded.
        most: usize,
    },
    /// Times, and for each collective the kernels beside it and the reasons for which it is exposed.
    Overlaps,
}

/// A future event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A stream has done its task.
    Done(Lane),
    /// A message's latency is over.
    Open(Lane),
    /// The links that a message has to itself have carried it.
    Sent(Lane),
    /// A flow over a shared link ends, if nothing has changed since this was scheduled.
    Shares(u64),
}

/// One run of a collective.
#[derive(Default)]
struct Gathering {
    /// For each class that has reached the phase, its stream.
    ready: BTreeMap<usize, usize>,
    carried: BTreeMap<usize, usize>,
    /// Classes that are through.
    through: usize,
}

pub(super) struct Engine<'a> {
    program: &'a Program,
    /// The first rank of each class.
    ranks: &'a [Rank],
    /// Which runs are listed.
    detail: Detail,
    now: f64,
    /// By time; times are never negative, so their bits are in order.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Events so far: of those at one moment the first scheduled comes first.
    scheduled: u64,
    walks: Vec<Walk>,
    gatherings: BTreeMap<u64, Gathering>,
    links: Links,
    /// How often shares were worked out.
    version: u64,
}

impl<'a> Engine<'a> {
    pub(super) fn new(
        program: &'a Program,
        main: usize,
        (schedule, ranks): (&Schedule, &'a [Rank]),
        record: Record,
    ) -> Self {
        let n = program.sharers.len();
        let (detail, every) = match record {
            Record::Times | Record::Overlaps => (Detail::ALL, usize::MAX),
            Record::Spans { most } => Detail::within(schedule, ranks, most, LISTED),
        };
        let writes = |class: usize| class.is_multiple_of(every);
        let call = Loop { callee: main, first: 0, layers: 1, order: ithaca_ir::ops::ScanOrder::Ascending };
        let walk = |class| Walk {
            frames: vec![Inside::enter(program, call, 0, class, true)],
            busy: [None; Stream::COUNT],
            message: Default::default(),
            accounted: 0.0,
            called: vec![0; program.frames.len()],
            ran: Ran {
                end: 0.0,
                busy: [0.0; Stream::COUNT],
                tasks: program.frames.iter().map(|f| vec![Time::default(); f.work.len()]).collect(),
                writer: matches!(record, Record::Spans { .. }).then(|| Writer::new(writes(class))),
                overlaps: (record == Record::Overlaps).then(Recorder::default),
            },
        };
        Self {
            program,
            ranks,
            detail,
            now: 0.0,
            events: BinaryHeap::new(),
            scheduled: 0,
            walks: (0..n).map(walk).collect(),
            gatherings: BTreeMap::new(),
            links: Links::default(),
            version: 0,
        }
    }

    /// Runs until nothing is to come.
    pub(super) fn run(&mut self) {
        (0..self.walks.len()).for_each(|class| self.advance(class));
        loop {
            // Whatever starts or ends at one moment is seen at once.
            let later = self.events.peek().is_none_or(|Reverse((at, ..))| f64::from_bits(*at) > self.now);
            if later && self.links.have_changed() {
                self.version += 1;
                if let Some(end) = self.links.share(self.now, self.program) {
                    self.schedule(end, Event::Shares(self.version));
                }
                continue;
            }
            let Some(Reverse((at, _, event))) = self.events.pop() else { break };
            match event {
                Event::Shares(version) if version != self.version || self.links.have_changed() => continue,
                _ => self.now = f64::from_bits(at),
            }
            match event {
                Event::Done(lane) => self.done(lane),
                Event::Open(lane) => self.open(lane),
                Event::Sent(lane) => self.carried(lane),
                Event::Shares(_) => {
                    for (class, stream) in self.links.ended(self.now) {
                        self.carried_by_shared((class, stream));
                    }
                }
            }
        }
    }

    /// The run of each class. Every class ends: the verifier refuses schedules that wait for themselves.
    pub(super) fn finish(self) -> Vec<Ran> {
        assert!(self.walks.iter().all(|walk| walk.frames.is_empty()), "every rank comes to its end");
        self.walks.into_iter().map(|walk| walk.ran).collect()
    }

    fn schedule(&mut self, at: f64, event: Event) {
        self.scheduled += 1;
        assert!(at >= 0.0, "time goes forward");
        self.events.push(Reverse((at.to_bits(), self.scheduled, event)));
    }

    /// Starts whatever a class can start.
    fn advance(&mut self, class: usize) {
        loop {
            let mut started = false;
            for stream in 0..Stream::COUNT {
                while self.start((class, stream)) {
                    started = true;
                }
            }
            if !self.turn(class) && !started {
                return;
            }
            if self.walks[class].frames.is_empty() {
                return;
            }
        }
    }

    /// Starts the next task of a stream; false where it has none that may start.
    fn start(&mut self, (class, stream): Lane) -> bool {
        let walk = &self.walks[class];
        let inside = walk.inside(self.program, stream).filter(|_| walk.busy[stream].is_none());
        let Some(inside) = inside else { return false };
        let frame = inside.call.callee;
        let tasks = &self.program.frames[frame];
        let Some(&task) = tasks.lanes[class][stream].get(inside.next[stream]) else { return false };
        if !inside.is_ready(self.program, task) || !walk.may_run(self.program, (class, stream), task) {
            return false;
        }
        let number = inside.base + tasks.at[task];
        match &tasks.work[task] {
            Does::Runs(_) => return false,
            Does::Takes(seconds) => {
                let seconds = on(seconds, class);
                self.occupy((class, stream));
                if seconds > 0.0 {
                    self.schedule(self.now + seconds, Event::Done((class, stream)));
                } else {
                    self.free((class, stream));
                }
            }
            Does::Exchanges(meetings) => {
                self.occupy((class, stream));
                self.meet((class, stream), (frame, task, number), &meetings[class]);
            }
        }
        true
    }

    /// Enters a call at which its streams have met, or leaves a frame that its streams have run.
    fn turn(&mut self, class: usize) -> bool {
        let program = self.program;
        let walk = &mut self.walks[class];
        let Some(inside) = walk.frames.last_mut() else { return false };
        let tasks = &program.frames[inside.call.callee];
        let next = |stream: usize| tasks.lanes[class][stream].get(inside.next[stream]).copied();
        let busy = &walk.busy;
        let all_at = |streams: Streams, task: Option<usize>| {
            streams.iter().all(|s| busy[s as usize].is_none() && next(s as usize) == task)
        };
        let Some(task) = next(Stream::Compute as usize) else {
            if !all_at(tasks.streams, None) {
                return false;
            }
            inside.done += 1;
            if inside.done < inside.call.layers {
                inside.base += tasks.size;
                inside.next = [0; Stream::COUNT];
                inside.pending.clone_from(&tasks.pending[class]);
                return true;
            }
            let streams = tasks.streams;
            walk.frames.pop();
            match walk.frames.last_mut() {
                Some(caller) => caller.pass_call(program, class, streams),
                None => walk.ran.end = self.now,
            }
            return true;
        };
        let Does::Runs(call) = tasks.work[task] else { return false };
        let base = inside.base + tasks.at[task] + 1;
        let meet = all_at(program.frames[call.callee].streams, Some(task)) && inside.is_ready(program, task);
        if !meet || !walk.may_run(program, (class, Stream::Compute as usize), task) {
            return false;
        }
        let is_listed = walk.is_listed(self.detail) && self.detail.shows_call(walk.called[call.callee]);
        walk.called[call.callee] += 1;
        walk.frames.push(Inside::enter(program, call, base, class, is_listed));
        true
    }

    /// A stream is at its task from now on.
    fn occupy(&mut self, (class, stream): Lane) {
        self.account(class);
        self.walks[class].busy[stream] = Some(self.now);
    }

    /// Accounts for a class whose overlaps are recorded, before the reason changes for which it waits.
    fn account_overlaps(&mut self, class: usize) {
        if self.walks[class].ran.overlaps.is_some() {
            self.account(class);
        }
    }

    /// Accounts for the time since the last account of a class.
    fn account(&mut self, class: usize) {
        let walk = &mut self.walks[class];
        let passed = self.now - walk.accounted;
        walk.accounted = self.now;
        if passed <= 0.0 {
            return;
        }
        let compute = walk.next(self.program, class, Stream::Compute as usize);
        let computes = walk.busy[Stream::Compute as usize].is_some();
        // The first of several busy streams hides the others.
        let mut is_hidden = false;
        for stream in (0..Stream::COUNT).filter(|&s| walk.busy[s].is_some()) {
            walk.ran.busy[stream] += passed;
            let at = walk.next(self.program, class, stream).filter(|_| stream != Stream::Compute as usize);
            if let Some((frame, Some(task))) = at {
                let time = &mut walk.ran.tasks[frame][task];
                time.total += passed;
                time.exposed += if is_hidden { 0.0 } else { passed };
                if let Some(writer) = walk.ran.writer.as_mut().filter(|_| !is_hidden) {
                    writer.expose(Stream::ALL[stream], (self.now - passed, self.now));
                }
                match (&mut walk.ran.overlaps, compute) {
                    (Some(overlaps), Some((kernel_frame, Some(kernel)))) if computes => {
                        overlaps.beside((frame, task), (kernel_frame, kernel), passed);
                    }
                    (Some(overlaps), Some(held)) if !is_hidden => {
                        let message = walk.message[stream].as_ref().filter(|m| m.stage == Phase::Waits);
                        let late = message.and_then(|message| {
                            let ready = &self.gatherings.get(&message.number)?.ready;
                            let Does::Exchanges(meetings) = &self.program.frames[frame].work[task] else {
                                return None;
                            };
                            meetings[class].with.iter().copied().find(|other| !ready.contains_key(other))
                        });
                        overlaps.exposed((frame, task), (held, late), passed);
                    }
                    _ => {}
                }
            }
            is_hidden = true;
        }
    }

    /// A stream has done its task.
    fn free(&mut self, (class, stream): Lane) {
        self.account(class);
        let program = self.program;
        let walk = &mut self.walks[class];
        let since = walk.busy[stream].take();
        let is_listed = walk.is_listed(self.detail);
        let within = walk.within(program, class, stream);
        let at = walk.frames.iter_mut().rev().find(|inside| inside.has(program, stream));
        let Some(inside) = at else { return };
        let frame = inside.call.callee;
        let lane = &program.frames[frame].lanes[class][stream];
        let position = inside.next[stream];
        let task = lane[position];
        inside.next[stream] += 1;
        if let Some(event) = program.frames[frame].records[task] {
            inside.pending[event] = false;
        }
        if stream != Stream::Compute as usize {
            walk.ran.tasks[frame][task].count += 1;
        }
        let layer = inside.call.layer(inside.done);
        let since = since.filter(|&since| since < self.now);
        if let Some((start, writer)) = since.zip(walk.ran.writer.as_mut()) {
            let run = Run { within, frame, task, layer, start, end: self.now };
            let is_listed = is_listed && self.detail.shows_task(position, lane.len());
            let (rank, detail) = (self.ranks[class], self.detail);
            let mut inside = Inner { program, class, rank, detail, called: &mut walk.called, writer };
            inside.write(Stream::ALL[stream], run, is_listed);
        }
    }

    fn done(&mut self, lane: Lane) {
        self.free(lane);
        self.advance(lane.0);
    }

    /// A class is ready for a collective.
    fn meet(&mut self, lane: Lane, (frame, task, number): (usize, usize, u64), meeting: &Meeting) {
        let message = Message { number, frame, task, missing: 0, own_end: 0.0, stage: Phase::Waits };
        self.walks[lane.0].message[lane.1] = Some(message);
        for lane in self.reach(lane, Phase::Waits, meeting) {
            self.start_message(lane);
        }
    }

    /// A class reaches a phase of its message; returns the lanes whose peers have all reached it, its own last.
    fn reach(&mut self, (class, stream): Lane, phase: Phase, meeting: &Meeting) -> Vec<Lane> {
        // Until now the others have waited for this class.
        meeting.with.iter().for_each(|&other| self.account_overlaps(other));
        let Some(message) = &mut self.walks[class].message[stream] else { return Vec::new() };
        message.stage = phase;
        let number = message.number;
        let gathering = self.gatherings.entry(number).or_default();
        let come = if phase == Phase::Waits { &mut gathering.ready } else { &mut gathering.carried };
        come.insert(class, stream);
        message.missing = meeting.with.iter().filter(|other| !come.contains_key(other)).count();
        let is_complete = message.missing == 0;
        let mut complete = Vec::new();
        for (&other, &on) in meeting.with.iter().filter_map(|other| come.get_key_value(other)) {
            let message = self.walks[other].message[on].as_mut();
            if let Some(message) = message.filter(|m| m.number == number && m.stage == phase) {
                message.missing -= 1;
                if message.missing == 0 {
                    complete.push((other, on));
                }
            }
        }
        complete.extend(is_complete.then_some((class, stream)));
        complete
    }

    /// The part of a class in the message of its stream.
    fn meeting(&self, (class, stream): Lane) -> Option<&'a Meeting> {
        let message = self.walks[class].message[stream].as_ref()?;
        match &self.program.frames[message.frame].work[message.task] {
            Does::Exchanges(meetings) => meetings.get(class),
            Does::Takes(_) | Does::Runs(_) => None,
        }
    }

    /// Starts the message of a lane: every rank that takes part is ready.
    fn start_message(&mut self, lane: Lane) {
        let Some(meeting) = self.meeting(lane) else { return };
        self.account_overlaps(lane.0);
        let own_end = self.now + meeting.latency + meeting.own;
        if let Some(message) = &mut self.walks[lane.0].message[lane.1] {
            message.stage = Phase::Travels;
            message.missing = meeting.with.len();
            message.own_end = own_end;
        }
        if meeting.shared.is_empty() {
            self.schedule(own_end, Event::Sent(lane));
        } else {
            self.schedule(self.now + meeting.latency, Event::Open(lane));
        }
    }

    fn open(&mut self, lane: Lane) {
        if let Some(meeting) = self.meeting(lane) {
            self.links.send(self.now, lane, &meeting.shared);
        }
    }

    /// The shared links have carried a message; the links of its own may take longer.
    fn carried_by_shared(&mut self, lane: Lane) {
        let own_end = self.walks[lane.0].message[lane.1].as_ref().map_or(0.0, |m| m.own_end);
        if own_end > self.now {
            self.schedule(own_end, Event::Sent(lane));
        } else {
            self.carried(lane);
        }
    }

    /// All links have carried a class's part.
    fn carried(&mut self, lane: Lane) {
        let Some(meeting) = self.meeting(lane) else { return };
        // Without a shared link, classes that start together end together.
        if !meeting.together || meeting.shared.is_empty() {
            return self.through(lane);
        }
        let mut complete = self.reach(lane, Phase::Carried, meeting);
        complete.sort_unstable();
        complete.into_iter().for_each(|lane| self.through(lane));
    }

    /// A collective has ended on a class.
    fn through(&mut self, lane: Lane) {
        let Some(message) = self.walks[lane.0].message[lane.1].take() else { return };
        if let Some(gathering) = self.gatherings.get_mut(&message.number) {
            gathering.through += 1;
            let runs = self.program.frames[message.frame].runners[message.task];
            if gathering.through == runs {
                self.gatherings.remove(&message.number);
            }
        }
        self.done(lane);
    }
}
