//! Prepares the space: declares copied, uneven and padded dimensions, and the mesh.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::mesh::AxisId;
use ithaca_ir::module::Level;
use ithaca_ir::ops::{Cache, Loss, Op};
use ithaca_ir::{Dim, DimId, Mesh, Module, TensorType};
use ithaca_pass::roles::Roles;

use super::experts::GroupSize;
use super::legality::Decisions;

/// `sharded`, a program, in a space with the mesh and the decided dimensions, still laid out whole; and for each key/value head
/// dimension that attention must see copied, the dimension that copies it.
pub(super) fn respace(
    mut sharded: Module,
    mesh: &Mesh,
    roles: &Roles,
    decisions: &Decisions,
) -> (Module, BTreeMap<DimId, DimId>) {
    sharded.level = Level::Sharded;
    sharded.space.mesh = mesh.clone();
    for (&dim, &size) in &decisions.padded {
        sharded.space.dims[dim].size = size;
        for part in sharded.space.dims.values_mut() {
            if let Some(of) = part.part.as_mut().filter(|part| part.of == dim) {
                // Runs are as long as before, and more.
                let each = (part.size / of.runs.max(1)).max(1);
                part.size = size / of.count.max(1);
                part.valid = part.size;
                of.runs = part.size / each;
            }
        }
    }
    for (&dim, groups) in &decisions.padded_groups {
        sharded.space.dims[dim].granule = groups.size;
        sharded.space.dims[dim].order = groups.order();
    }
    let mut renamed: BTreeMap<DimId, DimId> = BTreeMap::new();
    let mut copies = BTreeMap::new();
    for &(heads, kv_heads) in &roles.heads {
        let mut seen = kv_heads;
        if let Some(&size) = decisions.copy_weights.get(&kv_heads) {
            let copied =
                *renamed.entry(kv_heads).or_insert_with(|| declare_copy(&mut sharded, kv_heads, size));
            seen = copied;
        }
        if let Some(&size) = decisions.copy_activations.get(&kv_heads) {
            let loaded = seen;
            seen = *copies.entry(loaded).or_insert_with(|| declare_copy(&mut sharded, kv_heads, size));
        }
        if seen != kv_heads {
            let group = sharded.space.size(heads) / sharded.space.size(seen);
            sharded.space.dims[heads].granule = group;
        }
    }
    for &dim in &decisions.uneven {
        sharded.space.dims[dim].uneven = true;
    }
    for (&dim, &GroupSize { size, expected }) in &decisions.expert_groups {
        let Dim { size: whole, valid, ragged, .. } = &mut sharded.space.dims[dim];
        (*whole, *valid, *ragged) = (size, size, expected);
    }
    for (&dim, order) in &decisions.orders {
        sharded.space.dims[dim].order.clone_from(order);
    }
    rename(&mut sharded, &renamed);
    (sharded, copies)
}

fn declare_copy(module: &mut Module, of: DimId, size: u64) -> DimId {
    let original = &module.space.dims[of];
    let name = module.space.free_name(format!("{}_copies", original.name));
    let valid = original.valid * (size / original.size);
    module.space.dims.push(Dim { copies: Some(of), valid, ..Dim::new(name, size) })
}

/// For each vocabulary of a loss, or of a choice, that ranks split by `axes`, a dimension that tells apart what they have of it.
pub(super) fn parts(
    module: &mut Module,
    axes: &[AxisId],
    is_split: impl Fn(DimId) -> bool,
) -> BTreeMap<DimId, DimId> {
    let size = module.space.mesh.degree(axes);
    let nodes = module.functions.values().flat_map(|f| &f.nodes);
    let over = nodes.filter_map(|n| match n.op {
        Op::Loss(Loss::CrossEntropy { over, .. }) | Op::Cache(Cache::Argmax { over, parts: None }) => {
            Some(over)
        }
        _ => None,
    });
    let over: BTreeSet<DimId> = over.filter(|&d| size > 1 && is_split(d)).collect();
    if over.is_empty() {
        return BTreeMap::new();
    }
    let name = module.space.free_name("parts");
    let parts = module.space.dims.push(Dim::new(name, size));
    over.into_iter().map(|d| (d, parts)).collect()
}

/// Replaces dimensions in every type and attribute.
fn rename(module: &mut Module, renamed: &BTreeMap<DimId, DimId>) {
    if renamed.is_empty() {
        return;
    }
    let new = |dim: &mut DimId| *dim = renamed.get(dim).copied().unwrap_or(*dim);
    let in_type = |ty: &mut TensorType| ty.dims.iter_mut().for_each(new);
    for function in module.functions.values_mut() {
        function.retype(in_type);
        function.nodes.iter_mut().for_each(|node| node.op.each_dim_mut(&mut { new }));
    }
}
