//! Named dimensions: the one home of a size and of what may be done to it.

use crate::entity;

entity!(
    /// A dimension of a [`Space`](crate::Space).
    DimId, "dim"
);

/// A named dimension, for example `h`, the query heads.
///
/// Tensors name their dimensions and never repeat a size, so two tensors that share a name share the extent, and a
/// sharding rule reads as einsum does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dim {
    /// The name that the text form prints.
    pub name: String,
    /// The number of elements over all ranks, padding included.
    pub size: u64,
    /// Elements that stay together when the dimension is split: for query heads the size of a key/value group.
    pub granule: u64,
    /// Elements that carry data. The rest, at the end, is padding: filled with zeros when loaded, cut off when stored.
    pub valid: u64,
    /// Whether ranks may hold different numbers of granules.
    pub uneven: bool,
    /// The dimension of which this one repeats every element `size / size(of)` times in a row (replicated heads).
    pub copies: Option<DimId>,
}

impl Dim {
    /// A dimension of `size` elements that splits anywhere, evenly.
    pub fn new(name: impl Into<String>, size: u64) -> Self {
        Self { name: name.into(), size, granule: 1, valid: size, uneven: false, copies: None }
    }

    /// The largest accepted size, in elements; larger ones are refused before arithmetic can overflow.
    pub const MAX_SIZE: u64 = 1 << 40;

    /// Whether `degree` ranks can hold the same number of whole granules each.
    pub fn divides_evenly(&self, degree: u64) -> bool {
        degree != 0
            && self.size.is_multiple_of(self.granule)
            && (self.size / self.granule).is_multiple_of(degree)
    }
}
