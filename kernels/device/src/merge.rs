//! Merges the records of all ranks into one list.
//!
//! Records that differ in integers only become one record, whose integers are functions of mesh coordinates: affine along an
//! axis where the values allow it, otherwise a table. Other records become alternatives.

use std::collections::BTreeMap;
use std::rc::Rc;

use ithaca_ir::entity::{Arena, Entity};
use ithaca_ir::layout::At;
use ithaca_ir::{AxisId, Mesh, Rank};

use crate::address::{Address, Region, TableId};
use crate::argument::Word;
use crate::ops::trace::List;
use crate::program::Table;
use crate::record::{Block, Collective, Grid, Launch, Matrix, Product, Record, Transfer};
use crate::value::{Choice, Int, Varying};

/// The combinations of coordinates along some axes, the last axis fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Ascending.
    axes: Vec<AxisId>,
    sizes: Vec<usize>,
}

impl Span {
    /// The span of some axes, each of which may be named more than once.
    pub(crate) fn of(mesh: &Mesh, axes: impl IntoIterator<Item = AxisId>) -> Self {
        let mut axes: Vec<AxisId> = axes.into_iter().filter(|&axis| mesh.size(axis) > 1).collect();
        axes.sort_unstable();
        axes.dedup();
        let sizes = axes.iter().map(|&axis| index(mesh.size(axis))).collect();
        Self { axes, sizes }
    }

    pub(crate) fn axes(&self) -> &[AxisId] {
        &self.axes
    }

    pub(crate) fn len(&self) -> usize {
        self.sizes.iter().product()
    }

    /// For each combination the rank that has it and, along other axes, the coordinates of `from`.
    pub(crate) fn ranks<'m>(&'m self, mesh: &'m Mesh, from: Rank) -> impl Iterator<Item = Rank> + 'm {
        (0..self.len()).map(move |number| {
            let mut rest = number;
            self.axes.iter().zip(&self.sizes).rev().fold(from, |rank, (&axis, &size)| {
                let coordinate = rest % size;
                rest /= size;
                mesh.with_coordinate(rank, axis, coordinate as u64)
            })
        })
    }
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("a mesh has at most 2^20 ranks")
}

/// Some rank of a place, or rank 0.
pub(crate) fn rank_at(mesh: &Mesh, at: Option<At>) -> Rank {
    at.map_or(Rank(0), |at| mesh.with_coordinate(Rank(0), at.axis, at.coordinate))
}

/// Values by combination of coordinates; `None` for combinations that do not matter.
struct Values<T> {
    span: Span,
    values: Vec<Option<T>>,
}

impl<T: Clone + PartialEq> Values<T> {
    /// The values along the axis at a place of the span, line by line.
    fn lines(&self, place: usize) -> impl Iterator<Item = impl Iterator<Item = (i64, &T)>> {
        let n = self.span.sizes[place];
        let inner: usize = self.span.sizes[place + 1..].iter().product();
        let outer: usize = self.span.sizes[..place].iter().product();
        (0..outer * inner).map(move |line| {
            let start = line / inner * n * inner + line % inner;
            (0..n).filter_map(move |c| Some((c as i64, self.values[start + c * inner].as_ref()?)))
        })
    }

    /// Leaves out the axis at a place, if `without` is the same for all values along each line.
    fn leave_out(&mut self, place: usize, without: impl Fn(i64, &T) -> T) -> bool {
        let mut values = Vec::with_capacity(self.values.len() / self.span.sizes[place]);
        for mut line in self.lines(place) {
            let value = line.next().map(|(c, value)| without(c, value));
            if line.any(|(c, other)| value.as_ref() != Some(&without(c, other))) {
                return false;
            }
            values.push(value);
        }
        self.values = values;
        self.span.axes.remove(place);
        self.span.sizes.remove(place);
        true
    }
}

/// The integer with these values.
fn fit(span: &Span, values: Vec<Option<i64>>) -> Int {
    let mut some = values.iter().flatten();
    let first = some.next().copied().unwrap_or(0);
    if some.all(|&value| value == first) {
        return Int::Const(first);
    }
    let mut grid = Values { span: span.clone(), values };
    let mut varying = Varying::default();
    let mut place = 0;
    while place < grid.span.axes.len() {
        let axis = grid.span.axes[place];
        let slope = grid.lines(place).find_map(|mut line| {
            let ((c, value), (d, next)) = (line.next()?, line.next()?);
            Some(next.wrapping_sub(*value).checked_div(d - c).unwrap_or(0))
        });
        let slope = slope.unwrap_or(0);
        if grid.leave_out(place, |c, value| value.wrapping_sub(slope.wrapping_mul(c))) {
            varying.per_axis.push((axis, slope));
        } else {
            place += 1;
        }
    }
    if grid.span.axes.is_empty() {
        varying.base = grid.values[0].unwrap_or(0);
    } else {
        varying.axes = grid.span.axes;
        varying.values = grid.values.into_iter().map(|value| value.unwrap_or(0)).collect();
    }
    varying.into_int()
}

