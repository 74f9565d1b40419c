//! Invariants of dimensions, meshes and types: `V06`, `V09`, `V10`, `V13`, `V22`, `V23`, `V24`.

use std::ops::Range;

use crate::diagnostic::Diagnostic;
use crate::dim::{Dim, DimId, Fetched, Part};
use crate::entity::Entity;
use crate::identifier::is_identifier;
use crate::layout::{At, Layout};
use crate::mesh::{Axis, AxisId};
use crate::module::Level;
use crate::ops::error::{OpError, bail, ensure};
use crate::order::Order;
use crate::space::Space;
use crate::types::TensorType;

/// The most dimensions of a space: names are searched one by one.
pub const MAX_DIMS: usize = 4096;

/// The most axes of a mesh.
pub const MAX_AXES: usize = 32;

/// The most ranks of a mesh.
pub const MAX_RANKS: u64 = 1 << 20;

/// The most bytes of a tensor, over all ranks.
pub const MAX_BYTES: u64 = 1 << 62;

/// The mistakes in a dimension, given the dimensions declared before it.
pub(crate) fn check_dim(space: &Space, id: DimId) -> Result<(), Box<Diagnostic>> {
    let Dim { name, size, granule, valid, uneven, ragged, copies, order, fetched, part } = &space.dims[id];
    let (size, granule, valid) = (*size, *granule, *valid);
    ensure!(is_identifier(name), "V22", "`{name}` is no name for a dimension");
    ensure!(id.index() < MAX_DIMS, "V22", "there are more than {MAX_DIMS} dimensions");
    ensure!(space.dim(name) == Some(id), "V22", "dimension `{name}` is declared twice");
    let most = Dim::MAX_SIZE;
    let fits = (1..=most).contains(&size);
    ensure!(fits, "V22", "dimension `{name}` has {size} elements; it needs 1 to {most}");
    if granule == 0 || granule > size || (!uneven && size % granule != 0) {
        let message = format!("granules of {granule} do not divide dimension `{name}` of {size}");
        let help = "declare the dimension uneven, or choose a granule that divides it";
        return Err(Box::new(Diagnostic::new("V22", message).help(help)));
    }
    ensure!((1..=size).contains(&valid), "V22", "dimension `{name}` has {valid} valid elements of {size}");
    if let Some(expected) = *ragged {
        ensure!(expected <= size, "V22", "`{name}` has {size} elements and expects {expected} to be filled");
        let plain = valid == size && copies.is_none() && fetched.is_none() && *order == Order::Contiguous;
        ensure!(
            plain && !uneven,
            "V22",
            "`{name}` is ragged, and so has no padding, copies, fetches, order or uneven parts"
        );
    }
    order.check(size).map_err(|message| OpError::new("V27", format!("dimension `{name}`: {message}")))?;
    if let Some(part) = part {
        return check_part(space, id, part);
    }
    if let Some(fetched) = fetched {
        return check_fetched(space, id, fetched);
    }
    let Some(of) = *copies else { return Ok(()) };
    ensure!(
        of < id && space.dims[of].copies.is_none(),
        "V22",
        "`{name}` must copy a dimension that is declared before it and copies none"
    );
    let original = &space.dims[of];
    ensure!(
        size % original.size == 0,
        "V22",
        "`{name}` of {size} elements cannot copy `{}` of {}: not a multiple",
        original.name,
        original.size
    );
    let expected = original.valid * (size / original.size);
    ensure!(
        valid == expected,
        "V22",
        "`{name}` copies {} valid elements of `{}`, so {expected} of its own are valid, not {valid}",
        original.valid,
        original.name
    );
    Ok(())
}

