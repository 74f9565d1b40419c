//! Memory of a run: the scale of the arena, and the parts of weights and inputs that ranks hold.

use std::collections::{BTreeMap, BTreeSet};

use indexmap::IndexSet;
use ithaca_ir::boxes::{self, Region};
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::module::Layers;
use ithaca_ir::ops::Binding;
use ithaca_ir::schedule::{BufferId, Content, FrameId, Place, Schedule, Task, Work};
use ithaca_ir::{DType, Rank, Space, TensorType};

use crate::error::RunError;
use crate::source;
use crate::storage::Storage;
use crate::store::TensorSource;
use crate::tensor::{Tensor, index};

/// Bytes of an element as it is stored here, whatever its type.
const STORED_BYTES: u64 = 4;

/// The arena as `f32` elements.
///
/// One element stands for as many bytes of the schedule as its narrowest type takes, so buffers keep their order and
/// overlaps, and each is large enough.
#[derive(Clone, Debug)]
pub(super) struct ArenaShape {
    /// Bytes of the schedule for one element.
    bytes_per_slot: u64,
    /// Elements.
    pub(super) slots: u64,
}

impl ArenaShape {
    pub(super) fn of(schedule: &Schedule) -> Self {
        let buffers = schedule.frames.values().flat_map(|f| f.buffers.values());
        let narrowest = buffers.map(|b| b.dtype().bytes()).min().unwrap_or(STORED_BYTES);
        let bytes_per_slot = narrowest.min(STORED_BYTES);
        Self { bytes_per_slot, slots: schedule.arena_bytes().div_ceil(bytes_per_slot) }
    }

    /// The offset in bytes of an element.
    pub(super) fn bytes(&self, slot: usize) -> u64 {
        slot as u64 * self.bytes_per_slot
    }

    /// Elements that as many values of a type take in a schedule; no fewer than they take here.
    pub(super) fn slots_of(&self, n: usize, dtype: DType) -> usize {
        index((n as u64 * dtype.bytes()).div_ceil(self.bytes_per_slot)).max(n)
    }

    /// The element at an offset in bytes.
    pub(super) fn slot(&self, bytes: u64) -> Result<usize, RunError> {
        if bytes.is_multiple_of(self.bytes_per_slot) {
            Ok(index(bytes / self.bytes_per_slot))
        } else {
            Err(RunError::invalid(format!("offset {bytes} is not aligned")))
        }
    }
}

/// The most memory that a rank used at a time, in bytes of the schedule's element types.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// Weights.
    pub parameters: u64,
    /// Gradients and the state of the optimizer.
    pub states: u64,
    /// Inputs.
    pub inputs: u64,
    /// The arena, as far as it was written.
    pub arena: u64,
}

impl Peak {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.parameters + self.states + self.inputs + self.arena
    }

    /// The larger of two, kind by kind.
    pub fn or(&self, other: &Peak) -> Peak {
        Peak {
            parameters: self.parameters.max(other.parameters),
            states: self.states.max(other.states),
            inputs: self.inputs.max(other.inputs),
            arena: self.arena.max(other.arena),
        }
    }
}

/// The source of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum File {
    Weights,
    Inputs,
    /// The weights, or zeros.
    States,
}

/// A stored tensor and the parts that ranks hold.
#[derive(Debug)]
pub(crate) struct SourceTensor<'a> {
    file: File,
    pub(crate) binding: &'a Binding,
    /// On the ranks that have it.
    pub(crate) ty: TensorType,
    pub(crate) layer: u64,
    /// Different parts.
    pub(crate) regions: Vec<Region>,
    /// For each rank its part, if it has one.
    pub(crate) part_of: Vec<Option<usize>>,
    /// Whether some task writes it, so that each rank has its own.
    pub(crate) is_written: bool,
}

/// The tensors that a schedule loads.
#[derive(Debug)]
pub(crate) struct SourcePlan<'a> {
    tensors: Vec<SourceTensor<'a>>,
    /// The tensor of a buffer.
    of: BTreeMap<Loaded, usize>,
}

