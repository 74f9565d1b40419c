//! The part of an attention on one rank, in indices and positions: shared by the oracle and the runtime.

use std::ops::Range;

use ithaca_ir::boxes::Region;
use ithaca_ir::ops::{Attention, Dropout, Keyed};
use ithaca_ir::order::Run;
use ithaca_ir::{DimId, Mask, Space, TensorType};

use crate::error::RunError;
use crate::oracle::value::{Operand, OperandRegion};
use crate::positions;
use crate::real::Real;
use crate::tensor::{Offsets, extents, index, length, strides};

/// Keys and values of a cache of eight bits, as numbers; `None` where they have no scales.
///
/// # Errors
/// [`RunError::Invalid`] for operands that do not fit.
pub(crate) fn with_scales<T: Real>(
    attention: &Attention,
    operands: &[Operand<'_, T>],
) -> Result<Option<[Vec<T>; 2]>, RunError> {
    let Some(scales) = attention.scale_operands() else { return Ok(None) };
    let numbers = |i: usize, scales: usize| -> Result<Vec<T>, RunError> {
        let width = operands[i].shape().last().copied().unwrap_or(1).max(1);
        let rows = operands[i].real()?.chunks(width).zip(operands[scales].real()?);
        Ok(rows.flat_map(|(row, &scale)| row.iter().map(move |&x| x * scale)).collect())
    };
    Ok(Some([numbers(1, scales[0])?, numbers(2, scales[1])?]))
}

/// Sizes and positions of the queries and keys that a rank holds.
///
/// Queries and keys are counted as they are held; their positions may be in any order, and either may be empty.
#[derive(Clone, Debug)]
pub struct Extent {
    /// Combinations of the shared dimensions in front.
    pub front: usize,
    /// Queries held.
    pub queries: usize,
    /// Query heads held.
    pub heads: usize,
    /// Keys held.
    pub keys: usize,
    /// Key/value heads held.
    pub kv_heads: usize,
    /// Width of queries and keys.
    pub width: usize,
    /// Width of values.
    pub value_width: usize,
    /// The position of each query held.
    pub query_positions: Vec<u64>,
    /// The position of each key held, padding included.
    pub key_positions: Vec<u64>,
    /// For each query head held, the key/value head held that serves it.
    pub served_by: Vec<usize>,
    /// The number of each query head held among all, whichever part of them this attention has.
    head_numbers: Vec<u64>,
    /// For each combination of the dimensions in front, its number among those of all ranks.
    sequences: Vec<u64>,
    /// Keys held that are no padding, as runs by position; indices count the keys held.
    runs: Vec<Run>,
    /// Where keys are a ring.
    ring: Option<Ring>,
}

/// Keys that are a ring of the last tokens.
#[derive(Clone, Copy, Debug)]
struct Ring {
    /// Its tokens.
    tokens: u64,
    /// Tokens of the step, which it has room for.
    step: u64,
}

impl Ring {
    /// The position of the key at `slot` where the step starts at `start`; `None` where there is none yet.
    fn position(self, start: u64, slot: u64) -> Option<u64> {
        let end = start + self.step;
        let before = end - end % self.tokens;
        let lap = if slot < end % self.tokens { before } else { before.checked_sub(self.tokens)? };
        Some(lap + slot)
    }

    /// The same of a run of slots, in pieces.
    fn pieces(self, start: u64, run: &Run) -> impl Iterator<Item = Run> {
        let turn =
            ((start + self.step) % self.tokens).clamp(run.position, run.position + run.len) - run.position;
        let piece = move |part: Range<u64>, run: &Run| {
            let position = self.position(start, run.position + part.start)?;
            let len = part.end - part.start;
            (len > 0).then_some(Run { index: run.index + part.start, len, position })
        };
        [piece(0..turn, run), piece(turn..run.len, run)].into_iter().flatten()
    }
}

impl Extent {
    /// The extent of `attention` on operands of which the first three are q, k and v.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn of<T: Real>(
        space: &Space,
        attention: &Attention,
        operands: &[Operand<'_, T>],
    ) -> Result<Self, RunError> {
        Self::new(space, attention, operands[0].held(), operands[1].held(), operands[2].held())
    }

    /// The extent of `attention` on operands that hold these parts of q, k and v.
    ///
    /// # Errors
    /// [`RunError::Invalid`] when a query head is held without its key/value head, or shapes do not fit.
    pub fn new(
        space: &Space,
        attention: &Attention,
        (q_ty, q): OperandRegion<'_>,
        (k_ty, k): OperandRegion<'_>,
        (v_ty, v): OperandRegion<'_>,
    ) -> Result<Self, RunError> {
        let &Attention { heads, kv_heads, queries, keys, width, .. } = attention;
        let n = q.len();
        let ends = |ty: &TensorType, held: &Region, roles: &[DimId]| {
            n >= 3 && held.len() == n && ty.dims.len() == n && ty.dims[n - 3..].starts_with(roles)
        };
        let fits = ends(q_ty, q, &[queries, heads, width])
            && ends(k_ty, k, &[keys, kv_heads, width])
            && ends(v_ty, v, &[keys, kv_heads])
            && k[..n - 1] == v[..n - 1]
            && q[..n - 3] == k[..n - 3]
            && q[n - 1] == k[n - 1];
        if !fits {
            return Err(RunError::invalid("q, k and v of `attention` are held in parts that do not fit"));
        }
        let front_shape = extents(&q[..n - 3].to_vec());
        let whole: Vec<usize> = q_ty.dims[..n - 3].iter().map(|&d| index(space.size(d))).collect();
        let steps = strides(&whole);
        let first = q[..n - 3].iter().zip(&steps).map(|(r, step)| index(r.start) * step).sum();
        Ok(Self {
            front: front_shape.iter().product(),
            queries: length(&q[n - 3]),
            heads: length(&q[n - 2]),
            keys: length(&k[n - 3]),
            kv_heads: length(&k[n - 2]),
            width: length(&q[n - 1]),
            value_width: length(&v[n - 1]),
            query_positions: positions::sequence_positions(space, queries, q[n - 3].clone()),
            key_positions: positions::sequence_positions(space, keys, k[n - 3].clone()),
            served_by: served_by(space, attention, &q[n - 2], &k[n - 2])?,
            head_numbers: q[n - 2].clone().map(|head| space.origin(heads, head)).collect(),
            sequences: Offsets::new(front_shape, steps, first).map(|i| i as u64).collect(),
            runs: key_runs(space, keys, &k[n - 3]),
            ring: attention
                .wraps
                .then(|| Ring { tokens: space.dims[keys].valid, step: space.dims[queries].valid }),
        })
    }

    /// For each combination of the dimensions in front, an extent of that alone: of the keys before its end, or with the first
    /// query at the position where it starts.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for another number of lengths, or negative ones.
    pub(crate) fn of_sequences(&self, attention: &Attention, lengths: &[i32]) -> Result<Vec<Self>, RunError> {
        let wrong = || RunError::invalid("the lengths of `attention` are not one for each sequence");
        if lengths.len() != self.front {
            return Err(wrong());
        }
        let one = |(&length, &sequence): (&i32, &u64)| {
            let length = u64::try_from(length).map_err(|_| wrong())?;
            let one = Self { front: 1, sequences: vec![sequence], ..self.clone() };
            if attention.ends {
                return Ok(Self { runs: before(length, self.runs.iter().copied()), ..one });
            }
            let start = length;
            let query_positions = self.query_positions.iter().map(|p| p + start).collect();
            let one = Self { query_positions, ..one };
            let Some(ring) = self.ring else { return Ok(one) };
            let mut runs: Vec<Run> = self.runs.iter().flat_map(|run| ring.pieces(start, run)).collect();
            runs.sort_unstable_by_key(|run| run.position);
            let at = |&slot: &u64| ring.position(start, slot).unwrap_or(slot);
            let key_positions = self.key_positions.iter().map(at).collect();
            Ok(Self { runs, key_positions, ..one })
        };
        lengths.iter().zip(&self.sequences).map(one).collect()
    }

    /// The parts of q, k and v that belong to the `i`-th of [`of_sequences`](Self::of_sequences).
    pub(crate) fn sequence_of<'a, T>(&self, i: usize, [q, k, v]: [&'a [T]; 3]) -> [&'a [T]; 3] {
        let part = |x: &'a [T], n: usize| &x[i * n..(i + 1) * n];
        let keys = self.keys * self.kv_heads;
        [
            part(q, self.queries * self.heads * self.width),
            part(k, keys * self.width),
            part(v, keys * self.value_width),
        ]
    }

    /// The keys held that a query held sees, ascending.
    pub fn seen(&self, mask: &Mask, query: usize) -> Vec<Range<usize>> {
        let Some(span) = self.span() else { return Vec::new() };
        let wide = |r: Range<u64>| i128::from(r.start)..i128::from(r.end);
        self.held(mask.runs(self.query_positions[query], span).into_iter().map(wide))
    }

    /// [`seen`](Self::seen) for each of these queries, by the strips of the mask where their positions are
    /// neighbours.
    pub fn seen_by_each(&self, mask: &Mask, queries: Range<usize>) -> Vec<Vec<Range<usize>>> {
        let mut seen: Vec<Vec<Range<usize>>> = vec![Vec::new(); queries.len()];
        let Some(span) = self.span() else { return seen };
        let positions = &self.query_positions[queries];
        let mut start = 0;
        while start < positions.len() {
            let neighbours = positions[start..].windows(2).take_while(|pair| pair[0] + 1 == pair[1]).count();
            let end = start + neighbours + 1;
            let first = positions[start];
            for strip in mask.strips(first..positions[end - 1] + 1, span.clone()) {
                for query in strip.queries.clone() {
                    let row = start + index((query - i128::from(first)) as u64);
                    let visible = |run: &ithaca_ir::mask::Run| run.start.at(query)..run.end.at(query);
                    seen[row] = self.held(strip.runs.iter().map(visible));
                }
            }
            start = end;
        }
        seen
    }

    /// The positions from the first key held to the last.
    fn span(&self) -> Option<Range<u64>> {
        let (first, last) = (self.runs.first()?, self.runs.last()?);
        Some(first.position..last.position + last.len)
    }

    /// The keys held that have one of these positions, which are ascending; ascending by index.
    fn held(&self, visible: impl Iterator<Item = Range<i128>>) -> Vec<Range<usize>> {
        let mut seen = Vec::with_capacity(1);
        let mut runs = self.runs.iter().peekable();
        for visible in visible {
            // Both are ascending by position, so runs that end before this interval are done.
            while let Some(run) = runs.peek() {
                let (first, end) = (i128::from(run.position), i128::from(run.position + run.len));
                let (from, to) = (first.max(visible.start), end.min(visible.end));
                if from < to {
                    let start = index(run.index) + index((from - first) as u64);
                    seen.push(start..start + index((to - from) as u64));
                }
                if end > visible.end {
                    break;
                }
                runs.next();
            }
        }
        joined(seen)
    }

    /// The row of a query of a head: rows of q, o and lse are numbered by front, query and head.
    pub fn row(&self, front: usize, query: usize, head: usize) -> usize {
        (front * self.queries + query) * self.heads + head
    }

    /// The row of a key, of a key/value head held: rows of k and v.
    pub fn key_row(&self, front: usize, key: usize, kv_head: usize) -> usize {
        (front * self.keys + key) * self.kv_heads + kv_head
    }

    /// The distance in positions from a query to a key.
    pub fn offset(&self, query: usize, key: usize) -> i64 {
        self.key_positions[key].cast_signed().wrapping_sub(self.query_positions[query].cast_signed())
    }

    /// The factor by which `dropout` changes a weight: zero, or one over the share that is kept.
    pub fn kept(&self, dropout: &Dropout, front: usize, query: usize, head: usize, key: usize) -> f64 {
        let head = self.head_numbers[head];
        let (query, key) = (self.query_positions[query], self.key_positions[key]);
        if dropout.drops(self.sequences[front], head, query, key) { 0.0 } else { 1.0 / (1.0 - dropout.rate) }
    }
}

