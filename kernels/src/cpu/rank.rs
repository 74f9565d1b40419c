//! One rank's thread: frames, tasks in order of issue, buffers in the arena.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use ithaca_ir::entity::Entity;
use ithaca_ir::layers;
use ithaca_ir::layout::At;
use ithaca_ir::module::Layers;
use ithaca_ir::ops::{Random, Scan, ScanOrder, Stage, structure};
use ithaca_ir::schedule::{BufferId, Content, FrameId, Place, Schedule, Task, Transfer, Work, aligned};
use ithaca_ir::traffic::{self, Ledger};
use ithaca_ir::{Op, Rank, TensorType};

use super::communicator::Communicator;
use super::memory::{ArenaShape, Found, Own, Sources, from_int, to_int};
use super::message::Message;
use super::threads::Threads;
use super::timings::Timings;
use super::{attention, elementwise, gemm, transfer};
use crate::error::RunError;
use crate::oracle::{Elements, Operand, Value, Wanted, eval, random};
use crate::storage::Storage;
use crate::tensor::{extents, index};

/// Where a buffer lies for this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    /// From this element of the arena.
    Arena(usize),
    /// From an element of a part of the sources.
    Loaded(usize, usize),
    /// From an element of what the rank has of a weight or state that is written.
    Lasting(usize, usize),
}

/// The location `n` elements further.
fn further(location: Location, n: usize) -> Location {
    match location {
        Location::Arena(start) => Location::Arena(start + n),
        Location::Loaded(part, start) => Location::Loaded(part, start + n),
        Location::Lasting(number, start) => Location::Lasting(number, start + n),
    }
}

/// For each argument and each result of a call the elements of a layer's slice; `None` for those that all layers have
/// alike.
struct Strides {
    reads: Vec<Option<usize>>,
    writes: Vec<Option<usize>>,
}

/// One run of a frame.
struct Scope<'a> {
    frame: FrameId,
    /// The element of the arena where the frame starts.
    base: usize,
    layer: u64,
    /// The ranks that run the frame, this one among them.
    at: Option<At>,
    arguments: &'a [Location],
    results: &'a [Location],
}

struct Runner<'a> {
    schedule: &'a Schedule,
    shape: &'a ArenaShape,
    sources: &'a Sources,
    rank: Rank,
    communicator: &'a dyn Communicator,
    ledger: &'a Mutex<Ledger>,
    storage: Storage,
    arena: Vec<f32>,
    /// What the rank has of weights and states that are written.
    lasting: Own,
    /// The end of the arena as far as it was written, bytes of the schedule.
    reached: u64,
    timings: Timings,
}

/// What all ranks run in.
#[derive(Clone, Copy)]
pub(super) struct World<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) shape: &'a ArenaShape,
    pub(super) sources: &'a Sources,
    pub(super) communicator: &'a dyn Communicator,
    pub(super) ledger: &'a Mutex<Ledger>,
    pub(super) storage: Storage,
}

/// What a rank has when it is done.
pub(super) struct Done {
    /// Its part of each output of `main`; integers are returned as numbers.
    pub(super) outputs: Vec<Vec<f32>>,
    /// Its part of each weight and state that is written.
    pub(super) lasting: Own,
    /// The end of the arena as far as it was written, bytes of the schedule.
    pub(super) reached: u64,
    /// How long its tasks took.
    pub(super) timings: Timings,
}

/// Runs `main` on `rank`, which starts with `lasting` of what is written.
pub(super) fn run(world: World<'_>, rank: Rank, lasting: Own) -> Result<Done, RunError> {
    let World { schedule, shape, sources, communicator, ledger, storage } = world;
    let main = schedule.main().ok_or_else(|| RunError::NoMain(schedule.name.clone()))?;
    // What was never written is not a number, so that it cannot pass for a result.
    let arena = vec![f32::NAN; index(shape.slots)];
    let (reached, timings) = (0, Timings::default());
    let mut runner = Runner {
        schedule,
        shape,
        sources,
        rank,
        communicator,
        ledger,
        storage,
        arena,
        lasting,
        reached,
        timings,
    };
    let scope = Scope { frame: main, base: 0, layer: 0, at: None, arguments: &[], results: &[] };
    runner.frame(&scope)?;
    let outputs = schedule.frames[main]
        .outputs
        .iter()
        .map(|output| {
            let holds =
                schedule.frames[main].at(output.buffer).is_none_or(|at| at.has(&schedule.space.mesh, rank));
            if !holds {
                return Ok(Vec::new());
            }
            let data = runner.read(&scope, output.buffer)?;
            Ok(match schedule.frames[main].buffers[output.buffer].dtype().is_float() {
                true => data.to_vec(),
                false => data.iter().map(|&x| to_int(x) as f32).collect(),
            })
        })
        .collect::<Result<_, RunError>>()?;
    Ok(Done { outputs, lasting: runner.lasting, reached: runner.reached, timings: runner.timings })
}

