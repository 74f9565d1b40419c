//! Steps that continue sequences: lengths, rows of caches, the choice of tokens.

use std::ops::Range;

use ithaca_ir::ops::Cache;
use ithaca_ir::{DimId, Space};

use super::rows::Lines;
use super::value::{LocalOp, Operand, Value};
use crate::error::RunError;
use crate::positions::sequence_positions;
use crate::real::Real;
use crate::storage::scale_of_row;
use crate::tensor::{Offsets, index, strides};

/// Computes `op` on the parts of a rank.
///
/// # Errors
/// [`RunError::CacheFull`] where a sequence has more tokens than its cache; [`RunError::Invalid`] for operands that do not fit,
/// which a verified program does not have.
pub(super) fn cache<T: Real>(call: &LocalOp<'_, T>, op: &Cache) -> Result<Vec<Value<T>>, RunError> {
    let ints = |data: Vec<i32>| Ok(vec![Value::Int(call.tensor(0, data)?)]);
    match op {
        Cache::Advance => {
            let sums = call.int(0)?.iter().zip(call.int(1)?).map(|(start, new)| start + new);
            ints(sums.collect())
        }
        Cache::TokenPositions { rows } => {
            let held = call.result().region.last().cloned().unwrap_or_default();
            let rows = sequence_positions(call.space, *rows, held);
            let lengths = call.int(0)?.iter().zip(call.int(1)?);
            let of_sequence = |(&start, &end): (&i32, &i32)| {
                let position = move |&row: &u64| start.saturating_add(i32::try_from(row).unwrap_or(i32::MAX));
                rows.iter().map(position).map(move |p| if p < end { p } else { 0 }).collect::<Vec<_>>()
            };
            ints(lengths.flat_map(of_sequence).collect())
        }
        Cache::Append { over, rows, wraps } => append(call, (*over, *wraps), *rows)?.values(call),
        Cache::AppendPages { slots, rows, beyond, after, .. } => {
            append_pages(call, (*slots, *rows), (*beyond, *after))?.values(call)
        }
        Cache::GatherPages { pages, slots, over, beyond } => {
            let gathered = gather_pages(call, (*slots, *over), beyond.map(|beyond| (*pages, beyond)))?;
            Ok(vec![Value::Real(call.tensor(0, gathered)?)])
        }
        Cache::Upload => Ok(vec![Value::Real(call.tensor(0, call.real(0)?.to_vec())?)]),
        Cache::LastToken { over } => Ok(vec![Value::Real(call.tensor(0, last_token(call, *over)?)?)]),
        Cache::Argmax { over, .. } => argmax(call, *over),
        Cache::Choose => {
            let pairs = call.int(1)?.iter().zip(call.int(2)?);
            ints(call.int(0)?.iter().zip(pairs).map(|(&n, (&x, &y))| if n > 0 { x } else { y }).collect())
        }
    }
}

/// A cache that is written, and the scales of its rows where it has some.
struct Written<T> {
    cache: Vec<T>,
    scales: Option<Vec<T>>,
    /// Elements that share a scale.
    width: usize,
}

impl<T: Real> Written<T> {
    /// The cache before, whose scales are operand `scales`.
    fn of(call: &LocalOp<'_, T>, scales: usize) -> Result<Self, RunError> {
        let width = call.operands[0].shape().last().copied().unwrap_or(1).max(1);
        let scales = call.operands.get(scales).map(|scales| Ok::<_, RunError>(scales.real()?.to_vec()));
        Ok(Self { cache: call.real(0)?.to_vec(), scales: scales.transpose()?, width })
    }

    /// Writes the elements of a token from element `at` on.
    fn write(&mut self, at: usize, token: &[T]) {
        let to = &mut self.cache[at..at + token.len()];
        let Some(scales) = &mut self.scales else { return to.copy_from_slice(token) };
        let first = at / self.width;
        let rows = token.chunks(self.width).zip(to.chunks_mut(self.width));
        for ((row, to), scale) in rows.zip(&mut scales[first..]) {
            *scale = scale_of_row(row);
            to.iter_mut().zip(row).for_each(|(to, &x)| *to = x / *scale);
        }
    }

    fn values(self, call: &LocalOp<'_, T>) -> Result<Vec<Value<T>>, RunError> {
        let results = std::iter::once(self.cache).chain(self.scales).enumerate();
        results.map(|(i, data)| Ok(Value::Real(call.tensor(i, data)?))).collect()
    }
}

