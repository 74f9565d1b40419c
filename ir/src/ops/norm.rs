//! Normalisation: `rms_norm`, `layer_norm` and `softmax` over one dimension, `rms_scale` over several.

use crate::builder::FunctionBuilder;
use crate::dim::DimId;
use crate::dtype::DType;
use crate::handles::ValueId;
use crate::ops::check::{need_float, unplaced};
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::gradients::{Gradients, summed_to};
use crate::ops::table::op::Op;
use crate::ops::table::training::Gradient;
use crate::rule::{FactorKind, FactorRule};
use crate::space::Space;
use crate::types::TensorType;

pub(super) fn infer(
    name: &str,
    space: &Space,
    over: DimId,
    operands: &[&TensorType],
) -> Result<TensorType, OpError> {
    let x = operands[0];
    need_float(name, x.dtype)?;
    ensure!(x.has(over), "V05", "`{name}` is over `{}`, which x lacks", space.dims[over].name);
    for weight in &operands[1..] {
        ensure!(weight.dtype == x.dtype, "V04", "`{name}` of {} by {}", x.dtype, weight.dtype);
        if !weight.has(over) || weight.dims.iter().any(|&d| !x.has(d)) {
            let message = format!(
                "weights of `{name}` have dimension `{}` and no other than those of x",
                space.dims[over].name
            );
            return Err(OpError::new("V05", message));
        }
    }
    Ok(unplaced(x))
}

/// `rms_scale`: the squares are summed over `over` and have no dimension but those of x.
pub(super) fn infer_scale(
    space: &Space,
    over: &[DimId],
    operands: &[&TensorType],
) -> Result<TensorType, OpError> {
    let [x, squares, weight] = [operands[0], operands[1], operands[2]];
    need_float("rms_scale", x.dtype)?;
    let sum = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    if weight.dtype != x.dtype || squares.dtype != sum {
        let message = format!(
            "`rms_scale` of {} by {} and squares of {}, which must be of {sum}",
            x.dtype, weight.dtype, squares.dtype
        );
        return Err(OpError::new("V04", message));
    }
    let name = |d: DimId| space.dims[d].name.as_str();
    let twice = |i: usize| over[..i].contains(&over[i]);
    if over.is_empty() || (0..over.len()).any(twice) {
        bail!("V05", "`rms_scale` is over one dimension or more, each named once");
    }
    if let Some(&d) = over.iter().find(|&&d| !x.has(d) || squares.has(d)) {
        bail!("V05", "`rms_scale` is over `{}`, which x must have and the squares must not", name(d));
    }
    if let Some(&d) = x.dims.iter().find(|&&d| !over.contains(&d) && !squares.has(d)) {
        bail!("V05", "the squares of `rms_scale` lack dimension `{}` of x", name(d));
    }
    if let Some(&d) = squares.dims.iter().chain(&weight.dims).find(|&&d| !x.has(d)) {
        bail!("V05", "an operand of `rms_scale` has dimension `{}`, which x lacks", name(d));
    }
    Ok(unplaced(x))
}

/// The dimension stays whole; every other one is free.
pub(super) fn rule(over: DimId, operands: &[&TensorType], result: &TensorType) -> FactorRule {
    FactorRule::by_name(
        operands,
        &[result],
        |d| if d == over { FactorKind::Whole } else { FactorKind::Parallel },
    )
}

/// Gradients of `rms_norm` and `rms_scale`: one operation gives those of all operands.
pub(super) fn adjoint_rms(
    b: &mut FunctionBuilder<'_>,
    gradient: Gradient,
    operands: &[ValueId],
    d: ValueId,
) -> Result<Gradients, OpError> {
    let operands: Vec<ValueId> = operands.iter().copied().chain([d]).collect();
    Ok(b.node(Op::Gradient(gradient), &operands, &[])?.into_iter().map(Some).collect())
}

/// Gradients of `layer_norm`, whose bias may have other dimensions than its weight.
pub(super) fn adjoint_layer(
    b: &mut FunctionBuilder<'_>,
    over: DimId,
    eps: f64,
    operands: &[ValueId],
    d: ValueId,
) -> Result<Gradients, OpError> {
    let gradient = Op::Gradient(Gradient::LayerNorm { over, eps });
    let gradients = b.node(gradient, &[operands[0], operands[1], d], &[])?;
    let bias = b.ty(operands[2]).clone();
    let d_bias = if bias.dims == b.ty(operands[1]).dims { gradients[2] } else { summed_to(b, d, &bias)? };
    Ok(vec![Some(gradients[0]), Some(gradients[1]), Some(d_bias)])
}

/// The gradient of `softmax`, from its result alone: of explicit scores nothing is kept but the weights that they become.
pub(super) fn adjoint_softmax(
    b: &mut FunctionBuilder<'_>,
    over: DimId,
    result: ValueId,
    d: ValueId,
) -> Result<Gradients, OpError> {
    Ok(vec![Some(b.push(Op::Gradient(Gradient::Softmax { over }), &[result, d])?)])
}