/// The choice among `alternatives`, by number.
fn choose<T>(span: &Span, chosen: Vec<Option<usize>>, alternatives: Vec<T>) -> Choice<T> {
    let mut grid = Values { span: span.clone(), values: chosen };
    let mut place = 0;
    while place < grid.span.axes.len() {
        if !grid.leave_out(place, |_, &value| value) {
            place += 1;
        }
    }
    let chosen = grid.values.into_iter().map(|value| value.unwrap_or(0)).collect();
    Choice { axes: grid.span.axes, chosen, alternatives }
}

/// The integer with these values, one for each combination of the span.
pub(crate) fn integer(span: &Span, values: impl IntoIterator<Item = i64>) -> Int {
    fit(span, values.into_iter().map(Some).collect())
}

/// The lists as one for each length.
pub(crate) fn lists(span: &Span, lists: &[Option<&[i64]>]) -> Choice<Vec<Int>> {
    let mut lengths: Vec<usize> = lists.iter().flatten().map(|list| list.len()).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let of_length = |&n: &usize| -> Vec<Int> {
        let same = |list: &Option<&[i64]>, i: usize| list.filter(|list| list.len() == n).map(|list| list[i]);
        (0..n).map(|i| fit(span, lists.iter().map(|list| same(list, i)).collect())).collect()
    };
    let number =
        |list: &Option<&[i64]>| lengths.iter().position(|&n| list.is_some_and(|list| list.len() == n));
    choose(span, lists.iter().map(number).collect(), lengths.iter().map(of_length).collect())
}

/// The records of a task on one rank.
#[derive(Clone, Debug)]
pub(crate) struct Traced {
    pub(crate) records: Vec<Record>,
    pub(crate) lists: Vec<List>,
}

/// The distinct tables of a program.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) all: Arena<TableId, Table>,
    known: BTreeMap<Table, TableId>,
}

impl Tables {
    fn add(&mut self, table: Table) -> TableId {
        if let Some(&known) = self.known.get(&table) {
            return known;
        }
        let id = self.all.push(table.clone());
        self.known.insert(table, id);
        id
    }

    /// The list that the members of an alternative have at a place.
    fn merge(&mut self, span: &Span, members: &[Member], place: usize) -> TableId {
        let mut integers: Vec<Option<&[i64]>> = vec![None; span.len()];
        let mut reals: Vec<&Rc<Vec<u64>>> = Vec::new();
        let mut chosen = vec![None; span.len()];
        for member in members {
            match &member.lists[place] {
                List::Integers(list) => integers[member.number] = Some(list),
                List::Reals(list) => {
                    let known = reals.iter().position(|known| Rc::ptr_eq(known, list) || *known == list);
                    chosen[member.number] = Some(known.unwrap_or_else(|| {
                        reals.push(list);
                        reals.len() - 1
                    }));
                }
            }
        }
        self.add(if reals.is_empty() {
            Table::Integers(lists(span, &integers))
        } else {
            Table::Reals(choose(span, chosen, reals.into_iter().map(|list| list.to_vec()).collect()))
        })
    }
}

/// A combination of coordinates that has an alternative.
struct Member {
    number: usize,
    integers: Vec<i64>,
    lists: Vec<List>,
}

/// The records of all ranks; none for combinations of coordinates that do not run the task.
pub(crate) fn records(
    span: &Span,
    traced: impl IntoIterator<Item = Option<Traced>>,
    tables: &mut Tables,
) -> Choice<Vec<Record>> {
    let mut found: Vec<(Vec<Record>, Vec<Member>)> = Vec::new();
    let mut chosen = vec![None; span.len()];
    for (number, traced) in traced.into_iter().enumerate() {
        let Some(Traced { mut records, lists }) = traced else { continue };
        let mut integers = Vec::new();
        // Integers that vary with the layer are part of the skeleton.
        each_int(&mut records, &mut |n| {
            if let Int::Const(n) = n {
                integers.push(std::mem::take(n));
            }
        });
        let member = Member { number, integers, lists };
        let alike = found.iter().position(|(skeleton, _)| *skeleton == records);
        let alike = alike.unwrap_or_else(|| {
            found.push((records, Vec::new()));
            found.len() - 1
        });
        found[alike].1.push(member);
        chosen[number] = Some(alike);
    }
    let merged = |(mut records, members): (Vec<Record>, Vec<Member>)| {
        let n_lists = members.first().map_or(0, |member| member.lists.len());
        let ids: Vec<TableId> = (0..n_lists).map(|place| tables.merge(span, &members, place)).collect();
        let mut next = 0;
        each_int(&mut records, &mut |n| {
            if let Int::Const(_) = n {
                let mut values = vec![None; span.len()];
                members.iter().for_each(|member| values[member.number] = Some(member.integers[next]));
                *n = fit(span, values);
                next += 1;
            }
        });
        each_part(&mut records, &mut |part| {
            if let Part::Address(Address { region: Region::Table(local), .. }) = part {
                *local = ids[local.index()];
            }
        });
        records
    };
    let alternatives: Vec<Vec<Record>> = found.into_iter().map(merged).collect();
    if alternatives.is_empty() { Choice::only(Vec::new()) } else { choose(span, chosen, alternatives) }
}

