//! Offsets of blocks that need memory from one time to another.
//!
//! Largest first, and of equally large ones the earlier first, each takes the lowest offset that is free during its life on
//! the ranks that have it. Blocks that live at the same time on the same ranks, as what a layer saves for the backward pass, are
//! first placed as one; where these leave gaps, each is also placed alone, and the better way is taken.
//!
//! A schedule has tens of thousands of blocks, of which few live at one time, some of them for nearly the whole step.
//! Placed blocks are therefore indexed by the ranks that have them, then by length of life, then by start: a block is in
//! one list, and a query for a time visits few other blocks.

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
    let mut placed = Placed::default();
    let mut busy = Vec::new();
    for i in order {
        let block = &blocks[i];
        busy.clear();
        busy.extend(placed.meeting(block));
        busy.sort_unstable();
        let mut offset = 0;
        for &(start, end) in &busy {
            if offset + block.bytes <= start {
                break;
            }
            offset = offset.max(end);
        }
        offsets[i] = offset;
        placed.add(offset, block);
    }
    offsets
}

/// Blocks that have their offsets, by the ranks that have them.
#[derive(Default)]
struct Placed {
    places: BTreeMap<Option<At>, Lives>,
}

impl Placed {
    fn add(&mut self, offset: u64, block: &Block) {
        let &Block { bytes, first, last, at } = block;
        let memory = (offset, offset + bytes);
        self.places.entry(at).or_default().add(Life { first, last, memory });
    }

    /// The memory, from and to, of blocks that some rank has at a time at which it has this one.
    fn meeting(&self, block: &Block) -> impl Iterator<Item = (u64, u64)> {
        let meets = |there: Option<At>| there.is_none() || block.at.is_none() || there == block.at;
        let places = self.places.iter().filter(move |&(&there, _)| meets(there));
        places.flat_map(|(_, lives)| lives.meeting(block.first, block.last))
    }
}

/// Blocks of some ranks: those that live for at most `1 << span` times by `span`, then by `first >> span`.
#[derive(Default)]
struct Lives {
    spans: Vec<Vec<Vec<Life>>>,
}

/// When a block lives, and in which memory, from and to.
struct Life {
    first: usize,
    last: usize,
    memory: (u64, u64),
}

impl Lives {
    fn add(&mut self, life: Life) {
        let span = (life.last - life.first + 1).next_power_of_two().ilog2();
        let starts = grown(&mut self.spans, span as usize);
        grown(starts, life.first >> span).push(life);
    }

    /// The memory of those that live at some time from `first` to `last`.
    fn meeting(&self, first: usize, last: usize) -> impl Iterator<Item = (u64, u64)> {
        let near = self.spans.iter().enumerate().flat_map(move |(span, starts)| {
            // A block that began one step earlier may still live.
            let from = (first >> span).saturating_sub(1).min(starts.len());
            let to = ((last >> span) + 1).min(starts.len());
            &starts[from..to]
        });
        near.flatten().filter(move |life| life.first <= last && first <= life.last).map(|life| life.memory)
    }
}

/// The list at a place of a table, which is as long as it must be.
fn grown<T>(table: &mut Vec<Vec<T>>, at: usize) -> &mut Vec<T> {
    if table.len() <= at {
        table.resize_with(at + 1, Vec::new);
    }
    &mut table[at]
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
