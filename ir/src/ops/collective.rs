//! Collectives: layouts in, layouts out.
//!
//! An axis leaves a dimension from its minor end and joins at the minor end, so blocks stay contiguous.

use std::collections::BTreeSet;

use smallvec::smallvec;

use crate::boxes::{Corners, corners};
use crate::dim::DimId;
use crate::layout::{AxisList, Move};
use crate::mesh::{AxisId, Rank};
use crate::ops::check::only;
use crate::ops::context::Types;
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::table::experts::Rows;
use crate::ops::table::op::Op;
use crate::space::Space;
use crate::types::TensorType;

impl Op {
    /// The all-to-all along an axis, of the filled rows of a ragged dimension.
    pub fn all_to_all(axis: AxisId, split: DimId, concat: DimId) -> Self {
        Op::AllToAll { axis, split, concat, rows: Rows::Filled }
    }
}

pub(super) fn infer(
    op: &Op,
    space: &Space,
    x: &TensorType,
    declared: &[TensorType],
) -> Result<Types, OpError> {
    if let Op::Permute = op {
        return infer_permute(space, x, only("permute", declared)?);
    }
    ensure!(
        x.layout.moved.is_empty(),
        "V16",
        "`{}` takes parts where they belong; a permute brings them home",
        op.name()
    );
    apply(op, space, x).map(|ty| smallvec![ty])
}

/// The type after the collective `op`, a permute excepted.
///
/// # Errors
/// `V05` for a dimension that x lacks, `V16` for an axis that is not where the collective needs it.
pub fn apply(op: &Op, space: &Space, x: &TensorType) -> Result<TensorType, OpError> {
    let mut ty = x.clone();
    let name = op.name();
    let axis_name = |a: AxisId| space.mesh.axes[a].name.as_str();
    let split = |ty: &mut TensorType, dim: DimId, axis: AxisId| -> Result<(), OpError> {
        let in_use = ty.layout.axes().any(|a| a == axis);
        ensure!(!in_use, "V16", "`{name}`: axis `{}` is in use already", axis_name(axis));
        axes_mut(op, space, ty, dim)?.push(axis);
        Ok(())
    };
    let join = |ty: &mut TensorType, dim: DimId, axis: AxisId| -> Result<(), OpError> {
        let axes = axes_mut(op, space, ty, dim)?;
        let (last, dim) = (axis_name(axis), &space.dims[dim].name);
        let is_last = axes.last() == Some(&axis);
        ensure!(is_last, "V16", "`{name}`: axis `{last}` is not the innermost that splits `{dim}`");
        axes.pop();
        Ok(())
    };
    let reduce = |ty: &mut TensorType, axis: AxisId| -> Result<(), OpError> {
        let is_partial = ty.layout.partial.contains(&axis);
        ensure!(is_partial, "V16", "`{name}`: x is not a partial sum over `{}`", axis_name(axis));
        ty.layout.partial.retain(|a| *a != axis);
        Ok(())
    };
    match *op {
        Op::AllToAll { axis, split: to, concat: from, rows: _ } => {
            join(&mut ty, from, axis)?;
            split(&mut ty, to, axis)?;
        }
        Op::AllGather { axis, dim } => axis.iter().rev().try_for_each(|&axis| join(&mut ty, dim, axis))?,
        Op::Slice { axis, dim } => split(&mut ty, dim, axis)?,
        Op::ReduceScatter { axis, dim } => {
            for &axis in axis.iter() {
                reduce(&mut ty, axis)?;
                split(&mut ty, dim, axis)?;
            }
        }
        Op::AllReduce { axis } => axis.iter().try_for_each(|&axis| reduce(&mut ty, axis))?,
        Op::Fetch { to } => {
            let from = fetched_of(op, space, to)?;
            rename(op, space, &mut ty, from, to)?;
        }
        Op::FetchSum { from } => {
            let to = fetched_of(op, space, from)?;
            rename(op, space, &mut ty, from, to)?;
        }
        _ => unreachable!("only collectives with an axis come here"),
    }
    Ok(ty)
}

/// The dimension that `dim` is fetched from.
fn fetched_of(op: &Op, space: &Space, dim: DimId) -> Result<DimId, OpError> {
    let declared = &space.dims[dim];
    let of = declared.fetched.as_ref().map(|f| f.of);
    of.ok_or_else(|| {
        OpError::new("V05", format!("`{}`: `{}` is not declared to be fetched", op.name(), declared.name))
    })
}

