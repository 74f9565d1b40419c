//! Steps that continue sequences: a cache of keys and values for each layer, the number of tokens of each sequence, and its last
//! token, all of them states.
//!
//! One program serves a whole prompt, a part of it and a single token. `new_tokens` says by how many tokens each sequence grows;
//! none for one that is empty or finished.

use ithaca_ir::ops::cache::{CACHE, HOST, LENGTHS, SCALES, TOKEN};
use ithaca_ir::ops::{Attention, Binding, Cache, OpError, Target, cast};
use ithaca_ir::{DType, DimId, Op, TensorType, ValueId};

use super::body::{Body, Built, Continued};
use super::dims::PageDims;
use crate::workload::Mode;

/// The input that has the number of new tokens of each sequence.
pub(super) const NEW_TOKENS: &str = "new_tokens";
/// The input that has the pages of each sequence.
const PAGES: &str = "pages";

impl Body<'_> {
    /// Takes the lengths of sequences as parameters; call it after declaring the other parameters.
    pub(super) fn take_lengths(&mut self, batch: DimId, pages: Option<PageDims>) {
        let [start, end] = ["start", "end"].map(|name| self.numbers(batch, name));
        let table = pages.map(|of| {
            let ty = TensorType::new(DType::I32, [batch, of.entries]);
            (self.param(ty, Some(PAGES)), of)
        });
        self.continued = Some(Continued { start, end, table });
    }

    /// A parameter that has a number of each sequence.
    pub(super) fn numbers(&mut self, batch: DimId, name: &str) -> ValueId {
        self.param(TensorType::new(DType::I32, [batch]), Some(name))
    }

    /// The arguments of a call, and the lengths of sequences.
    pub(super) fn with_lengths(&self, arguments: &[ValueId]) -> Vec<ValueId> {
        let Some(Continued { start, end, table }) = self.continued else { return arguments.to_vec() };
        arguments.iter().copied().chain([start, end]).chain(table.map(|(table, _)| table)).collect()
    }

    /// Advances the lengths of sequences; returns the numbers of new tokens.
    pub(super) fn advance(&mut self, batch: DimId, pages: Option<PageDims>) -> Built<ValueId> {
        let ty = TensorType::new(DType::I32, [batch]);
        let start = self.state(LENGTHS, batch)?;
        let new = self.push_as(Op::Input(Binding::named(NEW_TOKENS)), &[], ty)?;
        self.name(new, Some(NEW_TOKENS));
        let end = self.push(Op::Cache(Cache::Advance), &[start, new])?;
        self.name(start, Some("start"));
        self.name(end, Some("end"));
        let mut table = None;
        if let Some(of) = pages {
            let ty = TensorType::new(DType::I32, [batch, of.entries]);
            let value = self.push_as(Op::Input(Binding::named(PAGES)), &[], ty)?;
            self.name(value, Some(PAGES));
            table = Some((value, of));
        }
        self.continued = Some(Continued { start, end, table });
        Ok(new)
    }

    /// The tokens of a step: an input, or in decoding the last token of each sequence.
    pub(super) fn tokens(&mut self, mode: Mode, [batch, tokens]: [DimId; 2]) -> Built<ValueId> {
        if mode != Mode::Decode {
            return self.input("input_ids", [batch, tokens]);
        }
        let last = self.last_token(batch)?;
        let ids = self.push_as(Op::Expand, &[last], TensorType::new(DType::I32, [batch, tokens]))?;
        self.name(ids, Some("input_ids"));
        Ok(ids)
    }

    fn last_token(&mut self, batch: DimId) -> Built<ValueId> {
        self.state(TOKEN, batch)
    }

    /// A state that has a number of each sequence.
    pub(super) fn state(&mut self, name: &str, batch: DimId) -> Built<ValueId> {
        self.push_as(Op::State(Binding::named(name)), &[], TensorType::new(DType::I32, [batch]))
    }

    /// A whole number, everywhere the same.
    pub(super) fn every(&mut self, value: f64, dims: &[DimId]) -> Built<ValueId> {
        let ty = TensorType::new(DType::F32, dims.iter().copied());
        let value = self.push_as(Op::Fill { value }, &[], ty)?;
        cast(self, value, DType::I32)
    }

    /// The next token of each sequence that grew, by the largest logit; the last one of the others. It and the lengths are
    /// written.
    pub(super) fn next_token(
        &mut self,
        new: ValueId,
        logits: ValueId,
        [batch, vocabulary]: [DimId; 2],
    ) -> Built<ValueId> {
        let before = self.last_token(batch)?;
        let found = self.node(Op::Cache(Cache::Argmax { over: vocabulary, parts: None }), &[logits], &[])?[0];
        let token = self.push(Op::Cache(Cache::Choose), &[new, found, before])?;
        self.write(TOKEN, token)?;
        if let Some(Continued { end, .. }) = self.continued {
            self.write(LENGTHS, end)?;
        }
        Ok(token)
    }

    pub(super) fn write(&mut self, name: &str, value: ValueId) -> Built<()> {
        let op = Op::Assign { target: Target::State, binding: Binding::named(name) };
        self.node(op, &[value], &[])?;
        Ok(())
    }

    /// The results of attention over caches, to which the step's rows are appended: those of keys, and of values if they are others.
    pub(super) fn attend_cached(
        &mut self,
        attention: Attention,
        (continued, (capacity, wraps)): (Continued, (DimId, bool)),
        queries: &[ValueId],
        rows: &[(&str, ValueId)],
    ) -> Built<Vec<ValueId>> {
        let over = attention.keys;
        let append =
            |&(name, row): &(&str, ValueId)| self.appended(continued, (name, row), over, (capacity, wraps));
        let caches: Vec<_> = rows.iter().map(append).collect::<Built<_>>()?;
        self.attend_caches("mixed", attention, (continued.start, (capacity, wraps)), queries, &caches)
    }

    /// The results of attention over caches, each with its scales if it has some: of `queries`, which are the queries and the bias if
    /// there is one, from position `start` on.
    pub(super) fn attend_caches(
        &mut self,
        name: &str,
        mut attention: Attention,
        (start, (capacity, wraps)): (ValueId, (DimId, bool)),
        queries: &[ValueId],
        caches: &[Vec<ValueId>],
    ) -> Built<Vec<ValueId>> {
        attention.keys = capacity;
        attention.starts = true;
        attention.wraps = wraps;
        attention.scaled = !self.tensors.cache.is_arithmetic();
        attention.latent = caches.len() == 1;
        let (Some(keys), Some(values)) = (caches.first(), caches.last()) else { return Ok(queries.to_vec()) };
        let mut operands = vec![queries[0], keys[0], values[0]];
        operands.extend(&queries[1..]);
        operands.push(start);
        operands.extend(keys.get(1).into_iter().chain(values.get(1)));
        let results = self.node(Op::Attention(attention), &operands, &[])?;
        self.name(results[0], Some(name));
        Ok(results.to_vec())
    }

    /// A cache of `capacity` tokens, and its scales if it has some, after the rows of a step, along `over`, are appended.
    pub(super) fn appended(
        &mut self,
        Continued { start, end, table }: Continued,
        (name, row): (&str, ValueId),
        over: DimId,
        (capacity, wraps): (DimId, bool),
    ) -> Built<Vec<ValueId>> {
        let dims = self.ty(row).dims.iter().map(|&d| if d == over { capacity } else { d });
        let mut ty = TensorType::new(self.tensors.cache, dims);
        let of_step = (row, start, end);
        let Some((table, of)) = table else {
            let append = Cache::Append { over: capacity, rows: over, wraps };
            return self.append((CACHE, name), ty, append, (of_step, None));
        };
        let PageDims { pages, slots, host, .. } = of;
        ty.dims[..2].copy_from_slice(&[pages, slots]);
        let append = |pages, beyond, after| Cache::AppendPages { pages, slots, rows: over, beyond, after };
        let on_device = append(pages, host, None);
        let mut after = self.append((CACHE, name), ty.clone(), on_device, (of_step, Some(table)))?;
        let in_host_memory = host.map(|host| {
            ty.dims[0] = host;
            let copies = self.states((HOST, name), &ty)?;
            let copies = copies.into_iter().map(|(_, pages)| self.push(Op::Cache(Cache::Upload), &[pages]));
            let copies = copies.collect::<Built<Vec<_>>>()?;
            let append = append(host, None, Some(pages));
            let after = self.append((HOST, name), ty, append, (of_step, Some(table)))?;
            Ok::<_, OpError>(copies.into_iter().zip(after).map(|(copy, after)| [copy, after]).collect())
        });
        let further: Vec<[ValueId; 2]> = in_host_memory.transpose()?.unwrap_or_default();
        for (i, value) in after.iter_mut().enumerate() {
            let further = further.get(i).map(|&[copy, current]| [copy, current, start]);
            let further = Vec::from_iter(further.into_iter().flatten());
            *value = self.gathered((*value, table), of, capacity, &further)?;
        }
        Ok(after)
    }

    /// A cache of these dimensions that earlier steps have filled, and its scales if it has some.
    pub(super) fn filled(
        &mut self,
        table: Option<(ValueId, PageDims)>,
        (name, dims): (&str, Vec<DimId>),
        capacity: DimId,
    ) -> Built<Vec<ValueId>> {
        let mut ty = TensorType::new(self.tensors.cache, dims);
        if let Some((_, PageDims { pages, slots, .. })) = table {
            ty.dims[..2].copy_from_slice(&[pages, slots]);
        }
        let states: Vec<ValueId> =
            self.states((CACHE, name), &ty)?.into_iter().map(|(_, state)| state).collect();
        let Some((table, of)) = table else { return Ok(states) };
        states.into_iter().map(|state| self.gathered((state, table), of, capacity, &[])).collect()
    }

    /// The tokens that pages have; `further` are those of pages in host memory.
    fn gathered(
        &mut self,
        (pages, table): (ValueId, ValueId),
        of: PageDims,
        capacity: DimId,
        further: &[ValueId],
    ) -> Built<ValueId> {
        let gather = Cache::GatherPages { pages: of.pages, slots: of.slots, over: capacity, beyond: of.host };
        let operands = [pages, table].into_iter().chain(further.iter().copied());
        self.push(Op::Cache(gather), &Vec::from_iter(operands))
    }

    /// The states that are the cache `name`, and the scales of its rows where it has some, before the step.
    fn states(&mut self, (prefix, name): (&str, &str), ty: &TensorType) -> Built<Vec<(Binding, ValueId)>> {
        let mut types = vec![(format!("{prefix}{name}.{{layer}}"), ty.clone())];
        if !ty.dtype.is_arithmetic() {
            let rows = &ty.dims[..ty.dims.len() - 1];
            let ty = TensorType::new(DType::F32, rows.iter().copied());
            types.push((format!("{prefix}{name}{SCALES}.{{layer}}"), ty));
        }
        let state = |(name, ty)| {
            let binding = Binding { host: prefix == HOST, ..Binding::named(name) };
            Ok((binding.clone(), self.push_as(Op::State(binding), &[], ty)?))
        };
        types.into_iter().map(state).collect()
    }

    /// A cache, and the scales of its rows, after the rows of a step are appended; in pages by a table.
    fn append(
        &mut self,
        name: (&str, &str),
        ty: TensorType,
        append: Cache,
        ((row, start, end), table): ((ValueId, ValueId, ValueId), Option<ValueId>),
    ) -> Built<Vec<ValueId>> {
        let (bindings, before): (Vec<_>, Vec<_>) = self.states(name, &ty)?.into_iter().unzip();
        let operands = [before[0], row, start, end].into_iter();
        let operands = operands.chain(table).chain(before[1..].iter().copied());
        let after = self.node(Op::Cache(append), &Vec::from_iter(operands), &[])?.to_vec();
        for (binding, &value) in bindings.into_iter().zip(&after) {
            self.node(Op::Assign { target: Target::State, binding }, &[value], &[])?;
        }
        Ok(after)
    }
}
