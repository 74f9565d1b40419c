//! The replication of key/value heads, and its adjoint.

use crate::dim::DimId;
use crate::ops::error::{OpError, bail, ensure};
use crate::space::Space;
use crate::types::TensorType;

pub(super) fn infer(space: &Space, from: DimId, to: DimId, x: &TensorType) -> Result<TensorType, OpError> {
    if !x.has(from) || x.has(to) {
        bail!("V05", "`repeat` needs `{}` in x", space.dims[from].name);
    }
    // Directly, or both copy the same dimension, the result the more often.
    let (source, target) = (&space.dims[from], &space.dims[to]);
    let siblings =
        target.copies.is_some() && target.copies == source.copies && target.size % source.size == 0;
    ensure!(
        target.copies == Some(from) || siblings,
        "V05",
        "`{}` is not declared to copy `{}`",
        space.dims[to].name,
        space.dims[from].name
    );
    let dims = x.dims.iter().map(|&d| if d == from { to } else { d });
    Ok(TensorType::new(x.dtype, dims.collect::<Vec<_>>()))
}

/// The sum over the copies of each element: split as the copies are as far as the originals divide; over the other axes
/// every rank has a summand.
pub(super) fn infer_sum(
    space: &Space,
    from: DimId,
    to: DimId,
    x: &TensorType,
) -> Result<TensorType, OpError> {
    let Some(i) = x.position(from).filter(|_| !x.has(to)) else {
        bail!("V05", "`sum_copies` needs `{}` in x", space.dims[from].name);
    };
    let (source, target) = (&space.dims[from], &space.dims[to]);
    let siblings =
        source.copies.is_some() && source.copies == target.copies && source.size % target.size == 0;
    ensure!(
        source.copies == Some(to) || siblings,
        "V05",
        "`{}` is not declared to copy `{}`",
        source.name,
        target.name
    );
    if !x.layout.partial.is_empty() || !x.layout.moved.is_empty() {
        bail!("V11", "`sum_copies` takes parts that are at home and no sum still to be taken");
    }
    let mut ty = x.clone();
    ty.dims[i] = to;
    let axes = std::mem::take(&mut ty.layout.split[i]);
    let kept = (0..=axes.len()).rev().find(|&n| space.can_split(to, &axes[..n])).unwrap_or(0);
    ty.layout.split[i] = axes[..kept].into();
    ty.layout.partial = axes[kept..].into();
    ty.layout.partial.sort_unstable();
    Ok(ty)
}
