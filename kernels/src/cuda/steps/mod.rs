//! The tasks of a schedule, issued for all ranks of a process by one thread.
//!
//! Frames run as the schedule has them: a task goes to its stream, waits for its events and records its own, on every rank
//! that runs it, before the next task is looked at. So the order in which ranks meet in collectives is that of the
//! schedule, on all communicators alike.
//!
//! One thread, so what fails on a rank is known for all of them at once; what may fail later is [watched](crate::cuda::watch).

mod failures;
mod nan;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ithaca_ir::boxes;
use ithaca_ir::entity::Entity;
use ithaca_ir::layers;
use ithaca_ir::layout::At;
use ithaca_ir::message;
use ithaca_ir::module::Layers;
use ithaca_ir::ops::{Scan, ScanOrder, Stage, structure};
use ithaca_ir::schedule::{
    BufferId, Content, FrameId, Place, Schedule, Stream as Queue, Task, Transfer, Work, communicates,
};
use ithaca_ir::strided::Strided;
use ithaca_ir::traffic::{self, Ledger};
use ithaca_ir::{Rank, Space, TensorType};

use crate::cpu::describe;
use crate::cpu::memory::SourcePlan;
use crate::cpu::{Fault, LookForNan, Timings};
use crate::cuda::arguments::Address;
use crate::cuda::collectives::{Broken, Collectives, End, Exchange, Kind};
use crate::cuda::device::{Event, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::execute::Options;
use crate::cuda::moments::{self, Moments};
use crate::cuda::ops::view::{Cx, View};
use crate::cuda::rank::Seat;
use crate::cuda::watch::{Run, Watch};
use crate::error::RunError;
use crate::tensor::index;

/// Whether tasks are timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// They are not: nothing waits but where the schedule says so.
    #[default]
    Off,
    /// Each is waited for before the next is issued, so that nothing runs beside it.
    EachTask,
    /// As they run, by events of their streams.
    Streams,
}

/// One run of a frame.
struct Scope {
    frame: FrameId,
    /// Bytes from the start of the arena.
    base: u64,
    layer: u64,
    /// The ranks that run the frame, by number of their seats.
    seats: Vec<usize>,
    at: Option<At>,
    /// For each seat, those that do not run the frame included, where its arguments lie.
    arguments: Vec<Vec<Address>>,
    results: Vec<Vec<Address>>,
}

/// Whether what is issued is done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Recording {
    /// It is.
    Off,
    /// It becomes part of a graph.
    On,
}

/// A schedule on the ranks of a process.
pub(in crate::cuda) struct Steps<'a> {
    pub(in crate::cuda) schedule: &'a Schedule,
    pub(in crate::cuda) plan: &'a SourcePlan<'a>,
    pub(in crate::cuda) collectives: &'a dyn Collectives,
    pub(in crate::cuda) seats: Vec<Seat<'a>>,
    pub(in crate::cuda) clock: Clock,
    fault: Option<Fault>,
    look_for_nan: LookForNan,
    pub(in crate::cuda) ledger: Ledger,
    pub(in crate::cuda) timings: Timings,
    /// When tasks ran, where streams are timed.
    pub(in crate::cuda) moments: Moments,
    /// Where the issue is: a rank and its task.
    here: Option<(Rank, Run)>,
    watch: Watch,
    /// How what is issued comes to run.
    recording: Recording,
    /// For each frame the number of its first event.
    first_event: Vec<usize>,
    /// The ends of each collective, memory and streams aside.
    known: BTreeMap<(FrameId, usize), Exchange>,
    /// How tensors lie that lie in wires.
    inside: BTreeMap<(FrameId, BufferId), Strided>,
}

impl<'a> Steps<'a> {
    pub(in crate::cuda) fn new(
        schedule: &'a Schedule,
        plan: &'a SourcePlan<'a>,
        collectives: &'a dyn Collectives,
        seats: Vec<Seat<'a>>,
        options: &Options,
    ) -> Self {
        let inside = schedule.frames.iter().flat_map(|(id, frame)| {
            let strided = move |b| Some(((id, b), frame.strided(&schedule.space, b)?));
            frame.buffers.ids().filter_map(strided)
        });
        let inside = inside.collect();
        let mut first_event = Vec::new();
        let mut n = 0;
        for frame in schedule.frames.values() {
            first_event.push(n);
            n += frame.n_events;
        }
        let watch = Watch::new(seats.len(), options.timeout);
        Self {
            schedule,
            plan,
            collectives,
            seats,
            clock: options.clock,
            fault: options.fault.clone(),
            look_for_nan: options.look_for_nan,
            here: None,
            watch,
            recording: Recording::Off,
            ledger: Ledger::default(),
            timings: Timings::default(),
            moments: Moments::default(),
            first_event,
            known: BTreeMap::new(),
            inside,
        }
    }

