//! Weights and states that were assigned, on all ranks.

use std::borrow::Cow;
use std::collections::BTreeMap;

use ithaca_ir::ops::{Binding, Target};
use ithaca_ir::{Space, TensorType};

use super::ranks::RankValues;
use super::value::Elements;
use crate::error::RunError;
use crate::real::Real;
use crate::store::TensorSource;
use crate::tensor::Outputs;
use crate::updates::{self, Update};

/// One binding, at one layer.
struct Entry<T: Real> {
    target: Target,
    binding: Binding,
    ty: TensorType,
    held: RankValues<T>,
}

/// The last assignments, by stored names.
pub(super) struct Assigned<T: Real> {
    entries: BTreeMap<String, Vec<Entry<T>>>,
}

impl<T: Real> Default for Assigned<T> {
    fn default() -> Self {
        Self { entries: BTreeMap::new() }
    }
}

impl<T: Real> Assigned<T> {
    /// The last value assigned to a binding.
    ///
    /// # Errors
    /// [`RunError::Invalid`] when it was assigned as another type.
    pub(super) fn get(
        &self,
        target: Target,
        binding: &Binding,
        layer: u64,
        ty: &TensorType,
    ) -> Result<Option<RankValues<T>>, RunError> {
        let entries = self.entries.get(&binding.stored_name(layer)).into_iter().flatten();
        match entries.into_iter().find(|e| e.is_of(target, binding, ty)) {
            Some(entry) => entry.check(ty).map(|()| Some(entry.held.clone())),
            None => Ok(None),
        }
    }

    /// Assigns.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub(super) fn set(
        &mut self,
        target: Target,
        binding: &Binding,
        layer: u64,
        ty: &TensorType,
        held: RankValues<T>,
    ) -> Result<(), RunError> {
        let entries = self.entries.entry(binding.stored_name(layer)).or_default();
        match entries.iter_mut().find(|e| e.is_of(target, binding, ty)) {
            Some(entry) => {
                entry.check(ty)?;
                entry.held = held;
            }
            None => entries.push(Entry { target, binding: binding.clone(), ty: ty.clone(), held }),
        }
        Ok(())
    }

    /// All assignments in their stored form; `before` has the earlier values.
    pub(super) fn kept(&self, space: &Space, before: &dyn TensorSource) -> Result<Outputs<T>, RunError> {
        let mut assigned: BTreeMap<&str, Vec<Update<'_, T>>> = BTreeMap::new();
        for (name, entries) in &self.entries {
            for Entry { binding, ty, held, .. } in entries {
                let held = held.iter().map(|value| match value.elements() {
                    Elements::Real(data) => Cow::Borrowed(data),
                    Elements::Int(data) => data.iter().map(|&x| T::from_f64(f64::from(x))).collect(),
                });
                let held = held.collect();
                assigned.entry(name).or_default().push(Update { binding, ty, held });
            }
        }
        updates::kept(space, &assigned, before)
    }
}

impl<T: Real> Entry<T> {
    fn check(&self, ty: &TensorType) -> Result<(), RunError> {
        if self.ty == *ty {
            return Ok(());
        }
        Err(RunError::invalid(format!("`{}` is assigned or read as two types", self.binding.name)))
    }

    /// Whether this is a binding of the same stored name, on the same ranks.
    fn is_of(&self, target: Target, binding: &Binding, ty: &TensorType) -> bool {
        let Binding { name: _, stored, view, window, ahead: _, fill: _, host: _ } = &self.binding;
        self.target == target
            && self.ty.layout.at == ty.layout.at
            && *stored == binding.stored
            && *view == binding.view
            && *window == binding.window
    }
}
