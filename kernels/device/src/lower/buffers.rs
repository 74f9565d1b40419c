//! The stored tensors of a schedule, slices of stacks, and at which multiples arguments of frames start.

use std::collections::BTreeMap;

use ithaca_ir::boxes;
use ithaca_ir::entity::{Arena, Entity};
use ithaca_ir::layout::At;
use ithaca_ir::module::Layers;
use ithaca_ir::ops::state::gradient_of_sum;
use ithaca_ir::ops::{Binding, structure};
use ithaca_ir::order::joined;
use ithaca_ir::schedule::{BufferId, Content, Frame, FrameId, Place, Schedule, Task, Work, integers};
use ithaca_ir::{Space, TensorType};

use super::axes::uneven_axes;
use super::resident;
use crate::address::SourceId;
use crate::error::LowerError;
use crate::flash::ALIGNMENT;
use crate::merge::{self, Span};
use crate::ops::view::signed;
use crate::program::{Source, SourceFile};
use crate::value::Int;

/// Layers, and the ranks that run them.
type Runs = Vec<(Layers, Option<At>)>;

/// The stored tensors of a schedule.
pub(super) struct Sources {
    all: Arena<SourceId, Found>,
    of: BTreeMap<(FrameId, BufferId), SourceId>,
}

struct Found {
    file: SourceFile,
    binding: Binding,
    ty: TensorType,
    layers: Runs,
    is_written: bool,
}

impl Sources {
    /// Buffers of different frames that are the same stored tensor share it; `runs` has the layers of each frame.
    pub(super) fn of(schedule: &Schedule, runs: &[Runs]) -> Result<Self, LowerError> {
        let mut sources = Sources { all: Arena::new(), of: BTreeMap::new() };
        for ((frame_id, frame), runs) in schedule.frames.iter().zip(runs).filter(|(_, runs)| !runs.is_empty())
        {
            for (buffer_id, buffer) in frame.buffers.iter() {
                let (file, binding) = match &buffer.place {
                    Place::Weight(binding) => (SourceFile::Weights, binding),
                    Place::Input(binding) => (SourceFile::Inputs, binding),
                    Place::State(binding) => (SourceFile::States, binding),
                    Place::Frame(_) | Place::Inside { .. } | Place::Argument(_) | Place::Result(_) => {
                        continue;
                    }
                };
                let Content::Tensor(ty) = &buffer.content else {
                    return LowerError::invalid(format!("`{}` is loaded into a wire buffer", buffer.name));
                };
                let is_written = frame.tasks.iter().any(|task| task.writes.contains(&buffer_id));
                let id = sources.add(file, binding, ty, runs);
                sources.all[id].is_written |= is_written;
                sources.of.insert((frame_id, buffer_id), id);
            }
        }
        Ok(sources)
    }

    /// The stored tensor of a buffer.
    pub(super) fn find(&self, frame: FrameId, buffer: BufferId) -> Option<SourceId> {
        self.of.get(&(frame, buffer)).copied()
    }

    /// The stored tensors of a frame, with its buffers.
    pub(super) fn of_frame(&self, frame: FrameId) -> BTreeMap<SourceId, BufferId> {
        let own = self.of.iter().filter(|((of, _), _)| *of == frame);
        own.map(|(&(_, buffer), &source)| (source, buffer)).collect()
    }

    fn add(&mut self, file: SourceFile, binding: &Binding, ty: &TensorType, runs: &Runs) -> SourceId {
        let at = ty.layout.at;
        let ty = ty.located(None);
        let layers_of = |layers: &Layers| if binding.is_per_layer() { layers.clone() } else { 0..1 };
        // What is of the next layer is loaded for that layer.
        let runs = if binding.is_of_next_layer() { &[][..] } else { runs };
        let layers = runs.iter().map(|(layers, place)| (layers_of(layers), at.or(*place)));
        let known = self.all.iter().find(|(_, s)| s.file == file && s.binding == *binding && s.ty == ty);
        let id = known.map(|(id, _)| id).unwrap_or_else(|| {
            let binding = binding.clone();
            self.all.push(Found { file, binding, ty, layers: Vec::new(), is_written: false })
        });
        let mut all = std::mem::take(&mut self.all[id].layers);
        all.extend(layers);
        self.all[id].layers = by_place(all);
        id
    }

    /// The sources of the program.
    pub(super) fn into_program(self, schedule: &Schedule) -> Arena<SourceId, Source> {
        let space = &schedule.space;
        let meanings = integers::of_inputs(schedule);
        let source = |found: &Found| {
            let Found { file, binding, ty, layers, is_written } = found;
            let meaning = meanings.get(&binding.name).filter(|_| *file == SourceFile::Inputs);
            Source {
                file: *file,
                binding: binding.clone(),
                ty: ty.clone(),
                layers: layers.clone(),
                is_written: *is_written && gradient_of_sum(&binding.name).is_none(),
                stored: binding.stored_shape(space, ty),
                integers: meaning.copied(),
                resident: resident::of_source(space, ty),
            }
        };
        self.all.values().map(source).collect()
    }
}

/// The same layers on the same ranks, those of a place as ranges that are ascending and do not touch.
fn by_place(mut runs: Runs) -> Runs {
    runs.sort_by_key(|(layers, at)| (*at, layers.start));
    let of_place = |runs: &[(Layers, Option<At>)]| -> Runs {
        let at = runs[0].1;
        let layers = joined(runs.iter().map(|(layers, _)| layers.clone()).collect());
        layers.into_iter().map(|layers| (layers, at)).collect()
    };
    runs.chunk_by(|a, b| a.1 == b.1).flat_map(of_place).collect()
}