/// The mistakes in a fetched dimension.
fn check_fetched(space: &Space, id: DimId, fetched: &Fetched) -> Result<(), Box<Diagnostic>> {
    let Dim { name, size, valid, granule, copies, order, uneven, .. } = &space.dims[id];
    let of = fetched.of;
    ensure!(
        of < id && space.dims[of].fetched.is_none(),
        "V27",
        "`{name}` must fetch from a dimension that is declared before it and fetches none"
    );
    let plain = copies.is_none() && *order == Order::Contiguous && !uneven && *granule == 1 && valid == size;
    ensure!(plain, "V27", "`{name}` is fetched, and so has no copies, order, granule or padding of its own");
    for (i, part) in fetched.parts().iter().enumerate() {
        let mut next = None;
        for range in part {
            let Range { start, end } = range;
            ensure!(
                next.is_none_or(|next| next < *start) && start < end && *end <= space.size(of),
                "V27",
                "part {i} of `{name}` fetches {start}..{end}, which is empty, out of order, next to another range or not in `{}`",
                space.dims[of].name
            );
            next = Some(range.end);
        }
    }
    let total = fetched.total();
    ensure!(total == *size, "V27", "the parts of `{name}` have {total} elements, not {size}");
    Ok(())
}

/// The mistakes in a part of a dimension.
fn check_part(space: &Space, id: DimId, part: &Part) -> Result<(), Box<Diagnostic>> {
    let Dim { name, size, valid, granule, copies, order, fetched, uneven, .. } = &space.dims[id];
    let Part { of, index, count, runs } = *part;
    let whole = space.dims.get(of).filter(|whole| of < id && whole.part.is_none() && whole.fetched.is_none());
    let Some(whole) = whole else {
        let rule = "must be a part of a dimension that is declared before it, is no part and fetches none";
        return Err(OpError::new("V22", format!("`{name}` {rule}")).into());
    };
    let plain =
        copies.is_none() && fetched.is_none() && *order == Order::Contiguous && !uneven && valid == size;
    // Where each run is one granule, granules themselves are cut: query heads of one key/value head.
    let is_torn = runs.checked_mul(whole.granule) == Some(whole.size)
        && count != 0
        && whole.granule.is_multiple_of(count);
    let unit = if is_torn { whole.granule / count } else { whole.granule };
    ensure!(
        plain && *granule == unit,
        "V22",
        "`{name}` is a part of `{}`: it has granules of {unit}, and no copies, order or padding of its own",
        whole.name
    );
    ensure!(
        index < count && runs != 0,
        "V22",
        "there is no part {index} of {count} of {runs} runs of `{}`",
        whole.name
    );
    // No product overflows: a factor that is larger than the dimension cannot divide it.
    let pieces = [runs, count, unit].into_iter().try_fold(1u64, u64::checked_mul);
    let divides = pieces.is_some_and(|n| whole.size.is_multiple_of(n));
    let Dim { name, size: n, granule, .. } = whole;
    ensure!(
        divides && *size == n / count,
        "V22",
        "`{name}` of {n} elements, in granules of {granule}, has no {count} parts of {size} in each of {runs} runs"
    );
    Ok(())
}

/// The mistakes in an axis, given the axes declared before it.
pub(crate) fn check_axis(space: &Space, id: AxisId) -> Result<(), Box<Diagnostic>> {
    let Axis { name, size } = &space.mesh.axes[id];
    ensure!(is_identifier(name), "V23", "`{name}` is no name for a mesh axis");
    ensure!(id.index() < MAX_AXES, "V23", "the mesh has more than {MAX_AXES} axes");
    ensure!(space.mesh.axis(name) == Some(id), "V23", "mesh axis `{name}` is declared twice");
    ensure!(*size != 0, "V23", "mesh axis `{name}` has no ranks");
    let before = space.mesh.axes.values().take(id.index() + 1);
    let ranks = before.map(|a| a.size).try_fold(1u64, u64::checked_mul);
    let fits = ranks.is_some_and(|n| n <= MAX_RANKS);
    ensure!(fits, "V23", "up to axis `{name}` the mesh has more than {MAX_RANKS} ranks");
    Ok(())
}

/// Everything that is wrong with a space.
pub(crate) fn check_space(space: &Space) -> Vec<Diagnostic> {
    let dims = space.dims.ids().map(|dim| check_dim(space, dim));
    let all = dims.chain(space.mesh.axes.ids().map(|axis| check_axis(space, axis)));
    all.filter_map(Result::err).map(|mistake| *mistake).collect()
}

