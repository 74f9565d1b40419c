//! The placement of every function: one for all, unless some layers have a strategy of their own inside attention.

use std::collections::BTreeMap;

use ithaca_ir::{Diagnostic, Mesh, Module};

use super::flow::family;
use super::options::ShardOptions;
use super::strategy::{self, Placement};
use crate::registry::Registry;

/// Placements by function.
#[derive(Clone, Debug, PartialEq)]
pub struct Placements {
    /// The placement of every function that has none of its own, and of everything outside attention.
    pub base: Placement,
    /// Functions with a placement of their own, which agrees with [`base`](Self::base) outside attention.
    pub layers: BTreeMap<String, Placement>,
}

impl Placements {
    /// The placements that `options` ask for.
    ///
    /// # Errors
    /// `P10`–`P12` for strategies and the mesh; `P13` for a function that is not there or has no attention, and for a
    /// strategy that differs outside attention.
    pub(super) fn of(
        registry: &Registry,
        module: &Module,
        options: &ShardOptions,
    ) -> Result<Self, Diagnostic> {
        let base = placement(registry, &options.strategy, &options.mesh)?;
        let mut layers = BTreeMap::new();
        for (name, text) in &options.layers {
            let known: Vec<&str> = module
                .functions
                .values()
                .filter(|f| f.nodes.iter().any(|n| super::is_attention(&n.op)))
                .map(|f| f.name.as_str())
                .filter(|name| family(name) == *name)
                .collect();
            if !known.contains(&name.as_str()) {
                let message =
                    format!("there is no function `{name}` with attention to have a strategy of its own");
                return Err(Diagnostic::new("P13", message)
                    .help(format!("functions with attention: {}", known.join(", "))));
            }
            let own = placement(registry, text, &options.mesh)?;
            if own.outside() != base.outside() || own.cache != base.cache {
                let message = format!(
                    "strategies `{}` and `{text}` of function `{name}` lay out differently outside attention",
                    options.strategy
                );
                return Err(Diagnostic::new("P13", message)
                    .help("layers may differ in what happens inside attention: they share axes and what these split"));
            }
            if layers.insert(name.clone(), own).is_some() {
                return Err(Diagnostic::new("P13", format!("function `{name}` is given two strategies")));
            }
        }
        Ok(Self { base, layers })
    }

    /// The placement of the function called `name`; that of `block.backward` is that of `block`.
    pub fn function(&self, name: &str) -> &Placement {
        self.layers.get(family(name)).unwrap_or(&self.base)
    }

    /// Every different placement that attention has.
    pub fn all(&self) -> impl Iterator<Item = &Placement> {
        std::iter::once(&self.base).chain(self.layers.values())
    }
}

fn placement(registry: &Registry, text: &str, mesh: &Mesh) -> Result<Placement, Diagnostic> {
    strategy::placement(&strategy::product(registry, text)?, mesh)
}