/// A buffer of a frame, at a layer, on the ranks that run it.
pub(crate) type Loaded = (FrameId, BufferId, u64, Option<At>);

/// Weights and inputs, each part once however many ranks hold it.
#[derive(Debug)]
pub(super) struct Sources {
    parts: Vec<Vec<f32>>,
    /// For each tensor of the plan and each rank, the start of its part.
    starts: Vec<Vec<Option<Location>>>,
    of: BTreeMap<Loaded, usize>,
}

/// The start of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Location {
    /// At this element of the arena.
    Arena(usize),
    /// In a read-only part of the sources, at an element.
    Shared(usize, usize),
    /// In the rank's copy of the n-th written weight or state, at an element.
    Written(usize, usize),
}

impl Location {
    /// The location `n` elements further.
    pub(super) fn further(self, n: usize) -> Location {
        match self {
            Location::Arena(start) => Location::Arena(start + n),
            Location::Shared(part, start) => Location::Shared(part, start + n),
            Location::Written(number, start) => Location::Written(number, start + n),
        }
    }
}

/// A rank's copy of each written weight and state, in order of numbers.
pub(super) type WrittenData = Vec<Vec<f32>>;

impl<'a> SourcePlan<'a> {
    pub(crate) fn of(schedule: &'a Schedule) -> Result<Self, RunError> {
        let mut plan = SourcePlan { tensors: Vec::new(), of: BTreeMap::new() };
        // Buffers of different frames that are the same stored tensor, such as tied embeddings, share it.
        let mut known: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for LoadedBuffer { key, file, binding, ty, is_written } in loaded_buffers(schedule)? {
            let (_, _, layer, at) = key;
            let ty = ty.located(at.or(ty.layout.at));
            let same = known.entry(binding.stored_name(layer)).or_default();
            let found = same.iter().copied().find(|&i| {
                let t: &SourceTensor<'_> = &plan.tensors[i];
                t.file == file
                    && t.binding.window == binding.window
                    && t.binding.stored == binding.stored
                    && t.binding.view == binding.view
                    && t.ty == ty
            });
            let i = found.unwrap_or_else(|| {
                plan.tensors.push(SourceTensor::new(&schedule.space, file, binding, ty, layer));
                same.push(plan.tensors.len() - 1);
                plan.tensors.len() - 1
            });
            plan.tensors[i].is_written |= is_written;
            plan.of.insert(key, i);
        }
        Ok(plan)
    }

