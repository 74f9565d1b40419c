//! Declares dimensions: parts, once each, and names that are free.

use ithaca_ir::{Dim, DimId, Part, Space};

/// The dimension that is this part: one that is there already, or a new one.
pub(crate) fn part(space: &mut Space, part: Part) -> DimId {
    if let Some((id, _)) = space.dims.iter().find(|(_, dim)| dim.part == Some(part)) {
        return id;
    }
    let whole = &space.dims[part.of];
    let is_torn = whole.size == part.runs * whole.granule && whole.granule.is_multiple_of(part.count);
    let granule = if is_torn { whole.granule / part.count } else { whole.granule };
    let size = whole.size / part.count;
    // It is filled from the front; parts of one run follow each other.
    let filled = |expected: u64| expected.saturating_sub(part.index * size).min(size);
    let ragged = whole.ragged.filter(|_| part.runs == 1).map(filled);
    let name = space.free_name(format!("{}_{}", whole.name, part.index));
    space.dims.push(Dim { granule, ragged, part: Some(part), ..Dim::new(name, size) })
}
