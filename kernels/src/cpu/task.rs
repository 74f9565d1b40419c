//! One run of one task: its reads, its work and its writes.

use std::borrow::Cow;

use ithaca_ir::message::{Parcel, Sent};
use ithaca_ir::ops::{Fused, Random};
use ithaca_ir::schedule::{BufferId, Content, Frame, Stream, Task, Transfer, Work, aligned};
use ithaca_ir::{Op, TensorType, traffic};

use super::buffers::{Area, Buffers, Scope};
use super::claims::{ARENA, Claim, Clock, Memory, MemoryRange, TaskRun};
use super::describe;
use super::memory::{from_int, to_int};
use super::options::LookForNan;
use super::threads::Threads;
use super::transfer::LocalTransfer;
use super::{attention, elementwise, gemm};
use crate::error::RunError;
use crate::oracle::{Elements, Operand, ResultSpec, Value, eval, pages, random};
use crate::tensor::{index, place_in};

/// The stream of a task, and its order with the other streams.
#[derive(Clone, Copy)]
pub(super) struct StreamPosition<'a> {
    /// The memory that the streams share.
    pub(super) memory: &'a Memory,
    /// The stream.
    pub(super) stream: Stream,
    /// How many tasks of each stream are known to have ended.
    pub(super) seen: Clock,
}

/// A running task with its claim.
pub(super) struct Running<'a> {
    buffers: Buffers<'a>,
    scope: &'a Scope<'a>,
    frame: &'a Frame,
    number: usize,
    claim: Claim<'a>,
    /// The end of the arena as far as the task wrote it, bytes of the schedule.
    arena_used: u64,
}

impl<'a> Running<'a> {
    /// Begins a task of a frame that is no call.
    ///
    /// # Errors
    /// [`RunError::Unordered`] when a task of another stream touches the same memory and nothing orders the two.
    pub(super) fn begin(
        buffers: Buffers<'a>,
        scope: &'a Scope<'a>,
        number: usize,
        position: StreamPosition<'a>,
    ) -> Result<Self, RunError> {
        let schedule = buffers.context.schedule;
        let frame = &schedule.frames[scope.frame];
        let task = &frame.tasks[number];
        let mut reads = Vec::with_capacity(task.reads.len());
        for &id in &task.reads {
            if let BufferLocation::Private(extent) = locate(buffers, scope, id, position.memory)? {
                reads.push(extent);
            }
        }
        let mut writes = Vec::with_capacity(task.writes.len());
        for &id in &task.writes {
            match locate(buffers, scope, id, position.memory)? {
                BufferLocation::Private(extent) => writes.push(extent),
                BufferLocation::Shared => {
                    return Err(RunError::invalid("it writes an input or data that ranks share"));
                }
                BufferLocation::Elsewhere => {}
            }
        }
        let run = TaskRun { frame: scope.frame, layer: scope.layer, task: number };
        let claim = position.memory.claim((position.stream, run), position.seen, reads, writes).map_err(
            |conflict| {
                let is_it = |id: &&BufferId| match buffers.area(scope, **id) {
                    Ok(Area::Private(extent)) => {
                        buffers.footprint(scope, **id, &extent).is_ok_and(|own| own == conflict.extent)
                    }
                    Ok(Area::Shared(_)) | Err(_) => false,
                };
                let buffer = task.writes.iter().chain(&task.reads).find(is_it);
                RunError::Unordered {
                    buffer: buffer.map_or("?", |&id| frame.buffers[id].name.as_str()).to_owned(),
                    other: describe::task_run(schedule, conflict.other),
                }
            },
        )?;
        Ok(Self { buffers, scope, frame, number, claim, arena_used: 0 })
    }

    /// The number of the task along its stream.
    pub(super) fn along(&self) -> u64 {
        self.claim.number()
    }

    /// Runs it; gives the end of the arena as far as it was written, bytes of the schedule.
    pub(super) fn run(mut self) -> Result<u64, RunError> {
        let task = self.task();
        match &task.work {
            Work::Compute(op) => self.compute(op)?,
            Work::Copy => {
                let (from, to) = (only(&task.reads, "reads")?, only(&task.writes, "writes")?);
                let data = self.read(from)?.into_owned();
                self.write(to, &data)?;
            }
            Work::Pack(t) | Work::Exchange(t) | Work::Unpack(t) => self.transfer(t)?,
            Work::Call { .. } => return Err(RunError::invalid("a call does not run as a task")),
        }
        Ok(self.arena_used)
    }

