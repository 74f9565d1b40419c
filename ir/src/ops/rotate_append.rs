//! Rotation and `append` in one kernel: types and rule follow from the operations that it is.

use crate::dim::DimId;
use crate::ops::check::{refuse, unplaced};
use crate::ops::context::Types;
use crate::ops::error::{OpError, ensure};
use crate::ops::table::cache::{Cache, RotateAppend};
use crate::ops::table::op::Op;
use crate::ops::{norm, rotary};
use crate::rule::{FactorKind, FactorRule};
use crate::space::Space;
use crate::types::TensorType;

/// Rows that are appended to a cache.
#[derive(Clone, Copy, Debug)]
pub struct Appended {
    /// `append` or `append_pages`.
    pub by: Cache,
    /// The operand with the tokens of each sequence before the step. The next one has those after it, and the one behind that the
    /// table of pages.
    pub start: usize,
}

impl RotateAppend {
    /// The operand `start`; the next one is `end`.
    pub const START: usize = 4;

    /// The operation that appends keys, or values.
    pub fn append(&self) -> Cache {
        let Self { slots, rows, wraps, pages, .. } = *self;
        match pages {
            Some(pages) => Cache::AppendPages { pages, slots, rows, beyond: None, after: None },
            None => Cache::Append { over: slots, rows, wraps },
        }
    }

    /// The operation that gives positions from the lengths.
    pub fn positions(&self) -> Cache {
        Cache::TokenPositions { rows: self.rows }
    }

    /// The operand with the table of pages.
    pub fn table(&self) -> Option<usize> {
        self.pages.map(|_| Self::START + 2)
    }

    /// The operand with queries.
    pub fn queries(&self) -> Option<usize> {
        self.queries.then_some(Self::START + 2 + usize::from(self.pages.is_some()))
    }

    /// The operands of the `append` of keys, 0, or of values, 1.
    pub fn operands_of(&self, i: usize) -> impl Iterator<Item = usize> {
        [i, 2 + i, Self::START, Self::START + 1].into_iter().chain(self.table())
    }

    /// The type of the positions of the step's tokens.
    ///
    /// # Errors
    /// `V04`, `V05` for lengths that do not fit.
    pub fn positions_type(&self, space: &Space, operands: &[&TensorType]) -> Result<TensorType, OpError> {
        Ok(self.positions().infer(space, &operands[Self::START..Self::START + 2])?.remove(0))
    }

    pub(super) fn infer(&self, space: &Space, operands: &[&TensorType]) -> Result<Types, OpError> {
        let [keys, values, k, v, ..] = *operands else { unreachable!("operands are counted before") };
        let further = usize::from(self.pages.is_some()) + usize::from(self.queries);
        ensure!(
            operands.len() == Self::START + 2 + further,
            "V01",
            "`rotate_append` takes a table with `pages` and queries with `queries`, and only then"
        );
        ensure!(
            keys == values && k == v,
            "V05",
            "keys and values of `rotate_append` have one type, and so have their caches"
        );
        ensure!(
            keys.dtype == k.dtype,
            "V04",
            "`rotate_append` writes rows of {} to caches of {}",
            k.dtype,
            keys.dtype
        );
        let positions = self.positions_type(space, operands)?;
        let rotated = |x: &TensorType| {
            let is_last = x.dims.last() == Some(&self.rotary.over);
            ensure!(is_last, "V05", "`rotate_append` rotates the last dimension of keys and queries");
            rotary::infer(&self.rotary, space, &[x, &positions])
        };
        rotated(k)?;
        let appended: Vec<&TensorType> = self.operands_of(0).map(|i| operands[i]).collect();
        let cache = unplaced(&self.append().infer(space, &appended)?[0]);
        let refused = |violation| refuse("rotate_append", space, violation);
        let appending = &operands[..operands.len() - usize::from(self.queries)];
        let mut results: Types = [cache.clone(), cache].into_iter().collect();
        let layouts =
            self.rule(appending, &[&results[0], &results[1]]).results(appending).map_err(refused)?;
        results.iter_mut().zip(layouts).for_each(|(ty, layout)| ty.layout = layout);
        if let Some(q) = self.queries().map(|i| operands[i]) {
            let mut turned = rotated(q)?;
            let at = |ty: &TensorType| ty.position(self.rows).unwrap_or(0);
            ensure!(
                q.dims[..=at(q)] == k.dims[..=at(k)] && q.layout.split[..=at(q)] == k.layout.split[..=at(k)],
                "V07",
                "a rank has the queries and the keys of the same tokens in `rotate_append`"
            );
            let rule = norm::rule(self.rotary.over, &[q], &turned);
            turned.layout = rule.results(&[q]).map_err(refused)?.remove(0);
            results.push(turned);
        }
        Ok(results)
    }

    /// The layouts of the caches; every rank has all rows of the step, whole where they are rotated.
    fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        let table = self.table().map(|i| operands[i].dims.as_slice());
        let [batch, entries] = [0, 1].map(|i| table.and_then(|dims| dims.get(i)).copied());
        let whole = [Some(self.rows), Some(self.rotary.over), entries];
        FactorRule::by_factor(operands, results, |dim: DimId| match batch {
            Some(batch) if self.pages == Some(dim) => (batch, FactorKind::Parallel),
            _ if whole.contains(&Some(dim)) => (dim, FactorKind::Whole),
            _ => (dim, FactorKind::Parallel),
        })
    }

    /// FLOPs: three for each element that is rotated.
    pub(super) fn flops(&self, space: &Space, operands: &[&TensorType]) -> u128 {
        let rotated = [Some(2), self.queries()].into_iter().flatten();
        rotated.map(|i| 3 * u128::from(space.max_local_elements(operands[i]))).sum()
    }

    /// Bytes: the rows of the step are read and written.
    pub(super) fn bytes(&self, space: &Space, operands: &[&TensorType]) -> u128 {
        let rows = [Some(2), Some(3), self.queries()].into_iter().flatten();
        rows.map(|i| 2 * u128::from(space.max_local_bytes(operands[i]))).sum()
    }
}

impl Op {
    /// The rows that an operation appends to caches.
    pub fn appended(&self) -> Option<Appended> {
        match self {
            Op::Cache(by @ (Cache::Append { .. } | Cache::AppendPages { .. })) => {
                Some(Appended { by: *by, start: 2 })
            }
            Op::RotateAppend(rotated) => Some(Appended { by: rotated.append(), start: RotateAppend::START }),
            _ => None,
        }
    }
}
