//! Whether the buffers of each task fit its work: `S03`, `S09` to `S12`.

use crate::boxes::{self, Side};
use crate::diagnostic::Diagnostics;
use crate::dtype::DType;
use crate::entity::Arena;
use crate::handles::MAX_LAYERS;
use crate::mesh::Rank;
use crate::message::{self, Parcel};
use crate::ops::context::Context;
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::structure;
use crate::ops::table::cache::Cache;
use crate::ops::table::op::Op;
use crate::ops::table::structure::{Scan, Stage};
use crate::schedule::verify::partner::in_task;
use crate::schedule::verify::report::name;
use crate::schedule::{BufferId, Content, Frame, FrameId, Place, Schedule, Stream, Task, Transfer, Work};
use crate::text::show::show;
use crate::types::TensorType;

/// Adds the mistakes in the tasks of a frame.
pub(super) fn check(schedule: &Schedule, frame: &Frame, found: &mut Diagnostics) {
    for (i, task) in frame.tasks.iter().enumerate() {
        let checker = Checker { schedule, frame, task };
        if let Err(error) = checker.writes_its_own().and_then(|()| checker.work()) {
            found.push(in_task(frame, i, error));
        }
    }
}

struct Checker<'s> {
    schedule: &'s Schedule,
    frame: &'s Frame,
    task: &'s Task,
}

impl<'s> Checker<'s> {
    fn writes_its_own(&self) -> Result<(), OpError> {
        for &written in &self.task.writes {
            match self.frame.buffers[written].place {
                Place::Frame(_)
                | Place::Inside { .. }
                | Place::Result(_)
                | Place::Weight(_)
                | Place::State(_) => {}
                Place::Argument(_) | Place::Input(_) => {
                    bail!("S11", "it writes `${}`, which is not the frame's", name(self.frame, written));
                }
            }
        }
        Ok(())
    }

    fn work(&self) -> Result<(), OpError> {
        let is_upload = matches!(self.task.work, Work::Compute(Op::Cache(Cache::Upload)));
        ensure!(
            is_upload == (self.task.stream == Stream::Host),
            "S19",
            "`{}` is on the stream `{}`; uploads, and they alone, are on `{}`",
            self.task.work.name(),
            self.task.stream,
            Stream::Host
        );
        let is_to_host = self.task.work == Work::Copy && self.task.writes.iter().any(|&b| self.is_on_host(b));
        ensure!(
            is_to_host == (self.task.stream == Stream::ToHost),
            "S19",
            "`{}` is on the stream `{}`; copies to host memory, and they alone, are on `{}`",
            self.task.work.name(),
            self.task.stream,
            Stream::ToHost
        );
        match &self.task.work {
            Work::Compute(op) => self.compute(op),
            Work::Pack(transfer) => {
                self.transfer(transfer)?;
                self.counts(transfer.parcels().len()..=transfer.parcels().len(), 1)?;
                for (i, parcel) in transfer.parcels().iter().enumerate() {
                    self.holds(self.read(i), &parcel.from)?;
                }
                self.carries(self.write(0), transfer, Side::Sent)
            }
            Work::Exchange(transfer) => {
                self.transfer(transfer)?;
                ensure!(
                    self.task.stream != Stream::Compute,
                    "S12",
                    "a collective is on the stream `compute`"
                );
                if transfer.is_direct() {
                    let parcels = transfer.parcels();
                    self.counts(parcels.len()..=parcels.len(), parcels.len())?;
                    for (i, parcel) in parcels.iter().enumerate() {
                        self.holds(self.read(i), &parcel.from)?;
                        self.holds(self.write(i), &parcel.to)?;
                    }
                    return Ok(());
                }
                self.counts(1..=1, 1)?;
                match (self.read(0), transfer.only()) {
                    (content @ Content::Tensor(_), Some(parcel)) => self.holds(content, &parcel.from)?,
                    (content, _) => self.carries(content, transfer, Side::Sent)?,
                }
                match (self.write(0), transfer.only()) {
                    (content @ Content::Tensor(_), Some(parcel)) => self.holds(content, &parcel.to),
                    (content, _) => self.carries(content, transfer, Side::Received),
                }
            }
            Work::Unpack(transfer) => {
                // The rank's own block may come from the tensor itself, which is then read second.
                self.transfer(transfer)?;
                let most = if transfer.only().is_some() { 2 } else { 1 };
                self.counts(1..=most, transfer.parcels().len())?;
                self.carries(self.read(0), transfer, Side::Received)?;
                if self.task.reads.len() == 2 {
                    self.holds(self.read(1), &transfer.first().from)?;
                }
                for (i, parcel) in transfer.parcels().iter().enumerate() {
                    self.holds(self.write(i), &parcel.to)?;
                }
                Ok(())
            }
            Work::Copy => {
                self.on_device(&self.task.reads)?;
                self.counts(1..=1, 1)?;
                let there = self.frame.at(self.task.reads[0]);
                let stays = there.is_none() || there == self.frame.at(self.task.writes[0]);
                ensure!(
                    stays && is_anywhere(self.read(0), &here(self.write(0))),
                    "S03",
                    "it copies between buffers of different content"
                );
                Ok(())
            }
            Work::Call { callee, .. } => {
                self.on_device(self.task.reads.iter().chain(&self.task.writes))?;
                self.call(*callee)
            }
        }
    }