    /// Bytes that these ranks will take.
    pub(super) fn check(&self, ranks: &[Rank], arena: &ArenaShape, limit: u64) -> Result<u64, RunError> {
        let bytes = |elements: u64| u128::from(elements) * u128::from(STORED_BYTES);
        let elements = |t: &SourceTensor<'_>| -> u64 {
            let of = |part: usize| boxes::elements(&t.regions[part]);
            if t.is_written {
                t.parts_of(ranks).into_iter().flatten().map(of).sum()
            } else {
                t.parts_of(ranks).into_iter().flatten().collect::<BTreeSet<_>>().into_iter().map(of).sum()
            }
        };
        let weights: u128 = self.tensors.iter().map(|t| bytes(elements(t))).sum();
        let ranks = ranks.len() as u64;
        let arena = bytes(arena.slots);
        let needed = arena * u128::from(ranks) + weights;
        match u64::try_from(needed) {
            Ok(needed) if needed <= limit => Ok(needed),
            _ => Err(RunError::Memory { needed, ranks, arena, weights, limit }),
        }
    }

    /// Bytes of the schedule's element types that each rank holds, its arena left out.
    pub(crate) fn held(&self, ranks: usize) -> Vec<Peak> {
        let of_rank = |rank: usize| {
            let mut held = Peak::default();
            for t in &self.tensors {
                let Some(part) = t.part_of[rank] else { continue };
                let bytes = boxes::elements(&t.regions[part]) * t.ty.dtype.bytes();
                match t.file {
                    File::Weights => held.parameters += bytes,
                    File::Inputs => held.inputs += bytes,
                    File::States => held.states += bytes,
                }
            }
            held
        };
        (0..ranks).map(of_rank).collect()
    }

    /// The stored tensors of which a rank has a part.
    pub(super) fn names_of(&self, space: &Space, rank: Rank) -> BTreeSet<String> {
        let held = self.tensors.iter().filter(|t| t.part_of.get(index(rank.0)).copied().flatten().is_some());
        held.flat_map(|t| {
            let n = t.binding.stored_shape(space, &t.ty).first().copied().unwrap_or(1);
            t.binding.stored_names(t.layer, n)
        })
        .collect()
    }

    /// Every stored tensor.
    pub(crate) fn tensors(&self) -> &[SourceTensor<'a>] {
        &self.tensors
    }

    /// The number of the tensor that is loaded for a buffer.
    pub(crate) fn find(&self, loaded: Loaded) -> Option<usize> {
        self.of.get(&loaded).copied()
    }

    /// The written tensors, in order of numbers.
    pub(super) fn written(&self) -> impl Iterator<Item = &SourceTensor<'a>> + Clone {
        self.tensors.iter().filter(|t| t.is_written)
    }

    /// Reads each stored tensor of which one of `ranks` has a part once and cuts it. Returns the shared parts, and for
    /// each rank its copies of the written tensors.
    pub(super) fn load(
        &self,
        space: &Space,
        ranks: &[Rank],
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        storage: Storage,
    ) -> Result<(Sources, Vec<WrittenData>), RunError> {
        let mut sources = Sources { parts: Vec::new(), starts: Vec::new(), of: self.of.clone() };
        let mut own: Vec<WrittenData> = vec![Vec::new(); ranks.len()];
        let mut n_written = 0;
        for tensor in &self.tensors {
            let held = tensor.parts_of(ranks);
            let cut = if held.iter().any(Option::is_some) {
                tensor.cut(space, &held, weights, inputs, storage)?
            } else {
                BTreeMap::new()
            };
            if tensor.is_written {
                for (own, part) in own.iter_mut().zip(&held) {
                    own.push(part.map_or_else(Vec::new, |part| cut[&part].clone()));
                }
                sources.starts.push(vec![Some(Location::Written(n_written, 0)); tensor.part_of.len()]);
                n_written += 1;
            } else {
                let mut number = BTreeMap::new();
                for (part, data) in cut {
                    number.insert(part, sources.parts.len());
                    sources.parts.push(data);
                }
                let start = |part: &Option<usize>| Some(Location::Shared(*number.get(&(*part)?)?, 0));
                sources.starts.push(tensor.part_of.iter().map(start).collect());
            }
        }
        Ok((sources, own))
    }
}

impl<'a> SourceTensor<'a> {
    fn new(space: &Space, file: File, binding: &'a Binding, ty: TensorType, layer: u64) -> Self {
        let mut regions: IndexSet<Region> = IndexSet::new();
        let part = |rank| space.holds(&ty, rank).then(|| regions.insert_full(space.local_box(&ty, rank)).0);
        let part_of = space.mesh.iter_ranks().map(part).collect();
        Self { file, binding, ty, layer, regions: regions.into_iter().collect(), part_of, is_written: false }
    }

    /// For each of `ranks`, which part it has.
    fn parts_of(&self, ranks: &[Rank]) -> Vec<Option<usize>> {
        ranks.iter().map(|rank| self.part_of.get(index(rank.0)).copied().flatten()).collect()
    }

