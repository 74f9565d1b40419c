//! Offsets of blocks that need memory from one time to another.
//!
//! Largest first, and of equally large ones the earlier first, each takes the lowest offset that is free during its life on
//! the ranks that have it. Blocks that live at the same time on the same ranks, as what a layer saves for the backward pass, are
//! first placed as one; where these leave gaps, each is also placed alone, and the better way is taken.
//!
//! A schedule has tens of thousands of blocks, and all of the inputs of as many micro-batches may live at one time. The
//! memory of placed blocks is therefore in a segment tree over time for the ranks that have them, and memory that touches is
//! joined: a block finds its offset in time that grows with the depth of the tree and the gaps, not with the blocks alive.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use ithaca_ir::layout::At;

/// Something that needs memory from one time to another, both included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) bytes: u64,
    pub(super) first: usize,
    pub(super) last: usize,
    /// The ranks that have it; two blocks need separate memory only on ranks that have both.
    pub(super) at: Option<At>,
}

/// Gaps of one part in so many of the memory are accepted.
const GAPS: u64 = 128;

/// For each block its offset in bytes.
pub(super) fn offsets(blocks: &[Block]) -> Vec<u64> {
    let (groups, members) = alike(blocks);
    let of_groups = first_fit(&groups);
    let together: Vec<u64> = members.iter().map(|&(group, offset)| of_groups[group] + offset).collect();
    let least = alive(&groups);
    if groups.len() == blocks.len() || top(blocks, &together) <= least + least / GAPS {
        return together;
    }
    let apart = first_fit(blocks);
    if top(blocks, &apart) <= top(blocks, &together) { apart } else { together }
}

/// Blocks that live at the same time on the same ranks as one; by block, the number of its group and its offset there.
fn alike(blocks: &[Block]) -> (Vec<Block>, Vec<(usize, u64)>) {
    let mut known: BTreeMap<(usize, usize, Option<At>), usize> = BTreeMap::new();
    let mut groups: Vec<Block> = Vec::new();
    let mut join = |block: &Block| {
        let group = *known.entry((block.first, block.last, block.at)).or_insert_with(|| {
            groups.push(Block { bytes: 0, ..*block });
            groups.len() - 1
        });
        let offset = groups[group].bytes;
        groups[group].bytes += block.bytes;
        (group, offset)
    };
    let members = blocks.iter().map(&mut join).collect();
    (groups, members)
}

/// The most bytes that live at one time on one rank.
fn alive(blocks: &[Block]) -> u64 {
    let end = blocks.iter().map(|block| block.last + 1).max().unwrap_or(0);
    // By ranks, the bytes that begin and end to live at each time.
    let mut changes: BTreeMap<Option<At>, Vec<(u64, u64)>> = BTreeMap::new();
    for &Block { bytes, first, last, at } in blocks {
        let changes = changes.entry(at).or_insert_with(|| vec![(0, 0); end + 1]);
        changes[first].0 += bytes;
        changes[last + 1].1 += bytes;
    }
    let shared = changes.remove(&None).unwrap_or_else(|| vec![(0, 0); end + 1]);
    let most = |own: Option<&Vec<(u64, u64)>>| {
        let (mut now, mut most) = (0, 0);
        for (i, &(more, less)) in shared.iter().enumerate() {
            let own = own.map_or((0, 0), |own| own[i]);
            now = now + more + own.0 - less - own.1;
            most = most.max(now);
        }
        most
    };
    changes.values().map(|own| most(Some(own))).fold(most(None), u64::max)
}

/// The end of the memory that blocks take.
fn top(blocks: &[Block], offsets: &[u64]) -> u64 {
    blocks.iter().zip(offsets).map(|(block, offset)| offset + block.bytes).max().unwrap_or(0)
}

/// The offsets of blocks that are placed one by one.
fn first_fit(blocks: &[Block]) -> Vec<u64> {
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|&i| Reverse(blocks[i].bytes));
    let mut offsets = vec![0; blocks.len()];
    let mut placed = Placed::of(blocks);
    // Blocks without bytes come last, and meet nothing.
    for i in order.into_iter().take_while(|&i| blocks[i].bytes > 0) {
        offsets[i] = placed.lowest(&blocks[i]);
        placed.add(offsets[i], &blocks[i]);
    }
    offsets
}

