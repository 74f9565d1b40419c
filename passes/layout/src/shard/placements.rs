//! The placement of every function: one for all, unless some layers have a strategy of their own inside attention; and
//! which axes split which sequence, unless those of the strategy split all alike.

use std::collections::BTreeMap;

use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{Attention, Movement};
use ithaca_ir::{Diagnostic, DimId, Function, Mesh, Module};
use ithaca_pass::roles::Roles;

use super::inner::is_attention;
use super::options::ShardOptions;
use super::strategy::{self, Placement};
use crate::registry::Registry;

/// Placements by function, with exceptions.
#[derive(Clone, Debug, PartialEq)]
pub struct Placements {
    /// The placement of every function that has none of its own, and of everything outside attention.
    pub base: Placement,
    /// Functions with a placement of their own, which agrees with [`base`](Self::base) outside attention.
    pub layers: BTreeMap<String, Placement>,
    /// Sequences that are split by other axes than [`Placement::sequence`].
    pub sequences: BTreeMap<DimId, AxisList>,
    movement: Option<Movement>,
    cross_movement: Option<Movement>,
}

impl Placements {
    /// The placements that `options` ask for.
    ///
    /// # Errors
    /// `P10`–`P12` for strategies and the mesh; `P13` for a function that is not there or has no attention, for a
    /// strategy that differs outside attention, and for sequences that are none or cannot be split so.
    pub(super) fn of(
        registry: &Registry,
        module: &Module,
        roles: &Roles,
        options: &ShardOptions,
    ) -> Result<Self, Diagnostic> {
        let sequences = sequences(module, roles, options)?;
        let also: Vec<AxisId> = sequences.values().flatten().copied().collect();
        let placement = |text: &str| placement(registry, text, &options.mesh, &also);
        let base = placement(&options.strategy)?;
        let mut layers = BTreeMap::new();
        for (name, text) in &options.layers {
            check_function(module, name)?;
            let own = placement(text)?;
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
        let choice = &options.attention;
        let placements = Self {
            base,
            layers,
            sequences,
            movement: choice.movement.clone(),
            cross_movement: choice.cross_movement.clone(),
        };
        for (&dim, axes) in &placements.sequences {
            placements.all().try_for_each(|p| free_for(module, p, dim, axes, &options.mesh))?;
        }
        Ok(placements)
    }

    /// The placement of a function: that of the function of the model that it was made from.
    pub fn function(&self, function: &Function) -> &Placement {
        self.layers.get(function.model_name()).unwrap_or(&self.base)
    }

    /// Every different placement that attention has.
    pub fn all(&self) -> impl Iterator<Item = &Placement> {
        std::iter::once(&self.base).chain(self.layers.values())
    }

    /// The axes that split sequence `dim` of every activation, and of inputs.
    pub fn sequence(&self, dim: DimId) -> &AxisList {
        self.sequences.get(&dim).unwrap_or(&self.base.sequence)
    }

    /// The axes that split sequence `dim` of the residual stream.
    pub fn residual_sequence(&self, dim: DimId) -> AxisList {
        self.sequence(dim).iter().chain(&self.base.residual).copied().collect()
    }

    /// The axes that split sequence `dim` inside attention of `function`.
    pub fn attention_sequence(&self, function: &Function, dim: DimId) -> AxisList {
        let heads = &self.function(function).heads;
        self.sequence(dim).iter().filter(|a| !heads.contains(a)).copied().collect()
    }

    /// The axes that split the keys of an attention of `function`: those of their sequence, and of a cache.
    pub fn key_sequence(&self, function: &Function, keys: DimId, roles: &Roles) -> AxisList {
        let mut axes = self.attention_sequence(function, keys);
        if roles.caches.contains(&keys) {
            axes.extend(self.function(function).cache.iter().copied());
        }
        axes
    }

    /// The movement that brings keys of other ranks to queries, in `attention` of `function`.
    pub fn movement(&self, function: &Function, attention: &Attention) -> Option<Movement> {
        let named = |name: &String| Movement { name: name.clone(), options: Vec::new() };
        let strategy = |p: &Placement| p.movement.as_ref().map(named);
        let cross = self.cross_movement.clone().filter(|_| attention.queries != attention.keys);
        cross.or_else(|| match self.layers.get(function.model_name()) {
            Some(own) => strategy(own),
            None => self.movement.clone().or_else(|| strategy(&self.base)),
        })
    }
}

fn placement(registry: &Registry, text: &str, mesh: &Mesh, also: &[AxisId]) -> Result<Placement, Diagnostic> {
    strategy::placement(&registry.product(text)?, mesh, also)
}

/// Checks that the functions and the sequences that `options` name are those of a program.
///
/// # Errors
/// `P13`.
pub fn check_names(module: &Module, options: &ShardOptions) -> Result<(), Diagnostic> {
    options.layers.iter().try_for_each(|(name, _)| check_function(module, name))?;
    let roles = Roles::of(module);
    options.attention.sequences.iter().try_for_each(|(name, _)| sequence(module, &roles, name).map(drop))
}

/// Checks that a function of the model has attention.
fn check_function(module: &Module, name: &str) -> Result<(), Diagnostic> {
    let functions = module.functions.values().filter(|f| f.origin.is_none());
    let with_attention = functions.filter(|f| f.nodes.iter().any(|n| is_attention(&n.op)));
    let known: Vec<&str> = with_attention.map(|f| f.name.as_str()).collect();
    if known.contains(&name) {
        return Ok(());
    }
    let message = format!("there is no function `{name}` with attention to have a strategy of its own");
    Err(Diagnostic::new("P13", message).names("functions with attention", name, known))
}

/// The sequence of a name.
fn sequence(module: &Module, roles: &Roles, name: &str) -> Result<DimId, Diagnostic> {
    let dims = &module.space.dims;
    let sequences = roles.sequences.iter().copied().filter(|&d| dims[d].part.is_none());
    sequences.clone().find(|&d| dims[d].name == name).ok_or_else(|| {
        let message = format!("there is no sequence `{name}` to have axes of its own");
        Diagnostic::new("P13", message).names("sequences", name, sequences.map(|d| dims[d].name.as_str()))
    })
}

/// The axes of the sequences that have their own.
fn sequences(
    module: &Module,
    roles: &Roles,
    options: &ShardOptions,
) -> Result<BTreeMap<DimId, AxisList>, Diagnostic> {
    let dims = &module.space.dims;
    let mut found = BTreeMap::new();
    for (name, axes) in &options.attention.sequences {
        let dim = sequence(module, roles, name)?;
        let mut list = AxisList::new();
        for axis in axes {
            let Some(id) = options.mesh.axis(axis) else {
                let message = format!(
                    "sequence `{name}` is to be split by axis `{axis}`, which mesh `{}` lacks",
                    options.mesh
                );
                return Err(Diagnostic::new("P11", message)
                    .help(format!("name the axis in the mesh too, as in `{axis}=2`")));
            };
            if list.contains(&id) {
                let message = format!("sequence `{name}` is to be split by axis `{axis}` twice");
                return Err(Diagnostic::new("P13", message));
            }
            list.push(id);
        }
        if found.insert(dim, list).is_some() {
            return Err(Diagnostic::new("P13", format!("sequence `{name}` is given axes twice")));
        }
    }
    // Parts are split as the sequence is.
    let parts = dims.iter().filter_map(|(id, dim)| Some((id, found.get(&dim.part?.of)?.clone())));
    let parts: Vec<(DimId, AxisList)> = parts.collect();
    found.extend(parts);
    Ok(found)
}

/// Whether `axes` may split sequence `dim`: they split nothing else of an activation, and those that split heads inside
/// attention are the innermost, so that an all-to-all can trade them.
fn free_for(
    module: &Module,
    placement: &Placement,
    dim: DimId,
    axes: &AxisList,
    mesh: &Mesh,
) -> Result<(), Diagnostic> {
    let name = &module.space.dims[dim].name;
    let Placement { batch, weights, residual, cache, heads, .. } = placement;
    let others = [
        (batch, "the batch"),
        (weights, "weights"),
        (residual, "the residual stream by itself"),
        (cache, "caches of keys"),
    ];
    for (taken, what) in others {
        if let Some(&axis) = axes.iter().find(|a| taken.contains(a)) {
            let axis = &mesh.axes[axis].name;
            let message = format!("axis `{axis}` cannot split sequence `{name}`: it splits {what}");
            return Err(Diagnostic::new("P13", message).help("give the sequence an axis of its own"));
        }
    }
    let trades = |a: &AxisId| heads.contains(a);
    if axes.iter().skip_while(|a| !trades(a)).all(trades) {
        Ok(())
    } else {
        Err(Diagnostic::new(
            "P13",
            format!("axes of sequence `{name}` that split heads inside attention must come last"),
        )
        .help("an all-to-all trades the innermost axes of a sequence for heads"))
    }
}
