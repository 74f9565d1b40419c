//! Prepares the space: declares copied, uneven and padded dimensions, and the mesh.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::mesh::AxisId;
use ithaca_ir::module::Level;
use ithaca_ir::ops::{Loss, Op};
use ithaca_ir::{Dim, DimId, Mesh, Module, TensorType};

use super::legality::Decisions;
use super::roles::Roles;

/// The program in a space with the mesh and the decided dimensions, still laid out whole; and for each key/value head
/// dimension that attention must see copied, the dimension that copies it.
pub(super) fn respace(
    module: &Module,
    mesh: &Mesh,
    roles: &Roles,
    decisions: &Decisions,
) -> (Module, BTreeMap<DimId, DimId>) {
    let mut sharded = module.clone();
    sharded.level = Level::Sharded;
    sharded.space.mesh = mesh.clone();
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
    for (&dim, order) in &decisions.orders {
        sharded.space.dims[dim].order.clone_from(order);
    }
    rename(&mut sharded, &renamed);
    (sharded, copies)
}

fn declare_copy(module: &mut Module, of: DimId, size: u64) -> DimId {
    let base = module.space.dims[of].name.clone();
    let mut name = format!("{base}{size}");
    while module.space.dim(&name).is_some() {
        name.push('_');
    }
    module.space.dims.push(Dim { copies: Some(of), ..Dim::new(name, size) })
}

/// For each vocabulary of a loss that ranks split by `axes`, a dimension that tells apart what they have of it.
pub(super) fn parts(
    module: &mut Module,
    axes: &[AxisId],
    is_split: impl Fn(DimId) -> bool,
) -> BTreeMap<DimId, DimId> {
    let size = module.space.mesh.degree(axes);
    let nodes = module.functions.values().flat_map(|f| &f.nodes);
    let over = nodes.filter_map(|n| match n.op {
        Op::Loss(Loss::CrossEntropy { over, .. }) => Some(over),
        _ => None,
    });
    let over: BTreeSet<DimId> = over.filter(|&d| size > 1 && is_split(d)).collect();
    if over.is_empty() {
        return BTreeMap::new();
    }
    let mut name = "parts".to_owned();
    while module.space.dim(&name).is_some() {
        name.push('_');
    }
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
        function.values.values_mut().for_each(|v| in_type(&mut v.ty));
        function.nodes.iter_mut().for_each(|node| rename_in(&mut node.op, &new));
    }
}

/// Replaces the dimensions in the attributes of an operation.
fn rename_in(op: &mut Op, new: &impl Fn(&mut DimId)) {
    match op {
        Op::Attention(a) | Op::AttentionBackward(a) => a.dims_mut().for_each(new),
        Op::Scores { attention, columns } | Op::Weigh { attention, columns } => {
            attention.dims_mut().chain([columns]).for_each(new);
        }
        Op::MergeParts { over } => new(over),
        Op::RowLse { over, parts } => std::iter::once(over).chain(parts).for_each(new),
        Op::Gradient(g) => g.dims_mut().for_each(new),
        Op::Loss(l) => l.dims_mut().for_each(new),
        Op::Experts(e) => e.dims_mut().for_each(new),
        Op::Window(w) => new(w.dim_mut()),
        Op::Call { scan: Some(scan), .. } => new(&mut scan.over),
        Op::Fetch { to: dim } | Op::FetchSum { from: dim } => new(dim),
        Op::Take { to } | Op::Join { to } => new(to),
        Op::Embed { over, .. }
        | Op::RmsNorm { over, .. }
        | Op::LayerNorm { over, .. }
        | Op::Softmax { over } => new(over),
        Op::RmsScale { over, .. } => over.iter_mut().for_each(new),
        Op::Rotary(rotary) => new(&mut rotary.over),
        Op::Repeat { from, to } | Op::SumCopies { from, to } => [from, to].into_iter().for_each(new),
        Op::AllToAll { split, concat, .. } => [split, concat].into_iter().for_each(new),
        Op::AllGather { dim, .. } | Op::Slice { dim, .. } | Op::ReduceScatter { dim, .. } => new(dim),
        Op::Param(_)
        | Op::Input(_)
        | Op::State(_)
        | Op::Assign { .. }
        | Op::Fill { .. }
        | Op::Sum
        | Op::Expand
        | Op::Optimizer(_)
        | Op::Random(_)
        | Op::Positions
        | Op::Einsum
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Scale { .. }
        | Op::Cast { .. }
        | Op::Call { scan: None, .. }
        | Op::Reshard
        | Op::Merge
        | Op::Accumulate
        | Op::Sink
        | Op::AllReduce { .. }
        | Op::Permute => {}
        Op::Coalesced(members) => members.iter_mut().for_each(|member| rename_in(member, new)),
    }
}
