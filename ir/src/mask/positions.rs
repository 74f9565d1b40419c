//! Sets of positions, and how many pairs a mask keeps between two of them.
//!
//! A rank's tokens are rarely one range: a zigzag gives it two, a striped order one in every so many. A set is kept as
//! runs of equal length at equal distance, so a stripe is one entry however long the sequence is, and pairs between two
//! stripes are sums of arithmetic series.

use std::ops::Range;

use smallvec::SmallVec;

use crate::dim::DimId;
use crate::mask::Mask;
use crate::mask::strip::{Bound, Strip, magnitude};
use crate::order::{StridedRun, joined};
use crate::space::Space;

/// As many runs of one set are counted pair by pair with those of another.
const FEW: usize = 4;

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
        Self::of_parts(parts)
    }

    /// The positions of `indices` of a dimension.
    pub fn of(space: &Space, dim: DimId, indices: Range<u64>) -> Self {
        /// As many runs are joined one by one.
        const JOINED: u64 = 1024;
        Self::merging(space.strided_runs(dim, indices), JOINED)
    }

    /// The positions of all strided runs, which have none twice; more than `few` runs are merged as strided runs if they can be.
    fn merging(strided_runs: Vec<StridedRun>, few: u64) -> Self {
        let runs = |s: &StridedRun| {
            let StridedRun { position, len, stride, count } = *s;
            (0..count).map(move |i| position + i * stride..position + i * stride + len)
        };
        let is_few = strided_runs.iter().map(|s| s.count).sum::<u64>() <= few;
        let merged = (!is_few).then(|| merged(&strided_runs)).flatten();
        merged.map_or_else(|| Self::new(strided_runs.iter().flat_map(runs)), Self::of_parts)
    }

    fn of_parts(parts: Vec<Progression>) -> Self {
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

    /// The runs, if there are few.
    fn few_runs(&self) -> Option<SmallVec<[Range<i128>; FEW]>> {
        let n = |part: &Progression| if part.is_whole() { 1 } else { part.count };
        if self.parts.iter().map(n).sum::<i128>() > FEW as i128 {
            return None;
        }
        let runs = |part: &Progression| {
            let Progression { first, len, stride, count } = *part;
            let (len, count) = if part.is_whole() { (count * len, 1) } else { (len, count) };
            (0..count).map(move |i| first + i * stride..first + i * stride + len)
        };
        Some(self.parts.iter().flat_map(runs).collect())
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

/// Stretches as ascending progressions of which no two interleave: those of one stride that are side by side are one, and a
/// few runs may be left before and after it. `None` where they are not of this form.
fn merged(strided_runs: &[StridedRun]) -> Option<Vec<Progression>> {
    let (mut long, single): (Vec<StridedRun>, Vec<StridedRun>) =
        strided_runs.iter().partition(|s| s.count > 1);
    long.sort_by_key(|s| s.position);
    let (first, count) = (*long.first()?, long.iter().map(|s| s.count).min()?);
    let mut rest: Vec<Range<u64>> = single.iter().map(|s| s.position..s.position + s.len).collect();
    let mut tiles: Vec<StridedRun> = Vec::new();
    for one in long {
        if one.stride != first.stride || one.count - count > 1 {
            return None;
        }
        let last = one.position + count * one.stride;
        rest.extend((one.count > count).then_some(last..last + one.len));
        let one = StridedRun { count, ..one };
        match tiles.last_mut() {
            Some(tile) if tile.position + tile.len == one.position => tile.len += one.len,
            _ => tiles.push(one),
        }
    }
    // Two that are side by side around the stride are one but for the first run of one and the last of the other.
    if let [a, b] = tiles[..]
        && b.position + b.len == a.position + a.stride
        && count > 1
    {
        let last = b.position + (count - 1) * b.stride;
        rest.extend([a.position..a.position + a.len, last..last + b.len]);
        tiles = vec![StridedRun { len: a.len + b.len, count: count - 1, ..b }];
    }
    let [StridedRun { position, len, stride, count }] = tiles[..] else { return None };
    if len > stride {
        return None;
    }
    let whole = position..position + (count - 1) * stride + len;
    if len == stride {
        rest.push(whole);
        return Some(Positions::new(rest).parts);
    }
    let (before, after): (Vec<_>, Vec<_>) = rest.into_iter().partition(|r| r.end <= whole.start);
    if after.iter().any(|r| r.start < whole.end) {
        return None;
    }
    let [first, len, stride, count] = [position, len, stride, count].map(i128::from);
    let mut parts = Positions::new(before).parts;
    parts.push(Progression { first, len, stride, count });
    parts.extend(Positions::new(after).parts);
    Some(parts)
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

/// Pairs of a query of one run and a key of another whose difference, `key - query`, is within two bounds.
fn pairs_of_runs(
    (low, high): (Option<i128>, Option<i128>),
    queries: &Range<i128>,
    keys: &Range<i128>,
) -> i128 {
    let (m, n) = (queries.end - queries.start, keys.end - keys.start);
    // The sum, over all x below t, of x between 0 and n.
    let ramp = |t: i128| {
        let rising = t.clamp(0, n + 1);
        rising * (rising - 1) / 2 + (t - n - 1).max(0) * n
    };
    // Pairs whose difference is at most this.
    let up_to = |difference: i128| {
        let first = queries.start + difference + 1 - keys.start;
        ramp(first + m) - ramp(first)
    };
    let below = low.map_or(0, |low| up_to(low - 1));
    (high.map_or(m * n, up_to) - below).max(0)
}

impl Mask {
    /// Number of pairs kept between two sets of positions.
    pub fn pairs_between(&self, queries: &Positions, keys: &Positions) -> u128 {
        let Some(extent) = keys.extent() else { return 0 };
        if let Some(band) = self.offsets()
            && let (Some(queries), Some(keys)) = (queries.few_runs(), keys.few_runs())
        {
            let pairs = queries.iter().flat_map(|q| keys.iter().map(|k| pairs_of_runs(band, q, k)));
            return magnitude(pairs.sum());
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Order;

    fn expanded(strided_runs: &[StridedRun]) -> Positions {
        let runs = |s: &StridedRun| {
            let StridedRun { position, len, stride, count } = *s;
            (0..count).map(move |i| position + i * stride..position + i * stride + len)
        };
        Positions::new(strided_runs.iter().flat_map(runs))
    }

    /// Parts of stripes, taken from several ranks, have the same pairs merged as run by run.
    #[test]
    fn merged_stretches_are_the_runs() {
        let size = 96;
        let order = Order::Striped { parts: 8, block: 2 };
        let mut n_merged = 0;
        for (first, n, cut) in
            (0..8).flat_map(|a| (1..=8).flat_map(move |n| (0..4).map(move |cut| (a, n, cut))))
        {
            let mut strided_runs = Vec::new();
            for part in (first..first + n).map(|part| part % 8) {
                let from = part * 12 + if part < first { 0 } else { cut / 2 * 2 };
                let to = (part + 1) * 12 - if part < first { cut % 2 * 2 } else { 0 };
                order.strided_runs(size, from..to, &mut strided_runs);
            }
            n_merged += usize::from(merged(&strided_runs).is_some());
            let (alone, together) = (expanded(&strided_runs), Positions::merging(strided_runs.clone(), 0));
            assert_eq!(alone.len(), together.len(), "{strided_runs:?}");
            for (queries, keys) in
                [(0, 30), (17, 80), (40, 96)].into_iter().flat_map(|q| [(q, (0, 50)), (q, (3, 96))])
            {
                let of = |(from, to): (u64, u64)| Positions::new(std::iter::once(from..to));
                for mask in [Mask::Causal, Mask::Window { left: Some(9), right: Some(2) }] {
                    assert_eq!(
                        mask.pairs_between(&of(queries), &alone),
                        mask.pairs_between(&of(queries), &together)
                    );
                    assert_eq!(
                        mask.pairs_between(&alone, &of(keys)),
                        mask.pairs_between(&together, &of(keys))
                    );
                }
            }
        }
        assert!(n_merged > 100, "{n_merged} were merged");
    }

    #[test]
    fn stretches_have_the_positions_of_indices() {
        for order in [Order::Striped { parts: 4, block: 3 }, Order::Zigzag { parts: 3 }, Order::Contiguous] {
            let size = 60;
            for (from, to) in (0..size).flat_map(|from| (from..=size).map(move |to| (from, to))) {
                let mut strided_runs = Vec::new();
                order.strided_runs(size, from..to, &mut strided_runs);
                let runs = order.runs(size, from..to);
                assert_eq!(
                    expanded(&strided_runs),
                    Positions::new(runs.iter().map(crate::order::Run::positions))
                );
            }
        }
    }

    #[test]
    fn pairs_of_runs_are_those_that_are_allowed() {
        let run = |r: Range<u64>| Positions::new([r]);
        let masks = [
            Mask::Full,
            Mask::Causal,
            Mask::CausalAtEnd { queries: 6, keys: 9 },
            Mask::Window { left: Some(2), right: Some(1) },
            Mask::Window { left: None, right: Some(3) },
            Mask::All(vec![Mask::Causal, Mask::Window { left: Some(3), right: None }]),
        ];
        let ranges = || (0..9u64).flat_map(|a| (a + 1..10).map(move |b| a..b));
        for mask in &masks {
            for (q, k) in ranges().flat_map(|q| ranges().map(move |k| (q.clone(), k))) {
                let allowed = q.clone().flat_map(|q| k.clone().map(move |k| (q, k)));
                let expected = allowed.filter(|&(q, k)| mask.allows(q, k)).count() as u128;
                assert_eq!(
                    mask.pairs_between(&run(q.clone()), &run(k.clone())),
                    expected,
                    "{mask:?} {q:?} {k:?}"
                );
            }
        }
    }
}