/// The mistakes in a type of a correct space.
///
/// # Errors
/// `V06`, `V24`, `V13`, `V10`, `V09`, in this order.
pub(crate) fn check_type(space: &Space, level: Level, ty: &TensorType) -> Result<(), OpError> {
    let TensorType { dtype, dims, layout } = ty;
    for (i, &dim) in dims.iter().enumerate() {
        let Some(declared) = space.dims.get(dim) else {
            bail!("V06", "{dim:?} is no dimension of this module");
        };
        ensure!(!dims[..i].contains(&dim), "V06", "a type names dimension `{}` twice", declared.name);
    }
    let known =
        layout.axes().chain(layout.moved.iter().map(|m| m.axis)).all(|a| space.mesh.axes.get(a).is_some());
    let ascending = layout.partial.is_sorted();
    if layout.split.len() != dims.len() || !known || !ascending {
        bail!("V06", "a layout has a split for each dimension, by axes of the mesh");
    }
    let mut sizes = dims.iter().map(|&d| space.size(d));
    let bytes =
        sizes.try_fold(dtype.bytes(), |product, n| product.checked_mul(n).filter(|&b| b <= MAX_BYTES));
    ensure!(bytes.is_some(), "V24", "a tensor of shape {:?} is too large", space.shape(ty));
    ensure!(
        level != Level::Program || layout.is_whole(),
        "V13",
        "on the program level tensors are whole, but this one has a layout"
    );
    let mut seen: Vec<AxisId> = Vec::new();
    for axis in layout.axes() {
        if seen.contains(&axis) {
            let name = &space.mesh.axes[axis].name;
            bail!("V10", "axis `{name}` is used twice in one type");
        }
        seen.push(axis);
    }
    check_moved(space, layout)?;
    check_at(space, level, layout)?;
    dims.iter().zip(&layout.split).try_for_each(|(&dim, axes)| check_split(space, dim, axes))
}

/// The ranks that hold a value are told apart by an axis that does nothing else with it.
fn check_at(space: &Space, level: Level, layout: &Layout) -> Result<(), OpError> {
    let Some(At { axis, coordinate }) = layout.at else { return Ok(()) };
    ensure!(level != Level::Program, "V13", "on the program level all values are in one place");
    let Some(along) = space.mesh.axes.get(axis) else {
        bail!("V06", "a value is on ranks along an axis that is not of the mesh");
    };
    ensure!(
        coordinate < along.size,
        "V33",
        "a value is at coordinate {coordinate} of `{}`={}",
        along.name,
        along.size
    );
    if layout.axes().any(|a| a == axis) {
        Err(OpError::new("V10", format!("axis `{}` is used twice in one type", along.name)))
    } else {
        Ok(())
    }
}

/// Parts move along axes that split a dimension, by less than a round, and nothing that is still to be summed does.
fn check_moved(space: &Space, layout: &Layout) -> Result<(), OpError> {
    let ascending = layout.moved.windows(2).all(|pair| pair[0].axis < pair[1].axis);
    for m in &layout.moved {
        let (name, n) = (&space.mesh.axes[m.axis].name, space.mesh.size(m.axis));
        let splits = layout.split.iter().any(|axes| axes.contains(&m.axis));
        let some = m.only.is_none_or(|(start, end)| start < end && end <= n);
        if !ascending || !splits || m.by >= n || !some || (m.by == 0 && m.only.is_none()) {
            bail!("V28", "parts along `{name}` of {n} ranks cannot have moved as the type says");
        }
        ensure!(layout.partial.is_empty(), "V28", "parts of a sum still to be taken cannot have moved");
    }
    Ok(())
}

fn check_split(space: &Space, dim: DimId, axes: &[AxisId]) -> Result<(), OpError> {
    if space.can_split(dim, axes) {
        return Ok(());
    }
    let Dim { name, size, granule, uneven, part, .. } = &space.dims[dim];
    let degree = space.mesh.degree(axes);
    if let Some(part) = part {
        let message = format!(
            "`{name}` is a part of `{}` in {} runs, which {degree} ranks do not hold as many of each",
            space.dims[part.of].name, part.runs
        );
        return Err(OpError::new("V09", message));
    }
    let message = if *uneven {
        format!("{} granules of `{name}` leave some of {degree} ranks without any", size / granule)
    } else {
        format!("`{name}` of {size} elements, in granules of {granule}, does not divide by {degree} ranks")
    };
    Err(OpError::new("V09", message))
}
