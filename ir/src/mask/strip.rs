//! Strips: ranges of queries on which the kept keys are intervals with ends that are constant or move with the query.
//!
//! Within a strip the ends never change their order, so that intervals can be counted, met and joined as if the strip
//! were one row. Where ends would cross the strip is cut.

use std::ops::Range;

use crate::order;

/// An end of an interval of keys, as a function of the query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// This key, for every query.
    At(i128),
    /// The key at this distance from the query.
    Beside(i128),
}

impl Bound {
    /// The end for the query at `q`.
    pub fn at(self, q: i128) -> i128 {
        match self {
            Bound::At(key) => key,
            Bound::Beside(distance) => q + distance,
        }
    }
}

/// An interval of keys, `start..end`, for each query of a strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first key.
    pub start: Bound,
    /// One after the last key; nowhere before `start`.
    pub end: Bound,
}

impl Run {
    /// The interval for the query at `q`.
    pub(super) fn at(&self, q: i128) -> Range<i128> {
        self.start.at(q)..self.end.at(q)
    }
}

/// Queries and the keys they see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strip {
    /// The queries, at least one.
    pub queries: Range<i128>,
    /// Disjoint ascending intervals, at least one; none is empty for all queries.
    pub runs: Vec<Run>,
}

impl Strip {
    /// Kept pairs: lengths of intervals are arithmetic series over the queries.
    pub fn pairs(&self) -> u128 {
        let n = magnitude(self.queries.end - self.queries.start);
        let length = |run: &Run, q| {
            let keys = run.at(q);
            magnitude(keys.end - keys.start)
        };
        let series = |run: &Run| {
            let ends = length(run, self.queries.start) + length(run, self.queries.end - 1);
            // One of the factors is even; to halve it first keeps the product in range.
            if n.is_multiple_of(2) { n / 2 * ends } else { n * (ends / 2) }
        };
        self.runs.iter().map(series).sum()
    }

    /// The keys that `run` covers over all queries: neighbouring rows touch or overlap, so they are one interval.
    pub(super) fn reach(&self, run: &Run) -> Option<Range<i128>> {
        let keys = run.start.at(self.queries.start)..run.end.at(self.queries.end - 1);
        (!keys.is_empty()).then_some(keys)
    }
}

/// How two masks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// Keys that both keep.
    Both,
    /// Keys that one of them keeps.
    Either,
}

/// For each query the keys from the highest of `starts` to the lowest of `ends`.
pub(super) fn between(queries: Range<i128>, starts: &[Bound], ends: &[Bound]) -> Vec<Strip> {
    let mut out = Vec::new();
    if queries.is_empty() {
        return out;
    }
    let bounds: Vec<Bound> = starts.iter().chain(ends).copied().collect();
    for queries in uncrossed(queries, &bounds) {
        let order = Order::of(&queries);
        let start = starts.iter().copied().max_by_key(|&b| order.key(b));
        let end = ends.iter().copied().min_by_key(|&b| order.key(b));
        if let (Some(start), Some(end)) = (start, end)
            && order.key(start) < order.key(end)
        {
            push(&mut out, Strip { queries, runs: vec![Run { start, end }] });
        }
    }
    out
}

/// The strips of two masks over the same tile as those of their intersection or union.
pub(super) fn combine(a: &[Strip], b: &[Strip], how: How) -> Vec<Strip> {
    let ends = |strips: &[Strip]| strips.iter().flat_map(|s| [s.queries.start, s.queries.end]).collect();
    let mut cuts: Vec<i128> = ends(a);
    cuts.extend::<Vec<i128>>(ends(b));
    cuts.sort_unstable();
    cuts.dedup();
    let (mut a, mut b) = (a, b);
    let mut out = Vec::new();
    for cut in cuts.windows(2) {
        let queries = cut[0]..cut[1];
        let (of_a, of_b) = (advance(&mut a, &queries), advance(&mut b, &queries));
        let bounds: Vec<Bound> = match (of_a.is_empty(), of_b.is_empty(), how) {
            (false, false, _) => of_a.iter().chain(of_b).flat_map(|r| [r.start, r.end]).collect(),
            // The ends of one mask are in order already.
            (false, true, How::Either) | (true, false, How::Either) => Vec::new(),
            (true, true, _) | (_, _, How::Both) => continue,
        };
        for queries in uncrossed(queries, &bounds) {
            let order = Order::of(&queries);
            let runs = match how {
                How::Both => met(of_a, of_b, order),
                How::Either => either(of_a, of_b, order),
            };
            push(&mut out, Strip { queries, runs });
        }
    }
    out
}

