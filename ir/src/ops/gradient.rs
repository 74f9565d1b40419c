//! Adjoints that are operations of their own: one kernel reads what the forward operation read and the gradient of its
//! result.
//!
//! Products, sums and rotations need none: their adjoints are made of operations that are there already.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::ops::elementwise::need_float;
use crate::ops::{OpError, Types, Unary, loss, norm, unplaced};
use crate::rule::{FactorKind, FactorRule};
use crate::space::Space;
use crate::types::TensorType;

/// The gradient of an operation, from its operands and the gradient of its result.
#[derive(Clone, Debug, PartialEq)]
pub enum Gradient {
    /// `x, dy → dx` of a function of one element: `dy · f'(x)`.
    Unary(Unary),
    /// `ids, dy → d_table`: every row of `over` sums the gradients of the tokens that looked it up.
    Embed {
        /// The dimension of the table that the integers index.
        over: DimId,
        /// The row that has no gradient.
        padding: Option<u64>,
    },
    /// `x, weight, dy → dx, d_weight` of [`RmsNorm`](crate::Op::RmsNorm).
    RmsNorm {
        /// The dimension that is normalised.
        over: DimId,
        /// Added to the mean square.
        eps: f64,
        /// Added to the weight.
        offset: f64,
    },
    /// `x, squares, weight, dy → dx, d_squares, d_weight` of [`RmsScale`](crate::Op::RmsScale).
    RmsScale {
        /// The dimensions over which the squares were summed.
        over: Vec<DimId>,
        /// Added to the mean square.
        eps: f64,
    },
    /// `x, weight, dy → dx, d_weight, d_bias` of [`LayerNorm`](crate::Op::LayerNorm).
    LayerNorm {
        /// The dimension that is normalised.
        over: DimId,
        /// Added to the variance.
        eps: f64,
    },
    /// `logits, labels, lse, d_nll → d_logits` of [`CrossEntropy`](crate::ops::Loss::CrossEntropy):
    /// `(exp(logit − lse) − [v = label]) · d_nll`, zero at ignored labels.
    CrossEntropy {
        /// The vocabulary.
        over: DimId,
        /// The label that counts for nothing.
        ignore: i64,
    },
    /// `y, dy → dx` of [`Softmax`](crate::Op::Softmax), `y` being its result: `y · (dy − Σ y · dy)`.
    Softmax {
        /// The dimension that is summed over.
        over: DimId,
    },
    /// `o, d_o, lse_before, lse → d_o_before, d_lse_before, d_logits` of [`Sink`](crate::Op::Sink), `o` and `lse` being
    /// its results.
    Sink,
}