/// Replaces dimension `from` by `to`, split by the same axes.
fn rename(op: &Op, space: &Space, ty: &mut TensorType, from: DimId, to: DimId) -> Result<(), OpError> {
    ensure!(!ty.has(to), "V05", "`{}`: x has `{}` already", op.name(), space.dims[to].name);
    let axes = axes_mut(op, space, ty, from)?.clone();
    let i = ty.position(from).expect("its axes were found");
    ty.dims[i] = to;
    ensure!(
        !axes.is_empty() && space.can_split(to, &axes),
        "V16",
        "`{}`: the axes that split `{}` are not as many ranks as fetch",
        op.name(),
        space.dims[from].name
    );
    Ok(())
}

fn axes_mut<'t>(
    op: &Op,
    space: &Space,
    ty: &'t mut TensorType,
    dim: DimId,
) -> Result<&'t mut AxisList, OpError> {
    let Some(i) = ty.position(dim) else {
        bail!("V05", "`{}`: x has no dimension `{}`", op.name(), space.dims[dim].name);
    };
    Ok(&mut ty.layout.split[i])
}

/// A permute keeps local shapes, and some rank holds the whole of every block that a rank needs.
fn infer_permute(space: &Space, x: &TensorType, ty: &TensorType) -> Result<Types, OpError> {
    if ty.dims != x.dims || ty.dtype != x.dtype || ty.layout.partial != x.layout.partial {
        bail!("V03", "`permute` changes the layout only, and no pending sums");
    }
    if !x.layout.partial.is_empty() {
        // Ranks with the same block hold different summands, so moving blocks would mix them up.
        bail!("V16", "`permute` of a partial sum; reduce it first");
    }
    if ty.layout.at != x.layout.at {
        return infer_relocation(space, x, ty);
    }
    if ty.layout.split == x.layout.split {
        // Parts move along axes: a rank of the same line holds each part that a rank needs, unless some hold nothing.
        let served = wants_nothing(space, ty) || space.mesh.axes.ids().all(|axis| serves(space, x, ty, axis));
        ensure!(served, "V16", "`permute`: a rank wants a part that no rank holds");
        return Ok(smallvec![ty.clone()]);
    }
    if serves_by_dimension(space, x, ty) {
        return Ok(smallvec![ty.clone()]);
    }
    let held: BTreeSet<Corners> = space.mesh.iter_ranks().map(|r| corners(&space.local_box(x, r))).collect();
    let unserved = space.mesh.iter_ranks().find(|&r| !held.contains(&corners(&space.local_box(ty, r))));
    if let Some(Rank(r)) = unserved {
        bail!("V16", "`permute`: no rank holds the block that rank {r} wants");
    }
    Ok(smallvec![ty.clone()])
}

/// The owners of the parts that are held along `axis`: the first coordinate, around the ring, and their number.
fn held_along(space: &Space, ty: &TensorType, axis: AxisId) -> (u64, u64) {
    let n = space.mesh.size(axis).max(1);
    match ty.layout.moved_along(axis) {
        Some(&Move { by, only: Some((start, end)), .. }) => {
            ((start + by) % n, end.saturating_sub(start).min(n))
        }
        Some(Move { only: None, .. }) | None => (0, n),
    }
}

fn wants_nothing(space: &Space, ty: &TensorType) -> bool {
    space.mesh.axes.ids().any(|axis| held_along(space, ty, axis).1 == 0)
}

/// Whether each part along `axis` that is held as `to` is held as `from`.
fn serves(space: &Space, from: &TensorType, to: &TensorType, axis: AxisId) -> bool {
    let n = space.mesh.size(axis).max(1);
    let ((held, some), (wanted, of)) = (held_along(space, from, axis), held_along(space, to, axis));
    some == n || (wanted + n - held) % n + of <= some
}

/// Whether each dimension by itself shows that every needed block is held. Where no part has moved, and no axis splits two
/// dimensions, blocks are all combinations of the ranges along each dimension, so ranks need not be checked one by one.
fn serves_by_dimension(space: &Space, from: &TensorType, to: &TensorType) -> bool {
    let combines = |ty: &TensorType| {
        let axes: AxisList = ty.layout.split.iter().flatten().copied().collect();
        let once = (0..axes.len()).all(|i| !axes[..i].contains(&axes[i]));
        ty.layout.moved.is_empty() && ty.layout.at.is_none() && once
    };
    let parts = |dim: DimId, axes: &AxisList| -> BTreeSet<(u64, u64)> {
        let ranks = space.mesh.group_along(Rank(0), axes).into_iter();
        ranks.map(|rank| space.range(dim, axes, rank)).map(|part| (part.start, part.end)).collect()
    };
    let mut splits = from.dims.iter().zip(from.layout.split.iter().zip(&to.layout.split));
    let served = |(&dim, (held, wanted)): (&DimId, (&AxisList, &AxisList))| {
        held == wanted || parts(dim, wanted).is_subset(&parts(dim, held))
    };
    combines(from) && combines(to) && splits.all(served)
}

