//! Which elements of a state a rank has, and which of them another rank gives it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::side::{MicroBatch, Move, Piece, Pieces, Side, State};
use crate::dim::DimId;
use crate::mesh::Rank;
use crate::ops::source::stored_runs;
use crate::order::Run;
use crate::space::Space;

/// The part of a state that each rank has: a list of places for each dimension.
pub(super) type Parts = Vec<Option<Vec<usize>>>;

/// The elements of one dimension that a rank reads, by the lists that have them.
type ByHolders = Vec<(BTreeSet<usize>, Vec<Run>)>;

/// The elements of a state that each rank reads.
pub(super) fn missing(read: &Parts, lists: &Lists) -> Vec<u64> {
    let along = |&list: &usize| lists.of[list].iter().map(|run| run.len).sum::<u64>();
    read.iter().map(|part| part.as_ref().map_or(0, |part| part.iter().map(along).product())).collect()
}

/// Lists of places along dimensions, each once.
#[derive(Debug, Default)]
pub(super) struct Lists {
    pub(super) of: Vec<Vec<Run>>,
    known: BTreeMap<(usize, DimId, [u64; 4]), usize>,
    same: BTreeMap<Vec<[u64; 3]>, usize>,
}

impl Lists {
    /// The list of the indices `range` of a dimension of side `number`: where they are stored, behind the `first` ones, and of a
    /// micro-batch in turns with the others.
    fn add(
        &mut self,
        (number, space): (usize, &Space),
        (dim, range): (DimId, Range<u64>),
        (first, micro_batch): (u64, Option<MicroBatch>),
    ) -> usize {
        let MicroBatch { index, of } = micro_batch.unwrap_or(MicroBatch { index: 0, of: 1 });
        let key = (number, dim, [range.start, range.end, first + index, of]);
        if let Some(&known) = self.known.get(&key) {
            return known;
        }
        let stored = stored_runs(space, dim, range);
        let alone = |run: Run| {
            (0..run.len).map(move |i| Run { index: run.index + i, position: run.position + i, len: 1 })
        };
        let mut runs = if of == 1 { stored } else { stored.into_iter().flat_map(alone).collect() };
        runs.iter_mut().for_each(|run| run.position = first + run.position * of + index);
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
pub(super) fn parts(
    side: &Side<'_>,
    states: &[usize],
    (number, first): (usize, u64),
    lists: &mut Lists,
) -> Parts {
    let space = side.space;
    let is_on =
        |state: &State<'_>, rank| state.places.iter().any(|p| p.is_none_or(|at| at.has(&space.mesh, rank)));
    let of_rank = |rank: Rank| {
        let state = states.iter().map(|&i| &side.states[i]).find(|state| is_on(state, rank))?;
        let dims = state.ty.dims.iter().zip(space.local_box(state.ty, rank)).enumerate();
        let own = |i| if i == 0 { (first, state.micro_batch) } else { (0, None) };
        Some(dims.map(|(i, (&dim, range))| lists.add((number, space), (dim, range), own(i))).collect())
    };
    (0..space.mesh.ranks()).map(Rank).map(of_rank).collect()
}

/// The moves that give each rank of `read` its part, from ranks of `written`; where these have some sequences only, its part of them.
pub(super) fn moves(
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