impl Runner<'_> {
    /// Runs every task of a frame.
    fn frame(&mut self, scope: &Scope<'_>) -> Result<(), RunError> {
        let schedule = self.schedule;
        let frame = &schedule.frames[scope.frame];
        let mut happened = vec![false; frame.n_events];
        for (i, task) in frame.tasks.iter().enumerate() {
            let waited = task.waits.iter().find(|e| !happened.get(e.index()).copied().unwrap_or(false));
            let result = match waited {
                Some(event) => Err(RunError::invalid(format!(
                    "it waits for event {event:?}, which no task before it records"
                ))),
                // Other ranks do that.
                None if !frame.runs(&schedule.space, task, self.rank) => Ok(()),
                None => self.communicator.check().and_then(|()| self.timed(scope, i)),
            };
            match result {
                Ok(()) => {}
                // A task in a callee has placed its error already.
                Err(error @ RunError::Rank { .. }) => return Err(error),
                Err(error) => {
                    return Err(RunError::Rank {
                        rank: self.rank.0,
                        frame: frame.name.clone(),
                        task: i,
                        work: describe(schedule, &task.work),
                        cause: Box::new(error),
                    });
                }
            }
            if let Some(event) = task.records {
                let event = happened.get_mut(event.index());
                *event.ok_or_else(|| RunError::invalid("a task records an event that is not declared"))? =
                    true;
            }
        }
        Ok(())
    }

    /// Runs the task of a frame with this number and counts what it took; a call is counted by the tasks of its frame.
    fn timed(&mut self, scope: &Scope<'_>, number: usize) -> Result<(), RunError> {
        let work = &self.schedule.frames[scope.frame].tasks[number].work;
        if let Work::Call { .. } = work {
            return self.task(scope, number);
        }
        let start = Instant::now();
        self.task(scope, number)?;
        self.timings.add(&describe(self.schedule, work), start.elapsed());
        Ok(())
    }

    /// Runs the task of a frame with this number.
    fn task(&mut self, scope: &Scope<'_>, number: usize) -> Result<(), RunError> {
        let schedule = self.schedule;
        let task = &schedule.frames[scope.frame].tasks[number];
        match &task.work {
            Work::Compute(op) => self.compute(scope, task, op),
            Work::Copy => {
                let (from, to) = (only(&task.reads, "reads")?, only(&task.writes, "writes")?);
                let data = self.read(scope, from)?.to_vec();
                self.write(scope, to, &data)
            }
            Work::Pack(t) | Work::Exchange(t) | Work::Unpack(t) => {
                if t.only().is_none() {
                    return self.message(scope, (number, task), t);
                }
                let (from, to) = (only(&task.reads, "reads")?, only(&task.writes, "writes")?);
                let buffers = &self.schedule.frames[scope.frame].buffers;
                let parcel = t.first();
                let parties = transfer::Parties {
                    space: &self.schedule.space,
                    transfer: parcel,
                    rank: self.rank,
                    reads: &buffers[from].content,
                    writes: &buffers[to].content,
                };
                let holds = |ty: &TensorType| self.schedule.space.holds(ty, self.rank);
                let data = if holds(&parcel.from) { self.read(scope, from)? } else { &[] };
                let written = match &task.work {
                    Work::Pack(_) => parties.pack(data)?,
                    Work::Unpack(_) => parties.unpack(data)?,
                    _ => {
                        let (written, sent) = parties.exchange(data, self.communicator)?;
                        self.count((scope.frame, number), t, sent * parcel.from.dtype.bytes());
                        written
                    }
                };
                if holds(&parcel.to) { self.write(scope, to, &written) } else { Ok(()) }
            }
            Work::Call { callee, layers, stride, scan, stage, base } => {
                let base = scope.base + self.shape.slot(*base)?;
                let at = stage.and_then(Stage::at).or(scope.at);
                let layers = layers::shifted(layers, *stride, scope.layer);
                self.layers(scope, task, (*callee, base, at), &layers, scan.as_ref())
            }
        }
    }

    /// Runs a frame for each layer: what is carried is handed on, of stacks each layer has its slice.
    fn layers(
        &mut self,
        scope: &Scope<'_>,
        task: &Task,
        (callee, base, at): (FrameId, usize, Option<At>),
        layers: &Layers,
        scan: Option<&Scan>,
    ) -> Result<(), RunError> {
        let locate = |buffers: &[BufferId]| -> Result<Vec<Location>, RunError> {
            buffers.iter().map(|&b| self.locate(scope, b)).collect()
        };
        let (arguments, results) = (locate(&task.reads)?, locate(&task.writes)?);
        let n_carried = scan.map_or(results.len(), |scan| scan.carried);
        let strides = self.strides(scope, task, callee, scan)?;
        let place = |location: &Location, stride: &Option<usize>, k: usize| match stride {
            Some(stride) => further(*location, k * stride),
            None => *location,
        };
        let order = scan.map_or(ScanOrder::Ascending, |scan| scan.order);
        for (done, layer) in order.layers(layers).enumerate() {
            let k = index(layer - layers.start);
            let mut own: Vec<Location> =
                arguments.iter().zip(&strides.reads).map(|(l, stride)| place(l, stride, k)).collect();
            // What is carried is the argument of the first layer, and a result of the one before to the others.
            if done > 0 {
                for (argument, result) in own.iter_mut().zip(&results).take(n_carried) {
                    *argument = *result;
                }
            }
            let own_results: Vec<Location> =
                results.iter().zip(&strides.writes).map(|(l, stride)| place(l, stride, k)).collect();
            let inner = Scope { frame: callee, base, layer, at, arguments: &own, results: &own_results };
            self.frame(&inner)?;
        }
        Ok(())
    }

    /// The slices that layers of a call have.
    fn strides(
        &self,
        scope: &Scope<'_>,
        task: &Task,
        callee: FrameId,
        scan: Option<&Scan>,
    ) -> Result<Strides, RunError> {
        let mut strides =
            Strides { reads: vec![None; task.reads.len()], writes: vec![None; task.writes.len()] };
        let Some(scan) = scan else { return Ok(strides) };
        for buffer in self.schedule.frames[callee].buffers.values() {
            let Content::Tensor(ty) = &buffer.content else { continue };
            let n: usize = extents(&self.schedule.space.local_box(ty, self.rank)).iter().product();
            match buffer.place {
                Place::Argument(i) if i < task.reads.len() => {
                    let here = self.tensor_type(scope, task.reads[i])?;
                    strides.reads[i] = structure::is_sliced(Some(scan), i, here, ty).then_some(n);
                }
                Place::Result(i) if i < task.writes.len() => {
                    strides.writes[i] = (i >= scan.carried).then_some(n);
                }
                _ => {}
            }
        }
        Ok(strides)
    }

    /// Runs a kernel: its results are made beside the arena and then put there, so operands may lie where they go.
    fn compute(&mut self, scope: &Scope<'_>, task: &Task, op: &Op) -> Result<(), RunError> {
        let space = &self.schedule.space;
        let mut wanted: Vec<Wanted<'_>> = Vec::with_capacity(task.writes.len());
        for &b in &task.writes {
            let ty = self.tensor_type(scope, b)?;
            wanted.push(Wanted { ty, region: space.local_box(ty, self.rank) });
        }
        let mut ints: Vec<Vec<i32>> = Vec::new();
        for &b in &task.reads {
            let data = match self.tensor_type(scope, b)?.dtype.is_float() {
                true => Vec::new(),
                false => self.read(scope, b)?.iter().map(|&x| to_int(x)).collect(),
            };
            ints.push(data);
        }
        let mut operands: Vec<Operand<'_, f32>> = Vec::with_capacity(task.reads.len());
        for (&b, ints) in task.reads.iter().zip(&ints) {
            let ty = self.tensor_type(scope, b)?;
            let elements = match ty.dtype.is_float() {
                true => Elements::Real(self.read(scope, b)?),
                false => Elements::Int(ints),
            };
            operands.push(Operand { ty, region: space.local_box(ty, self.rank), elements });
        }
        if operands.len() < *op.info().operands.start() {
            return Err(RunError::invalid(format!("`{}` reads {} buffers", op.name(), operands.len())));
        }
        let threads = Threads::beside(space.mesh.ranks());
        let values = match (op, wanted.first()) {
            (Op::Einsum, Some(Wanted { ty, region })) => {
                let product = gemm::einsum(&operands[0], &operands[1], ty, region, threads)?;
                eval::into_results(op, vec![product], &wanted)?
            }
            (Op::Attention(a), _) => {
                let rows = attention::attention(space, a, &operands, threads)?;
                eval::into_results(op, rows.into(), &wanted)?
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
                Value::Real(t) => self.write(scope, to, &t.data)?,
                Value::Int(t) => {
                    let data: Vec<f32> = t.data.iter().map(|&x| from_int(x)).collect();
                    self.write(scope, to, &data)?;
                }
            }
        }
        Ok(())
    }

    /// A step of a message of several tensors: from them to a wire, from wire to wire, from a wire to them.
    fn message(
        &mut self,
        scope: &Scope<'_>,
        (number, task): (usize, &Task),
        transfer: &Transfer,
    ) -> Result<(), RunError> {
        let space = &self.schedule.space;
        let message = Message { space, parcels: transfer.parcels(), rank: self.rank };
        let holds = |ty: &TensorType| space.holds(ty, self.rank);
        let (from, to) = (holds(&transfer.first().from), holds(&transfer.first().to));
        match &task.work {
            Work::Unpack(_) if to => {
                let tensors = message.unpack(self.read(scope, only(&task.reads, "reads")?)?)?;
                if tensors.len() != task.writes.len() {
                    return Err(RunError::invalid(format!("it writes {} buffers", task.writes.len())));
                }
                task.writes.iter().zip(tensors).try_for_each(|(&b, data)| self.write(scope, b, &data))
            }
            Work::Pack(_) if from => {
                let tensors: Vec<&[f32]> =
                    task.reads.iter().map(|&b| self.read(scope, b)).collect::<Result<_, _>>()?;
                let wire = message.pack(&tensors)?;
                self.write(scope, only(&task.writes, "writes")?, &wire)
            }
            Work::Exchange(_) => {
                let data = if from { self.read(scope, only(&task.reads, "reads")?)? } else { &[] };
                let (wire, sent) = message.exchange(data, self.communicator)?;
                self.count((scope.frame, number), transfer, sent * transfer.first().from.dtype.bytes());
                if to { self.write(scope, only(&task.writes, "writes")?, &wire) } else { Ok(()) }
            }
            // What other ranks send or receive.
            _ => Ok(()),
        }
    }

    fn count(&self, (frame, task): (FrameId, usize), transfer: &Transfer, bytes: u64) {
        let phase = traffic::phase_of_task(self.schedule, &self.schedule.frames[frame], task);
        if let Some(key) = traffic::key(&self.schedule.space, phase, transfer.parcels()) {
            let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
            ledger.record(key, self.rank, 1, bytes);
        }
    }

    fn tensor_type(&self, scope: &Scope<'_>, buffer: BufferId) -> Result<&TensorType, RunError> {
        let buffer = self.buffer(scope, buffer)?;
        match &buffer.content {
            Content::Tensor(ty) => Ok(ty),
            Content::Wire { .. } => {
                Err(RunError::invalid(format!("`{}` is a wire buffer where a tensor belongs", buffer.name)))
            }
        }
    }

    fn buffer(&self, scope: &Scope<'_>, id: BufferId) -> Result<&ithaca_ir::schedule::Buffer, RunError> {
        let buffers = &self.schedule.frames[scope.frame].buffers;
        buffers.get(id).ok_or_else(|| RunError::invalid(format!("there is no buffer {id:?}")))
    }

    fn locate(&self, scope: &Scope<'_>, id: BufferId) -> Result<Location, RunError> {
        let buffer = self.buffer(scope, id)?;
        let found = match &buffer.place {
            Place::Frame(offset) => Some(Location::Arena(scope.base + self.shape.slot(*offset)?)),
            Place::Argument(i) => scope.arguments.get(*i).copied(),
            Place::Result(i) => scope.results.get(*i).copied(),
            Place::Weight(_) | Place::Input(_) | Place::State(_) => self
                .sources
                .find((scope.frame, id, scope.layer, scope.at), self.rank)
                .map(|found| match found {
                    Found::Part(part) => Location::Loaded(part, 0),
                    Found::Lasting(number) => Location::Lasting(number, 0),
                }),
        };
        found.ok_or_else(|| RunError::invalid(format!("buffer `{}` has no place", buffer.name)))
    }

    /// Elements that this rank holds in a buffer.
    fn length(&self, scope: &Scope<'_>, id: BufferId) -> Result<usize, RunError> {
        Ok(match &self.buffer(scope, id)?.content {
            Content::Tensor(ty) => extents(&self.schedule.space.local_box(ty, self.rank)).iter().product(),
            Content::Wire { elements, .. } => index(*elements),
        })
    }

    fn read(&self, scope: &Scope<'_>, id: BufferId) -> Result<&[f32], RunError> {
        let n = self.length(scope, id)?;
        let data = match self.locate(scope, id)? {
            Location::Arena(start) => self.arena.get(start..start + n),
            Location::Loaded(part, start) => self.sources.part(part).get(start..start + n),
            Location::Lasting(number, start) => {
                self.lasting.get(number).and_then(|data| data.get(start..start + n))
            }
        };
        data.ok_or_else(|| self.outside(scope, id))
    }

    /// Writes the first elements of a buffer: all of a tensor, what there is of a wire; numbers as they are stored.
    fn write(&mut self, scope: &Scope<'_>, id: BufferId, data: &[f32]) -> Result<(), RunError> {
        let n = self.length(scope, id)?;
        let dtype = self.buffer(scope, id)?.dtype();
        let fits = match self.buffer(scope, id)?.content {
            Content::Tensor(_) => data.len() == n,
            Content::Wire { .. } => data.len() <= n,
        };
        let place = match self.locate(scope, id)? {
            Location::Arena(start) => {
                let end = self.shape.bytes(start) + data.len() as u64 * dtype.bytes();
                self.reached = self.reached.max(aligned(end));
                self.arena.get_mut(start..start + data.len())
            }
            Location::Lasting(number, start) => {
                self.lasting.get_mut(number).and_then(|own| own.get_mut(start..start + data.len()))
            }
            Location::Loaded(..) => {
                return Err(RunError::invalid("it writes an input, or what other ranks share"));
            }
        };
        match place {
            Some(place) if fits => {
                place.copy_from_slice(data);
                self.storage.keep(dtype, place);
                Ok(())
            }
            _ => Err(self.outside(scope, id)),
        }
    }

    fn outside(&self, scope: &Scope<'_>, id: BufferId) -> RunError {
        let frame = &self.schedule.frames[scope.frame];
        RunError::invalid(format!(
            "buffer `{}` of `{}` is not as large as its content",
            frame.buffers[id].name, frame.name
        ))
    }
}

fn only(buffers: &[BufferId], what: &str) -> Result<BufferId, RunError> {
    match buffers {
        [buffer] => Ok(*buffer),
        _ => Err(RunError::invalid(format!("it {what} {} buffers instead of one", buffers.len()))),
    }
}

pub(crate) fn describe(schedule: &Schedule, work: &Work) -> String {
    match work {
        Work::Compute(op) => op.name().to_owned(),
        Work::Pack(t) => format!("pack of {}", t.first().op.name()),
        Work::Exchange(t) => t.first().op.name().to_owned(),
        Work::Unpack(t) => format!("unpack of {}", t.first().op.name()),
        Work::Copy => "copy".to_owned(),
        Work::Call { callee, .. } => {
            format!("call of {}", schedule.frames.get(*callee).map_or("?", |f| f.name.as_str()))
        }
    }
}
