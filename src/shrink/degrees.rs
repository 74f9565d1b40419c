//! The axes of a mesh that a proof may shorten, and the degrees of what they split.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::layout::AxisList;
use ithaca_ir::{AxisId, DimId, Mask, Mesh, Module, Op};
use ithaca_passes::import::{Degrees, OfSize};
use ithaca_passes::shard::strategy::Placement;

use crate::job::Job;

/// The axes that may be shorter, the longest first.
///
/// A stage of a pipeline has layers of its own, so all stages stay. So do axes that split the sequence where tokens see some
/// tokens only: the length of a block decides which ranks need which keys.
pub(super) fn shortened(job: &Job, placement: &Placement) -> Vec<AxisId> {
    let mesh = &job.options.mesh;
    let mut nodes = job.program.functions.values().flat_map(|f| &f.nodes);
    let sees_some = nodes.any(|node| match &node.op {
        Op::Attention(attention) => !matches!(attention.mask, Mask::Full | Mask::Causal),
        _ => false,
    });
    let may =
        |axis: &AxisId| !placement.stages.contains(axis) && (!sees_some || placement.batch.contains(axis));
    let mut axes: Vec<AxisId> = mesh.axes.iter().map(|(axis, _)| axis).filter(may).collect();
    axes.sort_by_key(|&axis| std::cmp::Reverse(mesh.size(axis)));
    axes
}

/// The divisors of a size, but one and the size.
pub(super) fn divisors(size: u64) -> impl Iterator<Item = u64> {
    (2..=size / 2).filter(move |n| size.is_multiple_of(*n))
}

/// The degrees by which `per_rank`, a program of ranks of a mesh, splits dimensions, with those of the mesh `small`.
pub(super) fn of((large, placement): (&Mesh, &Placement), small: &Mesh, per_rank: &Module) -> Degrees {
    let space = &per_rank.space;
    let pair = |axes: &[AxisId]| [large.degree(axes), small.degree(axes)];
    // ZeRO splits a tensor by all ranks that have the same weights, if a dimension divides.
    let replicas = Vec::from_iter(large.axes.ids().filter(|&axis| placement.holds_same_weights(axis)));
    let mut of_size: BTreeMap<u64, OfSize> = BTreeMap::new();
    for (dim, axes) in splits(large, per_rank) {
        of_size.entry(space.size(dim)).or_default().must.insert(pair(&axes));
        // Elements that stay together are split as one.
        let OfSize { must, may } = of_size.entry(space.size(dim) / space.dims[dim].granule).or_default();
        must.insert(pair(&axes));
        let others = axes.iter().filter(|axis| !replicas.contains(axis)).chain(&replicas);
        may.insert(pair(&Vec::from_iter(others.copied())));
    }
    Degrees { ranks: small.ranks() / small.degree(&placement.stages), all: Vec::new(), of_size }
}

/// The dimensions of a program of ranks of a mesh, each with axes that split it.
fn splits(mesh: &Mesh, per_rank: &Module) -> BTreeSet<(DimId, Vec<AxisId>)> {
    // An axis in two levels has other names, and is as long as before.
    let named = |axes: &AxisList| -> Option<Vec<AxisId>> {
        axes.iter().map(|&axis| mesh.axis(&per_rank.space.mesh.axes[axis].name)).collect()
    };
    let values = per_rank.functions.values().flat_map(|function| function.values.values());
    let all = values.flat_map(|value| value.ty.dims.iter().zip(&value.ty.layout.split));
    all.filter_map(|(&dim, axes)| Some((dim, named(axes)?))).collect()
}

/// The degrees by which `per_rank`, a program of ranks of the mesh `large`, splits sequences, with those of the mesh `small`.
pub(super) fn of_batch([large, small]: [&Mesh; 2], per_rank: &Module) -> BTreeSet<[u64; 2]> {
    let of_sequences = |(dim, _): &(DimId, Vec<AxisId>)| per_rank.space.dims[*dim].name == "b";
    let splits = splits(large, per_rank).into_iter().filter(of_sequences);
    splits.map(|(_, axes)| [large.degree(&axes), small.degree(&axes)]).collect()
}

/// The width of a head, if there is attention.
pub(super) fn head_width(per_rank: &Module) -> Option<u64> {
    let mut nodes = per_rank.functions.values().flat_map(|function| &function.nodes);
    nodes.find_map(|node| match &node.op {
        Op::Attention(attention) => Some(per_rank.space.size(attention.width)),
        _ => None,
    })
}