    /// Issues `main` once.
    pub(in crate::cuda) fn issue(&mut self) -> Result<(), RunError> {
        let scope = self.main()?;
        if self.clock == Clock::Streams {
            self.moments = Moments::begin(&self.seats)?;
        }
        self.frame(&scope)
    }

    /// Records `main` as a graph and runs it. Every list that kernels read has been uploaded by a step before.
    ///
    /// Ranks of one device are one graph, drawn in from the compute stream of the first.
    pub(in crate::cuda) fn graph(&mut self) -> Result<(), RunError> {
        let Some(first) = self.seats.first() else { return Ok(()) };
        let (device, origin) = (first.device, first.stream(Queue::Compute));
        if self.clock != Clock::Off {
            return Err(CudaError::Unsupported("a graph of tasks that are timed".to_owned()).into());
        }
        if self.seats.iter().any(|seat| !std::ptr::addr_eq(seat.device, device)) {
            return Err(CudaError::Unsupported("a graph over several devices".to_owned()).into());
        }
        let [fork, ends] = [device.event()?, device.event()?];
        device.begin_graph(origin)?;
        self.recording = Recording::On;
        let recorded = self.draw(origin, fork, ends);
        self.recording = Recording::Off;
        // Recording ends in any case, or the stream is lost.
        let graph = device.end_graph(origin);
        recorded?;
        // SAFETY: the memory of the seats lives as long as this.
        unsafe { device.run_graph(origin, graph?) }?;
        self.here = None;
        self.note(0, Queue::Compute, (0, None), None)?;
        self.wait()
    }

    /// Issues `main` so that all streams start from `origin` and end in it.
    fn draw(&mut self, origin: Stream, fork: Event, ends: Event) -> Result<(), RunError> {
        let streams: Vec<(usize, Stream)> = (0..self.seats.len())
            .flat_map(|i| Queue::ALL.map(|queue| (i, self.seats[i].stream(queue))))
            .filter(|(_, stream)| *stream != origin)
            .collect();
        let device = self.seats[0].device;
        device.record(origin, fork)?;
        streams.iter().try_for_each(|&(seat, stream)| self.seats[seat].device.wait(stream, fork))?;
        self.issue()?;
        for &(seat, stream) in &streams {
            self.seats[seat].device.record(stream, ends)?;
            device.wait(origin, ends)?;
        }
        Ok(())
    }

    /// Where a buffer of `main` lies on a seat.
    pub(in crate::cuda) fn in_main(&self, seat: usize, buffer: BufferId) -> Result<Address, RunError> {
        self.locate(&self.main()?, seat, buffer)
    }

    fn main(&self) -> Result<Scope, RunError> {
        let main = self.schedule.main().ok_or_else(|| RunError::NoMain(self.schedule.name.clone()))?;
        let none = vec![Vec::new(); self.seats.len()];
        Ok(Scope {
            frame: main,
            base: 0,
            layer: 0,
            seats: (0..self.seats.len()).collect(),
            at: None,
            arguments: none.clone(),
            results: none,
        })
    }

