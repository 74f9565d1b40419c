//! The steps of a device program, issued for all ranks of a process by one thread.
//!
//! Each step waits for its events, is issued and records its event on every rank that runs it, before the next step. So all
//! communicators see collectives in the order of the schedule.
//!
//! With one thread, an error of one rank ends all ranks at once; [`watch`](crate::cuda::watch) finds asynchronous errors.

mod failures;
mod filled;
mod nan;
mod records;
mod state;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ithaca_device::{Call, Choice, Operand, Output, Record, Step, Work};
use ithaca_ir::layers;
use ithaca_ir::message::{self, Sent};
use ithaca_ir::schedule::{self, Stream as Queue, Streams, Transfer};
use ithaca_ir::{DType, boxes, traffic};

use crate::cpu::describe;
use crate::cuda::arguments::Address;
use crate::cuda::collectives::{CollectiveFailure, Exchange};
use crate::cuda::device::{Event, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::options::Clock;
use crate::cuda::timestamps::{self, Timestamps};
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
            self.timestamps = Timestamps::begin(&self.locals)?;
        }
        self.frame(&scope)
    }

    /// Records `main` as a graph and runs it.
    ///
    /// All ranks of a device are one graph, which starts on the compute stream of the first rank.
    pub(in crate::cuda) fn graph(&mut self) -> Result<(), RunError> {
        let Some(first) = self.locals.first() else { return Ok(()) };
        let (device, origin) = (first.device, first.stream(Queue::Compute));
        if self.clock != Clock::Off {
            return Err(CudaError::Unsupported("a graph of tasks that are timed".to_owned()).into());
        }
        if self.locals.iter().any(|local| !std::ptr::addr_eq(local.device, device)) {
            return Err(CudaError::Unsupported("a graph over several devices".to_owned()).into());
        }
        let [fork, ends] = [device.event()?, device.event()?];
        device.begin_graph(origin)?;
        self.recording = Recording::On;
        let recorded = self.capture(origin, fork, ends);
        self.recording = Recording::Off;
        // Recording ends after an error too, or the stream is lost.
        let graph = device.end_graph(origin);
        recorded?;
        // SAFETY: the memory of the local ranks lives as long as this.
        unsafe { device.run_graph(origin, graph?) }?;
        self.here = None;
        self.note(0, Queue::Compute, (0, None), None)?;
        self.wait()
    }

    /// Issues `main` so that all streams start from `origin` and end in it.
    fn capture(&mut self, origin: Stream, fork: Event, ends: Event) -> Result<(), RunError> {
        let streams: Vec<(usize, Stream)> = (0..self.locals.len())
            .flat_map(|i| Queue::ALL.map(|queue| (i, self.locals[i].stream(queue))))
            .filter(|(_, stream)| *stream != origin)
            .collect();
        let device = self.locals[0].device;
        device.record(origin, fork)?;
        streams.iter().try_for_each(|&(local, stream)| self.locals[local].device.wait(stream, fork))?;
        self.issue()?;
        for &(local, stream) in &streams {
            self.locals[local].device.record(stream, ends)?;
            device.wait(origin, ends)?;
        }
        Ok(())
    }

    /// Downloads a local rank's part of an output.
    pub(in crate::cuda) fn output(&self, local: usize, output: &Output) -> Result<Vec<f32>, RunError> {
        let rank = self.rank(local);
        let n = boxes::elements(&self.schedule.space.local_box(&output.ty, rank));
        let at = self.address(&self.main()?, local, &output.address);
        Ok(self.locals[local].download(at, n, output.ty.dtype)?)
    }

    fn main(&self) -> Result<Scope, RunError> {
        let main = self.program.main().ok_or_else(|| RunError::NoMain(self.schedule.name.clone()))?;
        let none = vec![Vec::new(); self.locals.len()];
        Ok(Scope {
            frame: main,
            base: 0,
            layer: 0,
            locals: (0..self.locals.len()).collect(),
            at: None,
            arguments: none.clone(),
            results: none,
        })
    }

    fn frame(&mut self, scope: &Scope) -> Result<(), RunError> {
        let program = self.program;
        let frame = &program.frames[scope.frame];
        let join = |steps: &Self| {
            let mut locals = scope.locals.iter().filter(|_| frame.joined_streams != Streams::default());
            locals.try_for_each(|&local| steps.locals[local].synchronize_streams(frame.joined_streams))
        };
        join(self)?;
        for (number, step) in frame.steps.iter().enumerate() {
            let runs = |&&local: &&usize| self.is_at(local, step.places.as_deref());
            let locals: Vec<usize> = scope.locals.iter().filter(runs).copied().collect();
            self.step(scope, number, step, &locals).map_err(|error| self.failed_here(error))?;
        }
        join(self)?;
        Ok(())
    }

    /// Issues a step of a frame to the local ranks that run it.
    fn step(&mut self, scope: &Scope, number: usize, step: &Step, locals: &[usize]) -> Result<(), RunError> {
        let task: &schedule::Task = &self.schedule.frames[scope.frame].tasks[number];
        let run = Run { frame: scope.frame, layer: scope.layer, task: number };
        if let Some(&local) = locals.first() {
            self.enter(local, run);
        }
        self.faults(run, locals)?;
        self.waits(step, run, locals)?;
        match &step.work {
            Work::Call(call) => self.layers(scope, call, locals)?,
            Work::Records(records) => {
                let since = self.begin()?;
                let starts = self.marks(run, locals, step.stream)?;
                let issue = self.watch.next();
                let mut arrivals = vec![None; locals.len()];
                if let schedule::Work::Exchange(transfer) = &task.work {
                    for (&local, arrived) in locals.iter().zip(&mut arrivals) {
                        self.enter(local, run);
                        if self.recording == Recording::Off {
                            *arrived =
                                Some(self.watch.record_event(&self.locals[local], local, step.stream)?);
                        }
                    }
                    let filled = self.exchange(scope, (run, issue), records, locals)?;
                    self.record_traffic(run, transfer, locals, &filled);
                } else {
                    for &local in locals {
                        self.enter(local, run);
                        self.issue_all(scope, local, step.stream, records.at(&self.locals[local].at))?;
                    }
                }
                for (&local, arrived) in locals.iter().zip(arrivals) {
                    self.enter(local, run);
                    self.note(local, step.stream, (issue, Some(run)), arrived)?;
                }
                self.end(&task.work, since)?;
                let ends = self.marks(run, locals, step.stream)?;
                self.look_for_nan(scope, run, step, locals)?;
                for ((&local, start), end) in locals.iter().zip(starts).zip(ends) {
                    self.timestamps.add((local, scope.frame, scope.layer, number), [start, end]);
                }
            }
        }
        if let Some(event) = step.records {
            for &local in locals {
                self.enter(local, run);
                let local = &self.locals[local];
                local.device.record(local.stream(step.stream), local.events[event])?;
            }
        }
        Ok(())
    }

    /// Makes the streams of a step wait for its events. A rank waits only for events that it records.
    fn waits(&mut self, step: &Step, run: Run, locals: &[usize]) -> Result<(), RunError> {
        for wait in &step.waits {
            for &local in locals {
                self.enter(local, run);
                if self.is_at(local, wait.places.as_deref()) {
                    let local = &self.locals[local];
                    local.device.wait(local.stream(step.stream), local.events[wait.event])?;
                }
            }
        }
        Ok(())
    }

    /// Waits for running work where each task is timed, and returns the start time.
    fn begin(&mut self) -> Result<Option<Instant>, RunError> {
        match self.clock {
            Clock::Off | Clock::Streams => Ok(None),
            Clock::EachTask => {
                self.wait()?;
                Ok(Some(Instant::now()))
            }
        }
    }

    /// Records an event on a stream of each rank where streams are timed.
    fn marks(&mut self, run: Run, locals: &[usize], queue: Queue) -> Result<Vec<Event>, CudaError> {
        match self.clock {
            Clock::Off | Clock::EachTask => Ok(Vec::new()),
            Clock::Streams => {
                let mark = |&local: &usize| {
                    self.enter(local, run);
                    timestamps::record(&self.locals[local], queue)
                };
                locals.iter().map(mark).collect()
            }
        }
    }

    fn end(&mut self, work: &schedule::Work, since: Option<Instant>) -> Result<(), RunError> {
        let Some(since) = since else { return Ok(()) };
        self.wait()?;
        let took: Duration = since.elapsed();
        self.timings.add(&describe(self.schedule, work), took, took);
        Ok(())
    }

    /// Issues a collective once for all ranks that take part. Returns the elements of filled rows that each local rank sends,
    /// where only these are sent.
    fn exchange(
        &mut self,
        scope: &Scope,
        (run, issue): (Run, u64),
        records: &Choice<Vec<Record>>,
        locals: &[usize],
    ) -> Result<BTreeMap<usize, u64>, RunError> {
        let queue = self.program.frames[run.frame].steps[run.task].stream;
        let mut filled = BTreeMap::new();
        // The records up to a transfer are issued on all ranks, then the transfer once for all of them.
        let mut rest: Vec<&[Record]> =
            locals.iter().map(|&local| records.at(&self.locals[local].at).as_slice()).collect();
        loop {
            let mut exchange: Option<Exchange> = None;
            let mut taking_part = Vec::new();
            for (&local, rest) in locals.iter().zip(&mut rest) {
                self.enter(local, run);
                let transfer = rest.iter().position(|record| matches!(record, Record::Transfer(_)));
                let (now, later) = rest.split_at(transfer.map_or(rest.len(), |i| i + 1));
                *rest = later;
                if let Some((transfer, end)) = self.issue_all(scope, local, queue, now)? {
                    let communicator = transfer.communicator;
                    let new = || Exchange { dtype: transfer.dtype, communicator, ends: Vec::new() };
                    exchange.get_or_insert_with(new).ends.push(end);
                    taking_part.push(local);
                }
            }
            let Some(mut exchange) = exchange else { return Ok(filled) };
            filled.extend(self.filled_rows(&mut exchange, &taking_part, (run, issue, queue))?);
            // SAFETY: the ends are buffers of the schedule with the size of their blocks; events order other accesses.
            let issued = unsafe { self.collectives.exchange(&exchange) };
            issued.map_err(|CollectiveFailure { rank, error }| self.failed(rank, run, error.into()))?;
        }
    }

    /// Accounts for the bytes that a collective's ranks send.
    fn record_traffic(
        &mut self,
        run: Run,
        transfer: &Transfer,
        locals: &[usize],
        filled: &BTreeMap<usize, u64>,
    ) {
        let (schedule, parcels) = (self.schedule, transfer.parcels());
        let phase = traffic::phase_of_task(schedule, &schedule.frames[run.frame], run.task);
        if let Some(key) = traffic::key(&schedule.space, phase, parcels) {
            for &local in locals {
                let rank = self.locals[local].rank;
                let expected = message::sent(&schedule.space, parcels, rank);
                // A graph exchanges all rows.
                let sent = |_| match filled.get(&local) {
                    Some(elements) => {
                        let rows = message::bytes_sent(&schedule.space, parcels, rank);
                        expected.bound - rows + elements * transfer.first().from.dtype.bytes()
                    }
                    None => expected.bound,
                };
                let bytes = Sent { filled: expected.filled.map(sent), ..expected };
                self.ledgers[local].record(key.clone(), rank, 1, bytes);
            }
        }
    }

    /// Runs a frame for each layer, with the carried values and the slices of stacks.
    fn layers(&mut self, scope: &Scope, call: &Call, locals: &[usize]) -> Result<(), RunError> {
        let layers = layers::shifted(&call.layers, call.stride, scope.layer);
        for (done, layer) in call.order.layers(&layers).enumerate() {
            let k = layer - layers.start;
            let mut inner = Scope {
                frame: call.frame,
                base: scope.base + call.base,
                layer,
                locals: locals.to_vec(),
                at: call.at.or(scope.at),
                arguments: vec![Vec::new(); self.locals.len()],
                results: vec![Vec::new(); self.locals.len()],
            };
            for &local in locals {
                inner.arguments[local] = self.operands(scope, local, &call.arguments, k);
                inner.results[local] = self.operands(scope, local, &call.results, k);
                // From the second layer on, carried arguments are results of the layer before.
                if done > 0 {
                    let carried = call.carried.min(call.results.len()).min(call.arguments.len());
                    let results = self.operands(scope, local, &call.results[..carried], 0);
                    inner.arguments[local][..carried].copy_from_slice(&results);
                }
            }
            self.frame(&inner)?;
        }
        Ok(())
    }

    /// The addresses of operands for the `k`-th layer of a call; null for operands that a rank does not have.
    fn operands(&self, scope: &Scope, local: usize, operands: &[Operand], k: u64) -> Vec<Address> {
        let address = |operand: &Operand| {
            if !operand.at.is_none_or(|at| at.has(&self.program.mesh, self.rank(local))) {
                return Address::NONE;
            }
            let slice = operand.slice.count_at(&self.locals[local].at, scope.layer);
            self.address(scope, local, &operand.address).offset(k * slice)
        };
        operands.iter().map(address).collect()
    }

    /// Downloads a local rank's part of a stored tensor; empty if it has none.
    pub(in crate::cuda) fn held(&self, local: usize, number: usize) -> Result<Vec<f32>, RunError> {
        let state = &self.locals[local];
        let tensor = &self.plan.tensors()[number];
        match (tensor.part_of[index(state.rank.0)], state.sources[number]) {
            (Some(part), Some(at)) => {
                // Integers as the bits of a float.
                let dtype = if tensor.ty.dtype == DType::I32 { DType::F32 } else { tensor.ty.dtype };
                Ok(state.download(at, boxes::elements(&tensor.regions[part]), dtype)?)
            }
            (None, _) | (_, None) => Ok(Vec::new()),
        }
    }
}
