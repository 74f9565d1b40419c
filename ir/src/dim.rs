//! Named dimensions: sizes, and the splits they allow.

use std::ops::Range;

use crate::entity;
use crate::order::Order;

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
    /// Elements that carry data: those whose position is below. The rest is padding: filled with zeros when loaded, cut
    /// off when stored.
    pub valid: u64,
    /// Whether ranks may hold different numbers of granules.
    pub uneven: bool,
    /// The elements that are expected to be filled, where the dimension is ragged: its size is a bound, it is filled from the
    /// front, by data that only a run knows, and elements that are not filled are zero.
    pub ragged: Option<u64>,
    /// The dimension of which this one repeats every element `size / size(of)` times in a row (replicated heads).
    pub copies: Option<DimId>,
    /// The position that each index has.
    pub order: Order,
    /// The elements of another dimension that ranks fetch, one rank after another, if this dimension is fetched.
    pub fetched: Option<Fetched>,
    /// Which part of another dimension this one is, if it is one.
    pub part: Option<Part>,
}

/// One of several equal parts of another dimension, cut rank by rank.
///
/// `of` is seen as `[runs, count, size / (runs · count)]` by index, and the part is what has `index` in the middle. Ranks
/// hold whole runs, as many each, so that every rank takes its part from its own elements. Indices of a part are its own
/// positions. A part has whole granules of a run, unless a run is one granule, which is cut
/// then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The dimension.
    pub of: DimId,
    /// Which part, below `count`.
    pub index: u64,
    /// Into how many parts it is cut.
    pub count: u64,
    /// The runs that are cut, one for each rank that holds some of the dimension.
    pub runs: u64,
}

/// The tokens that each rank needs of a sequence, its own among them.
///
/// The dimension is split by the axes that split `of`, and by these only: part `i` of it is fetched by the rank with coordinate
/// `i` along these axes needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The sequence.
    pub of: DimId,
    /// For each part the indices of `of`, ascending ranges that do not touch.
    pub parts: Vec<Vec<Range<u64>>>,
}

impl Fetched {
    /// Elements of part `i`.
    pub fn len(&self, i: usize) -> u64 {
        self.parts[i].iter().map(|r| r.end - r.start).sum()
    }

    /// The range of part `i` in the fetched dimension.
    pub fn part(&self, i: usize) -> Range<u64> {
        let start = (0..i).map(|i| self.len(i)).sum();
        start..start + self.len(i)
    }
}

impl Dim {
    /// A dimension of `size` elements that splits anywhere, evenly.
    pub fn new(name: impl Into<String>, size: u64) -> Self {
        Self {
            name: name.into(),
            size,
            granule: 1,
            valid: size,
            uneven: false,
            ragged: None,
            copies: None,
            order: Order::Contiguous,
            fetched: None,
            part: None,
        }
    }

    /// The largest accepted size, in elements; larger ones are refused before arithmetic can overflow.
    pub const MAX_SIZE: u64 = 1 << 40;

    /// Whether `degree` ranks can hold the same number of whole granules each.
    pub fn divides_evenly(&self, degree: u64) -> bool {
        degree != 0
            && self.size.is_multiple_of(self.granule)
            && (self.size / self.granule).is_multiple_of(degree)
    }

    /// The position of `index`.
    pub fn position(&self, index: u64) -> u64 {
        self.order.position(self.size, index)
    }
}