    fn task(&self) -> &'a Task {
        &self.frame.tasks[self.number]
    }

    /// A step of a collective: from tensors to a wire, from wire to wire, or from a wire to tensors.
    fn transfer(&mut self, transfer: &Transfer) -> Result<(), RunError> {
        let (task, scope, Buffers { context, rank }) = (self.task(), self.scope, self.buffers);
        let space = &context.schedule.space;
        let local = LocalTransfer { space, parcels: transfer.parcels(), rank, stream: task.stream };
        let first = transfer.first();
        let (from, to) = (space.holds(&first.from, rank), space.holds(&first.to, rank));
        match &task.work {
            Work::Pack(_) if from => {
                let tensors = self.read_all(&task.reads)?;
                let wire = local.pack(&tensors)?;
                self.write(only(&task.writes, "writes")?, &wire)
            }
            Work::Exchange(_) => {
                let together = if transfer.is_direct() { 1 } else { transfer.parcels().len() };
                let parts: Vec<&[Parcel]> = transfer.parcels().chunks(together).collect();
                if [task.reads.len(), task.writes.len()] != [parts.len(); 2] {
                    return Err(RunError::invalid(format!("it reads and writes {} buffers", parts.len())));
                }
                let mut sent_by_all = Sent::default();
                for (parcels, (&reads, &writes)) in parts.into_iter().zip(task.reads.iter().zip(&task.writes))
                {
                    let content = |id| self.buffers.buffer(scope, id).map(|buffer| &buffer.content);
                    let data = if from { self.read(reads)? } else { Cow::default() };
                    let ends = (content(reads)?, content(writes)?);
                    let local = LocalTransfer { space, parcels, rank, stream: task.stream };
                    let (written, sent) = local.exchange(&data, ends, context.communicator)?;
                    sent_by_all += sent;
                    if to {
                        self.write(writes, &written)?;
                    }
                }
                self.count(transfer, sent_by_all);
                Ok(())
            }
            Work::Unpack(_) if to => {
                let wire = only(&task.reads, "reads")?;
                let tensors = local.unpack(&self.read(wire)?)?;
                if tensors.len() != task.writes.len() {
                    return Err(RunError::invalid(format!("it writes {} buffers", task.writes.len())));
                }
                let out = task.writes.iter().zip(tensors).filter(|(b, _)| self.frame.holder(**b) != wire);
                out.into_iter().try_for_each(|(&b, data)| self.write(b, &data))
            }
            // Other ranks pack or unpack.
            Work::Unpack(_) | Work::Pack(_) | Work::Compute(_) | Work::Copy | Work::Call { .. } => Ok(()),
        }
    }

    /// Runs a kernel. Its results are computed outside the arena and then copied, so they may overlap operands.
    fn compute(&mut self, op: &Op) -> Result<(), RunError> {
        let (task, scope, Buffers { context, rank }) = (self.task(), self.scope, self.buffers);
        let space = &context.schedule.space;
        let types = |ids: &[BufferId]| -> Result<Vec<&TensorType>, RunError> {
            ids.iter().map(|&id| self.buffers.tensor_type(scope, id)).collect()
        };
        let (read, written) = (types(&task.reads)?, types(&task.writes)?);
        let wanted: Vec<ResultSpec<'_>> =
            written.into_iter().map(|ty| ResultSpec { ty, region: space.local_box(ty, rank) }).collect();
        let reals = self.read_all(&task.reads)?;
        let ints = reals.iter().zip(&read).map(|(data, ty)| {
            if ty.dtype.is_float() { Vec::new() } else { data.iter().map(|&x| to_int(x)).collect() }
        });
        let ints: Vec<Vec<i32>> = ints.collect();
        let mut operands: Vec<Operand<'_, f32>> = Vec::with_capacity(read.len());
        for (ty, (reals, ints)) in read.into_iter().zip(reals.iter().zip(&ints)) {
            let elements = if ty.dtype.is_float() { Elements::Real(reals) } else { Elements::Int(ints) };
            operands.push(Operand { ty, region: space.local_box(ty, rank), elements });
        }
        if operands.len() < *op.info().operands.start() {
            return Err(RunError::invalid(format!("`{}` reads {} buffers", op.name(), operands.len())));
        }
        let threads = Threads::beside(space.mesh.ranks());
        let values = match (op, wanted.first()) {
            (Op::Einsum, Some(ResultSpec { ty, region })) => {
                let product = gemm::einsum(space, (&operands[0], &operands[1]), ty, region, threads)?;
                eval::into_results(op, vec![product], &wanted)?
            }
            (Op::AccumulateProduct, Some(ResultSpec { ty, region })) => {
                let mut sum = operands[2].real()?.to_vec();
                let factors = (&operands[0], &operands[1]);
                gemm::accumulate(space, factors, (ty, region), &mut sum, threads)?;
                eval::into_results(op, vec![sum], &wanted)?
            }
            (Op::Fused(Fused::BiasProduct { of }), Some(ResultSpec { ty, region })) => {
                let factors = (&operands[0], &operands[1]);
                let mut out = elementwise::summands(&operands[2..], (ty, region))?;
                gemm::accumulate(space, factors, (ty, region), &mut out, threads)?;
                if let Some(f) = of {
                    out = elementwise::applied(*f, &out, threads);
                }
                eval::into_results(op, vec![out], &wanted)?
            }
            (Op::Fused(Fused::ProductPair), Some(ResultSpec { ty, region })) => {
                let product = |y| gemm::einsum(space, (&operands[0], y), ty, region, threads);
                eval::into_results(op, vec![product(&operands[1])?, product(&operands[2])?], &wanted)?
            }
            (Op::Attention(a), _) => {
                eval::into_results(op, attention::attention(space, a, &operands, threads)?, &wanted)?
            }
            (Op::AttendPages { attention: a, pages, slots }, _) => {
                let rows = pages::with_gathered(space, (a, [*pages, *slots]), &operands, |operands| {
                    attention::attention(space, a, operands, threads)
                })?;
                eval::into_results(op, rows, &wanted)?
            }
            (Op::AttentionBackward(a), _) => {
                let gradients = attention::attention_backward(space, a, &operands, threads)?;
                eval::into_results(op, gradients, &wanted)?
            }
            (Op::Random(Random::LayerKey), _) => {
                vec![random::layer_key(operands[0].elements, scope.layer)?]
            }
            (op, _) => match elementwise::results(space, op, &operands, &wanted, threads)? {
                Some(results) => eval::into_results(op, results, &wanted)?,
                None => eval::eval(space, op, &operands, &wanted)?,
            },
        };
        if values.len() != task.writes.len() {
            return Err(RunError::invalid(format!("it writes {} buffers", task.writes.len())));
        }
        for (&to, value) in task.writes.iter().zip(values) {
            match value {
                Value::Real(t) => self.write(to, &t.data)?,
                Value::Int(t) => {
                    let data: Vec<f32> = t.data.iter().map(|&x| from_int(x)).collect();
                    self.write(to, &data)?;
                }
            }
        }
        Ok(())
    }

    /// Adds the bytes that were sent to the traffic.
    fn count(&self, transfer: &Transfer, bytes: Sent) {
        let Buffers { context, rank } = self.buffers;
        let phase = traffic::phase_of_task(context.schedule, self.frame, self.number);
        if let Some(key) = traffic::key(&context.schedule.space, phase, transfer.parcels()) {
            context
                .ledger
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .record(key, rank, 1, bytes);
        }
    }

    fn read_all(&self, ids: &[BufferId]) -> Result<Vec<Cow<'_, [f32]>>, RunError> {
        ids.iter().map(|&id| self.read(id)).collect()
    }

    /// The elements of a buffer; copied where they are in pieces in a wire.
    fn read(&self, id: BufferId) -> Result<Cow<'_, [f32]>, RunError> {
        let outside = || self.buffers.outside(self.scope, id);
        let data = match self.buffers.area(self.scope, id)? {
            Area::Shared(data) => data,
            Area::Private(extent) => self.claim.read(&extent).ok_or_else(outside)?,
        };
        match self.buffers.rows(self.scope, id)?.as_deref() {
            None => Ok(Cow::Borrowed(data)),
            Some([(_, on_wire)]) => data.get(on_wire.clone()).map(Cow::Borrowed).ok_or_else(outside),
            Some(rows) => {
                let rows = rows.iter().map(|(_, on_wire)| data.get(on_wire.clone()).ok_or_else(outside));
                Ok(Cow::Owned(rows.collect::<Result<Vec<_>, _>>()?.concat()))
            }
        }
    }

    /// Writes the first elements of a buffer: all of a tensor, row by row where it is in a wire, or the filled part of a wire.
    fn write(&mut self, id: BufferId, data: &[f32]) -> Result<(), RunError> {
        let (context, buffer) = (self.buffers.context, self.buffers.buffer(self.scope, id)?);
        let Area::Private(MemoryRange { part, range }) = self.buffers.area(self.scope, id)? else {
            return Err(RunError::invalid("it writes an input or data that ranks share"));
        };
        let rows = self.buffers.rows(self.scope, id)?;
        let ahead = self.buffers.part(self.scope, id)?.map_or(0, |strided| index(strided.start));
        let fits = match (&buffer.content, &rows) {
            (Content::Tensor(_), None) => data.len() == range.len(),
            (Content::Tensor(_), Some(_)) | (Content::Wire { .. }, _) => data.len() <= range.len(),
        };
        for (dense, place) in rows.unwrap_or_else(|| vec![(0..data.len(), 0..data.len())]) {
            if part == ARENA {
                let elements = (ahead + place.end) as u64;
                let end = context.shape.bytes(range.start - ahead) + elements * buffer.dtype().bytes();
                self.arena_used = self.arena_used.max(aligned(end));
            }
            let extent = MemoryRange { part, range: range.start + place.start..range.start + place.end };
            let to = self.claim.write(&extent).filter(|_| fits);
            let (Some(from), Some(to)) = (data.get(dense.clone()), to) else {
                return Err(self.buffers.outside(self.scope, id));
            };
            to.copy_from_slice(from);
            context.options.storage.keep(buffer.dtype(), to);
            if context.options.look_for_nan == LookForNan::Writes
                && buffer.dtype().is_float()
                && let Some(i) = to.iter().position(|x| x.is_nan())
            {
                return Err(self.not_a_number(id, dense.start + i));
            }
        }
        Ok(())
    }

    /// The error of element `i` of a buffer on this rank.
    fn not_a_number(&self, id: BufferId, i: usize) -> RunError {
        let Buffers { context, rank } = self.buffers;
        let buffer = &self.frame.buffers[id];
        let at = match &buffer.content {
            Content::Wire { .. } => vec![i as u64],
            Content::Tensor(ty) => place_in(&context.schedule.space.local_box(ty, rank), i as u64),
        };
        RunError::NotANumber { buffer: buffer.name.clone(), at }
    }
}

/// How a rank holds a buffer.
enum BufferLocation {
    /// It occupies these elements of the rank's memory.
    Private(MemoryRange),
    /// Ranks share the elements.
    Shared,
    /// Other ranks hold it.
    Elsewhere,
}

fn locate(
    buffers: Buffers<'_>,
    scope: &Scope<'_>,
    id: BufferId,
    memory: &Memory,
) -> Result<BufferLocation, RunError> {
    if !buffers.holds(scope, id) {
        return Ok(BufferLocation::Elsewhere);
    }
    match buffers.area(scope, id)? {
        Area::Shared(_) => Ok(BufferLocation::Shared),
        Area::Private(extent) => match buffers.footprint(scope, id, &extent)? {
            footprint if memory.has(&footprint) => Ok(BufferLocation::Private(footprint)),
            _ => Err(buffers.outside(scope, id)),
        },
    }
}

fn only(buffers: &[BufferId], verb: &str) -> Result<BufferId, RunError> {
    match buffers {
        [buffer] => Ok(*buffer),
        _ => Err(RunError::invalid(format!("it {verb} {} buffers instead of one", buffers.len()))),
    }
}
