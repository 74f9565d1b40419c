//! Handovers: the states that one schedule leaves, moved to where another reads them.
//!
//! The caches of prompts go to the ranks of tokens, which may hold other parts of them and may be other processes. A handover says
//! which process sends which elements to which: it follows from the layouts of both alone. Every element that a rank reads comes
//! once, from one rank that has it; where several do, from the one that has sent least.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::layout::At;
use crate::mesh::Rank;
use crate::ops::source::{stored_runs, stored_size};
use crate::order::Run;
use crate::space::Space;
use crate::types::TensorType;

/// A state as some ranks of a schedule hold it. A name may have several: ranks of each have their own type of it.
#[derive(Clone, Debug)]
pub struct State<'a> {
    /// The name of the stored tensor.
    pub name: String,
    /// Its dimensions, element type and layout.
    pub ty: &'a TensorType,
    /// The places whose ranks have it; `None` means all ranks.
    pub places: Vec<Option<At>>,
}

/// One side of a handover.
#[derive(Clone, Debug)]
pub struct Side<'a> {
    /// Dimensions and mesh.
    pub space: &'a Space,
    /// The states.
    pub states: Vec<State<'a>>,
    /// The process of each rank.
    pub processes: Vec<u64>,
}

/// Elements side by side in the memory of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The first index in the part of the rank that sends.
    pub from: u64,
    /// The first index in the part of the rank that receives.
    pub to: u64,
    /// Their number.
    pub len: u64,
}

/// Equal pieces along a dimension, at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// The first one.
    pub first: Piece,
    /// Their number.
    pub count: u64,
    /// From one to the next in the part that sends, and in the part that receives; 0 where there is one.
    pub steps: [u64; 2],
}

impl Pieces {
    /// The pieces, in order.
    pub fn iter(self) -> impl Iterator<Item = Piece> {
        let Self { first, count, steps } = self;
        (0..count).map(move |i| Piece {
            from: first.from + i * steps[0],
            to: first.to + i * steps[1],
            ..first
        })
    }

    /// Adds the piece after them, if it is at the same distance.
    fn add(&mut self, next: Piece) -> bool {
        let Self { first, count, steps } = self;
        let last = (*count - 1) * steps[0] + first.from;
        let end = first.to + (*count - 1) * steps[1];
        let (Some(from), Some(to)) = (next.from.checked_sub(last), next.to.checked_sub(end)) else {
            return false;
        };
        let fits = next.len == first.len && (*count == 1 || *steps == [from, to]);
        if fits {
            (*count, *steps) = (*count + 1, [from, to]);
        }
        fits
    }
}

/// The elements of a state that go from a rank of one side to a rank of the other: all combinations of `pieces`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The rank that has them.
    pub from: Rank,
    /// The rank that reads them.
    pub to: Rank,
    /// For each dimension, in order of the elements.
    pub pieces: Vec<Vec<Pieces>>,
}

impl Move {
    /// Its elements.
    pub fn elements(&self) -> u64 {
        let along = |of_dim: &Vec<Pieces>| of_dim.iter().map(|p| p.count * p.first.len).sum::<u64>();
        self.pieces.iter().map(along).product()
    }

    /// Its elements in row-major order as pieces of the memory of both parts, which have these shapes.
    pub fn copies(&self, [from, to]: [&[u64]; 2]) -> Vec<Piece> {
        let mut all = vec![Piece { from: 0, to: 0, len: 1 }];
        for (dim, pieces) in self.pieces.iter().enumerate() {
            let is_last = dim + 1 == self.pieces.len();
            let one = |piece: Piece| {
                (0..piece.len).map(move |i| Piece { from: piece.from + i, to: piece.to + i, len: 1 })
            };
            let along = |before: &Piece| -> Vec<Piece> {
                let (from, to) = (before.from * from[dim], before.to * to[dim]);
                let at = |piece: Piece| Piece { from: from + piece.from, to: to + piece.to, len: piece.len };
                let pieces = pieces.iter().flat_map(|pieces| pieces.iter());
                if is_last { pieces.map(at).collect() } else { pieces.flat_map(one).map(at).collect() }
            };
            all = all.iter().flat_map(along).collect();
        }
        all
    }
}

/// A state that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The name of the stored tensor.
    pub name: String,
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

/// The part of a state that each rank has: a list of places for each dimension.
type Parts = Vec<Option<Vec<usize>>>;

