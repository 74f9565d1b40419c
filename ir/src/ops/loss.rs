//! The loss of a language model: cross-entropy of labels, token by token, and the pieces of it that ranks with parts of the
//! vocabulary compute.

use smallvec::smallvec;

use crate::builder::FunctionBuilder;
use crate::dim::DimId;
use crate::dtype::DType;
use crate::handles::ValueId;
use crate::ops::check::{need_float, sums_in, unplaced};
use crate::ops::context::Types;
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::gradients::Gradients;
use crate::ops::table::op::Op;
use crate::ops::table::training::{Gradient, Loss};
use crate::rule::{FactorKind, FactorRule};
use crate::space::Space;
use crate::types::TensorType;

impl Loss {
    /// The result types, their layouts left to the rule.
    pub(super) fn infer(&self, space: &Space, operands: &[&TensorType]) -> Result<Types, OpError> {
        let rows = |x: &TensorType, labels: &TensorType| {
            TensorType::new(sums_in(x.dtype), labels.dims.iter().copied())
        };
        match self {
            Loss::CrossEntropy { over, .. } => {
                check(self.name(), space, *over, operands[0], operands[1])?;
                let rows = rows(operands[0], operands[1]);
                Ok(smallvec![rows.clone(), rows])
            }
            Loss::Pick { over, .. } => {
                check(self.name(), space, *over, operands[0], operands[1])?;
                Ok(smallvec![rows(operands[0], operands[1])])
            }
            Loss::Valid { .. } => {
                ensure!(
                    operands[0].dtype == DType::I32,
                    "V04",
                    "`valid` asks of labels in i32, not {}",
                    operands[0].dtype
                );
                Ok(smallvec![TensorType { dtype: DType::F32, ..unplaced(operands[0]) }])
            }
        }
    }

    /// The factor rule: the whole vocabulary for the loss itself, any part of it for the logit of the label.
    pub(super) fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        FactorRule::by_name(operands, results, |d| match self {
            Loss::CrossEntropy { over, .. } if d == *over => FactorKind::Whole,
            Loss::Pick { over, .. } if d == *over => FactorKind::Sum,
            Loss::CrossEntropy { .. } | Loss::Pick { .. } | Loss::Valid { .. } => FactorKind::Parallel,
        })
    }
}

/// Labels are integers for every row of logits.
pub(super) fn check(
    name: &str,
    space: &Space,
    over: DimId,
    logits: &TensorType,
    labels: &TensorType,
) -> Result<(), OpError> {
    need_float(name, logits.dtype)?;
    ensure!(labels.dtype == DType::I32, "V04", "`{name}` takes labels in i32, not {}", labels.dtype);
    let rows: Vec<DimId> = logits.dims.iter().copied().filter(|&d| d != over).collect();
    ensure!(
        logits.has(over) && rows == labels.dims.as_slice(),
        "V05",
        "`{name}` takes labels with the dimensions of the logits but `{}`",
        space.dims[over].name
    );
    Ok(())
}

/// The gradient of the logits, from that of the loss alone.
pub(super) fn adjoint_cross_entropy(
    b: &mut FunctionBuilder<'_>,
    (over, ignore): (DimId, i64),
    operands: &[ValueId],
    results: &[ValueId],
    gradients: &[Option<ValueId>],
) -> Result<Gradients, OpError> {
    let (Some(d_nll), None) = (gradients[0], gradients[1]) else {
        bail!("V32", "a gradient reaches the lse of `cross_entropy`, which is not differentiated");
    };
    let gradient = Op::Gradient(Gradient::CrossEntropy { over, ignore });
    let d_logits = b.push(gradient, &[operands[0], operands[1], results[1], d_nll])?;
    Ok(vec![Some(d_logits), None])
}

/// The gradient of the logits is that of their labels: cross-entropy's without its softmax, which an lse beyond every
/// logit makes zero.
pub(super) fn adjoint_pick(
    b: &mut FunctionBuilder<'_>,
    (over, ignore): (DimId, i64),
    operands: &[ValueId],
    d: ValueId,
) -> Result<Gradients, OpError> {
    const BEYOND: f64 = 1e38;
    let rows = b.ty(d).clone();
    let minus = b.push(Op::Scale { factor: -1.0 }, &[d])?;
    let lse = b.push_as(Op::Fill { value: BEYOND }, &[], rows)?;
    let gradient = Op::Gradient(Gradient::CrossEntropy { over, ignore });
    Ok(vec![Some(b.push(gradient, &[operands[0], operands[1], lse, minus])?), None])
}