    /// Reads the stored tensor and cuts these parts of it.
    fn cut(
        &self,
        space: &Space,
        parts: &[Option<usize>],
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        storage: Storage,
    ) -> Result<BTreeMap<usize, Vec<f32>>, RunError> {
        let SourceTensor { binding, ty, regions, .. } = self;
        let stored = self.load(space, weights, inputs)?;
        let is_float = ty.dtype.is_float();
        let convert = |x: f64| if is_float { x as f32 } else { from_int(x as i32) };
        let parts: BTreeSet<usize> = parts.iter().copied().flatten().collect();
        let cut = |part: usize| {
            let mut data = source::cut(space, ty, &regions[part], (*binding, &stored), convert).data;
            storage.keep(ty.dtype, &mut data);
            (part, data)
        };
        Ok(parts.into_iter().map(cut).collect())
    }

    /// Reads it, whole.
    pub(crate) fn load(
        &self,
        space: &Space,
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
    ) -> Result<Tensor<f64>, RunError> {
        let SourceTensor { binding, ty, layer, .. } = self;
        match self.file {
            File::Weights => source::load(space, binding, ty, *layer, weights),
            File::Inputs => source::load(space, binding, ty, *layer, inputs),
            File::States => source::load_state(space, binding, ty, *layer, weights),
        }
    }
}

impl Sources {
    /// The start of the data of a buffer on `rank`.
    pub(super) fn find(&self, loaded: Loaded, rank: Rank) -> Option<Location> {
        self.starts[*self.of.get(&loaded)?].get(index(rank.0)).copied().flatten()
    }

    /// The elements of a part.
    pub(super) fn part(&self, part: usize) -> &[f32] {
        &self.parts[part]
    }
}

/// A buffer that is loaded for a layer.
pub(crate) struct LoadedBuffer<'a> {
    pub(crate) key: Loaded,
    pub(crate) file: File,
    pub(crate) binding: &'a Binding,
    pub(crate) ty: &'a TensorType,
    /// Whether a task of the frame writes it.
    pub(crate) is_written: bool,
}

/// The weights, states and inputs of every frame, for each layer that the frame runs for; `main` runs for layer 0.
///
/// # Errors
/// [`RunError::Invalid`] for a schedule that contradicts itself; verification finds it.
pub(crate) fn loaded_buffers(schedule: &Schedule) -> Result<Vec<LoadedBuffer<'_>>, RunError> {
    for (id, frame) in schedule.frames.iter() {
        let backwards = |task: &Task| matches!(task.work, Work::Call { callee, .. } if callee >= id);
        if frame.tasks.iter().any(backwards) {
            return Err(RunError::invalid(format!("`{}` calls a later frame", frame.name)));
        }
    }
    let layers = schedule.layers_by_place();
    let mut found = Vec::new();
    for (frame_id, frame) in schedule.frames.iter() {
        let one_by_one = |(layers, at): (Layers, Option<At>)| layers.map(move |layer| (layer, at));
        let runs: BTreeSet<(u64, Option<At>)> =
            layers[frame_id.index()].iter().cloned().flat_map(one_by_one).collect();
        for (buffer_id, buffer) in frame.buffers.iter() {
            let (file, binding) = match &buffer.place {
                Place::Weight(binding) => (File::Weights, binding),
                Place::Input(binding) => (File::Inputs, binding),
                Place::State(binding) => (File::States, binding),
                Place::Frame(_) | Place::Inside { .. } | Place::Argument(_) | Place::Result(_) => continue,
            };
            let is_written = frame.tasks.iter().any(|task| task.writes.contains(&buffer_id));
            let Content::Tensor(ty) = &buffer.content else {
                return Err(RunError::invalid(format!("`{}` is loaded into a wire buffer", buffer.name)));
            };
            found.extend(runs.iter().map(|&(layer, at)| LoadedBuffer {
                key: (frame_id, buffer_id, layer, at),
                file,
                binding,
                ty,
                is_written,
            }));
        }
    }
    Ok(found)
}

/// An integer as an element of the arena: the same bits.
pub(super) fn from_int(x: i32) -> f32 {
    f32::from_bits(x.cast_unsigned())
}

/// The integer that an element of the arena holds.
pub(super) fn to_int(x: f32) -> i32 {
    x.to_bits().cast_signed()
}
