//! The tensors that persist from one run of a schedule to the next: its weights and states, under their stored names.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::ops::{Binding, Target, source, state};
use ithaca_ir::schedule::{Content, Place, Schedule};
use ithaca_ir::{Rank, Space, TensorType};

use crate::cpu;
use crate::error::RunError;

/// A weight or a state of one layer, as one binding has it.
#[derive(Clone, Debug, PartialEq)]
pub struct PersistentTensor<'a> {
    /// Weight or state.
    pub target: Target,
    /// Its place in files.
    pub binding: &'a Binding,
    /// Its dimensions, element type and layout.
    pub ty: &'a TensorType,
    /// The layer.
    pub layer: u64,
    /// The places whose ranks have it; `None` means all ranks.
    pub places: Vec<Option<At>>,
    /// Whether the schedule writes it.
    pub is_written: bool,
}

impl PersistentTensor<'_> {
    /// The name of its stored tensor; a stack's is that of all its members.
    pub fn stored_name(&self) -> String {
        self.binding.stored_name(self.layer)
    }

    /// Whether `rank` has it.
    pub fn is_on(&self, space: &Space, rank: Rank) -> bool {
        self.places.iter().any(|place| place.is_none_or(|at| at.has(&space.mesh, rank)))
    }

    /// The stored tensors, several for a stack, each with the shape that files must have.
    pub fn stored(&self, space: &Space) -> Vec<(String, Vec<u64>)> {
        let shape = self.binding.stored_shape(space, self.ty);
        let names = source::members(&self.stored_name(), shape.first().copied().unwrap_or(1));
        let of_member =
            if self.binding.is_stack() { shape.get(1..).unwrap_or_default().to_vec() } else { shape };
        names.into_iter().map(|name| (name, of_member.clone())).collect()
    }

    /// Whether it is a gradient, which the next step does not need.
    pub fn is_gradient(&self) -> bool {
        self.target == Target::State && state::is_gradient(&self.binding.name)
    }
}

/// The persistent tensors of a schedule, in order of frames, each once.
///
/// # Errors
/// [`RunError::Invalid`] for a schedule that contradicts itself; verification finds it.
pub fn tensors(schedule: &Schedule) -> Result<Vec<PersistentTensor<'_>>, RunError> {
    let layers = cpu::layers_of(schedule)?;
    let mut found: Vec<PersistentTensor<'_>> = Vec::new();
    let mut known: BTreeMap<(Target, String, usize), usize> = BTreeMap::new();
    // A name may have several bindings or types, numbered here.
    let mut kinds: Vec<(&Binding, &TensorType)> = Vec::new();
    let mut written: BTreeSet<(Target, String)> = BTreeSet::new();
    for (frame_id, frame) in schedule.frames.iter() {
        for (buffer_id, buffer) in frame.buffers.iter() {
            let (target, binding) = match &buffer.place {
                Place::Weight(binding) => (Target::Param, binding),
                Place::State(binding) => (Target::State, binding),
                Place::Input(_)
                | Place::Frame(_)
                | Place::Wire { .. }
                | Place::Argument(_)
                | Place::Result(_) => continue,
            };
            let Content::Tensor(ty) = &buffer.content else {
                return Err(RunError::invalid(format!("`{}` is loaded into a wire buffer", buffer.name)));
            };
            let kind = kinds.iter().position(|&kind| kind == (binding, ty)).unwrap_or_else(|| {
                kinds.push((binding, ty));
                kinds.len() - 1
            });
            let is_written = frame.tasks.iter().any(|task| task.writes.contains(&buffer_id));
            // Stages of a pipeline share its name.
            for &(layer, at) in &layers[frame_id.index()] {
                let name = binding.stored_name(layer);
                if is_written {
                    written.insert((target, name.clone()));
                }
                let number = *known.entry((target, name, kind)).or_insert_with(|| {
                    found.push(PersistentTensor {
                        target,
                        binding,
                        ty,
                        layer,
                        places: Vec::new(),
                        is_written: false,
                    });
                    found.len() - 1
                });
                let places = &mut found[number].places;
                let place = ty.layout.at.or(at);
                if !places.contains(&place) {
                    places.push(place);
                }
            }
        }
    }
    for one in &mut found {
        one.is_written = written.contains(&(one.target, one.stored_name()));
    }
    Ok(found)
}