/// Ascending ranges, those that touch made one.
pub fn joined(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_unstable_by_key(|r| r.start);
    let mut out: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

/// For each query head held, the key/value head held that serves it. Global heads decide, so that parts of any size are
/// served rightly.
pub(crate) fn served_by(
    space: &Space,
    attention: &Attention,
    heads: &Range<u64>,
    kv_heads: &Range<u64>,
) -> Result<Vec<usize>, RunError> {
    let group = (space.size(attention.heads) / space.size(attention.kv_heads).max(1)).max(1);
    let serving = |head: u64| {
        if kv_heads.contains(&(head / group)) {
            Ok(index(head / group - kv_heads.start))
        } else {
            Err(RunError::invalid(format!(
                "query head {head} is held without its key/value head {}",
                head / group
            )))
        }
    };
    heads.clone().map(serving).collect()
}

/// Runs of the keys held, by position, those of padding left out.
fn key_runs(space: &Space, keys: DimId, held: &Range<u64>) -> Vec<Run> {
    let valid = space.dims[space.sequence(keys)].valid;
    let runs = space.position_runs(keys, held.clone()).into_iter();
    let mut runs = before(valid, runs.map(|run| Run { index: run.index - held.start, ..run }));
    runs.sort_unstable_by_key(|run| run.position);
    runs
}

/// The parts of runs at positions below `end`.
fn before(end: u64, runs: impl Iterator<Item = Run>) -> Vec<Run> {
    let cut = |run: Run| Run { len: end.min(run.position + run.len).saturating_sub(run.position), ..run };
    runs.map(cut).filter(|run| run.len > 0).collect()
}

/// Refuses attention that a rank cannot compute.
///
/// # Errors
/// [`RunError::Unsupported`] for dropout that follows the order of a device's own computation.
pub(crate) fn check(attention: &Attention) -> Result<(), RunError> {
    match attention.dropout.map(|d| d.keyed) {
        Some(Keyed::Stream) => {
            Err(RunError::Unsupported("dropout that is keyed by a device's stream of numbers".to_owned()))
        }
        Some(Keyed::Position) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_has_the_last_tokens_before_the_end_of_the_step() {
        let ring = Ring { tokens: 16, step: 3 };
        for start in 0..100u64 {
            let position = |slot: u64| ring.position(start, slot);
            for slot in 0..16 {
                let last = (0..start + 3).rev().find(|position| position % 16 == slot);
                assert_eq!(position(slot), last, "{start} {slot}");
            }
            let run = Run { index: 5, position: 4, len: 9 };
            let found: Vec<_> = ring.pieces(start, &run).collect();
            let all = found.iter().flat_map(|run| (0..run.len).map(|i| (run.index + i, run.position + i)));
            let expected = (0..9).filter_map(|i| Some((5 + i, position(4 + i)?)));
            assert!(all.eq(expected), "{start}: {found:?}");
        }
    }
}