    fn is_on_host(&self, buffer: BufferId) -> bool {
        self.frame.buffers[buffer].is_in_host_memory()
    }

    /// Kernels touch a cache in host memory where a step appends to it, and where it reads what it appended.
    fn host_memory(&self, op: &Op) -> Result<(), OpError> {
        let Task { reads, writes, .. } = self.task;
        match op {
            Op::Cache(Cache::Upload) => self.on_device(writes),
            Op::Cache(Cache::AppendPages { after: Some(_), .. }) => self.on_device(reads[1..].iter().take(4)),
            Op::Cache(Cache::GatherPages { beyond: Some(_), .. }) => {
                let others = reads.iter().enumerate().filter(|(i, _)| *i != 3).map(|(_, b)| b);
                self.on_device(others.chain(writes))
            }
            _ => self.on_device(reads.iter().chain(writes)),
        }
    }

    /// None of these is in host memory.
    fn on_device<'b>(&self, buffers: impl IntoIterator<Item = &'b BufferId>) -> Result<(), OpError> {
        for &buffer in buffers {
            if self.is_on_host(buffer) {
                let name = name(self.frame, buffer);
                bail!(
                    "S19",
                    "`${name}` is in host memory: uploads read it, and copies and steps that append write it"
                );
            }
        }
        Ok(())
    }

    fn compute(&self, op: &Op) -> Result<(), OpError> {
        ensure!(op.is_computation(), "S03", "`{}` is no work on local tensors", op.name());
        self.host_memory(op)?;
        let tensor = |content: &'s Content| match content {
            Content::Tensor(ty) => Ok(&**ty),
            Content::Wire { .. } => Err(OpError::new(
                "S03",
                "the operation needs a tensor, the buffer holds blocks as they travel",
            )),
        };
        let contents = |i: usize| tensor(self.read(i));
        let operands = (0..self.task.reads.len()).map(contents).collect::<Result<Vec<&TensorType>, _>>()?;
        let results = (0..self.task.writes.len()).map(|i| tensor(self.write(i)));
        let results = results.collect::<Result<Vec<&TensorType>, _>>()?;
        self.follows(op, &operands, &results)
    }

    /// Each parcel by itself, and several as members of one message.
    fn transfer(&self, transfer: &Transfer) -> Result<(), OpError> {
        for Parcel { op, from, to } in transfer.parcels() {
            if !op.is_communication() || matches!(op, Op::Coalesced(_)) {
                bail!("S03", "`{}` is no collective of one tensor", op.name());
            }
            for ty in [from, to] {
                crate::verify::check_type(&self.schedule.space, crate::module::Level::PerRank, ty)?;
            }
        }
        let ends: Vec<(&TensorType, &TensorType)> =
            transfer.parcels().iter().map(|parcel| (&parcel.from, &parcel.to)).collect();
        let (from, to): (Vec<&TensorType>, Vec<&TensorType>) = ends.into_iter().unzip();
        match transfer.parcels() {
            [one] => self.follows(&one.op, &from, &to),
            several => {
                let members = several.iter().map(|parcel| parcel.op.clone()).collect();
                self.follows(&Op::Coalesced(members), &from, &to)
            }
        }
    }

    /// Whether inference gives the stated types.
    fn follows(&self, op: &Op, operands: &[&TensorType], stated: &[&TensorType]) -> Result<(), OpError> {
        let cx = Context { space: &self.schedule.space, functions: &Arena::new() };
        let declared: Vec<TensorType> = stated.iter().map(|&ty| ty.clone()).collect();
        let inferred =
            op.infer(cx, operands, &declared).map_err(|error| OpError::new("S03", error.message))?;
        ensure!(
            inferred.len() == stated.len(),
            "S03",
            "`{}` has {} results, and {} are written",
            op.name(),
            inferred.len(),
            stated.len()
        );
        let space = &self.schedule.space;
        match inferred.iter().zip(stated).find(|&(ty, stated)| ty != *stated) {
            None => Ok(()),
            Some((ty, stated)) => {
                let message =
                    format!("`{}` gives {}, not {}", op.name(), show(space, ty), show(space, stated));
                Err(OpError::new("S03", message))
            }
        }
    }

    fn counts(&self, reads: std::ops::RangeInclusive<usize>, n_writes: usize) -> Result<(), OpError> {
        let (n, m) = (self.task.reads.len(), self.task.writes.len());
        ensure!(reads.contains(&n) && m == n_writes, "S03", "it reads {n} buffers and writes {m}");
        Ok(())
    }

    fn read(&self, i: usize) -> &'s Content {
        &self.frame.buffers[self.task.reads[i]].content
    }

    fn write(&self, i: usize) -> &'s Content {
        &self.frame.buffers[self.task.writes[i]].content
    }

    fn holds(&self, content: &Content, ty: &TensorType) -> Result<(), OpError> {
        let space = &self.schedule.space;
        match content {
            Content::Tensor(found) if **found == *ty => Ok(()),
            Content::Tensor(found) => Err(OpError::new(
                "S03",
                format!("the collective needs {}, the buffer holds {}", show(space, ty), show(space, found)),
            )),
            Content::Wire { .. } => Err(OpError::new(
                "S03",
                "the collective needs a tensor, the buffer holds blocks as they travel",
            )),
        }
    }

    /// Whether a wire buffer can take a message: of several tensors all of it, of one the blocks that rank 0 exchanges with others,
    /// and no permute is counted.
    fn carries(&self, content: &Content, transfer: &Transfer, side: Side) -> Result<(), OpError> {
        let Content::Wire { dtype, elements } = content else {
            bail!("S03", "the collective needs blocks as they travel, the buffer holds a tensor");
        };
        let (dtype, elements): (DType, u64) = (*dtype, *elements);
        let space = &self.schedule.space;
        let Parcel { op, from, to } = transfer.first();
        let needed = match op {
            _ if transfer.only().is_none() => message::wire_elements(space, transfer.parcels(), side),
            Op::Permute | Op::AllReduce { .. } => 0,
            Op::Fetch { .. } | Op::FetchSum { .. } => boxes::wire_elements(space, op, from, to, side),
            _ => {
                let exchange = boxes::exchange(space, op, from, to, Rank(0));
                let blocks = match side {
                    Side::Sent => &exchange.send,
                    Side::Received => &exchange.recv,
                };
                let others = exchange.group.iter().zip(blocks).filter(|&(&peer, _)| peer != Rank(0));
                others.map(|(_, block)| boxes::block_elements(block)).sum()
            }
        };
        ensure!(
            dtype == from.dtype && elements >= needed,
            "S03",
            "{needed} elements of {} do not fit in {elements} of {dtype}",
            from.dtype
        );
        Ok(())
    }

    fn call(&self, callee: FrameId) -> Result<(), OpError> {
        let Task { reads, writes, work, .. } = self.task;
        let frame = &self.schedule.frames[callee];
        let Work::Call { layers, scan, stage, .. } = work else { return Ok(()) };
        let at = stage.and_then(Stage::at);
        let elsewhere = |&b: &BufferId| self.frame.at(b).is_some_and(|there| Some(there) != at);
        if reads.iter().any(elsewhere) || writes.iter().any(|&b| self.frame.at(b) != at) {
            bail!("S09", "what `@{}` takes and gives is not on the ranks that run it", frame.name);
        }
        if layers.start >= layers.end || layers.end > MAX_LAYERS {
            bail!("S09", "it runs over layers {}..{}", layers.start, layers.end);
        }
        if reads.len() != frame.n_arguments || writes.len() != frame.outputs.len() {
            let message = format!(
                "`@{}` takes {} arguments and returns {}, but {} are passed and {} taken",
                frame.name,
                frame.n_arguments,
                frame.outputs.len(),
                reads.len(),
                writes.len()
            );
            return Err(OpError::new("S09", message));
        }
        let n_carried = scan.map_or(writes.len(), |scan| scan.carried);
        if let Some(Scan { over, carried, .. }) = scan
            && (self.schedule.space.size(*over) != layers.end - layers.start || *carried > writes.len())
        {
            let message = format!(
                "{} layers of `@{}` hand on {carried} of {} results and stack the others along `{}` of {}",
                layers.end - layers.start,
                frame.name,
                writes.len(),
                self.schedule.space.dims[*over].name,
                self.schedule.space.size(*over)
            );
            return Err(OpError::new("S09", message));
        }
        for buffer in frame.buffers.values() {
            let (fits, what) = match buffer.place {
                Place::Argument(i) => (
                    is_anywhere(self.read(i), &buffer.content)
                        || is_sliced(scan.as_ref(), i, self.read(i), &buffer.content),
                    format!("argument {i}"),
                ),
                Place::Result(i) => {
                    let here = match (scan, self.write(i), &buffer.content) {
                        (Some(scan), Content::Tensor(given), Content::Tensor(ty)) if i >= n_carried => {
                            given.located(None) == structure::stacked(ty, scan.over)
                        }
                        (_, given, content) => is_anywhere(given, content),
                    };
                    (here, format!("result {i}"))
                }
                Place::Frame(_)
                | Place::Inside { .. }
                | Place::Weight(_)
                | Place::Input(_)
                | Place::State(_) => continue,
            };
            ensure!(fits, "S09", "{what} of `@{}` has another content than its buffer here", frame.name);
        }
        let carried = (0..n_carried).find(|&i| reads.get(i) != Some(&writes[i]));
        match carried {
            Some(i) if layers.end - layers.start > 1 => {
                let message =
                    format!("result {i} is not in the buffer of argument {i}, but there are more layers");
                Err(OpError::new("S10", message))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// The content of a buffer for those that have it.
fn here(content: &Content) -> Content {
    match content {
        Content::Tensor(ty) => Content::Tensor(ty.located(None).into()),
        Content::Wire { .. } => content.clone(),
    }
}

/// Whether `given` is `whole`, the content of a buffer of all ranks, on whatever ranks it is.
fn is_anywhere(given: &Content, whole: &Content) -> bool {
    match (given, whole) {
        (Content::Tensor(given), Content::Tensor(whole)) => given.is_anywhere(whole),
        _ => given == whole,
    }
}

/// Whether a call passes each layer its slice of an argument.
pub(super) fn is_sliced(scan: Option<&Scan>, index: usize, argument: &Content, parameter: &Content) -> bool {
    match (argument, parameter) {
        (Content::Tensor(argument), Content::Tensor(parameter)) => {
            structure::is_sliced(scan, index, argument, parameter)
        }
        _ => false,
    }
}
