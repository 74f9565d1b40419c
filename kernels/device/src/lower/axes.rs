//! The axes along which the parts of a tensor differ.

use ithaca_ir::layout::AxisList;
use ithaca_ir::{AxisId, DimId, Space, TensorType};

/// The axes along which ranks have parts of different places, or travelled parts.
pub(super) fn splitting_axes(ty: &TensorType) -> impl Iterator<Item = AxisId> + '_ {
    ty.layout.split.iter().flatten().copied().chain(ty.layout.moved.iter().map(|moved| moved.axis))
}

/// The axes along which ranks may have parts of different sizes.
pub(super) fn uneven_axes<'t>(space: &'t Space, ty: &'t TensorType) -> impl Iterator<Item = AxisId> + 't {
    let everywhere = ty.layout.moved.iter().all(|moved| moved.only.is_none());
    let uneven = move |(dim, axes): (&DimId, &AxisList)| {
        let dim = &space.dims[*dim];
        dim.fetched.is_some() || !dim.divides_evenly(space.mesh.degree(axes))
    };
    let dims = ty.dims.iter().zip(&ty.layout.split);
    let uneven_dims = dims.filter(move |&part| uneven(part)).flat_map(|(_, axes)| axes).copied();
    let any = ty.dims.iter().zip(&ty.layout.split).any(uneven);
    let moved = ty.layout.moved.iter().filter(move |_| any || !everywhere);
    let split = ty.layout.split.iter().flatten().copied().filter(move |_| !everywhere);
    uneven_dims.chain(moved.map(|moved| moved.axis)).chain(split)
}