/// Ascending intervals; those that touch or overlap are one.
pub(super) fn joined(intervals: impl Iterator<Item = Range<i128>>) -> Vec<Range<u64>> {
    let inside = |k: i128| u64::try_from(k).expect("strips stay inside their tile");
    let some = intervals.filter(|r| !r.is_empty());
    order::joined(some.map(|r| inside(r.start)..inside(r.end)).collect())
}

/// The intervals of the strip that covers `queries`, those before it dropped; nothing where none does.
fn advance<'s>(strips: &mut &'s [Strip], queries: &Range<i128>) -> &'s [Run] {
    while let Some((first, rest)) = strips.split_first() {
        if first.queries.end > queries.start {
            return if first.queries.start <= queries.start { &first.runs } else { &[] };
        }
        *strips = rest;
    }
    &[]
}

/// Parts of `queries` on which no two of `bounds` cross.
fn uncrossed(queries: Range<i128>, bounds: &[Bound]) -> Vec<Range<i128>> {
    let mut cuts = vec![queries.start, queries.end];
    // Tables have many constant ends; few ends move.
    let distance = |b: &Bound| match *b {
        Bound::At(_) => None,
        Bound::Beside(distance) => Some(distance),
    };
    let key = |b: &Bound| match *b {
        Bound::At(key) => Some(key),
        Bound::Beside(_) => None,
    };
    for distance in bounds.iter().filter_map(distance) {
        let meetings = bounds.iter().filter_map(key).map(|key| key - distance);
        cuts.extend(meetings.filter(|&q| queries.start < q && q < queries.end));
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

/// The order of bounds in a range of queries where none cross: that of their sums over the first and the last query.
#[derive(Clone, Copy)]
struct Order {
    first: i128,
    last: i128,
}

impl Order {
    fn of(queries: &Range<i128>) -> Self {
        Self { first: queries.start, last: queries.end - 1 }
    }

    fn key(self, bound: Bound) -> i128 {
        bound.at(self.first) + bound.at(self.last)
    }
}

fn met(a: &[Run], b: &[Run], order: Order) -> Vec<Run> {
    let mut out = Vec::new();
    let (mut i, mut j) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        let start = if order.key(x.start) >= order.key(y.start) { x.start } else { y.start };
        let x_ends_first = order.key(x.end) <= order.key(y.end);
        let end = if x_ends_first { x.end } else { y.end };
        if order.key(start) < order.key(end) {
            out.push(Run { start, end });
        }
        if x_ends_first {
            i += 1;
        } else {
            j += 1;
        }
    }
    out
}

fn either(a: &[Run], b: &[Run], order: Order) -> Vec<Run> {
    let mut runs: Vec<Run> = a.iter().chain(b).copied().collect();
    runs.sort_by_key(|r| order.key(r.start));
    let mut out: Vec<Run> = Vec::new();
    for run in runs {
        match out.last_mut() {
            Some(last) if order.key(run.start) <= order.key(last.end) => {
                if order.key(run.end) > order.key(last.end) {
                    last.end = run.end;
                }
            }
            // A run that its own strip kept for other rows may be empty in all of these.
            _ if order.key(run.start) == order.key(run.end) => {}
            _ => out.push(run),
        }
    }
    out
}

/// Adds a strip, to the last one if that ends here and says the same.
fn push(out: &mut Vec<Strip>, strip: Strip) {
    if strip.runs.is_empty() {
        return;
    }
    match out.last_mut() {
        Some(last) if last.queries.end == strip.queries.start && last.runs == strip.runs => {
            last.queries.end = strip.queries.end;
        }
        _ => out.push(strip),
    }
}

/// A count as an unsigned number.
pub(super) fn magnitude(n: i128) -> u128 {
    u128::try_from(n).expect("the ends of an interval are in order")
}