/// The cache with the new rows that belong to the rank.
fn append<T: Real>(
    call: &LocalOp<'_, T>,
    (over, wraps): (DimId, bool),
    rows: DimId,
) -> Result<Written<T>, RunError> {
    let (mut written, data) = (Written::of(call, 4)?, call.real(1)?);
    let [held, x, start, end] = [0, 1, 2, 3].map(|i| &call.operands[i]);
    let (start_of, end_of) = (start.int()?, end.int()?);
    let at = x.ty.position(rows).ok_or_else(|| call.invalid("with x that lacks the rows"))?;
    if start.ty.dims.iter().any(|d| !x.ty.dims[..at].contains(d)) {
        return Err(RunError::Unsupported("`append` with lengths of dimensions behind the rows".to_owned()));
    }
    let shape = x.shape();
    let width: usize = shape[at + 1..].iter().product();
    let slots = held.shape().get(at).copied().unwrap_or(0);
    let positions = sequence_positions(call.space, rows, x.region[at].clone());
    let of_sequences = start.strides_in(x.ty)[..at].to_vec();
    let capacity = call.space.dims[over].valid;
    for (front, sequence) in Offsets::new(shape[..at].to_vec(), of_sequences, 0).enumerate() {
        let [start, end] = [start_of[sequence], end_of[sequence]].map(|n| u64::try_from(n).unwrap_or(0));
        if end > capacity && !wraps {
            return Err(RunError::CacheFull { tokens: end, capacity });
        }
        for (row, position) in positions.iter().enumerate() {
            let position = start + position;
            if position >= end {
                continue;
            }
            let position = if wraps { position % capacity } else { position };
            let slots_held = held.region[at].clone();
            let Some(slot) = call.space.index_at(over, slots_held.clone(), position) else { continue };
            let to = (front * slots + index(slot - slots_held.start)) * width;
            let from = (front * positions.len() + row) * width;
            written.write(to, &data[from..from + width]);
        }
    }
    Ok(written)
}

/// Where a rank has a token in its pages.
enum InPage {
    /// In this row of its part: the page times the slots, plus the slot.
    Row(usize),
    /// In a slot that another rank has, or in other memory.
    Elsewhere,
    /// The table has no page of the rank.
    No,
}

/// The pages of a rank, and the table that says which page has which tokens.
struct Pages<'a> {
    space: &'a Space,
    /// The dimensions of pages and slots, and the parts that the rank has.
    pages: (DimId, Range<u64>),
    slots: (DimId, Range<u64>),
    entries: usize,
    table: &'a [i32],
    /// The number of the first page, and those of pages in other memory.
    first: u64,
    others: Range<u64>,
}

impl<'a> Pages<'a> {
    fn of<T: Real>(
        call: &'a LocalOp<'_, T>,
        cache: &Operand<'_, T>,
        table: &'a Operand<'_, T>,
    ) -> Result<Self, RunError> {
        let part = |i: usize| Some((*cache.ty.dims.get(i)?, cache.region.get(i)?.clone()));
        let (Some(pages), Some(slots), &[_, entries]) = (part(0), part(1), table.shape().as_slice()) else {
            return Err(call.invalid("with a cache that is not in pages"));
        };
        Ok(Self { space: call.space, pages, slots, entries, table: table.int()?, first: 0, others: 0..0 })
    }

    /// The same where pages of `beyond` are numbered after these, and these after those of `after`.
    fn beside(self, beyond: Option<DimId>, after: Option<DimId>) -> Self {
        let size = |dim: Option<DimId>| dim.map_or(0, |dim| self.space.size(dim));
        let (first, own) = (size(after), self.space.size(self.pages.0));
        let others = if after.is_some() { 0..first } else { own..own + size(beyond) };
        Self { first, others, ..self }
    }

    /// Where the token at `position` of a sequence of the rank is.
    fn place(&self, sequence: usize, position: u64) -> InPage {
        let (slots, held) = &self.slots;
        let all = self.space.size(*slots);
        let entry = index(position / all);
        let Some(slot) = self.space.index_at(*slots, held.clone(), position % all) else {
            return InPage::Elsewhere;
        };
        let page = if entry < self.entries { self.table[sequence * self.entries + entry] } else { -1 };
        let (pages, own) = &self.pages;
        let page = u64::try_from(page).ok();
        let number = page.and_then(|page| page.checked_sub(self.first));
        match number.and_then(|page| self.space.index_at(*pages, own.clone(), page)) {
            None if page.is_some_and(|page| self.others.contains(&page)) => InPage::Elsewhere,
            None => InPage::No,
            Some(page) => {
                InPage::Row(index((page - own.start) * (held.end - held.start) + (slot - held.start)))
            }
        }
    }
}

/// The pages with the new rows that belong to the rank.
fn append_pages<T: Real>(
    call: &LocalOp<'_, T>,
    (slots, rows): (DimId, DimId),
    (beyond, after): (Option<DimId>, Option<DimId>),
) -> Result<Written<T>, RunError> {
    let (mut written, data) = (Written::of(call, 5)?, call.real(1)?);
    let (x, table) = (&call.operands[1], &call.operands[4]);
    let pages = Pages::of(call, &call.operands[0], table)?.beside(beyond, after);
    let capacity = pages.entries as u64 * call.space.size(slots);
    let width: usize = x.shape()[2..].iter().product();
    let positions = sequence_positions(call.space, rows, x.region[1].clone());
    for (sequence, (&start, &end)) in call.int(2)?.iter().zip(call.int(3)?).enumerate() {
        let [start, end] = [start, end].map(|n| u64::try_from(n).unwrap_or(0));
        if end > capacity {
            return Err(RunError::CacheFull { tokens: end, capacity });
        }
        for (row, position) in positions.iter().enumerate().map(|(row, position)| (row, start + position)) {
            if position >= end {
                continue;
            }
            let to = match pages.place(sequence, position) {
                InPage::Row(row) => row * width,
                InPage::Elsewhere => continue,
                InPage::No => return Err(RunError::NoPage { token: position, sequence: sequence as u64 }),
            };
            let from = (sequence * positions.len() + row) * width;
            written.write(to, &data[from..from + width]);
        }
    }
    Ok(written)
}

