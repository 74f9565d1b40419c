//! Adjoints that are operations of their own: one kernel reads what the forward operation read and the gradient of its
//! result.
//!
//! Products, sums and rotations need none: their adjoints are made of operations that are there already.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::layout::AxisList;
use crate::ops::check::{need_float, only, sums_in, unplaced};
use crate::ops::context::Types;
use crate::ops::error::{OpError, ensure};
use crate::ops::table::training::Gradient;
use crate::ops::{loss, norm};
use crate::rule::{FactorKind, FactorRule};
use crate::space::Space;
use crate::types::TensorType;

impl Gradient {
    /// The result types, their layouts left to the rule; `declared` says which dimensions a table has.
    pub(super) fn infer(
        &self,
        space: &Space,
        operands: &[&TensorType],
        declared: &[TensorType],
    ) -> Result<Types, OpError> {
        let name = self.name();
        match self {
            Gradient::Unary(_) | Gradient::Clamp { .. } => {
                same(name, operands[0], operands[1])?;
                Ok(smallvec![unplaced(operands[0])])
            }
            Gradient::Embed { over, .. } => embed(space, *over, operands, declared),
            Gradient::RmsNorm { over, .. } => {
                norm::infer(name, space, *over, &operands[..2])?;
                same(name, operands[0], operands[2])?;
                Ok(operands[..2].iter().map(|&ty| unplaced(ty)).collect())
            }
            Gradient::LayerNorm { over, .. } => {
                norm::infer(name, space, *over, &operands[..2])?;
                same(name, operands[0], operands[2])?;
                Ok([0, 1, 1].iter().map(|&i| unplaced(operands[i])).collect())
            }
            Gradient::RmsScale { over, .. } => {
                norm::infer_scale(space, over, &operands[..3])?;
                same(name, operands[0], operands[3])?;
                Ok(operands[..3].iter().map(|&ty| unplaced(ty)).collect())
            }
            Gradient::CrossEntropy { over, .. } => {
                let [logits, labels, lse, d_nll] = [0, 1, 2, 3].map(|i| operands[i]);
                loss::check(name, space, *over, logits, labels)?;
                for rows in [lse, d_nll] {
                    if rows.dims != labels.dims || rows.dtype != sums_in(logits.dtype) {
                        let message = format!(
                            "`{name}` takes lse and the gradient of each token, summed in {}",
                            sums_in(logits.dtype)
                        );
                        return Err(OpError::new("V05", message));
                    }
                }
                Ok(smallvec![unplaced(logits)])
            }
            Gradient::Softmax { over } => {
                same(name, operands[0], operands[1])?;
                norm::infer(name, space, *over, &operands[..1]).map(|ty| smallvec![ty])
            }
            Gradient::Sink => sink(operands),
        }
    }

    /// The axes by which the declared gradient of a look-up splits its rows: every rank may add to the rows of its own.
    pub(super) fn declared_rows(&self, declared: &[TensorType]) -> Option<(DimId, AxisList)> {
        let Gradient::Embed { over, padding: _ } = self else { return None };
        declared.first().map(|table| (*over, table.axes_of(*over).into()))
    }

    /// The factor rule.
    pub(super) fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        let is_whole = |d: DimId| match self {
            Gradient::RmsNorm { over, .. }
            | Gradient::LayerNorm { over, .. }
            | Gradient::Softmax { over } => d == *over,
            Gradient::Unary(_)
            | Gradient::Clamp { .. }
            | Gradient::Embed { .. }
            | Gradient::RmsScale { .. }
            | Gradient::CrossEntropy { .. }
            | Gradient::Sink => false,
        };
        FactorRule::by_name(operands, results, |d| {
            if is_whole(d) {
                FactorKind::Whole
            } else if results.iter().any(|ty| ty.has(d)) {
                FactorKind::Parallel
            } else {
                FactorKind::Sum
            }
        })
    }
}

fn same(name: &str, x: &TensorType, dy: &TensorType) -> Result<(), OpError> {
    need_float(name, x.dtype)?;
    ensure!(
        x.dims == dy.dims && x.dtype == dy.dtype,
        "V05",
        "`{name}` takes x and a gradient of the same type"
    );
    Ok(())
}

fn embed(
    space: &Space,
    over: DimId,
    operands: &[&TensorType],
    declared: &[TensorType],
) -> Result<Types, OpError> {
    let table = only("embed_backward", declared)?;
    let [ids, dy] = [operands[0], operands[1]];
    need_float("embed_backward", dy.dtype)?;
    ensure!(ids.dtype == DType::I32, "V04", "`embed_backward` is indexed by i32, not {}", ids.dtype);
    let row: Vec<DimId> = dy.dims.iter().copied().filter(|&d| !ids.has(d)).collect();
    let fits = table.dims.first() == Some(&over)
        && table.dims[1..] == row
        && !dy.has(over)
        && ids.dims.iter().all(|&d| dy.has(d))
        && table.dtype == dy.dtype;
    ensure!(
        fits,
        "V05",
        "`embed_backward` gives a table of `{}` and the dimensions of the gradient that no index has",
        space.dims[over].name
    );
    Ok(smallvec![unplaced(table)])
}

fn sink(operands: &[&TensorType]) -> Result<Types, OpError> {
    let [o, d_o, before, lse] = [0, 1, 2, 3].map(|i| operands[i]);
    same("sink_backward", o, d_o)?;
    let rows = o.dims.len().checked_sub(1);
    let fits = rows.is_some_and(|n| before.dims[..] == o.dims[..n])
        && before.dims == lse.dims
        && before.dtype == lse.dtype
        && before.dims.len() >= 2;
    ensure!(fits, "V05", "`sink_backward`: lse has the dimensions of o but the last");
    let heads = before.dims[before.dims.len() - 1];
    Ok(smallvec![unplaced(o), unplaced(before), TensorType::new(lse.dtype, [heads])])
}
