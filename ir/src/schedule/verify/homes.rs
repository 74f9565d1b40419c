//! Maps of weights and states.

use std::collections::BTreeMap;

use crate::ops::table::source::{Binding, Target};

/// A weight or state: its target and its name, and how it is bound.
pub(super) type Home<'a> = (Target, &'a Binding);

/// A map of weights and states, in order of targets and names.
#[derive(Clone, Debug)]
pub(super) struct Homes<'a, V> {
    by_name: BTreeMap<(Target, &'a str), Vec<(&'a Binding, V)>>,
}

impl<V> Default for Homes<'_, V> {
    fn default() -> Self {
        Self { by_name: BTreeMap::new() }
    }
}

impl<'a, V: Copy> Homes<'a, V> {
    pub(super) fn get(&self, (target, binding): Home<'_>) -> Option<V> {
        let named = self.by_name.get(&(target, binding.name.as_str()))?;
        named.iter().find(|(known, _)| *known == binding).map(|(_, value)| *value)
    }

    pub(super) fn set(&mut self, (target, binding): Home<'a>, value: V) {
        let named = self.by_name.entry((target, binding.name.as_str())).or_default();
        match named.iter_mut().find(|(known, _)| *known == binding) {
            Some((_, known)) => *known = value,
            None => named.push((binding, value)),
        }
    }

    pub(super) fn remove(&mut self, (target, binding): Home<'a>) {
        if let Some(named) = self.by_name.get_mut(&(target, binding.name.as_str())) {
            named.retain(|(known, _)| *known != binding);
        }
    }

    /// Whether a weight or state of this name is there, bound in any way.
    pub(super) fn has_name(&self, (target, binding): Home<'_>) -> bool {
        self.by_name.contains_key(&(target, binding.name.as_str()))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Home<'a>, V)> {
        self.by_name.iter().flat_map(|(&(target, _), named)| {
            named.iter().map(move |(binding, value)| ((target, *binding), *value))
        })
    }
}