/// The tokens of each sequence that the rank is to have.
pub(super) fn gather_pages<T: Real>(
    call: &LocalOp<'_, T>,
    (slots, over): (DimId, DimId),
    in_host_memory: Option<(DimId, DimId)>,
) -> Result<Vec<T>, RunError> {
    let data = call.real(0)?;
    let of = |operand: usize| Pages::of(call, &call.operands[operand], &call.operands[1]);
    let pages = of(0)?.beside(in_host_memory.map(|(_, beyond)| beyond), None);
    let further = in_host_memory.map(|(own, _)| {
        Ok::<_, RunError>((of(2)?.beside(None, Some(own)), [call.real(2)?, call.real(3)?], call.int(4)?))
    });
    let further = further.transpose()?;
    let result = call.result();
    let shape = call.shape();
    let (sequences, width) = (shape[0], shape[2..].iter().product::<usize>());
    let positions = sequence_positions(call.space, over, result.region[1].clone());
    let mut gathered = vec![T::ZERO; shape.iter().product()];
    let places = (0..sequences).flat_map(|sequence| positions.iter().map(move |&p| (sequence, p)));
    for ((sequence, position), row) in places.zip(gathered.chunks_mut(width.max(1))) {
        let (place, data) = match (pages.place(sequence, position), &further) {
            (InPage::Elsewhere, Some((pages, [copy, current], start))) => {
                let is_old = u64::try_from(start[sequence]).is_ok_and(|start| position < start);
                (pages.place(sequence, position), if is_old { *copy } else { *current })
            }
            (place, _) => (place, data),
        };
        match place {
            InPage::Row(from) => row.copy_from_slice(&data[from * width..(from + 1) * width]),
            InPage::No => {}
            InPage::Elsewhere => {
                let slots = &call.space.dims[slots].name;
                return Err(call.invalid(&format!("with tokens in slots `{slots}` that the rank lacks")));
            }
        }
    }
    Ok(gathered)
}

/// The row of each sequence's last new token, zero where another rank has it.
fn last_token<T: Real>(call: &LocalOp<'_, T>, over: DimId) -> Result<Vec<T>, RunError> {
    let (x, data) = (&call.operands[0], call.real(0)?);
    let [start, end] = [call.int(1)?, call.int(2)?];
    let at = x.ty.position(over).ok_or_else(|| call.invalid("over a dimension that x lacks"))?;
    let (held, step) = (x.region[at].clone(), strides(&x.shape())[at]);
    let result = call.result();
    let sequences = Offsets::new(call.shape(), call.operands[1].strides_in(result.ty), 0);
    let rows = Offsets::new(call.shape(), x.strides_in(result.ty), 0);
    let element = |(sequence, row): (usize, usize)| {
        let last = u64::try_from(end[sequence] - start[sequence] - 1).ok()?;
        let found = call.space.index_at(over, held.clone(), last)?;
        Some(data[row + index(found - held.start) * step])
    };
    Ok(sequences.zip(rows).map(|places| element(places).unwrap_or(T::ZERO)).collect())
}

/// The largest element of each line and its place, or what the second operand has there.
fn argmax<T: Real>(call: &LocalOp<'_, T>, over: DimId) -> Result<Vec<Value<T>>, RunError> {
    let (x, data) = (&call.operands[0], call.real(0)?);
    let given = call.operands.get(1).map(|places| places.int()).transpose()?;
    let at = x.ty.position(over).ok_or_else(|| call.invalid("over a dimension that x lacks"))?;
    let positions = sequence_positions(call.space, over, x.region[at].clone());
    let valid = call.space.dims[over].valid;
    let lines = Lines::of(x, over)?;
    let (mut places, mut values) = (Vec::new(), Vec::new());
    for line in lines.iter() {
        let mut best: Option<(usize, u64)> = None;
        for (i, &position) in line.zip(&positions).filter(|&(_, &position)| position < valid) {
            let better =
                best.is_none_or(|(j, first)| data[i] > data[j] || (data[i] == data[j] && position < first));
            if better {
                best = Some((i, position));
            }
        }
        places.push(match (best, given) {
            (Some((i, _)), Some(given)) => given[i],
            (Some((_, position)), None) => i32::try_from(position).unwrap_or(i32::MAX),
            (None, _) => 0,
        });
        values.push(best.map_or(T::NEG_INFINITY, |(i, _)| data[i]));
    }
    let values = if call.results.len() > 1 { vec![Value::Real(call.tensor(1, values)?)] } else { Vec::new() };
    Ok(std::iter::once(Value::Int(call.tensor(0, places)?)).chain(values).collect())
}
