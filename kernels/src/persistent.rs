//! The tensors that persist from one run of a schedule to the next: its weights and states, under their stored names.

use std::collections::BTreeMap;

use ithaca_ir::layout::At;
use ithaca_ir::ops::{Binding, Target, source, state};
use ithaca_ir::schedule::Schedule;
use ithaca_ir::{Rank, Space, TensorType};

use crate::cpu::memory::{File, LoadedBuffer, loaded_buffers};
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
        members(&self.stored_name(), &self.binding.stored_shape(space, self.ty))
    }

    /// Whether it is a gradient, which the next step does not need.
    pub fn is_gradient(&self) -> bool {
        self.target == Target::State && state::is_gradient(&self.binding.name)
    }
}

/// The tensors in files that a stored tensor of this shape is, each with its shape: several for a stack.
pub(crate) fn members(name: &str, shape: &[u64]) -> Vec<(String, Vec<u64>)> {
    let names = source::members(name, shape.first().copied().unwrap_or(1));
    let is_stack = names != [name];
    let of_member = if is_stack { shape.get(1..).unwrap_or_default() } else { shape };
    names.into_iter().map(|name| (name, of_member.to_vec())).collect()
}

/// The persistent tensors of a schedule, in order of frames, each once.
///
/// # Errors
/// [`RunError::Invalid`] for a schedule that contradicts itself; verification finds it.
pub fn tensors(schedule: &Schedule) -> Result<Vec<PersistentTensor<'_>>, RunError> {
    let mut found: Vec<PersistentTensor<'_>> = Vec::new();
    // A name may have several bindings or types.
    let mut known: BTreeMap<(Target, String), Vec<usize>> = BTreeMap::new();
    for LoadedBuffer { key: (_, _, layer, at), file, binding, ty, is_written } in loaded_buffers(schedule)? {
        let target = match file {
            File::Weights => Target::Param,
            File::States => Target::State,
            File::Inputs => continue,
        };
        let same = known.entry((target, binding.stored_name(layer))).or_default();
        let is_known = |&i: &usize| (found[i].binding, found[i].ty) == (binding, ty);
        let number = same.iter().copied().find(is_known).unwrap_or_else(|| {
            let (places, is_written) = (Vec::new(), same.first().is_some_and(|&i| found[i].is_written));
            found.push(PersistentTensor { target, binding, ty, layer, places, is_written });
            same.push(found.len() - 1);
            found.len() - 1
        });
        if is_written {
            same.iter().for_each(|&i| found[i].is_written = true);
        }
        // Stages of a pipeline share its name.
        let (places, place) = (&mut found[number].places, ty.layout.at.or(at));
        if !places.contains(&place) {
            places.push(place);
        }
    }
    Ok(found)
}
