//! Handovers: the states that one schedule leaves, moved to where another reads them.
//!
//! The caches of prompts go to the ranks of tokens, which may hold other parts of them and may be other processes. A handover says
//! which process sends which elements to which: it follows from the layouts of both alone. Every element that a rank reads comes
//! once, from one rank that has it; where several do, from the one that has sent least.

mod parts;
mod side;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use self::parts::{Lists, Parts, missing, moves, parts};
pub use self::side::{MicroBatch, Move, Piece, Pieces, Side, State};
use crate::dtype::DType;
use crate::ops::source::stored_size;
use crate::types::TensorType;

/// A state that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The name of the stored tensor.
    pub name: String,
    /// The micro-batches whose parts it goes from and to.
    pub micro_batches: [Option<MicroBatch>; 2],
    /// As the receiver has it; where several types do, as the first of them.
    pub ty: TensorType,
    /// Its moves, as an index of [`Handover::moves`]: layers have the same.
    pub moves: usize,
}

/// All moves between two sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover {
    /// States of which a process reads other parts than it left; in order of names. Where steps of one side have more sequences than
    /// those of the other, each round gives it further ones.
    pub rounds: Vec<Vec<Moved>>,
    /// Lists of moves, in order of receivers.
    pub moves: Vec<Vec<Move>>,
    /// The process of each rank that sends, and of each that receives.
    pub processes: [Vec<u64>; 2],
}

/// The states of a name, by micro-batch.
type ByMicroBatch = BTreeMap<Option<MicroBatch>, Vec<usize>>;

/// For each rank of one side the rank of the other that has the same parts of all states; `None` where some rank has others.
pub fn places(from: &Side<'_>, to: &Side<'_>) -> Option<Vec<u64>> {
    type StateParts = Vec<(String, Option<MicroBatch>, Vec<usize>)>;
    let mut lists = Lists::default();
    let mut held = |side: &Side<'_>, number| -> Vec<StateParts> {
        let mut of_ranks = vec![Vec::new(); side.processes.len()];
        for (name, of_name) in by_name(side) {
            for (micro_batch, states) in of_name {
                for (held, part) in of_ranks.iter_mut().zip(parts(side, &states, (number, 0), &mut lists)) {
                    held.extend(part.map(|part| (name.clone(), micro_batch, part)));
                }
            }
        }
        of_ranks
    };
    let (left, read) = (held(from, 0), held(to, 1));
    let mut free: BTreeMap<StateParts, Vec<u64>> = BTreeMap::new();
    for (rank, held) in read.into_iter().enumerate().rev() {
        free.entry(held).or_default().push(rank as u64);
    }
    left.into_iter().map(|held| free.get_mut(&held)?.pop()).collect()
}

/// The states of a side, by name.
fn by_name(side: &Side<'_>) -> BTreeMap<String, ByMicroBatch> {
    let mut found: BTreeMap<String, ByMicroBatch> = BTreeMap::new();
    for (i, state) in side.states.iter().enumerate() {
        found.entry(state.name.clone()).or_default().entry(state.micro_batch).or_default().push(i);
    }
    found
}

impl Handover {
    /// The moves from one side to the other.
    ///
    /// # Errors
    /// The state that the sender lacks, has in another shape or type, or does not have whole.
    pub fn between(from: &Side<'_>, to: &Side<'_>) -> Result<Self, String> {
        let mut lists = Lists::default();
        let (left, read) = (by_name(from), by_name(to));
        let processes = [from.processes.clone(), to.processes.clone()];
        let mut handover = Self { rounds: Vec::new(), moves: Vec::new(), processes };
        let mut known: BTreeMap<(DType, Parts, Parts), Option<usize>> = BTreeMap::new();
        let mut sent = vec![0; from.processes.len()];
        let mut n_rounds = 1;
        for (name, states) in &read {
            let Some(senders) = left.get(name) else { return Err(format!("no step leaves `{name}`")) };
            n_rounds = n_rounds.max(rounds_of(name, (from, senders), (to, states))?);
        }
        // The elements that each rank receives, by name and micro-batch.
        let mut received: BTreeMap<(&str, Option<MicroBatch>), Vec<u64>> = BTreeMap::new();
        for round in 0..n_rounds {
            let mut moved = Vec::new();
            for (name, of_name) in &read {
                let rounds = rounds_of(name, (from, &left[name]), (to, of_name))?;
                if rounds == 1 && round + 1 < n_rounds {
                    // It is of all sequences: the last round has it.
                    continue;
                }
                let first = if rounds == 1 { 0 } else { round * sequences(from, &left[name]) };
                let mut key = |senders: &[usize], readers: &[usize]| {
                    let written = parts(from, senders, (0, first), &mut lists);
                    (to.states[readers[0]].ty.dtype, written, parts(to, readers, (1, 0), &mut lists))
                };
                let pairs = |(at, readers)| {
                    left[name].iter().map(move |(&from_at, senders)| ([from_at, at], senders, readers))
                };
                let pairs = of_name.iter().map(|(&at, readers)| (at, readers)).flat_map(pairs);
                let pairs = Vec::from_iter(
                    pairs.map(|(at, senders, readers)| (at, readers[0], key(senders, readers))),
                );
                let is_same = |[from, to]: &[Option<MicroBatch>; 2]| from == to;
                if n_rounds == 1
                    && of_name.keys().eq(left[name].keys())
                    && pairs
                        .iter()
                        .filter(|(at, ..)| is_same(at))
                        .all(|(_, _, key)| handover.stays(key, &lists))
                {
                    continue;
                }
                let is_part = rounds > 1 || left[name].len() > 1;
                for (micro_batches, reader, key) in pairs {
                    let moves = match known.get(&key) {
                        Some(&moves) => moves,
                        None => {
                            let load = (sent.as_mut_slice(), key.0.bytes());
                            let found =
                                moves(name, (&key.1, &key.2, is_part), &handover.processes, &lists, load)?;
                            let some = !found.is_empty();
                            handover.moves.extend(some.then_some(found));
                            some.then(|| handover.moves.len() - 1)
                        }
                    };
                    let all =
                        received.entry((name, micro_batches[1])).or_insert_with(|| missing(&key.2, &lists));
                    for one in moves.iter().flat_map(|&moves| &handover.moves[moves]) {
                        all[one.to.0 as usize] -= one.elements();
                    }
                    known.insert(key, moves);
                    let ty = to.states[reader].ty.clone();
                    moved.extend(moves.map(|moves| Moved { name: name.clone(), micro_batches, ty, moves }));
                }
            }
            handover.rounds.push(moved);
        }
        match received.iter().find(|(_, missing)| missing.iter().any(|&n| n > 0)) {
            None => Ok(handover),
            Some(((name, _), _)) => Err(format!("no step leaves all of `{name}`")),
        }
    }

