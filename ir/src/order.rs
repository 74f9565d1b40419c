//! Token orders: which position of the sequence each index of a dimension has.
//!
//! A sequence that is split over ranks is split by index, in a row. An order deals positions to indices, so a rank's row
//! of indices may be any set of tokens: chunks from both ends (zigzag), every n-th token (striped), a table. Masks,
//! rotary angles and labels go by position; inputs are loaded and outputs stored by position. Shapes and byte counts
//! know nothing of orders.

use std::fmt;
use std::ops::Range;

/// The position that each index of a dimension has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Index `i` is position `i`.
    #[default]
    Contiguous,
    /// `2 · parts` chunks; part `i` has chunks `i` and `2 · parts − 1 − i`, so that under a causal mask all parts have
    /// as many pairs (Llama 3, arXiv 2407.21783, section 3.3.2).
    Zigzag {
        /// Parts, as many as the ranks that share the work.
        parts: u64,
    },
    /// Blocks dealt round: part `i` has blocks `i`, `i + parts`, … (Striped Attention, arXiv 2311.09431).
    Striped {
        /// Parts, as many as the ranks that share the work.
        parts: u64,
        /// Tokens of a block.
        block: u64,
    },
    /// Runs of positions in order of index; each position occurs once.
    Table(Vec<Range<u64>>),
}

/// Neighbouring indices that have neighbouring positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first index.
    pub index: u64,
    /// The position of the first index.
    pub position: u64,
    /// Number of elements.
    pub len: u64,
}

impl Run {
    /// The positions.
    pub fn positions(&self) -> Range<u64> {
        self.position..self.position + self.len
    }

    /// The indices.
    pub fn indices(&self) -> Range<u64> {
        self.index..self.index + self.len
    }
}

/// Runs of `len` positions, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StridedRun {
    pub(crate) position: u64,
    pub(crate) len: u64,
    pub(crate) stride: u64,
    pub(crate) count: u64,
}

impl Order {
    /// The mistake in the order for a dimension of `size` elements, if there is one.
    ///
    /// # Errors
    /// The quantity that does not divide, or the position that occurs twice or never.
    pub fn check(&self, size: u64) -> Result<(), String> {
        match self {
            Order::Contiguous => Ok(()),
            Order::Zigzag { parts } => match chunk(size, parts.checked_mul(2)) {
                Some(_) => Ok(()),
                None => Err(format!(
                    "order zigzag({parts}) needs a multiple of 2 · {parts} tokens, and {size} is none"
                )),
            },
            Order::Striped { parts, block } => match chunk(size, parts.checked_mul(*block)) {
                Some(_) => Ok(()),
                None => Err(format!(
                    "order striped({parts}, {block}) needs a multiple of {parts} · {block} tokens, and {size} is none"
                )),
            },
            Order::Table(runs) => check_table(runs, size),
        }
    }

    /// The position of `index` in a dimension of `size` elements.
    pub fn position(&self, size: u64, index: u64) -> u64 {
        self.run_at(size, index).map_or(index, |run| run.position + (index - run.index))
    }

    /// The whole run of `index`.
    fn run_at(&self, size: u64, index: u64) -> Option<Run> {
        match self {
            Order::Contiguous => Some(Run { index: 0, position: 0, len: size }),
            Order::Zigzag { parts } => {
                let len = chunk(size, parts.checked_mul(2))?;
                let i = index / len;
                let at = if i.is_multiple_of(2) { i / 2 } else { 2 * parts - 1 - i / 2 };
                Some(Run { index: i * len, position: at * len, len })
            }
            Order::Striped { parts, block } => {
                let stripes = chunk(size, parts.checked_mul(*block))?;
                let i = index / block;
                let (part, stripe) = (i / stripes, i % stripes);
                Some(Run { index: i * block, position: (stripe * parts + part) * block, len: *block })
            }
            Order::Table(runs) => {
                let mut first = 0;
                for run in runs {
                    let len = run.end - run.start;
                    if index < first + len {
                        return Some(Run { index: first, position: run.start, len });
                    }
                    first += len;
                }
                None
            }
        }
    }

    /// The positions of `indices` as runs, in order of index; runs that continue each other are one.
    pub fn runs(&self, size: u64, indices: Range<u64>) -> Vec<Run> {
        let mut out: Vec<Run> = Vec::new();
        let mut add = |run: Run| {
            let from = run.index.max(indices.start);
            let to = (run.index + run.len).min(indices.end);
            if from >= to {
                return;
            }
            let run = Run { index: from, position: run.position + (from - run.index), len: to - from };
            match out.last_mut() {
                Some(last) if last.position + last.len == run.position => last.len += run.len,
                _ => out.push(run),
            }
        };
        if let Order::Table(runs) = self {
            let mut index = 0;
            for run in runs {
                let len = run.end - run.start;
                add(Run { index, position: run.start, len });
                index += len;
            }
            return out;
        }
        if let Order::Striped { parts, block } = self
            && let Some(stripes) = chunk(size, parts.checked_mul(*block))
        {
            let (mut part, mut stripe) = (indices.start / block / stripes, indices.start / block % stripes);
            let mut index = indices.start / block * block;
            while part < *parts && index < indices.end {
                add(Run { index, position: (stripe * parts + part) * block, len: *block });
                (index, stripe) = (index + block, stripe + 1);
                if stripe == stripes {
                    (part, stripe) = (part + 1, 0);
                }
            }
            return out;
        }
        let mut at = indices.start;
        while at < indices.end {
            let Some(run) = self.run_at(size, at) else { break };
            add(run);
            at = run.index + run.len;
        }
        out
    }

