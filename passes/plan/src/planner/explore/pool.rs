//! Steps that are estimated, by the blocks that they are made of.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ithaca_differentiate::Recompute;
use ithaca_layout::shard::Zero;
use ithaca_layout::shard::strategy::EXPERT_AXIS;

use super::{Candidate, Inside, NEAR_IF_HIDDEN};
use crate::planner::block::Block;
use crate::planner::fusion::HIDDEN;

/// A block that is compiled.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) inside: usize,
    pub(super) data: u64,
    pub(super) zero: Zero,
    pub(super) recompute: Recompute,
    pub(super) loss_chunks: u64,
    pub(super) sequences: u64,
    /// One, or two for any number of them.
    pub(super) micro_batches: u64,
    pub(super) bucket: Option<u64>,
}

impl Key {
    pub(super) fn of(candidate: &Candidate) -> Self {
        Self {
            inside: candidate.inside,
            data: candidate.data,
            zero: candidate.zero,
            recompute: candidate.recompute,
            loss_chunks: candidate.loss_chunks,
            sequences: candidate.sequences,
            micro_batches: candidate.shape.micro_batches.min(2),
            bucket: candidate.bucket,
        }
    }
}

/// Layouts by family: the numbers of data-parallel ranks, of stages, of ranks of a sequence that have the same weights, and of ranks
/// over which experts are split. The rest, such as the movement of keys, hardly changes the time of a step that messages of weights bound.
#[derive(Clone, Default)]
pub(super) struct Families {
    known: BTreeMap<[u64; 4], BTreeSet<Key>>,
}

impl Families {
    pub(super) fn of(insides: &[Inside], candidate: &Candidate) -> [u64; 4] {
        let Inside { options, copies, .. } = &insides[candidate.inside];
        let experts = options.mesh.axis(EXPERT_AXIS).map_or(1, |axis| options.mesh.size(axis));
        [candidate.data, candidate.shape.stages, *copies, experts]
    }

    /// Whether a step of the family of this one is known.
    pub(super) fn has(&self, insides: &[Inside], candidate: &Candidate) -> bool {
        self.known.contains_key(&Self::of(insides, candidate))
    }

    /// Whether a step is one of the first `most` blocks of its family.
    pub(super) fn admits(&mut self, insides: &[Inside], candidate: &Candidate, most: usize) -> bool {
        let family = Self::of(insides, candidate);
        // One loss in parts and whole is one.
        let (known, key) =
            (self.known.entry(family).or_default(), Key { loss_chunks: 0, ..Key::of(candidate) });
        if known.len() < most {
            known.insert(key);
            return true;
        }
        known.contains(&key)
    }
}

/// Steps by the numbers of their blocks, the best first.
#[derive(Default)]
pub(super) struct Pool {
    pub(super) all: Vec<(usize, Candidate)>,
    pub(super) keys: Vec<Key>,
    numbers: BTreeMap<Key, usize>,
    /// Whether the steps of a block were estimated, and the block if it is legal.
    pub(super) done: Vec<bool>,
    blocks: Vec<Option<Arc<Block>>>,
}

impl Pool {
    /// Adds coarse estimates; `estimate` makes estimates of those whose block is known.
    pub(super) fn add(
        &mut self,
        candidates: Vec<&Candidate>,
        estimate: &dyn Fn(&mut Candidate, Option<&Block>),
    ) {
        let Self { all, keys, numbers, done, blocks } = self;
        for candidate in candidates {
            let number = *numbers.entry(Key::of(candidate)).or_insert_with_key(|key| {
                keys.push(key.clone());
                done.push(false);
                blocks.push(None);
                keys.len() - 1
            });
            let mut candidate = candidate.clone();
            if done[number] {
                estimate(&mut candidate, blocks[number].as_deref());
            }
            all.push((number, candidate));
        }
    }

    /// Estimates all steps of a block.
    pub(super) fn finish(
        &mut self,
        number: usize,
        block: Option<Arc<Block>>,
        estimate: &dyn Fn(&mut Candidate, Option<&Block>),
    ) {
        let steps = self.all.iter_mut().filter(|(key, _)| *key == number);
        steps.for_each(|(_, candidate)| estimate(candidate, block.as_deref()));
        (self.done[number], self.blocks[number]) = (true, block);
    }

    /// The blocks of the best step with other movements or strategies inside, which were passed over for others of their family;
    /// those that were not near enough are taken from `rest`.
    pub(super) fn siblings(
        &mut self,
        insides: &[Inside],
        rest: &mut Vec<&Candidate>,
        estimate: &dyn Fn(&mut Candidate, Option<&Block>),
    ) -> Vec<usize> {
        let Some((_, best)) = self.all.iter().find(|(key, _)| self.done[*key]) else { return Vec::new() };
        let kind = |candidate: &Candidate| {
            (candidate.shape, Families::of(insides, candidate), candidate.zero, candidate.recompute)
        };
        let of_best = kind(best);
        let (siblings, others) = rest.drain(..).partition(|candidate| kind(candidate) == of_best);
        *rest = others;
        self.add(siblings, estimate);
        let is_sibling =
            |(key, candidate): &&(usize, Candidate)| !self.done[*key] && kind(candidate) == of_best;
        self.all.iter().filter(is_sibling).map(|(key, _)| *key).collect()
    }

    /// The blocks that fit and may take less than `best` where chunks hide what they expose, one of each family without stages of
    /// which none is estimated; `most` of them, which are noted.
    pub(super) fn speculative(
        &mut self,
        insides: &[Inside],
        (best, most): (f64, usize),
        fits: impl Fn(&Candidate) -> bool,
    ) -> Vec<usize> {
        let mut families = Families::default();
        for (_, candidate) in self.all.iter().filter(|(key, _)| self.done[*key]) {
            families.admits(insides, candidate, 1);
        }
        let if_hidden =
            |candidate: &Candidate| candidate.estimate.seconds * (1.0 - HIDDEN * candidate.hideable);
        let is_near = |candidate: &Candidate| {
            let is_near = candidate.estimate.seconds <= NEAR_IF_HIDDEN * best && if_hidden(candidate) < best;
            candidate.shape.stages == 1 && is_near && fits(candidate)
        };
        let mut others: Vec<&(usize, Candidate)> =
            self.all.iter().filter(|(key, candidate)| !self.done[*key] && is_near(candidate)).collect();
        others.sort_by(|(_, a), (_, b)| if_hidden(a).total_cmp(&if_hidden(b)));
        others.retain(|(_, candidate)| families.admits(insides, candidate, 1));
        let keys: Vec<usize> = others.into_iter().map(|(key, _)| *key).take(most).collect();
        self.all.iter_mut().for_each(|(key, candidate)| candidate.is_speculative |= keys.contains(key));
        keys
    }
}