/// Calls `of` with every integer, in order.
fn each_int(records: &mut [Record], of: &mut impl FnMut(&mut Int)) {
    each_part(records, &mut |part| match part {
        Part::Int(n) => of(n),
        Part::Address(address) => of(&mut address.offset),
    });
}

enum Part<'a> {
    Int(&'a mut Int),
    Address(&'a mut Address),
}

/// Calls `of` with every address and every other integer, in order.
fn each_part(records: &mut [Record], of: &mut impl FnMut(Part<'_>)) {
    let block = |Block { peer, at, count }: &mut Block, of: &mut dyn FnMut(Part<'_>)| {
        of(Part::Int(peer));
        of(Part::Address(at));
        of(Part::Int(count));
    };
    let product = |product: &mut Product, of: &mut dyn FnMut(Part<'_>)| {
        let Product {
            dtype: _,
            result: _,
            activation: _,
            rows,
            columns,
            inner,
            batch,
            a,
            b,
            before,
            bias,
            bias_step,
            c,
        } = product;
        [before, bias].into_iter().for_each(|at| of(Part::Address(at)));
        [rows, columns, inner, batch, bias_step].into_iter().for_each(|n| of(Part::Int(n)));
        for Matrix { at, form: _, leading, step } in [a, b, c] {
            of(Part::Address(at));
            of(Part::Int(leading));
            of(Part::Int(step));
        }
    };
    for record in records {
        match record {
            Record::Launch(Launch { kernel: _, grid, args }) => {
                match grid {
                    Grid::Threads(n) | Grid::Blocks { blocks: n, .. } => of(Part::Int(n)),
                }
                for word in args.iter_mut().flat_map(|arg| &mut arg.words) {
                    match word {
                        Word::Int(n) => of(Part::Int(n)),
                        Word::Address(address) => of(Part::Address(address)),
                        Word::Real(_) => {}
                    }
                }
            }
            Record::Product(of_one) => product(of_one, of),
            Record::Pair(pair) => pair.iter_mut().for_each(|of_one| product(of_one, of)),
            Record::Copy { from, to, bytes } => {
                of(Part::Address(from));
                of(Part::Address(to));
                of(Part::Int(bytes));
            }
            Record::Transfer(Transfer { collective, .. }) => match collective {
                Collective::SendReceive { sends, receives } => {
                    sends.iter_mut().chain(receives).for_each(|b| block(b, of));
                }
                Collective::Filled { from, to, outgoing, incoming, runs: _, sent: _, received: _ } => {
                    [from, to, outgoing, incoming].into_iter().for_each(|at| of(Part::Address(at)));
                }
                Collective::Even { kind: _, from, to, count } => {
                    of(Part::Address(from));
                    of(Part::Address(to));
                    of(Part::Int(count));
                }
                Collective::Reduce { blocks, to } => {
                    blocks.iter_mut().for_each(|b| block(b, of));
                    of(Part::Address(to));
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Coordinates;

    #[test]
    fn integers_have_the_values_that_they_were_made_of() {
        let mesh = Mesh::new([("a", 3), ("b", 2), ("c", 4)]);
        let span = Span::of(&mesh, mesh.axes.ids());
        let ranks: Vec<Rank> = span.ranks(&mesh, Rank(0)).collect();
        assert_eq!(ranks, mesh.iter_ranks().collect::<Vec<_>>());
        let uneven = [0, 5, 6];
        let along = |rank: Rank| mesh.axes.ids().map(|a| mesh.coordinate(rank, a) as i64).collect::<Vec<_>>();
        type Case<'f> = &'f dyn Fn(&[i64]) -> i64;
        let cases: [Case<'_>; 5] = [
            &|_| 7,
            &|c| 4 + 10 * c[2],
            &|c| uneven[c[0] as usize] + 100 * c[1] + 3,
            &|c| (c[2] + 1) % 4 + 4 * c[0],
            &|c| c[0] * c[1] * c[2],
        ];
        let tables = [0, 0, 3, 4, 24];
        for (value, n) in cases.into_iter().zip(tables) {
            let int = integer(&span, ranks.iter().map(|&rank| value(&along(rank))));
            for &rank in &ranks {
                assert_eq!(int.at(&Coordinates::of(&mesh, rank), 0), value(&along(rank)), "{int:?}");
            }
            let found = if let Int::Varying(v) = &int { v.values.len() } else { 0 };
            assert_eq!(found, n, "{int:?}");
        }
    }

    #[test]
    fn lists_of_different_lengths_are_alternatives() {
        let mesh = Mesh::new([("a", 2), ("b", 2)]);
        let span = Span::of(&mesh, mesh.axes.ids());
        let all: [&[i64]; 4] = [&[0, 1], &[0, 2], &[5], &[5]];
        let made = lists(&span, &all.map(Some));
        assert_eq!((made.axes.len(), made.alternatives.len()), (1, 2));
        for (rank, list) in mesh.iter_ranks().zip(all) {
            let at = Coordinates::of(&mesh, rank);
            assert_eq!(made.at(&at).iter().map(|n| n.at(&at, 0)).collect::<Vec<_>>(), list);
        }
    }
}
