//! Weights and states that were assigned, on all ranks.

use std::borrow::Cow;
use std::collections::BTreeMap;

use ithaca_ir::ops::{Binding, Target};
use ithaca_ir::{Space, TensorType};

use super::ranks::Held;
use super::value::Value;
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
    held: Held<T>,
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
    ) -> Result<Option<Held<T>>, RunError> {
        let entries = self.entries.get(&binding.stored_name(layer)).into_iter().flatten();
        match entries.into_iter().find(|e| e.is_of(target, binding, ty)) {
            Some(entry) if entry.ty == *ty => Ok(Some(entry.held.clone())),
            Some(_) => Err(RunError::invalid(format!(
                "`{}` is assigned as another type than it is read",
                binding.name
            ))),
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
        held: Held<T>,
    ) -> Result<(), RunError> {
        let entries = self.entries.entry(binding.stored_name(layer)).or_default();
        match entries.iter_mut().find(|e| e.is_of(target, binding, ty)) {
            Some(entry) if entry.ty == *ty => entry.held = held,
            Some(_) => {
                return Err(RunError::invalid(format!("`{}` is assigned as two types", binding.name)));
            }
            None => entries.push(Entry { target, binding: binding.clone(), ty: ty.clone(), held }),
        }
        Ok(())
    }

    /// All assignments in their stored form; `before` has the earlier values.
    pub(super) fn kept(&self, space: &Space, before: &dyn TensorSource) -> Result<Outputs<T>, RunError> {
        let mut kept = Outputs::new();
        for (name, entries) in &self.entries {
            let mut parts = Vec::with_capacity(entries.len());
            for entry in entries {
                let real = |value: &std::rc::Rc<Value<T>>| match &**value {
                    Value::Real(t) => Ok(Cow::Owned(t.data.clone())),
                    Value::Int(_) => Err(RunError::invalid(format!("integers are assigned to `{name}`"))),
                };
                let held = entry.held.iter().map(real).collect::<Result<_, _>>()?;
                parts.push(Update { binding: &entry.binding, ty: &entry.ty, held });
            }
            kept.extend(updates::unstack(name, updates::merge(space, name, &parts, before)?));
        }
        Ok(kept)
    }
}

impl<T: Real> Entry<T> {
    /// Whether this is a binding of the same stored name, on the same ranks.
    fn is_of(&self, target: Target, binding: &Binding, ty: &TensorType) -> bool {
        let Binding { name: _, stored, view, window, ahead: _, fill: _ } = &self.binding;
        self.target == target
            && self.ty.layout.at == ty.layout.at
            && *stored == binding.stored
            && *view == binding.view
            && *window == binding.window
    }
}
