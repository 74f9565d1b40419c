//! The steps of a device program, issued for all ranks of a process by one thread.
//!
//! Frames run as the program has them: a step goes to its stream, waits for its events and records its own, on every rank
//! that runs it, before the next step is looked at. So the order in which ranks meet in collectives is that of the
//! schedule, on all communicators alike.
//!
//! One thread, so what fails on a rank is known for all of them at once; what may fail later is [watched](crate::cuda::watch).

mod failures;
mod nan;
mod records;
mod state;

use std::time::{Duration, Instant};

use ithaca_device::{Call, Choice, Operand, Output, Record, Step, Work};
use ithaca_ir::layers;
use ithaca_ir::message;
use ithaca_ir::schedule::{self, Stream as Queue, Transfer};
use ithaca_ir::{boxes, traffic};

use crate::cpu::describe;
use crate::cuda::arguments::Address;
use crate::cuda::collectives::{Broken, Exchange};
use crate::cuda::device::{Event, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::moments::{self, Moments};
use crate::cuda::options::Clock;
use crate::cuda::watch::Run;
use crate::error::RunError;
use crate::tensor::index;

pub(in crate::cuda) use state::Steps;
use state::{Recording, Scope};

impl Steps<'_> {
    /// Issues `main` once.
    pub(in crate::cuda) fn issue(&mut self) -> Result<(), RunError> {
        let scope = self.main()?;
        if self.clock == Clock::Streams {
            self.moments = Moments::begin(&self.seats)?;
        }
        self.frame(&scope)
    }

    /// Records `main` as a graph and runs it.
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

    /// The numbers that a seat has of an output.
    pub(in crate::cuda) fn output(&self, seat: usize, output: &Output) -> Result<Vec<f32>, RunError> {
        let rank = self.rank(seat);
        let n = boxes::elements(&self.schedule.space.local_box(&output.ty, rank));
        let at = self.address(&self.main()?, seat, &output.address)?;
        Ok(self.seats[seat].download(at, n, output.ty.dtype)?)
    }

    fn main(&self) -> Result<Scope, RunError> {
        let main = self.program.main().ok_or_else(|| RunError::NoMain(self.schedule.name.clone()))?;
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

    fn frame(&mut self, scope: &Scope) -> Result<(), RunError> {
        let program = self.program;
        let frame = &program.frames[scope.frame];
        let meet = |steps: &Self| {
            let mut seats = scope.seats.iter().filter(|_| frame.meets);
            seats.try_for_each(|&seat| steps.seats[seat].meet())
        };
        meet(self)?;
        for (number, step) in frame.steps.iter().enumerate() {
            let runs = |&&seat: &&usize| self.is_at(seat, step.places.as_deref());
            let seats: Vec<usize> = scope.seats.iter().filter(runs).copied().collect();
            self.step(scope, number, step, &seats).map_err(|error| self.failed_here(error))?;
        }
        meet(self)?;
        Ok(())
    }

    /// Issues a step of a frame to the seats that run it.
    fn step(&mut self, scope: &Scope, number: usize, step: &Step, seats: &[usize]) -> Result<(), RunError> {
        let task: &schedule::Task = &self.schedule.frames[scope.frame].tasks[number];
        let run = Run { frame: scope.frame, layer: scope.layer, task: number };
        if let Some(&seat) = seats.first() {
            self.enter(seat, run);
        }
        self.faults(run, seats)?;
        self.waits(step, run, seats)?;
        match &step.work {
            Work::Call(call) => self.layers(scope, call, seats)?,
            Work::Records(records) => {
                let since = self.begin()?;
                let starts = self.marks(run, seats, step.stream)?;
                let issue = self.watch.next();
                let mut come = vec![None; seats.len()];
                if let schedule::Work::Exchange(transfer) = &task.work {
                    for (&seat, come) in seats.iter().zip(&mut come) {
                        self.enter(seat, run);
                        if self.recording == Recording::Off {
                            *come = Some(self.watch.comes(&self.seats[seat], seat, step.stream)?);
                        }
                    }
                    self.exchange(scope, run, records, seats)?;
                    self.account(run, transfer, seats);
                } else {
                    for &seat in seats {
                        self.enter(seat, run);
                        self.issue_all(scope, seat, step.stream, records.at(&self.seats[seat].at))?;
                    }
                }
                for (&seat, come) in seats.iter().zip(come) {
                    self.enter(seat, run);
                    self.note(seat, step.stream, (issue, Some(run)), come)?;
                }
                self.end(&task.work, since)?;
                let ends = self.marks(run, seats, step.stream)?;
                self.look_for_nan(scope, run, step, seats)?;
                for ((&seat, start), end) in seats.iter().zip(starts).zip(ends) {
                    self.moments.add((seat, scope.frame, scope.layer, number), [start, end]);
                }
            }
        }
        if let Some(event) = step.records {
            for &seat in seats {
                self.enter(seat, run);
                let seat = &self.seats[seat];
                seat.device.record(seat.stream(step.stream), seat.events[event])?;
            }
        }
        Ok(())
    }

    /// Lets the streams of a step wait for its events; of ranks that run it some may not run what is waited for.
    fn waits(&mut self, step: &Step, run: Run, seats: &[usize]) -> Result<(), RunError> {
        for wait in &step.waits {
            for &seat in seats {
                self.enter(seat, run);
                if self.is_at(seat, wait.places.as_deref()) {
                    let seat = &self.seats[seat];
                    seat.device.wait(seat.stream(step.stream), seat.events[wait.event])?;
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

    fn end(&mut self, work: &schedule::Work, since: Option<Instant>) -> Result<(), RunError> {
        let Some(since) = since else { return Ok(()) };
        self.wait()?;
        let took: Duration = since.elapsed();
        self.timings.add(&describe(self.schedule, work), took);
        Ok(())
    }

    /// Issues a collective, once for all ranks that take part.
    fn exchange(
        &mut self,
        scope: &Scope,
        run: Run,
        records: &Choice<Vec<Record>>,
        seats: &[usize],
    ) -> Result<(), RunError> {
        let queue = self.program.frames[run.frame].steps[run.task].stream;
        let mut exchange: Option<Exchange> = None;
        for &seat in seats {
            self.enter(seat, run);
            let own = records.at(&self.seats[seat].at);
            if let Some((transfer, end)) = self.issue_all(scope, seat, queue, own)? {
                let communicator = transfer.communicator;
                let new = || Exchange { dtype: transfer.dtype, communicator, ends: Vec::new() };
                exchange.get_or_insert_with(new).ends.push(end);
            }
        }
        let Some(exchange) = exchange else { return Ok(()) };
        // SAFETY: the ends are buffers of the schedule, as large as the blocks that the geometry of the collective says;
        // events keep them from others.
        let issued = unsafe { self.collectives.exchange(&exchange) };
        issued.map_err(|Broken { rank, error }| self.failed(rank, run, error.into()))
    }

    /// Accounts for the bytes that a collective's ranks send.
    fn account(&mut self, run: Run, transfer: &Transfer, seats: &[usize]) {
        let (schedule, parcels) = (self.schedule, transfer.parcels());
        let phase = traffic::phase_of_task(schedule, &schedule.frames[run.frame], run.task);
        if let Some(key) = traffic::key(&schedule.space, phase, parcels) {
            for &seat in seats {
                let rank = self.seats[seat].rank;
                let bytes = message::bytes_sent(&schedule.space, parcels, rank);
                self.ledgers[seat].record(key.clone(), rank, 1, bytes);
            }
        }
    }

    /// Runs a frame for each layer: what is carried is handed on, of stacks each layer has its slice.
    fn layers(&mut self, scope: &Scope, call: &Call, seats: &[usize]) -> Result<(), RunError> {
        let layers = layers::shifted(&call.layers, call.stride, scope.layer);
        for (done, layer) in call.order.layers(&layers).enumerate() {
            let k = layer - layers.start;
            let mut inner = Scope {
                frame: call.frame,
                base: scope.base + call.base,
                layer,
                seats: seats.to_vec(),
                at: call.at.or(scope.at),
                arguments: vec![Vec::new(); self.seats.len()],
                results: vec![Vec::new(); self.seats.len()],
            };
            for &seat in seats {
                inner.arguments[seat] = self.operands(scope, seat, &call.arguments, k)?;
                inner.results[seat] = self.operands(scope, seat, &call.results, k)?;
                // What is carried is the argument of the first layer, and a result of the one before to the others.
                if done > 0 {
                    let carried = call.carried.min(call.results.len()).min(call.arguments.len());
                    let results = self.operands(scope, seat, &call.results[..carried], 0)?;
                    inner.arguments[seat][..carried].copy_from_slice(&results);
                }
            }
            self.frame(&inner)?;
        }
        Ok(())
    }

    /// The addresses of operands for the layer that is the `k`-th of a call; none of those that a rank does not have.
    fn operands(
        &self,
        scope: &Scope,
        seat: usize,
        operands: &[Operand],
        k: u64,
    ) -> Result<Vec<Address>, RunError> {
        let address = |operand: &Operand| {
            if !operand.at.is_none_or(|at| at.has(&self.program.mesh, self.rank(seat))) {
                return Ok(Address::NONE);
            }
            let slice = operand.slice.count_at(&self.seats[seat].at, scope.layer);
            Ok(self.address(scope, seat, &operand.address)?.offset(k * slice))
        };
        operands.iter().map(address).collect()
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