    /// Adds the positions of `indices`: whole stripes of a part are one stretch.
    pub(crate) fn strided_runs(&self, size: u64, indices: Range<u64>, out: &mut Vec<StridedRun>) {
        let single =
            |run: Run| StridedRun { position: run.position, len: run.len, stride: run.len, count: 1 };
        let mut rest = indices;
        if let Order::Striped { parts, block } = self
            && let Some(stripes) = chunk(size, parts.checked_mul(*block))
        {
            while rest.start < rest.end.min(size) {
                let (part, first) = (rest.start / block / stripes, rest.start.div_ceil(*block));
                let last = (rest.end / block).min((part + 1) * stripes);
                let head = first * block;
                if rest.start < head || first >= last {
                    // The end of a block, or the start of one.
                    let end = if rest.start < head { head } else { head + block }.min(rest.end);
                    out.extend(self.runs(size, rest.start..end).into_iter().map(single));
                    rest.start = end;
                    continue;
                }
                let position = (first % stripes * parts + part) * block;
                out.push(StridedRun { position, len: *block, stride: parts * block, count: last - first });
                rest.start = last * block;
            }
            return;
        }
        out.extend(self.runs(size, rest).into_iter().map(single));
    }

    /// The indices of `positions`, ascending ranges that neither touch nor are empty.
    pub fn indices(&self, size: u64, positions: &[Range<u64>]) -> Vec<Range<u64>> {
        if let Order::Contiguous = self {
            return joined(positions.to_vec());
        }
        let mut found = Vec::new();
        if let Order::Striped { parts, block } = self
            && let Some(stripes) = chunk(size, parts.checked_mul(*block))
        {
            // Of each part, positions in a row are indices in a row.
            let before = |part: u64, position: u64| {
                let (stripe, rest) = (position / (parts * block), position % (parts * block));
                stripe * block + rest.saturating_sub(part * block).min(*block)
            };
            for part in 0..*parts {
                let first = part * stripes * block;
                found.extend(positions.iter().map(|wanted| {
                    let [start, end] = [wanted.start, wanted.end].map(|p| first + before(part, p.min(size)));
                    start..end
                }));
            }
            return joined(found);
        }
        for run in self.runs(size, 0..size) {
            for wanted in positions {
                let start = wanted.start.max(run.position);
                let end = wanted.end.min(run.position + run.len);
                if start < end {
                    let first = run.index + (start - run.position);
                    found.push(first..first + (end - start));
                }
            }
        }
        joined(found)
    }

    /// A zigzag inside each document of a packed batch: every part has two chunks of every document.
    ///
    /// # Errors
    /// The document whose length is no multiple of `2 · parts`.
    pub fn zigzag_documents(bounds: &[u64], parts: u64) -> Result<Order, String> {
        let mut runs = Vec::new();
        for pair in bounds.windows(2) {
            let len = pair[1].saturating_sub(pair[0]);
            if chunk(len, parts.checked_mul(2)).is_none() {
                return Err(format!(
                    "the document of {len} tokens at {} is no multiple of 2 · {parts} tokens",
                    pair[0]
                ));
            }
        }
        for part in 0..parts {
            for pair in bounds.windows(2) {
                let len = (pair[1] - pair[0]) / (2 * parts);
                for i in [part, 2 * parts - 1 - part] {
                    runs.push(pair[0] + i * len..pair[0] + (i + 1) * len);
                }
            }
        }
        Ok(Order::Table(runs))
    }
}

/// The length of each of `n` equal chunks of `size`, if there are such.
fn chunk(size: u64, n: Option<u64>) -> Option<u64> {
    let n = n.filter(|&n| n > 0)?;
    (size.is_multiple_of(n) && size >= n).then(|| size / n)
}

fn check_table(runs: &[Range<u64>], size: u64) -> Result<(), String> {
    let mut sorted = runs.to_vec();
    sorted.sort_by_key(|r| r.start);
    let mut next = 0;
    for run in &sorted {
        if run.start >= run.end {
            return Err(format!("run {}..{} of an order is empty", run.start, run.end));
        }
        if run.start < next {
            return Err(format!("an order is no permutation: position {} occurs twice", run.start));
        }
        if run.start > next {
            return Err(format!("an order is no permutation: position {next} is missing"));
        }
        next = run.end;
    }
    if next == size { Ok(()) } else { Err(format!("an order has {next} positions for {size} tokens")) }
}

/// Ranges in ascending order, those that touch or overlap made one.
pub fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|r| r.start < r.end);
    if let Some(joined) = joined_dense(&ranges) {
        return joined;
    }
    ranges.sort_by_key(|r| r.start);
    let mut out: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

