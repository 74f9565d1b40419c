//! Sets of positions, and how many pairs a mask keeps between two of them.
//!
//! A rank's tokens are rarely one range: a zigzag gives it two, a striped order one in every so many. A set is kept as
//! runs of equal length at equal distance, so a stripe is one entry however long the sequence is, and pairs between two
//! stripes are sums of arithmetic series.

use std::ops::Range;

use crate::mask::Mask;
use crate::mask::strip::{Bound, Strip, magnitude};
use crate::order::joined;

/// A set of positions below 2^60.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Positions {
    /// Ascending; no two interleave.
    parts: Vec<Progression>,
    /// Number of positions before each part, and of all.
    before: Vec<i128>,
}

/// `count` runs of `len` positions, `stride` apart; a single run is as many runs of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Progression {
    first: i128,
    len: i128,
    stride: i128,
    count: i128,
}

impl Positions {
    /// The positions of `ranges`, in whatever order; repeated ones count once.
    pub fn new(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut parts: Vec<Progression> = Vec::new();
        for range in joined(ranges.into_iter().collect()) {
            let (first, len) = (i128::from(range.start), i128::from(range.end - range.start));
            match parts.last_mut().filter(|last| last.goes_on(first, len)) {
                Some(last) => *last = last.and(first, len),
                None => parts.push(Progression { first, len: 1, stride: 1, count: len }),
            }
        }
        let mut before = vec![0];
        before.extend(parts.iter().scan(0, |sum, part| {
            *sum += part.elements();
            Some(*sum)
        }));
        Self { parts, before }
    }

    /// The positions this many later.
    #[must_use]
    pub fn behind(&self, by: u64) -> Self {
        let later = |part: &Progression| Progression { first: part.first + i128::from(by), ..*part };
        Self { parts: self.parts.iter().map(later).collect(), before: self.before.clone() }
    }

    /// Number of positions.
    pub fn len(&self) -> u128 {
        magnitude(self.before.last().copied().unwrap_or(0))
    }

    /// Whether there are no positions.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// From the first to one after the last.
    fn extent(&self) -> Option<Range<u64>> {
        let at = |p: i128| u64::try_from(p).expect("positions are whole numbers of 64 bits");
        Some(at(self.parts.first()?.first)..at(self.parts.last()?.end()))
    }

    /// The sum, over the queries `xs`, of the number of positions before `bound`.
    fn sum_below(&self, xs: Progression, bound: Bound) -> i128 {
        let xs = match bound {
            Bound::At(key) => {
                let first = self.parts.partition_point(|p| p.end() <= key);
                let inside = self.parts.get(first).map_or(0, |p| p.below(key));
                return xs.elements() * (self.before[first] + inside);
            }
            Bound::Beside(distance) => Progression { first: xs.first + distance, ..xs },
        };
        let first = self.parts.partition_point(|p| p.end() <= xs.first);
        let reached = self.parts[first..].iter().take_while(|p| p.first < xs.end());
        let sum = |part: &Progression| {
            let within: i128 = xs.cut(part.first..part.end()).into_iter().map(|x| part.sum_below(x)).sum();
            within + part.elements() * xs.count_from(part.end())
        };
        xs.elements() * self.before[first] + reached.map(sum).sum::<i128>()
    }
}

impl Progression {
    fn elements(self) -> i128 {
        self.len * self.count
    }

    /// One after the last position.
    fn end(self) -> i128 {
        self.first + (self.count - 1) * self.stride + self.len
    }

    /// Whether it is one run.
    fn is_whole(self) -> bool {
        self.len == self.stride
    }

    /// Whether the run of `len` at `first` is the next of the progression, or makes one of the single run that it is.
    fn goes_on(self, first: i128, len: i128) -> bool {
        if self.is_whole() {
            self.count == len
        } else {
            self.len == len && self.first + self.count * self.stride == first
        }
    }