    /// Whether each process that reads a state has left the same part of it, in the same order.
    fn stays(&self, (_, written, read): &(DType, Parts, Parts), lists: &Lists) -> bool {
        let [senders, receivers] = &self.processes;
        let mut of_process: BTreeMap<u64, &Option<Vec<usize>>> =
            senders.iter().copied().zip(written).collect();
        let mut same = |(process, part): (&u64, &Option<Vec<usize>>)| {
            let left = of_process.remove(process);
            match (part, left) {
                (None, _) => true,
                (Some(part), Some(Some(left))) => {
                    part.iter().zip(left).all(|(&a, &b)| lists.of[a] == lists.of[b])
                }
                (Some(_), _) => false,
            }
        };
        receivers.iter().zip(read).all(&mut same)
    }

    /// The number of processes of both sides.
    pub fn n_processes(&self) -> u64 {
        self.processes.iter().flatten().max().map_or(0, |last| last + 1)
    }

    /// The states that move, those of equal moves together, each with its moves of each round.
    pub fn alike(&self) -> Vec<(Vec<&Moved>, Vec<&[Move]>)> {
        let mut of_state: BTreeMap<_, (&Moved, Vec<Option<usize>>)> = BTreeMap::new();
        for (round, state) in
            self.rounds.iter().enumerate().flat_map(|(i, states)| states.iter().map(move |s| (i, s)))
        {
            let key = (state.micro_batches, &state.name);
            let none = || (state, vec![None; self.rounds.len()]);
            of_state.entry(key).or_insert_with(none).1[round] = Some(state.moves);
        }
        let mut alike: BTreeMap<_, Vec<&Moved>> = BTreeMap::new();
        for (state, moves) in of_state.into_values() {
            alike.entry((state.micro_batches, moves)).or_default().push(state);
        }
        let moves = |i: Option<usize>| i.map_or(&[][..], |i| &self.moves[i]);
        alike.into_iter().map(|((_, list), states)| (states, list.into_iter().map(moves).collect())).collect()
    }

    /// Whether every process has what it reads.
    pub fn is_empty(&self) -> bool {
        self.rounds.iter().all(Vec::is_empty)
    }

    /// Bytes between processes, by sender and receiver.
    pub fn bytes(&self) -> BTreeMap<(u64, u64), u64> {
        let mut bytes: BTreeMap<(u64, u64), u64> = BTreeMap::new();
        for state in self.rounds.iter().flatten() {
            for one in &self.moves[state.moves] {
                let [from, to] =
                    [(0, one.from), (1, one.to)].map(|(i, rank)| self.processes[i][rank.0 as usize]);
                if from != to {
                    *bytes.entry((from, to)).or_default() += one.elements() * state.ty.dtype.bytes();
                }
            }
        }
        bytes
    }
}

/// The sequences of a state, its first dimension, in all micro-batches.
fn sequences(side: &Side<'_>, of_name: &ByMicroBatch) -> u64 {
    let of = |states: &Vec<usize>| {
        side.states[states[0]].ty.dims.first().map_or(1, |&dim| stored_size(side.space, dim))
    };
    of_name.values().map(of).sum()
}

/// How many rounds give a state all its sequences.
///
/// # Errors
/// The other differences of its types.
fn rounds_of(
    name: &str,
    (from, written): (&Side<'_>, &ByMicroBatch),
    (to, read): (&Side<'_>, &ByMicroBatch),
) -> Result<u64, String> {
    let state = |side: &Side<'_>, of_name: &ByMicroBatch| -> Option<(DType, Vec<u64>)> {
        let ty = side.states[*of_name.values().next()?.first()?].ty;
        let mut shape: Vec<u64> = ty.dims.iter().map(|&d| stored_size(side.space, d)).collect();
        shape.first_mut().iter_mut().for_each(|n| **n = sequences(side, of_name));
        Some((ty.dtype, shape))
    };
    let (Some((left, a)), Some((right, b))) = (state(from, written), state(to, read)) else { return Ok(1) };
    let (few, many) = (a.first().copied().unwrap_or(1).max(1), b.first().copied().unwrap_or(1));
    if left != right || a.len() != b.len() || a.get(1..) != b.get(1..) || !many.is_multiple_of(few) {
        return Err(format!(
            "`{name}` is {left} {a:?} where it is written, and {right} {b:?} where it is read"
        ));
    }
    Ok(many / few)
}