/// Blocks that have their offsets, by the ranks that have them.
struct Placed {
    places: BTreeMap<Option<At>, Lives>,
}

impl Placed {
    fn of(blocks: &[Block]) -> Self {
        let mut times: BTreeMap<Option<At>, Vec<usize>> = BTreeMap::new();
        for block in blocks {
            times.entry(block.at).or_default().extend([block.first, block.last]);
        }
        Self { places: times.into_iter().map(|(at, times)| (at, Lives::at(times))).collect() }
    }

    fn add(&mut self, offset: u64, block: &Block) {
        let lives = self.places.get_mut(&block.at).expect("every block has a place");
        lives.add((block.first, block.last), (offset, offset + block.bytes));
    }

    /// The lowest offset at which nothing is that some rank has at a time at which it has this block.
    fn lowest(&self, block: &Block) -> u64 {
        let meets = |there: Option<At>| there.is_none() || block.at.is_none() || there == block.at;
        let mut met: Vec<&[Memory]> = Vec::new();
        for (_, lives) in self.places.iter().filter(|&(&there, _)| meets(there)) {
            lives.meeting((block.first, block.last), &mut met);
        }
        let mut offset = 0;
        loop {
            let before = offset;
            for taken in &mut met {
                let passed = taken.partition_point(|&(_, end)| end <= offset);
                *taken = &taken[passed..];
                while let Some((&(start, end), rest)) = taken.split_first()
                    && start < offset + block.bytes
                {
                    offset = offset.max(end);
                    *taken = rest;
                }
            }
            if offset == before {
                return offset;
            }
        }
    }
}

/// Memory from an offset to another.
type Memory = (u64, u64);

/// The memory of the blocks of some ranks: a segment tree over time.
struct Lives {
    /// The times at which a block begins or ends to live, in order.
    times: Vec<usize>,
    /// The number of leaves: time `i` is leaf `2 i + 1`, and the times before it leaf `2 i`.
    leaves: usize,
    /// The children of node `i` are `2 i` and `2 i + 1`, and leaf `i` is node `leaves + i`.
    nodes: Vec<Node>,
}

/// A span of time.
#[derive(Clone, Default)]
struct Node {
    /// The memory of blocks of which the span is a part.
    through: Vec<Memory>,
    /// The memory of blocks that live at some time of the span, but for those of which it is inside a part.
    within: Vec<Memory>,
}

impl Lives {
    fn at(mut times: Vec<usize>) -> Self {
        times.sort_unstable();
        times.dedup();
        let leaves = (2 * times.len() + 1).next_power_of_two();
        Self { times, leaves, nodes: vec![Node::default(); 2 * leaves] }
    }

    fn add(&mut self, life: (usize, usize), memory: Memory) {
        let (from, to) = self.leaves(life);
        for leaf in [from, to] {
            // A node has the memory of those below it: where one has it already, those above do too.
            for node in above(leaf) {
                if !insert(&mut self.nodes[node].within, memory) {
                    break;
                }
            }
        }
        for node in parts(from, to) {
            insert(&mut self.nodes[node].through, memory);
            insert(&mut self.nodes[node].within, memory);
        }
    }

    /// Adds the memory of blocks that live at some time of a life.
    fn meeting<'a>(&'a self, life: (usize, usize), met: &mut Vec<&'a [Memory]>) {
        let (from, to) = self.leaves(life);
        let mut take = |list: &'a Vec<Memory>| {
            if !list.is_empty() {
                met.push(list);
            }
        };
        parts(from, to).for_each(|node| take(&self.nodes[node].within));
        above(from).for_each(|node| take(&self.nodes[node].through));
        // The others are above both.
        above(to)
            .zip(above(from))
            .take_while(|(a, b)| a != b)
            .for_each(|(node, _)| take(&self.nodes[node].through));
    }

    /// The first and the last leaf of a life, as nodes.
    fn leaves(&self, (first, last): (usize, usize)) -> (usize, usize) {
        let leaf = |time| self.leaves + self.times.binary_search(&time).map_or_else(|i| 2 * i, |i| 2 * i + 1);
        (leaf(first), leaf(last))
    }
}