/// As [`joined`], of many ranges that are close together, by marking what they have: stripes are as many as tokens.
fn joined_dense(ranges: &[Range<u64>]) -> Option<Vec<Range<u64>>> {
    const MANY: usize = 4096;
    const APART: u64 = 64;
    if ranges.len() < MANY {
        return None;
    }
    let first = ranges.iter().map(|r| r.start).min()?;
    let last = ranges.iter().map(|r| r.end).max()?;
    let n = usize::try_from(last - first).ok().filter(|&n| n as u64 <= APART * ranges.len() as u64)?;
    // How many ranges begin at each place, less those that end there.
    let mut edges = vec![0i32; n + 1];
    for range in ranges {
        edges[(range.start - first) as usize] += 1;
        edges[(range.end - first) as usize] -= 1;
    }
    let (mut out, mut depth, mut start) = (Vec::new(), 0i32, None);
    for (at, edge) in (first..).zip(edges) {
        depth += edge;
        match start {
            None if depth > 0 => start = Some(at),
            Some(from) if depth == 0 => {
                out.push(from..at);
                start = None;
            }
            None | Some(_) => {}
        }
    }
    Some(out)
}

impl fmt::Display for Order {
    /// `contiguous`, `zigzag(4)`, `striped(4, 16)`, `[0..2, 6..8, 2..6]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Order::Contiguous => f.write_str("contiguous"),
            Order::Zigzag { parts } => write!(f, "zigzag({parts})"),
            Order::Striped { parts, block } => write!(f, "striped({parts}, {block})"),
            Order::Table(runs) => write_ranges(f, runs),
        }
    }
}

/// `[0..2, 6..8]`.
pub(crate) fn write_ranges(f: &mut impl fmt::Write, ranges: &[Range<u64>]) -> fmt::Result {
    f.write_str("[")?;
    for (i, r) in ranges.iter().enumerate() {
        write!(f, "{}{}..{}", if i == 0 { "" } else { ", " }, r.start, r.end)?;
    }
    f.write_str("]")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positions(order: &Order, size: u64) -> Vec<u64> {
        (0..size).map(|i| order.position(size, i)).collect()
    }

    fn orders() -> Vec<Order> {
        vec![
            Order::Contiguous,
            Order::Zigzag { parts: 3 },
            Order::Striped { parts: 3, block: 1 },
            Order::Striped { parts: 2, block: 3 },
            Order::Table(vec![5..7, 0..5, 7..12]),
            Order::zigzag_documents(&[0, 4, 12], 2).unwrap(),
        ]
    }

    #[test]
    fn zigzag_gives_each_part_a_chunk_from_both_ends() {
        assert_eq!(positions(&Order::Zigzag { parts: 2 }, 8), [0, 1, 6, 7, 2, 3, 4, 5]);
        assert_eq!(positions(&Order::Striped { parts: 2, block: 1 }, 6), [0, 2, 4, 1, 3, 5]);
        assert_eq!(positions(&Order::zigzag_documents(&[0, 4, 8], 2).unwrap(), 8), [0, 3, 4, 7, 1, 2, 5, 6]);
    }

    #[test]
    fn orders_are_permutations_and_runs_and_indices_agree_with_positions() {
        for order in orders() {
            order.check(12).unwrap();
            let all = positions(&order, 12);
            let mut sorted = all.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..12).collect::<Vec<_>>(), "{order}");
            let runs = order.runs(12, 2..11);
            let spelled: Vec<u64> = runs.iter().flat_map(Run::positions).collect();
            assert_eq!(spelled, all[2..11], "{order}");
            let indices: Vec<u64> = order.indices(12, &[1..3, 6..9]).into_iter().flatten().collect();
            let expected: Vec<u64> =
                (0..12).filter(|&i| [1, 2, 6, 7, 8].contains(&all[i as usize])).collect();
            assert_eq!(indices, expected, "{order}");
        }
    }

    #[test]
    fn many_ranges_are_joined_as_few_are() {
        for step in [2, 3, 7] {
            // Some touch, some overlap, some are apart, in no order.
            let ranges: Vec<Range<u64>> = (0..5000u64)
                .map(|i| i * 7919 % 5000 * step)
                .map(|at| 10 + at..10 + at + 1 + at % 4)
                .collect();
            let mut sorted = ranges.clone();
            sorted.sort_by_key(|r| r.start);
            let mut expected: Vec<Range<u64>> = Vec::new();
            for range in sorted {
                match expected.last_mut() {
                    Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                    _ => expected.push(range),
                }
            }
            assert!(joined_dense(&ranges).is_some());
            assert_eq!(joined(ranges), expected, "{step}");
        }
    }

    #[test]
    fn what_is_no_permutation_is_refused_with_the_position() {
        let error = Order::Table(vec![0..2, 1..4]).check(4).unwrap_err();
        assert!(error.contains("position 1 occurs twice"), "{error}");
        let error = Order::Table(vec![0..2, 3..4]).check(4).unwrap_err();
        assert!(error.contains("position 2 is missing"), "{error}");
        assert!(Order::Zigzag { parts: 4 }.check(12).is_err());
    }
}
