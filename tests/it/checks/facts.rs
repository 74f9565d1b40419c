//! What the ranks of a place do in a frame, and whether that differs from what others do: values by number, as far as anyone sees them.

use std::collections::{BTreeMap, BTreeSet};

/// The source of an operand.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// The result of a task, by the task's number in the schedule that was changed.
    Task(usize, String),
    /// From outside.
    Given(String),
}

/// The work of the ranks of a place in a frame, with the sources of its operands.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Facts {
    pub(super) work: BTreeMap<usize, String>,
    /// For each task the sources of its operands, then those of the weights and states that its callee reads.
    pub(super) reads: BTreeMap<usize, Vec<Source>>,
    /// Tasks that only copy.
    pub(super) copies: BTreeSet<usize>,
    /// Calls, whose operands matter whether or not their results are read.
    pub(super) calls: BTreeSet<usize>,
    /// Exchanges, whose operands matter where their results are read, on this rank or another.
    pub(super) exchanges: BTreeSet<usize>,
    /// Operands that lie where results lie, of tasks that need more of them than the element that they write.
    pub(super) in_place: BTreeSet<(usize, usize, usize)>,
    pub(super) outputs: Vec<Source>,
    pub(super) homes: BTreeMap<String, Source>,
}

/// Numbers of values. Two have one number where the same work makes them of values of one number each: then they are
/// equal on every rank, for work is deterministic, and ranks that send each other what has one number receive it so.
#[derive(Debug, Default)]
struct Numbers {
    known: BTreeMap<(String, Vec<usize>), usize>,
}

impl Numbers {
    fn number(&mut self, what: String, of: Vec<usize>) -> usize {
        let n = self.known.len();
        *self.known.entry((what, of)).or_insert(n)
    }

    /// The number of a value; `made` has the results of tasks that were met.
    fn of(&mut self, facts: &Facts, source: &Source, made: &mut BTreeMap<usize, usize>) -> usize {
        let (task, result) = match source {
            Source::Given(what) => return self.number(format!("given {what}"), Vec::new()),
            Source::Task(task, result) => (*task, result),
        };
        if facts.copies.contains(&task) {
            return self.of(facts, &facts.reads[&task][0], made);
        }
        let all = match made.get(&task) {
            Some(&all) => all,
            None => {
                let reads = &facts.reads[&task];
                let of = reads.iter().map(|read| self.of(facts, read, made)).collect();
                let all = self.number(facts.work[&task].clone(), of);
                made.insert(task, all);
                all
            }
        };
        self.number(result.clone(), vec![all])
    }

    /// Everything that anyone can see of what is done: what is returned, left behind, handed to callees, and sent by
    /// exchanges that are `needed`.
    fn visible(&mut self, facts: &Facts, needed: &BTreeSet<usize>) -> BTreeMap<String, Vec<usize>> {
        let mut made = BTreeMap::new();
        let mut all = |sources: &mut dyn Iterator<Item = &Source>| -> Vec<usize> {
            sources.map(|source| self.of(facts, source, &mut made)).collect()
        };
        let mut visible = BTreeMap::from([("outputs".to_owned(), all(&mut facts.outputs.iter()))]);
        for (home, source) in &facts.homes {
            visible.insert(home.clone(), all(&mut std::iter::once(source)));
        }
        for task in facts.calls.iter().chain(facts.exchanges.intersection(needed)) {
            visible.insert(format!("{task} {}", facts.work[task]), all(&mut facts.reads[task].iter()));
        }
        visible
    }
}

/// The exchanges that bring at some place what is returned, left behind, handed to a callee, or sent on by another such. All
/// ranks of a schedule run the others, or none does, so without them they meet as before.
fn needed(places: &[Facts]) -> BTreeSet<usize> {
    let mut needed: BTreeSet<usize> = BTreeSet::new();
    loop {
        let mut found = needed.clone();
        for facts in places {
            let given = facts.calls.iter().chain(&needed).filter_map(|task| facts.reads.get(task)).flatten();
            let mut open: Vec<&Source> =
                facts.outputs.iter().chain(facts.homes.values()).chain(given).collect();
            let mut met: BTreeSet<usize> = BTreeSet::new();
            while let Some(source) = open.pop() {
                if let Source::Task(task, _) = source
                    && met.insert(*task)
                {
                    open.extend(&facts.reads[task]);
                }
            }
            found.extend(met.intersection(&facts.exchanges));
        }
        if found == needed {
            return needed;
        }
        needed = found;
    }
}

/// What ranks see a difference in; none where the same values are returned, left behind, sent and handed on, and nothing is
/// overwritten too early that was not before.
pub(super) fn difference(before: &[Facts], after: &[Facts]) -> Option<String> {
    let mut numbers = Numbers::default();
    if before.len() != after.len() {
        return Some("other places run it".to_owned());
    }
    let (needed_before, needed_after) = (needed(before), needed(after));
    before.iter().zip(after).find_map(|(before, after)| {
        if let Some((task, _, _)) = after.in_place.difference(&before.in_place).next() {
            return Some(format!("task {task} writes where it reads"));
        }
        let (was, is) = (numbers.visible(before, &needed_before), numbers.visible(after, &needed_after));
        let all: BTreeSet<&String> = was.keys().chain(is.keys()).collect();
        let other = all.into_iter().find(|&what| was.get(what) != is.get(what))?;
        Some(format!("other values are returned, left behind, sent or handed to a callee: {other}"))
    })
}