    fn space(&self) -> &'a Space {
        &self.schedule.space
    }

    fn rank(&self, seat: usize) -> Rank {
        self.seats[seat].rank
    }

    fn frame(&mut self, scope: &Scope) -> Result<(), RunError> {
        let schedule = self.schedule;
        let frame = &schedule.frames[scope.frame];
        // Frames that only compute leave their callers' communication alone.
        let meets = schedule.main() == Some(scope.frame) || communicates(&schedule.frames, scope.frame);
        let meet = |steps: &Self| match meets {
            true => scope.seats.iter().try_for_each(|&seat| steps.seats[seat].meet()),
            false => Ok(()),
        };
        meet(self)?;
        for (number, task) in frame.tasks.iter().enumerate() {
            let runs = |seat: &usize| frame.runs(&schedule.space, task, self.rank(*seat));
            let seats: Vec<usize> = scope.seats.iter().copied().filter(runs).collect();
            self.task(scope, number, &seats).map_err(|error| self.failed_here(error))?;
        }
        meet(self)?;
        Ok(())
    }

    /// Issues the task of a frame with this number to the seats that run it.
    fn task(&mut self, scope: &Scope, number: usize, seats: &[usize]) -> Result<(), RunError> {
        let schedule = self.schedule;
        let task = &schedule.frames[scope.frame].tasks[number];
        let run = Run { frame: scope.frame, layer: scope.layer, task: number };
        if let Some(&seat) = seats.first() {
            self.enter(seat, run);
        }
        self.faults(run, seats)?;
        self.waits(scope, run, seats)?;
        if let Work::Call { callee, layers, stride, scan, stage, base } = &task.work {
            let at = stage.and_then(Stage::at).or(scope.at);
            let layers = layers::shifted(layers, *stride, scope.layer);
            let base = scope.base + base;
            self.layers(scope, (task, seats), (*callee, base, at), &layers, scan.as_ref())?;
        } else {
            let since = self.begin()?;
            let starts = self.marks(run, seats, task.stream)?;
            let issue = self.watch.next();
            let mut come = vec![None; seats.len()];
            match &task.work {
                Work::Exchange(transfer) => {
                    for (&seat, come) in seats.iter().zip(&mut come) {
                        self.enter(seat, run);
                        if self.recording == Recording::Off {
                            *come = Some(self.watch.comes(&self.seats[seat], seat, task.stream)?);
                        }
                    }
                    self.exchange(scope, (number, task), seats, transfer)?;
                }
                _ => {
                    for &seat in seats {
                        self.enter(seat, run);
                        self.local(scope, task, seat)?;
                    }
                }
            }
            for (&seat, come) in seats.iter().zip(come) {
                self.enter(seat, run);
                self.note(seat, task.stream, (issue, Some(run)), come)?;
            }
            self.end(&task.work, since)?;
            let ends = self.marks(run, seats, task.stream)?;
            self.look_for_nan(scope, run, seats)?;
            for ((&seat, start), end) in seats.iter().zip(starts).zip(ends) {
                self.moments.add((seat, scope.frame, scope.layer, number), [start, end]);
            }
        }
        if let Some(event) = task.records {
            let number = self.first_event[scope.frame.index()] + event.index();
            for &seat in seats {
                self.enter(seat, run);
                let seat = &self.seats[seat];
                let lacking = || RunError::invalid("a task records an event that is not declared");
                let event = *seat.events.get(number).ok_or_else(lacking)?;
                seat.device.record(seat.stream(task.stream), event)?;
            }
        }
        Ok(())
    }

    /// Lets the streams of a task wait for its events; of ranks that run it some may not run what is waited for.
    fn waits(&mut self, scope: &Scope, run: Run, seats: &[usize]) -> Result<(), RunError> {
        let frame = &self.schedule.frames[scope.frame];
        let task = &frame.tasks[run.task];
        for event in &task.waits {
            let recorded = frame.tasks[..run.task].iter().rfind(|t| t.records == Some(*event));
            let Some(recorded) = recorded else {
                let message = format!("it waits for event {event:?}, which no task before it records");
                return Err(RunError::invalid(message));
            };
            for &seat in seats {
                self.enter(seat, run);
                if frame.runs(self.space(), recorded, self.rank(seat)) {
                    let seat = &self.seats[seat];
                    let event = seat.events[self.first_event[scope.frame.index()] + event.index()];
                    seat.device.wait(seat.stream(task.stream), event)?;
                }
            }
        }
        Ok(())
    }

    /// Waits until nothing runs, where tasks are timed.
    fn begin(&mut self) -> Result<Option<Instant>, RunError> {
        match self.clock {
            Clock::Off | Clock::Streams => Ok(None),
            Clock::EachTask => {
                self.wait()?;
                Ok(Some(Instant::now()))
            }
        }
    }

    /// An event on a stream of each rank, where streams are timed.
    fn marks(&mut self, run: Run, seats: &[usize], queue: Queue) -> Result<Vec<Event>, CudaError> {
        match self.clock {
            Clock::Off | Clock::EachTask => Ok(Vec::new()),
            Clock::Streams => {
                let mark = |&seat: &usize| {
                    self.enter(seat, run);
                    moments::now(&self.seats[seat], queue)
                };
                seats.iter().map(mark).collect()
            }
        }
    }

    fn end(&mut self, work: &Work, since: Option<Instant>) -> Result<(), RunError> {
        let Some(since) = since else { return Ok(()) };
        self.wait()?;
        let took: Duration = since.elapsed();
        self.timings.add(&describe(self.schedule, work), took);
        Ok(())
    }

    /// Issues what a rank does by itself.
    fn local(&self, scope: &Scope, task: &Task, seat: usize) -> Result<(), RunError> {
        let cx = self.cx(scope, task, seat);
        let holds = |ty: &TensorType| self.space().holds(ty, self.rank(seat));
        match &task.work {
            Work::Compute(op) => {
                let reads = self.views(scope, seat, &task.reads)?;
                let writes = self.views(scope, seat, &task.writes)?;
                Ok(cx.compute(op, &reads, &writes)?)
            }
            Work::Copy => {
                let (from, to) = (only(&task.reads)?, only(&task.writes)?);
                let bytes = self.bytes(scope, seat, from)?;
                Ok(cx.copy(bytes, self.locate(scope, seat, from)?, self.locate(scope, seat, to)?)?)
            }
            Work::Pack(transfer) if holds(&transfer.first().from) => {
                let tensors = self.packed(scope, seat, only(&task.writes)?, &task.reads)?;
                let wire = self.locate(scope, seat, only(&task.writes)?)?;
                whole(transfer, &tensors)?;
                Ok(cx.pack(transfer.parcels(), &tensors, wire)?)
            }
            Work::Unpack(transfer) if holds(&transfer.first().to) => {
                let wire = self.locate(scope, seat, only(&task.reads)?)?;
                let tensors = self.packed(scope, seat, only(&task.reads)?, &task.writes)?;
                whole(transfer, &tensors)?;
                Ok(cx.unpack(transfer.parcels(), wire, &tensors)?)
            }
            // What other ranks send or receive.
            Work::Pack(_) | Work::Unpack(_) => Ok(()),
            Work::Exchange(_) | Work::Call { .. } => {
                Err(RunError::invalid("a task of several ranks was given to one"))
            }
        }
    }

    /// Issues a collective, once for all ranks that take part.
    fn exchange(
        &mut self,
        scope: &Scope,
        (number, task): (usize, &Task),
        seats: &[usize],
        transfer: &Transfer,
    ) -> Result<(), RunError> {
        let (schedule, space) = (self.schedule, self.space());
        let parcels = transfer.parcels();
        let first = transfer.first();
        let key = (scope.frame, number);
        if !self.known.contains_key(&key) {
            let exchange = Exchange {
                kind: Kind::of(&first.op)?,
                dtype: first.from.dtype,
                axes: boxes::axes(space, &first.op, &first.from, &first.to).unwrap_or_default(),
                ends: self
                    .seats
                    .iter()
                    .map(|seat| End::of(space, parcels, seat.rank, seat.stream(task.stream)))
                    .collect(),
            };
            self.known.insert(key, exchange);
        }
        let known = &self.known[&key];
        let (from, to) = (only(&task.reads)?, only(&task.writes)?);
        let mut ends = Vec::with_capacity(seats.len());
        for &seat in seats {
            let mut end = known.ends[seat].clone();
            let rank = self.rank(seat);
            if space.holds(&first.from, rank) {
                end.from = self.locate(scope, seat, from)?;
            }
            if space.holds(&first.to, rank) {
                end.to = self.locate(scope, seat, to)?;
            }
            ends.push(end);
        }
        let exchange = Exchange { ends, axes: known.axes.clone(), ..*known };
        // SAFETY: the ends are buffers of the schedule, as large as the blocks that the geometry of the collective says;
        // events keep them from others.
        let issued = unsafe { self.collectives.exchange(&exchange) };
        issued.map_err(|Broken { rank, error }| {
            self.failed(rank, Run { frame: scope.frame, layer: scope.layer, task: number }, error.into())
        })?;
        let phase = traffic::phase_of_task(schedule, &schedule.frames[scope.frame], number);
        if let Some(key) = traffic::key(space, phase, parcels) {
            for &seat in seats {
                let rank = self.seats[seat].rank;
                self.ledger.record(key.clone(), rank, 1, message::bytes_sent(space, parcels, rank));
            }
        }
        Ok(())
    }

    /// Runs a frame for each layer: what is carried is handed on, of stacks each layer has its slice.
    fn layers(
        &mut self,
        scope: &Scope,
        (task, seats): (&Task, &[usize]),
        (callee, base, at): (FrameId, u64, Option<At>),
        layers: &Layers,
        scan: Option<&Scan>,
    ) -> Result<(), RunError> {
        let mut arguments = vec![Vec::new(); self.seats.len()];
        let mut results = arguments.clone();
        let mut strides = vec![Default::default(); self.seats.len()];
        for &seat in seats {
            arguments[seat] = self.addresses(scope, seat, &task.reads)?;
            results[seat] = self.addresses(scope, seat, &task.writes)?;
            strides[seat] = self.strides(scope, (task, seat), callee, scan)?;
        }
        let order = scan.map_or(ScanOrder::Ascending, |scan| scan.order);
        for (done, layer) in order.layers(layers).enumerate() {
            let k = layer - layers.start;
            let mut inner = Scope {
                frame: callee,
                base,
                layer,
                seats: seats.to_vec(),
                at,
                arguments: arguments.clone(),
                results: results.clone(),
            };
            for &seat in seats {
                let Strides { reads, writes } = &strides[seat];
                further(&mut inner.arguments[seat], reads, k);
                further(&mut inner.results[seat], writes, k);
                // What is carried is the argument of the first layer, and a result of the one before to the others.
                if done > 0 {
                    let n_carried = scan.map_or(results[seat].len(), |scan| scan.carried);
                    let carried = inner.arguments[seat].iter_mut().zip(&results[seat]).take(n_carried);
                    carried.for_each(|(argument, result)| *argument = *result);
                }
            }
            self.frame(&inner)?;
        }
        Ok(())
    }

    /// The slices that layers of a call have.
    fn strides(
        &self,
        scope: &Scope,
        (task, seat): (&Task, usize),
        callee: FrameId,
        scan: Option<&Scan>,
    ) -> Result<Strides, RunError> {
        let mut strides = Strides { reads: vec![0; task.reads.len()], writes: vec![0; task.writes.len()] };
        let Some(scan) = scan else { return Ok(strides) };
        for buffer in self.schedule.frames[callee].buffers.values() {
            let Content::Tensor(ty) = &buffer.content else { continue };
            let bytes = boxes::elements(&self.space().local_box(ty, self.rank(seat))) * ty.dtype.bytes();
            match buffer.place {
                Place::Argument(i) if i < task.reads.len() => {
                    let here = self.tensor(scope, task.reads[i])?;
                    if structure::is_sliced(Some(scan), i, here, ty) {
                        strides.reads[i] = bytes;
                    }
                }
                Place::Result(i) if i < task.writes.len() && i >= scan.carried => strides.writes[i] = bytes,
                _ => {}
            }
        }
        Ok(strides)
    }

    fn cx<'s>(&'s self, scope: &Scope, task: &Task, seat: usize) -> Cx<'s> {
        let seat = &self.seats[seat];
        Cx {
            space: self.space(),
            rank: seat.rank,
            device: seat.device,
            tables: &seat.tables,
            stream: seat.stream(task.stream),
            layer: scope.layer,
        }
    }

    fn views(&self, scope: &Scope, seat: usize, buffers: &[BufferId]) -> Result<Vec<View<'_>>, RunError> {
        let view = |&b: &BufferId| {
            let strided = self.inside.get(&(scope.frame, b)).filter(|strided| strided.cut.is_some());
            Ok(View { ty: self.tensor(scope, b)?, at: self.locate(scope, seat, b)?, strided })
        };
        buffers.iter().map(view).collect()
    }

    fn addresses(&self, scope: &Scope, seat: usize, buffers: &[BufferId]) -> Result<Vec<Address>, RunError> {
        // A rank that has no part of a buffer is given none.
        let held = |b: &BufferId| {
            let at = self.schedule.frames[scope.frame].at(*b);
            at.is_none_or(|at| at.has(&self.space().mesh, self.rank(seat)))
        };
        let address = |b: &BufferId| match held(b) {
            true => self.locate(scope, seat, *b),
            false => Ok(Address::NONE),
        };
        buffers.iter().map(address).collect()
    }

    /// The tensors of a message; none in the place of those that lie in the wire, which stay there.
    fn packed(
        &self,
        scope: &Scope,
        seat: usize,
        wire: BufferId,
        buffers: &[BufferId],
    ) -> Result<Vec<Address>, RunError> {
        let mut tensors = self.addresses(scope, seat, buffers)?;
        let frame = &self.schedule.frames[scope.frame];
        for (tensor, &buffer) in tensors.iter_mut().zip(buffers) {
            if buffer != wire && frame.holder(buffer) == wire {
                *tensor = Address::NONE;
            }
        }
        Ok(tensors)
    }

    fn tensor(&self, scope: &Scope, id: BufferId) -> Result<&'a TensorType, RunError> {
        let schedule: &'a Schedule = self.schedule;
        let buffer = schedule.frames[scope.frame].buffers.get(id);
        let buffer = buffer.ok_or_else(|| RunError::invalid(format!("there is no buffer {id:?}")))?;
        match &buffer.content {
            Content::Tensor(ty) => Ok(ty),
            Content::Wire { .. } => {
                Err(RunError::invalid(format!("`{}` is a wire buffer where a tensor belongs", buffer.name)))
            }
        }
    }

    /// Bytes that a rank holds in a buffer.
    fn bytes(&self, scope: &Scope, seat: usize, id: BufferId) -> Result<u64, RunError> {
        let buffer = &self.schedule.frames[scope.frame].buffers[id];
        Ok(match &buffer.content {
            Content::Wire { dtype, elements } => dtype.bytes() * elements,
            Content::Tensor(ty) => {
                boxes::elements(&self.space().local_box(ty, self.rank(seat))) * ty.dtype.bytes()
            }
        })
    }

    fn locate(&self, scope: &Scope, seat: usize, id: BufferId) -> Result<Address, RunError> {
        let buffer = self.schedule.frames[scope.frame].buffers.get(id);
        let buffer = buffer.ok_or_else(|| RunError::invalid(format!("there is no buffer {id:?}")))?;
        let own = &self.seats[seat];
        let found = match &buffer.place {
            Place::Frame(offset) => {
                let start = scope.base + offset;
                let end = start + self.bytes(scope, seat, id)?;
                // A wire is as long as the busiest rank's, which this one need not have room for.
                let fits =
                    end <= own.arena || matches!(buffer.content, Content::Wire { .. }) && start <= own.arena;
                fits.then(|| own.memory.offset(start))
            }
            Place::Wire { wire, .. } => match self.inside.get(&(scope.frame, id)) {
                Some(strided) => {
                    let first = strided.start * buffer.dtype().bytes();
                    Some(self.locate(scope, seat, *wire)?.offset(first))
                }
                None => None,
            },
            Place::Argument(i) => scope.arguments[seat].get(*i).copied(),
            Place::Result(i) => scope.results[seat].get(*i).copied(),
            Place::Weight(_) | Place::Input(_) | Place::State(_) => {
                let number = self.plan.find((scope.frame, id, scope.layer, scope.at));
                number.and_then(|number| own.sources[number])
            }
        };
        found.ok_or_else(|| RunError::invalid(format!("buffer `{}` has no place", buffer.name)))
    }

    /// The part of a stored tensor that a seat holds; nothing where it holds none.
    pub(in crate::cuda) fn held(&self, seat: usize, number: usize) -> Result<Vec<f32>, RunError> {
        let own = &self.seats[seat];
        let tensor = &self.plan.tensors()[number];
        match (tensor.part_of[index(own.rank.0)], own.sources[number]) {
            (Some(part), Some(at)) => {
                Ok(own.download(at, boxes::elements(&tensor.regions[part]), tensor.ty.dtype)?)
            }
            (None, _) | (_, None) => Ok(Vec::new()),
        }
    }
}

/// For each argument and each result of a call the bytes of a layer's slice; zero for those that all layers have alike.
#[derive(Clone, Default)]
struct Strides {
    reads: Vec<u64>,
    writes: Vec<u64>,
}

/// Moves addresses on by the slices of `k` layers.
fn further(addresses: &mut [Address], strides: &[u64], k: u64) {
    for (address, stride) in addresses.iter_mut().zip(strides) {
        *address = address.offset(k * stride);
    }
}

fn only(buffers: &[BufferId]) -> Result<BufferId, RunError> {
    match buffers {
        [buffer] => Ok(*buffer),
        _ => Err(RunError::invalid(format!("it has {} buffers instead of one", buffers.len()))),
    }
}

/// A message has as many tensors as parcels.
fn whole(transfer: &Transfer, tensors: &[Address]) -> Result<(), RunError> {
    match tensors.len() == transfer.parcels().len() {
        true => Ok(()),
        false => Err(RunError::invalid(format!("it has {} tensors", tensors.len()))),
    }
}