impl Gradient {
    /// The name in the text form.
    pub fn name(&self) -> &'static str {
        match self {
            Gradient::Unary(_) => "unary_backward",
            Gradient::Embed { .. } => "embed_backward",
            Gradient::RmsNorm { .. } => "rms_norm_backward",
            Gradient::RmsScale { .. } => "rms_scale_backward",
            Gradient::LayerNorm { .. } => "layer_norm_backward",
            Gradient::CrossEntropy { .. } => "cross_entropy_backward",
            Gradient::Softmax { .. } => "softmax_backward",
            Gradient::Sink => "sink_backward",
        }
    }

    /// The dimensions among the attributes, for a pass to replace.
    pub fn dims_mut(&mut self) -> impl Iterator<Item = &mut DimId> {
        let dims: Vec<&mut DimId> = match self {
            Gradient::Unary(_) | Gradient::Sink => Vec::new(),
            Gradient::RmsScale { over, .. } => over.iter_mut().collect(),
            Gradient::Embed { over, .. }
            | Gradient::RmsNorm { over, .. }
            | Gradient::LayerNorm { over, .. }
            | Gradient::Softmax { over }
            | Gradient::CrossEntropy { over, .. } => vec![over],
        };
        dims.into_iter()
    }

    /// FLOPs for each element of the first operand.
    pub(super) fn flops(&self) -> u128 {
        match self {
            Gradient::Unary(f) => f.flops() + 2,
            Gradient::Embed { .. } => 0,
            Gradient::RmsNorm { .. } => 8,
            Gradient::RmsScale { .. } => 6,
            Gradient::LayerNorm { .. } => 11,
            Gradient::CrossEntropy { .. } => 6,
            Gradient::Softmax { .. } | Gradient::Sink => 4,
        }
    }

    /// The result types, their layouts left to the rule; `declared` says which dimensions a table has.
    pub(super) fn infer(
        &self,
        space: &Space,
        operands: &[&TensorType],
        declared: &[TensorType],
    ) -> Result<Types, OpError> {
        let name = self.name();
        match self {
            Gradient::Unary(_) => {
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
                    if rows.dims != labels.dims || rows.dtype != loss::sums_in(logits.dtype) {
                        return Err(OpError::new(
                            "V05",
                            format!(
                                "`{name}` takes lse and the gradient of each token, summed in {}",
                                loss::sums_in(logits.dtype)
                            ),
                        ));
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

    /// The factor rule.
    pub(super) fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        let dims: Vec<&[DimId]> = results.iter().map(|ty| ty.dims.as_slice()).collect();
        let whole = |d: DimId| match self {
            Gradient::RmsNorm { over, .. }
            | Gradient::LayerNorm { over, .. }
            | Gradient::Softmax { over } => d == *over,
            Gradient::Unary(_)
            | Gradient::Embed { .. }
            | Gradient::RmsScale { .. }
            | Gradient::CrossEntropy { .. }
            | Gradient::Sink => false,
        };
        FactorRule::by_name(operands, &dims, |d| match () {
            () if whole(d) => FactorKind::Whole,
            () if dims.iter().any(|dims| dims.contains(&d)) => FactorKind::Parallel,
            () => FactorKind::Sum,
        })
    }
}

fn same(name: &str, x: &TensorType, dy: &TensorType) -> Result<(), OpError> {
    need_float(name, x.dtype)?;
    match x.dims == dy.dims && x.dtype == dy.dtype {
        true => Ok(()),
        false => Err(OpError::new("V05", format!("`{name}` takes x and a gradient of the same type"))),
    }
}

fn embed(
    space: &Space,
    over: DimId,
    operands: &[&TensorType],
    declared: &[TensorType],
) -> Result<Types, OpError> {
    let table = super::source::only("embed_backward", declared)?;
    let [ids, dy] = [operands[0], operands[1]];
    need_float("embed_backward", dy.dtype)?;
    if ids.dtype != DType::I32 {
        return Err(OpError::new("V04", format!("`embed_backward` is indexed by i32, not {}", ids.dtype)));
    }
    let row: Vec<DimId> = dy.dims.iter().copied().filter(|&d| !ids.has(d)).collect();
    let fits = table.dims.first() == Some(&over)
        && table.dims[1..] == row
        && !dy.has(over)
        && ids.dims.iter().all(|&d| dy.has(d))
        && table.dtype == dy.dtype;
    match fits {
        true => Ok(smallvec![unplaced(table)]),
        false => Err(OpError::new(
            "V05",
            format!(
                "`embed_backward` gives a table of `{}` and the dimensions of the gradient that no index has",
                space.dims[over].name
            ),
        )),
    }
}

fn sink(operands: &[&TensorType]) -> Result<Types, OpError> {
    let [o, d_o, before, lse] = [0, 1, 2, 3].map(|i| operands[i]);
    same("sink_backward", o, d_o)?;
    let rows = o.dims.len().checked_sub(1);
    let fits = rows.is_some_and(|n| before.dims[..] == o.dims[..n])
        && before.dims == lse.dims
        && before.dtype == lse.dtype
        && before.dims.len() >= 2;
    if !fits {
        return Err(OpError::new("V05", "`sink_backward`: lse has the dimensions of o but the last"));
    }
    let heads = before.dims[before.dims.len() - 1];
    Ok(smallvec![unplaced(o), unplaced(before), TensorType::new(lse.dtype, [heads])])
}