    /// The progression with the run that goes on.
    fn and(self, first: i128, len: i128) -> Progression {
        if self.is_whole() {
            Progression { first: self.first, len, stride: first - self.first, count: 2 }
        } else {
            Progression { count: self.count + 1, ..self }
        }
    }

    /// Its positions before `key`.
    fn below(self, key: i128) -> i128 {
        let y = (key - self.first).clamp(0, self.end() - self.first);
        y / self.stride * self.len + (y % self.stride).min(self.len)
    }

    /// Its positions from `key` on.
    fn count_from(self, key: i128) -> i128 {
        self.elements() - self.below(key)
    }

    /// Its positions in `range`: the rest of a run, whole runs, the start of a run.
    fn cut(self, range: Range<i128>) -> Vec<Progression> {
        let run = |from: i128, to: i128| {
            let (from, to) = (from.max(range.start), to.min(range.end));
            (from < to).then_some(Progression { first: from, len: 1, stride: 1, count: to - from })
        };
        if self.is_whole() {
            return run(self.first, self.end()).into_iter().collect();
        }
        let start = |i: i128| self.first + i * self.stride;
        // Runs within the range, and the runs before and after them.
        let from = (range.start - self.first).max(0).div_euclid(self.stride)
            + i128::from((range.start - self.first).max(0).rem_euclid(self.stride) > 0);
        let to = ((range.end - self.len - self.first).div_euclid(self.stride) + 1).min(self.count);
        let whole = (from < to).then(|| Progression { first: start(from), count: to - from, ..self });
        let mut out = Vec::with_capacity(3);
        let behind = to.max(from);
        out.extend((from > 0).then(|| run(start(from - 1), start(from - 1) + self.len)).flatten());
        out.extend(whole);
        out.extend((behind < self.count).then(|| run(start(behind), start(behind) + self.len)).flatten());
        out
    }

    /// The sum, over `xs` inside the extent, of its positions before each.
    fn sum_below(self, xs: Progression) -> i128 {
        let run = |first: i128, len: i128| self.sum_to(first + len) - self.sum_to(first);
        if xs.is_whole() {
            return run(xs.first, xs.count);
        }
        if xs.stride % self.stride != 0 {
            return (0..xs.count).map(|i| run(xs.first + i * xs.stride, xs.len)).sum();
        }
        // Each run is ahead of the one before by the same number of whole periods.
        let more = xs.stride / self.stride * self.len;
        xs.count * run(xs.first, xs.len) + xs.len * more * (xs.count * (xs.count - 1) / 2)
    }

    /// The sum, over every `x` from the first to before `end`, of its positions before `x`.
    fn sum_to(self, end: i128) -> i128 {
        let y = end - self.first;
        let (periods, rest) = (y / self.stride, y % self.stride);
        let ramp = |n: i128| {
            let rising = n.min(self.len);
            rising * (rising - 1) / 2 + (n - rising) * self.len
        };
        periods * ramp(self.stride)
            + self.len * self.stride * (periods * (periods - 1) / 2)
            + periods * self.len * rest
            + ramp(rest)
    }
}

impl Mask {
    /// Number of pairs kept between two sets of positions.
    pub fn pairs_between(&self, queries: &Positions, keys: &Positions) -> u128 {
        let Some(extent) = keys.extent() else { return 0 };
        let of_strip = |part: &Progression, strip: &Strip| -> i128 {
            let rows = part.cut(strip.queries.clone());
            let of_run = |(start, end)| -> i128 {
                rows.iter().map(|&xs| keys.sum_below(xs, end) - keys.sum_below(xs, start)).sum()
            };
            strip.runs.iter().map(|r| of_run((r.start, r.end))).sum()
        };
        let of_part = |part: &Progression| -> i128 {
            let at = |p: i128| u64::try_from(p).expect("positions are whole numbers of 64 bits");
            let strips = self.strips(at(part.first)..at(part.end()), extent.clone());
            strips.iter().map(|strip| of_strip(part, strip)).sum()
        };
        magnitude(queries.parts.iter().map(of_part).sum())
    }
}
