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
    parts: Vec<Vec<Range<u64>>>,
    /// The end of each part in the fetched dimension.
    ends: Vec<u64>,
}

impl Fetched {
    /// Parts of `of`, each of ascending ranges of indices that do not touch.
    pub fn new(of: DimId, parts: Vec<Vec<Range<u64>>>) -> Self {
        let len =
            |part: &Vec<Range<u64>>| -> u64 { part.iter().map(|r| r.end.saturating_sub(r.start)).sum() };
        let ends = parts.iter().scan(0u64, |end, part| {
            *end = end.saturating_add(len(part));
            Some(*end)
        });
        Self { of, ends: ends.collect(), parts }
    }

    /// For each part the indices of `of`.
    pub fn parts(&self) -> &[Vec<Range<u64>>] {
        &self.parts
    }

    /// Elements of part `i`.
    pub fn len(&self, i: usize) -> u64 {
        let Range { start, end } = self.part(i);
        end - start
    }

    /// Elements of all parts.
    pub fn total(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The range of part `i` in the fetched dimension.
    pub fn part(&self, i: usize) -> Range<u64> {
        let start = i.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[i]
    }

    /// The indices of `of` that `indices` of the fetched dimension are, in order, each range with its first fetched index.
    pub fn sources(&self, indices: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
        let first = self.ends.partition_point(|&end| end <= indices.start);
        let touched = (first..self.parts.len()).take_while({
            let end = indices.end;
            move |&i| self.part(i).start < end
        });
        let ranges = touched.flat_map(|i| {
            let mut next = self.part(i).start;
            self.parts[i].iter().map(move |range| {
                let at = next;
                next += range.end - range.start;
                (at, range)
            })
        });
        ranges.filter_map(move |(at, range)| {
            let len = range.end - range.start;
            let (start, end) = (indices.start.max(at), indices.end.min(at + len));
            (start < end).then(|| (start, range.start + (start - at)..range.start + (end - at)))
        })
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