/// Some ranks send their tensor, its layout unchanged, to other ranks along the axis, or to all of them.
fn infer_relocation(space: &Space, x: &TensorType, ty: &TensorType) -> Result<Types, OpError> {
    let Some(from) = x.layout.at else {
        bail!("V16", "`permute`: what all ranks hold need not be sent to some of them");
    };
    let fits = ty.layout.at.is_none_or(|to| to.axis == from.axis && to.coordinate < space.mesh.size(to.axis));
    if !fits || x.located(None) != ty.located(None) {
        let message =
            "`permute` sends what some ranks hold along the axis that tells them apart, and changes no more";
        return Err(OpError::new("V16", message));
    }
    Ok(smallvec![ty.clone()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;
    use crate::{DType, Dim};

    #[test]
    fn parts_that_some_ranks_hold_serve_whom_the_ranks_themselves_say() {
        let mut space = Space { mesh: Mesh::new([("o", 2), ("r", 5)]), ..Space::default() };
        let s = space.dims.push(Dim::new("s", 10));
        let [o, r] = ["o", "r"].map(|name| space.mesh.axis(name).unwrap());
        let mut home = TensorType::new(DType::F32, [s]);
        home.layout.split[0].extend([o, r]);
        let moved = |by: u64, only| home.with_layout(home.layout.clone().moved(r, by, 5, only));
        let some = [None, Some((0, 5)), Some((0, 2)), Some((1, 4)), Some((3, 5)), Some((2, 2))];
        let all: Vec<TensorType> = (0..5).flat_map(|by| some.map(|only| moved(by, only))).collect();
        for (from, to) in all.iter().flat_map(|from| all.iter().map(move |to| (from, to))) {
            let served = |rank| match to.layout.owner(&space.mesh, rank) {
                Some(owner) => from.layout.holder(&space.mesh, owner).is_some(),
                None => true,
            };
            let expected = space.mesh.iter_ranks().all(served);
            assert_eq!(infer_permute(&space, from, to).is_ok(), expected, "{from:?} {to:?}");
        }
    }

    /// The check by dimensions agrees with the check of all ranks' blocks.
    #[test]
    fn dimensions_serve_by_themselves_where_blocks_do() {
        let mut space = Space { mesh: Mesh::new([("a", 2), ("b", 3), ("c", 2)]), ..Space::default() };
        let s = space.dims.push(Dim { uneven: true, ..Dim::new("s", 14) });
        let h = space.dims.push(Dim::new("h", 12));
        let [a, b, c] = ["a", "b", "c"].map(|name| space.mesh.axis(name).unwrap());
        let splits: [&[AxisId]; 8] = [&[], &[a], &[b], &[c], &[a, b], &[b, a], &[a, c], &[c, b, a]];
        let types = splits.iter().flat_map(|&of_s| {
            splits.map(|of_h| {
                let mut ty = TensorType::new(DType::F32, [s, h]);
                ty.layout.split = [of_s, of_h].into_iter().map(AxisList::from_slice).collect();
                ty
            })
        });
        let once = |ty: &TensorType| {
            let [of_s, of_h] = [0, 1].map(|i| &ty.layout.split[i]);
            !of_s.iter().any(|axis| of_h.contains(axis))
        };
        let all: Vec<TensorType> = types.filter(once).collect();
        let mut n_served = 0;
        for (from, to) in all.iter().flat_map(|from| all.iter().map(move |to| (from, to))) {
            let blocks = |ty: &TensorType| -> BTreeSet<Corners> {
                space.mesh.iter_ranks().map(|rank| corners(&space.local_box(ty, rank))).collect()
            };
            let expected = blocks(to).is_subset(&blocks(from));
            assert_eq!(serves_by_dimension(&space, from, to), expected, "{from:?} {to:?}");
            n_served += usize::from(expected);
        }
        assert!(n_served > all.len(), "some are served by others than themselves");
    }
}