/// For each argument and each result of a call the bytes of a layer's slice; zero for those that all layers share.
pub(super) struct Slices {
    pub(super) arguments: Vec<Int>,
    pub(super) results: Vec<Int>,
}

/// The slices of a call.
pub(super) fn slices(schedule: &Schedule, caller: &Frame, task: &Task) -> Slices {
    let mut slices =
        Slices { arguments: vec![Int::ZERO; task.reads.len()], results: vec![Int::ZERO; task.writes.len()] };
    let Work::Call { callee, scan: Some(scan), .. } = &task.work else { return slices };
    for buffer in schedule.frames[*callee].buffers.values() {
        let Content::Tensor(ty) = &buffer.content else { continue };
        match buffer.place {
            Place::Argument(i) if i < task.reads.len() => {
                let here = caller.buffers.get(task.reads[i]).map(|buffer| &buffer.content);
                if let Some(Content::Tensor(here)) = here
                    && structure::is_sliced(Some(scan), i, here, ty)
                {
                    slices.arguments[i] = local_bytes(&schedule.space, ty);
                }
            }
            Place::Result(i) if i < task.writes.len() && i >= scan.carried => {
                slices.results[i] = local_bytes(&schedule.space, ty);
            }
            Place::Argument(_)
            | Place::Result(_)
            | Place::Frame(_)
            | Place::Inside { .. }
            | Place::Weight(_)
            | Place::Input(_)
            | Place::State(_) => {}
        }
    }
    slices
}

/// The bytes of a rank's part of a tensor.
fn local_bytes(space: &Space, ty: &TensorType) -> Int {
    let span = Span::of(&space.mesh, uneven_axes(space, ty));
    let bytes = |rank| signed(boxes::elements(&space.local_box(ty, rank)) * ty.dtype.bytes());
    merge::integer(&span, span.ranks(&space.mesh, merge::rank_at(&space.mesh, ty.layout.at)).map(bytes))
}

/// Whether arguments and results of frames start at multiples of [`ALIGNMENT`] in every call.
pub(super) struct Alignments {
    /// For each frame: of its arguments and of its results.
    of_frames: Vec<[Vec<bool>; 2]>,
}

impl Alignments {
    pub(super) fn of(schedule: &Schedule) -> Result<Self, LowerError> {
        let operands = |frame: &Frame| [vec![true; frame.n_arguments], vec![true; frame.outputs.len()]];
        let mut found = Alignments { of_frames: schedule.frames.values().map(operands).collect() };
        // Callers follow the frames that they call.
        for (id, frame) in schedule.frames.iter().rev() {
            for task in &frame.tasks {
                let Work::Call { callee, scan, .. } = &task.work else { continue };
                if *callee >= id {
                    return LowerError::invalid(format!(
                        "`{}` calls a frame that is after it in the schedule",
                        frame.name
                    ));
                }
                let slices = slices(schedule, frame, task);
                let is_aligned = |(&buffer, slice): (&BufferId, &Int)| {
                    found.starts_aligned(&schedule.space, (id, frame), buffer) && steps_aligned(slice)
                };
                let mut arguments: Vec<bool> =
                    task.reads.iter().zip(&slices.arguments).map(is_aligned).collect();
                let results: Vec<bool> = task.writes.iter().zip(&slices.results).map(is_aligned).collect();
                let n_carried = scan.as_ref().map_or(results.len(), |scan| scan.carried);
                arguments.iter_mut().zip(&results).take(n_carried).for_each(|(a, r)| *a &= r);
                for (known, new) in found.of_frames[callee.index()].iter_mut().zip([arguments, results]) {
                    known.iter_mut().zip(new).for_each(|(known, new)| *known &= new);
                }
            }
        }
        Ok(found)
    }

    /// Of the arguments and of the results of a frame.
    pub(super) fn of_frame(&self, id: FrameId) -> [&[bool]; 2] {
        self.of_frames[id.index()].each_ref().map(Vec::as_slice)
    }

    fn starts_aligned(&self, space: &Space, (id, frame): (FrameId, &Frame), buffer: BufferId) -> bool {
        let of = |known: &[bool], i: usize| known.get(i).copied().unwrap_or(false);
        let [arguments, results] = self.of_frame(id);
        let Some(of_buffer) = frame.buffers.get(buffer) else { return false };
        match &of_buffer.place {
            Place::Frame(offset) => offset.is_multiple_of(ALIGNMENT),
            Place::Argument(i) => of(arguments, *i),
            Place::Result(i) => of(results, *i),
            Place::Weight(_) | Place::Input(_) | Place::State(_) => true,
            Place::Inside { whole, .. } => {
                let first = frame.strided(space, buffer).map(|s| s.start * of_buffer.dtype().bytes());
                first.is_some_and(|first| first.is_multiple_of(ALIGNMENT))
                    && self.starts_aligned(space, (id, frame), *whole)
            }
        }
    }
}

/// Whether every rank's slices are multiples of the alignment.
fn steps_aligned(slice: &Int) -> bool {
    let fits = |n: i64| n.cast_unsigned().is_multiple_of(ALIGNMENT);
    match slice {
        Int::Const(n) => fits(*n),
        Int::Varying(v) => {
            let factors = v.per_axis.iter().map(|&(_, by)| by).chain([v.per_layer, v.base]);
            factors.chain(v.values.iter().copied()).all(fits)
        }
    }
}