/// The elements of one dimension that a rank reads, by the lists that have them.
type ByHolders = Vec<(BTreeSet<usize>, Vec<Run>)>;

/// For each rank of one side the rank of the other that has the same parts of all states; `None` where some rank has others.
pub fn places(from: &Side<'_>, to: &Side<'_>) -> Option<Vec<u64>> {
    let mut lists = Lists::default();
    let mut held = |side: &Side<'_>, number| -> Vec<Vec<(String, Vec<usize>)>> {
        let mut of_ranks = vec![Vec::new(); side.processes.len()];
        for (name, states) in by_name(side) {
            for (held, part) in of_ranks.iter_mut().zip(parts(side, &states, (number, 0), &mut lists)) {
                held.extend(part.map(|part| (name.clone(), part)));
            }
        }
        of_ranks
    };
    let (left, read) = (held(from, 0), held(to, 1));
    let mut free: BTreeMap<Vec<(String, Vec<usize>)>, Vec<u64>> = BTreeMap::new();
    for (rank, held) in read.into_iter().enumerate().rev() {
        free.entry(held).or_default().push(rank as u64);
    }
    left.into_iter().map(|held| free.get_mut(&held)?.pop()).collect()
}

/// The states of a side, by name.
fn by_name(side: &Side<'_>) -> BTreeMap<String, Vec<usize>> {
    let mut found: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (i, state) in side.states.iter().enumerate() {
        found.entry(state.name.clone()).or_default().push(i);
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
        let left = by_name(from);
        let read = by_name(to);
        let processes = [from.processes.clone(), to.processes.clone()];
        let mut handover = Self { rounds: Vec::new(), moves: Vec::new(), processes };
        let mut known: BTreeMap<(DType, Parts, Parts), Option<usize>> = BTreeMap::new();
        let mut sent = vec![0; from.processes.len()];
        let mut n_rounds = 1;
        for (name, states) in &read {
            let Some(senders) = left.get(name) else { return Err(format!("no step leaves `{name}`")) };
            n_rounds = n_rounds.max(rounds_of(name, (from, senders[0]), (to, states[0]))?);
        }
        for round in 0..n_rounds {
            let mut moved = Vec::new();
            for (name, states) in &read {
                let senders = &left[name];
                let (ty, dtype) = (to.states[states[0]].ty, to.states[states[0]].ty.dtype);
                let rounds = rounds_of(name, (from, senders[0]), (to, states[0]))?;
                let first = if rounds == 1 { 0 } else { round * sequences(from, senders[0]) };
                let written = parts(from, senders, (0, first), &mut lists);
                let key = (dtype, written, parts(to, states, (1, 0), &mut lists));
                let moves = match known.get(&key) {
                    Some(&moves) => moves,
                    None if n_rounds == 1 && handover.stays(&key, &lists) => None,
                    None => {
                        let load = (sent.as_mut_slice(), dtype.bytes());
                        let is_part = rounds > 1;
                        let found =
                            moves(name, (&key.1, &key.2, is_part), &handover.processes, &lists, load)?;
                        handover.moves.push(found);
                        Some(handover.moves.len() - 1)
                    }
                };
                known.insert(key, moves);
                moved.extend(moves.map(|moves| Moved { name: name.clone(), ty: ty.clone(), moves }));
            }
            handover.rounds.push(moved);
        }
        Ok(handover)
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

    /// The states that move, by name, those of equal moves together: their types, and for each round its moves.
    pub fn alike(&self) -> Vec<(Vec<&Moved>, Vec<&[Move]>)> {
        let mut of_name: BTreeMap<&str, Vec<&Moved>> = BTreeMap::new();
        self.rounds.iter().flatten().for_each(|state| of_name.entry(&state.name).or_default().push(state));
        let mut alike: BTreeMap<Vec<usize>, Vec<&Moved>> = BTreeMap::new();
        for states in of_name.into_values() {
            alike.entry(states.iter().map(|state| state.moves).collect()).or_default().push(states[0]);
        }
        let moves = |list: Vec<usize>| list.into_iter().map(|i| self.moves[i].as_slice()).collect();
        alike.into_iter().map(|(list, states)| (states, moves(list))).collect()
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

/// The sequences of a state, its first dimension.
fn sequences(side: &Side<'_>, state: usize) -> u64 {
    side.states[state].ty.dims.first().map_or(1, |&dim| stored_size(side.space, dim))
}

/// How many rounds give a state all its sequences.
///
/// # Errors
/// The other differences of its types.
fn rounds_of(
    name: &str,
    (from, written): (&Side<'_>, usize),
    (to, read): (&Side<'_>, usize),
) -> Result<u64, String> {
    let shape = |side: &Side<'_>, state: usize| -> Vec<u64> {
        side.states[state].ty.dims.iter().map(|&d| stored_size(side.space, d)).collect()
    };
    let (a, b) = (shape(from, written), shape(to, read));
    let (left, right) = (from.states[written].ty.dtype, to.states[read].ty.dtype);
    let (few, many) = (sequences(from, written), sequences(to, read));
    if left != right || a.len() != b.len() || a.get(1..) != b.get(1..) || !many.is_multiple_of(few.max(1)) {
        return Err(format!(
            "`{name}` is {left} {a:?} where it is written, and {right} {b:?} where it is read"
        ));
    }
    Ok(many / few.max(1))
}

/// Lists of places along dimensions, each once.
#[derive(Debug, Default)]
struct Lists {
    of: Vec<Vec<Run>>,
    known: BTreeMap<(usize, DimId, [u64; 3]), usize>,
    same: BTreeMap<Vec<[u64; 3]>, usize>,
}

impl Lists {
    /// The list of the indices `range` of a dimension of side `number`: where they are stored, behind the `first` ones.
    fn add(&mut self, (number, space): (usize, &Space), dim: DimId, range: Range<u64>, first: u64) -> usize {
        let key = (number, dim, [range.start, range.end, first]);
        if let Some(&known) = self.known.get(&key) {
            return known;
        }
        let mut runs = stored_runs(space, dim, range);
        runs.iter_mut().for_each(|run| run.position += first);
        let plain = runs.iter().map(|run| [run.index, run.position, run.len]).collect();
        let id = *self.same.entry(plain).or_insert_with(|| {
            self.of.push(runs);
            self.of.len() - 1
        });
        self.known.insert(key, id);
        id
    }
}

/// The part that each rank of a side has of a state, which some of `states` are; its sequences come behind the `first` ones.
fn parts(side: &Side<'_>, states: &[usize], (number, first): (usize, u64), lists: &mut Lists) -> Parts {
    let space = side.space;
    let is_on =
        |state: &State<'_>, rank| state.places.iter().any(|p| p.is_none_or(|at| at.has(&space.mesh, rank)));
    let of_rank = |rank: Rank| {
        let state = states.iter().map(|&i| &side.states[i]).find(|state| is_on(state, rank))?;
        let dims = state.ty.dims.iter().zip(space.local_box(state.ty, rank)).enumerate();
        let first = |i| if i == 0 { first } else { 0 };
        Some(dims.map(|(i, (&dim, range))| lists.add((number, space), dim, range, first(i))).collect())
    };
    (0..space.mesh.ranks()).map(Rank).map(of_rank).collect()
}

/// The moves that give each rank of `read` its part, from ranks of `written`; where these have some sequences only, its part of them.
fn moves(
    name: &str,
    (written, read, is_part): (&Parts, &Parts, bool),
    [senders, receivers]: &[Vec<u64>; 2],
    lists: &Lists,
    (sent, width): (&mut [u64], u64),
) -> Result<Vec<Move>, String> {
    let rank_of = written.iter().flatten().map(Vec::len).max().unwrap_or(0);
    let holders: Vec<Holders> = (0..rank_of)
        .map(|dim| Holders::of(&written.iter().flatten().map(|part| part[dim]).collect(), lists))
        .collect();
    let mut by_list: BTreeMap<(usize, usize), ByHolders> = BTreeMap::new();
    let mut all = Vec::new();
    for (to, part) in read.iter().enumerate() {
        let Some(part) = part else { continue };
        for (dim, &list) in part.iter().enumerate() {
            by_list.entry((dim, list)).or_insert_with(|| {
                let mut classes = holders[dim].split(&lists.of[list]);
                classes.retain(|(holders, _)| !holders.is_empty() || dim > 0 || !is_part);
                classes
            });
        }
        let along: Vec<&ByHolders> =
            part.iter().enumerate().map(|(dim, &list)| &by_list[&(dim, list)]).collect();
        let combinations = along.iter().map(|classes| classes.len()).product();
        for combination in 0..combinations {
            let mut left = combination;
            let mut chosen = Vec::new();
            for classes in &along {
                chosen.push(&classes[left % classes.len()]);
                left /= classes.len();
            }
            let has_all = |part: &Vec<usize>| {
                part.iter().zip(&chosen).all(|(list, (holders, _))| holders.contains(list))
            };
            let able = (0..written.len()).filter(|&rank| written[rank].as_ref().is_some_and(has_all));
            let from = able.min_by_key(|&rank| (senders[rank] != receivers[to], sent[rank], rank));
            let Some(from) = from else { return Err(format!("no step leaves all of `{name}`")) };
            let held = written[from].as_deref().unwrap_or_default();
            let pieces =
                held.iter().zip(&chosen).map(|(&list, (_, runs))| pieces(&lists.of[list], runs)).collect();
            let one = Move { from: Rank(from as u64), to: Rank(to as u64), pieces };
            if senders[from] != receivers[to] {
                sent[from] += one.elements() * width;
            }
            all.push(one);
        }
    }
    Ok(all)
}

/// For positions along a dimension the lists that have them: stretches in order, each with its end.
struct Holders(Vec<(Range<u64>, BTreeSet<usize>)>);

impl Holders {
    fn of(used: &BTreeSet<usize>, lists: &Lists) -> Self {
        // Where a list begins or ceases to have elements; it may have some twice.
        let mut changes: BTreeMap<u64, Vec<(usize, i64)>> = BTreeMap::new();
        for &list in used {
            for run in &lists.of[list] {
                changes.entry(run.position).or_default().push((list, 1));
                changes.entry(run.position + run.len).or_default().push((list, -1));
            }
        }
        let mut stretches: Vec<(Range<u64>, BTreeSet<usize>)> = Vec::new();
        let (mut counts, mut start) = (BTreeMap::<usize, i64>::new(), 0);
        for (position, of_position) in changes {
            let held: BTreeSet<usize> = counts.keys().copied().collect();
            match stretches.last_mut() {
                _ if held.is_empty() => {}
                Some((range, before)) if *before == held && range.end == start => range.end = position,
                _ => stretches.push((start..position, held)),
            }
            for (list, change) in of_position {
                let count = counts.entry(list).or_default();
                *count += change;
                if *count == 0 {
                    counts.remove(&list);
                }
            }
            start = position;
        }
        Self(stretches)
    }

    /// Runs by the lists that have their positions; those that none has are in a class of their own.
    fn split(&self, runs: &[Run]) -> ByHolders {
        let mut classes: BTreeMap<BTreeSet<usize>, Vec<Run>> = BTreeMap::new();
        for run in runs {
            let mut position = run.position;
            while position < run.positions().end {
                let next = self.0.partition_point(|(range, _)| range.end <= position);
                let (end, held) = match self.0.get(next) {
                    Some((range, held)) if range.start <= position => (range.end, held.clone()),
                    Some((range, _)) => (range.start, BTreeSet::new()),
                    None => (u64::MAX, BTreeSet::new()),
                };
                let len = end.min(run.positions().end) - position;
                let index = run.index + (position - run.position);
                classes.entry(held).or_default().push(Run { index, position, len });
                position += len;
            }
        }
        classes.into_iter().collect()
    }
}

/// `runs`, which are all in the list `held`, as pieces of both.
fn pieces(held: &[Run], runs: &[Run]) -> Vec<Pieces> {
    let mut by_position: Vec<&Run> = held.iter().collect();
    by_position.sort_by_key(|run| run.position);
    let mut found: Vec<Piece> = Vec::new();
    for run in runs {
        let mut done = 0;
        while done < run.len {
            let position = run.position + done;
            let next = by_position.partition_point(|held| held.positions().end <= position);
            let Some(held) = by_position.get(next) else { break };
            let offset = position - held.position;
            let piece = Piece {
                from: held.index + offset,
                to: run.index + done,
                len: (held.len - offset).min(run.len - done),
            };
            done += piece.len;
            match found.last_mut() {
                Some(last) if (last.from + last.len, last.to + last.len) == (piece.from, piece.to) => {
                    last.len += piece.len
                }
                _ => found.push(piece),
            }
        }
    }
    let mut equal: Vec<Pieces> = Vec::new();
    for piece in found {
        if !equal.last_mut().is_some_and(|last| last.add(piece)) {
            equal.push(Pieces { first: piece, count: 1, steps: [0, 0] });
        }
    }
    equal
}

#[cfg(test)]
mod tests;
