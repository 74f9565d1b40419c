//! Blocks of keys that some ranks receive: from home, or from the rank that held them in the step before.
//!
//! In the schedule of `DistFlashAttn` early ranks send their keys to many, and return partial results as well; late ranks
//! send queries. A block that is passed on by the rank that held it last loads the ranks in the middle instead. Which steps
//! pass blocks on is chosen so that the busiest rank sends least: on 16 ranks, with as many key/value heads as query heads
//! and partial results of the model's type, N·d elements forward instead of 1.44 N·d (arXiv 2310.03294).

use std::collections::BTreeMap;
use std::ops::Range;

use ithaca_ir::layout::Move;
use ithaca_ir::{DType, FunctionBuilder, Mesh, ValueId};

use crate::movement::{Partials, RankOffset, Step};

/// Bytes of a rank's blocks and of what returns from them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    pub(super) keys: u64,
    pub(super) queries: u64,
    /// Sums that return to the blocks' home when keys have travelled.
    pub(super) key_sums: u64,
    /// Sums that return when queries have travelled.
    pub(super) query_sums: u64,
}

impl Blocks {
    /// Of values that travel, and of f32 sums of the shapes of others.
    pub(super) fn new(
        b: &FunctionBuilder<'_>,
        [keys, queries]: [&[ValueId]; 2],
        [key_sums, query_sums]: [&[ValueId]; 2],
        partials: Partials,
    ) -> Self {
        let space = b.space();
        let bytes = |values: &[ValueId]| values.iter().map(|&v| space.max_local_bytes(b.ty(v))).sum();
        let wire = partials.wire(DType::F32).bytes();
        let sums =
            |values: &[ValueId]| values.iter().map(|&v| space.max_local_elements(b.ty(v)) * wire).sum();
        Self {
            keys: bytes(keys),
            queries: bytes(queries),
            key_sums: sums(key_sums),
            query_sums: sums(query_sums),
        }
    }
}

/// The number of ranks above which three choices are compared, and not improved step by step.
const IMPROVED: u64 = 512;

/// The offsets of keys that some ranks hold and that come from an earlier offset of that kind, which is given; the others come
/// from home.
pub(super) fn relays(mesh: &Mesh, steps: &[Step], blocks: Blocks) -> BTreeMap<RankOffset, RankOffset> {
    let offsets = || steps.iter().filter(|step| in_part(&step.keys).is_some());
    let before: Vec<(&RankOffset, &RankOffset)> = offsets()
        .zip(offsets().skip(1))
        .map(|(before, step)| (&step.keys, &before.keys))
        .filter(|(offset, before)| reaches(mesh, before, offset))
        .collect();
    let Some(axis) = before.first().map(|(offset, _)| offset[0].axis) else { return BTreeMap::new() };
    if steps.iter().flat_map(|s| s.keys.iter().chain(&s.queries)).any(|m| m.axis != axis) {
        return BTreeMap::new();
    }
    let n = mesh.size(axis);
    let starts = [|_| false, |_| true, |i: usize| i.is_multiple_of(2)];
    let choices = starts.map(|start| {
        let mut loads = Loads::from_home(n, steps, blocks);
        let mut relayed = vec![false; before.len()];
        for i in (0..before.len()).filter(|&i| start(i)) {
            loads.flip(&mut relayed, &before, i);
        }
        let mut improves = n <= IMPROVED;
        while std::mem::take(&mut improves) {
            for i in 0..before.len() {
                let squares = loads.squares();
                loads.flip(&mut relayed, &before, i);
                if loads.squares() < squares {
                    improves = true;
                } else {
                    loads.flip(&mut relayed, &before, i);
                }
            }
        }
        (loads.sent.iter().max().copied(), relayed)
    });
    let [first, others @ ..] = choices;
    let (_, relayed) = others.into_iter().fold(first, |best, next| if next.0 < best.0 { next } else { best });
    let chosen = before.iter().zip(relayed).filter(|(_, is_relayed)| *is_relayed);
    chosen.map(|(&(offset, before), _)| (offset.clone(), before.clone())).collect()
}

/// The displacement of blocks that some ranks along one axis hold, and these ranks.
fn in_part(offset: &RankOffset) -> Option<(u64, Range<u64>)> {
    match offset[..] {
        [Move { by, only: Some((start, end)), .. }] => Some((by, start..end)),
        _ => None,
    }
}

/// Whether each block at `offset` was at `before`, on another rank.
fn reaches(mesh: &Mesh, before: &RankOffset, offset: &RankOffset) -> bool {
    let (Some((from, held)), Some((by, ranks))) = (in_part(before), in_part(offset)) else { return false };
    let n = mesh.size(offset[0].axis);
    before[0].axis == offset[0].axis
        && from != by
        && ranks.into_iter().all(|r| held.contains(&((r + by + n - from) % n)))
}

/// Bytes that each rank sends.
struct Loads {
    sent: Vec<u64>,
    keys: u64,
}

impl Loads {
    /// When all blocks come from home.
    fn from_home(n: u64, steps: &[Step], blocks: Blocks) -> Self {
        let mut loads =
            Self { sent: vec![0; usize::try_from(n).expect("a mesh is small")], keys: blocks.keys };
        let travels = [
            ((|step| &step.keys) as fn(&Step) -> &RankOffset, blocks.keys, blocks.key_sums),
            (|step| &step.queries, blocks.queries, blocks.query_sums),
        ];
        for (offset, bytes, sums) in travels {
            for (by, ranks) in steps.iter().filter_map(|step| in_part(offset(step))) {
                for rank in ranks {
                    *loads.of(rank + by) += bytes;
                    *loads.of(rank) += sums;
                }
            }
        }
        loads
    }

    /// What a rank sends; numbers go round.
    fn of(&mut self, rank: u64) -> &mut u64 {
        let n = self.sent.len() as u64;
        &mut self.sent[usize::try_from(rank % n).expect("a mesh is small")]
    }

    /// Blocks of the offset `i` come from the offset before if they came from home, and the other way round.
    fn flip(&mut self, relayed: &mut [bool], before: &[(&RankOffset, &RankOffset)], i: usize) {
        let (offset, before) = before[i];
        let (Some((by, ranks)), Some((from, _))) = (in_part(offset), in_part(before)) else { return };
        let (n, keys) = (self.sent.len() as u64, self.keys);
        for rank in ranks {
            let (home, last) = (rank + by, rank + by + n - from);
            let (less, more) = if relayed[i] { (last, home) } else { (home, last) };
            *self.of(less) -= keys;
            *self.of(more) += keys;
        }
        relayed[i] = !relayed[i];
    }

    fn squares(&self) -> u128 {
        self.sent.iter().map(|&bytes| u128::from(bytes).pow(2)).sum()
    }
}