/// The fewest nodes whose spans are together the leaves `from` to `to`.
fn parts(from: usize, to: usize) -> impl Iterator<Item = usize> {
    let (mut from, mut end) = (from, to + 1);
    std::iter::from_fn(move || {
        while from < end {
            if from % 2 == 1 {
                from += 1;
                return Some(from - 1);
            }
            if end % 2 == 1 {
                end -= 1;
                return Some(end);
            }
            (from, end) = (from / 2, end / 2);
        }
        None
    })
}

/// The nodes above a leaf, from the lowest to the root.
fn above(leaf: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(leaf / 2), |node| Some(node / 2)).take_while(|&node| node > 0)
}

/// Adds memory to a list in order, in which memory that touches is joined; whether the list lacked some of it.
fn insert(list: &mut Vec<Memory>, (mut start, mut end): Memory) -> bool {
    let from = list.partition_point(|&(_, other)| other < start);
    let to = from + list[from..].partition_point(|&(other, _)| other <= end);
    if let (Some(first), Some(last)) = (list[from..to].first(), list[from..to].last()) {
        if first.0 <= start && end <= first.1 {
            return false;
        }
        (start, end) = (start.min(first.0), end.max(last.1));
    }
    list.splice(from..to, [(start, end)]);
    true
}

#[cfg(test)]
mod tests {
    use ithaca_ir::entity::Entity;
    use ithaca_ir::mesh::AxisId;

    use super::*;

    /// Whether some rank has both at one time.
    fn meet(a: &Block, b: &Block) -> bool {
        let apart = matches!((a.at, b.at), (Some(a), Some(b)) if a != b);
        !apart && a.first <= b.last && b.first <= a.last
    }

    /// The rule itself: each block against all that were placed.
    fn plain(blocks: &[Block]) -> Vec<u64> {
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        order.sort_by_key(|&i| Reverse(blocks[i].bytes));
        let mut offsets = vec![0; blocks.len()];
        for (n, &i) in order.iter().enumerate() {
            let mut busy: Vec<(u64, u64)> = order[..n]
                .iter()
                .filter(|&&j| meet(&blocks[j], &blocks[i]))
                .map(|&j| (offsets[j], offsets[j] + blocks[j].bytes))
                .collect();
            busy.sort_unstable();
            for (start, end) in busy {
                if offsets[i] + blocks[i].bytes <= start {
                    break;
                }
                offsets[i] = offsets[i].max(end);
            }
        }
        offsets
    }

    /// Blocks of few sizes, so that many are equally large, that live for one time, for a few, or for most of them, on all
    /// ranks or on those of one of some stages.
    fn some_block(below: &mut impl FnMut(u64) -> u64) -> Block {
        let first = below(300) as usize;
        let spans = [1, 3, 40, 300];
        let span = spans[below(4) as usize];
        let long = below(span) as usize;
        let at = (below(2) == 1).then(|| At { axis: AxisId::new(0), coordinate: below(4) });
        Block { bytes: 256 * below(12), first, last: first + long, at }
    }

    #[test]
    fn offsets_are_those_of_the_rule() {
        // Knuth, The Art of Computer Programming, volume 2, 3.3.4.
        let mut state = 1_u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        for _ in 0..200 {
            let n = below(250);
            let blocks: Vec<Block> = (0..n).map(|_| some_block(&mut below)).collect();
            assert_eq!(first_fit(&blocks), plain(&blocks), "{blocks:?}");
            let offsets = offsets(&blocks);
            assert!(top(&blocks, &offsets) >= alive(&blocks));
            for (i, a) in blocks.iter().enumerate() {
                for (j, b) in blocks[..i].iter().enumerate().filter(|(_, b)| meet(a, b)) {
                    let apart = offsets[i] + a.bytes <= offsets[j] || offsets[j] + b.bytes <= offsets[i];
                    assert!(apart, "{a:?} at {} and {b:?} at {}", offsets[i], offsets[j]);
                }
            }
        }
    }
}
