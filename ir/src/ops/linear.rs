//! Products, sums and look-ups: `einsum`, `sum`, `expand`, `select`, `embed`.

use crate::builder::FunctionBuilder;
use crate::dim::DimId;
use crate::dtype::DType;
use crate::handles::ValueId;
use crate::ops::check::{need_float, only, refuse, sums_in, unplaced};
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::gradients::{Gradients, summed_to};
use crate::ops::table::op::Op;
use crate::ops::table::training::Gradient;
use crate::rule::{FactorKind, FactorRule};
use crate::space::Space;
use crate::types::TensorType;

pub(super) fn infer_einsum(
    space: &Space,
    operands: &[&TensorType],
    declared: &[TensorType],
) -> Result<TensorType, OpError> {
    let ty = only("einsum", declared)?;
    let [x, y] = [operands[0], operands[1]];
    if x.dtype != y.dtype || !x.dtype.is_arithmetic() {
        bail!("V04", "`einsum` of {} and {}", x.dtype, y.dtype);
    }
    check_result(x.dtype, ty.dtype)?;
    if let Some(&d) = ty.dims.iter().find(|&&d| !x.has(d) && !y.has(d)) {
        bail!("V05", "`einsum` has no operand with dimension `{}`", space.dims[d].name);
    }
    Ok(unplaced(ty))
}

/// A product has the type of its operands, or the one in which products are summed.
fn check_result(operands: DType, result: DType) -> Result<(), OpError> {
    let sums = sums_in(operands);
    if result == operands || result == sums {
        return Ok(());
    }
    let or = if sums == operands { String::new() } else { format!(" or {sums}") };
    bail!("V04", "`einsum` of {operands} gives {operands}{or}, not {result}")
}

/// The third operand: the product of the others has its dimensions and its layout.
pub(super) fn infer_accumulate(space: &Space, operands: &[&TensorType]) -> Result<TensorType, OpError> {
    const NAME: &str = "accumulate_product";
    let (factors, sum) = (&operands[..2], operands[2]);
    let product = TensorType::new(sum.dtype, sum.dims.iter().copied());
    infer_einsum(space, factors, std::slice::from_ref(&product))?;
    let layouts = rule_einsum(factors, &product).results(factors);
    let layouts = layouts.map_err(|violation| refuse(NAME, space, violation))?;
    ensure!(layouts[0] == sum.layout, "V07", "`{NAME}`: the sum has the layout of the product");
    Ok(sum.clone())
}

/// The sum over the dimensions that the stated result lacks.
pub(super) fn infer_sum(
    space: &Space,
    x: &TensorType,
    declared: &[TensorType],
) -> Result<TensorType, OpError> {
    let ty = only("sum", declared)?;
    need_float("sum", x.dtype)?;
    let kept: Vec<DimId> = x.dims.iter().copied().filter(|&d| ty.has(d)).collect();
    subset("sum", space, x, ty, &kept)
}

/// The operand without a dimension that has the position.
pub(super) fn infer_select(
    space: &Space,
    over: DimId,
    position: u64,
    x: &TensorType,
) -> Result<TensorType, OpError> {
    need_float("select", x.dtype)?;
    let found = &space.dims[over];
    ensure!(x.has(over), "V05", "`select` over `{}`, which x does not have", found.name);
    let size = space.size(space.sequence(over));
    ensure!(position < size, "V05", "`select` of position {position} of `{}`, which has {size}", found.name);
    Ok(TensorType::new(x.dtype, x.dims.iter().copied().filter(|&d| d != over)))
}

/// The operand along the dimensions of the stated result.
pub(super) fn infer_expand(
    space: &Space,
    x: &TensorType,
    declared: &[TensorType],
) -> Result<TensorType, OpError> {
    let ty = only("expand", declared)?;
    let kept: Vec<DimId> = ty.dims.iter().copied().filter(|&d| x.has(d)).collect();
    subset("expand", space, ty, x, &kept)?;
    Ok(unplaced(ty))
}

/// `small` has exactly the dimensions `kept` of `large`, in their order, and its element type.
fn subset(
    name: &str,
    space: &Space,
    large: &TensorType,
    small: &TensorType,
    kept: &[DimId],
) -> Result<TensorType, OpError> {
    ensure!(large.dtype == small.dtype, "V04", "`{name}` between {} and {}", large.dtype, small.dtype);
    if small.dims.as_slice() == kept {
        Ok(unplaced(small))
    } else {
        let names: Vec<&str> = small.dims.iter().map(|&d| space.dims[d].name.as_str()).collect();
        let message =
            format!("`{name}`: [{}] are not dimensions of the other side in order", names.join(" "));
        Err(OpError::new("V05", message))
    }
}

pub(super) fn rule_einsum(operands: &[&TensorType], result: &TensorType) -> FactorRule {
    FactorRule::by_name(operands, &[result], |d| {
        if result.has(d) { FactorKind::Parallel } else { FactorKind::Sum }
    })
}

/// Two FLOPs for each combination of local indices.
pub(super) fn flops_einsum(space: &Space, operands: &[&TensorType], result: &TensorType) -> u128 {
    let local = |ty: &TensorType, d: DimId| u128::from(space.max_extent(d, ty.axes_of(d)));
    let mut flops: u128 = 2 * result.dims.iter().map(|&d| local(result, d)).product::<u128>();
    let mut summed: Vec<DimId> = Vec::new();
    for ty in operands {
        for &d in ty.dims.iter().filter(|&&d| !result.has(d)) {
            if !summed.contains(&d) {
                summed.push(d);
                flops *= local(ty, d);
            }
        }
    }
    flops
}

pub(super) fn infer_embed(
    space: &Space,
    over: DimId,
    operands: &[&TensorType],
) -> Result<TensorType, OpError> {
    let [table, ids] = [operands[0], operands[1]];
    ensure!(
        table.dims.first() == Some(&over),
        "V05",
        "`embed` looks up dimension `{}`, which must be the table's first",
        space.dims[over].name
    );
    ensure!(ids.dtype == DType::I32, "V04", "`embed` is indexed by i32, not {}", ids.dtype);
    if let Some(&d) = ids.dims.iter().find(|&&d| table.has(d)) {
        bail!("V05", "`embed` has dimension `{}` on both sides", space.dims[d].name);
    }
    Ok(TensorType::new(table.dtype, ids.dims.iter().chain(&table.dims[1..]).copied()))
}

/// The looked-up dimension sums: a rank contributes the rows that it has and zero elsewhere.
pub(super) fn rule_embed(over: DimId, operands: &[&TensorType], result: &TensorType) -> FactorRule {
    FactorRule::by_name(
        operands,
        &[result],
        |d| if d == over { FactorKind::Sum } else { FactorKind::Parallel },
    )
}

pub(super) fn bytes_embed(space: &Space, operands: &[&TensorType], result: &TensorType) -> u128 {
    u128::from(space.max_local_bytes(operands[1])) + 2 * u128::from(space.max_local_bytes(result))
}

/// Each operand's gradient is the product of the other one with that of the result: every dimension of an operand that is
/// in neither was summed by itself, and its gradient is the same all along it.
pub(super) fn adjoint_einsum(
    b: &mut FunctionBuilder<'_>,
    operands: &[ValueId],
    d: ValueId,
) -> Result<Gradients, OpError> {
    let [x, y] = [operands[0], operands[1]];
    let dtype = b.ty(x).dtype;
    let d = if b.ty(d).dtype == dtype { d } else { b.push(Op::Cast { to: dtype }, &[d])? };
    let one = |b: &mut FunctionBuilder<'_>, of: ValueId, factors: [ValueId; 2]| {
        let ty = b.ty(of).clone();
        let dims: Vec<DimId> =
            ty.dims.iter().copied().filter(|&d| factors.iter().any(|&f| b.ty(f).has(d))).collect();
        let product = b.einsum(factors[0], factors[1], &dims)?;
        expanded_to(b, product, &ty)
    };
    Ok(vec![Some(one(b, x, [d, y])?), Some(one(b, y, [x, d])?)])
}

pub(super) fn adjoint_sum(b: &mut FunctionBuilder<'_>, x: ValueId, d: ValueId) -> Result<Gradients, OpError> {
    let ty = b.ty(x).clone();
    Ok(vec![Some(expanded_to(b, d, &ty)?)])
}

pub(super) fn adjoint_expand(
    b: &mut FunctionBuilder<'_>,
    x: ValueId,
    d: ValueId,
) -> Result<Gradients, OpError> {
    let ty = b.ty(x).clone();
    Ok(vec![Some(summed_to(b, d, &ty)?)])
}

/// The table's gradient; integers have none.
pub(super) fn adjoint_embed(
    b: &mut FunctionBuilder<'_>,
    (over, padding): (DimId, Option<u64>),
    operands: &[ValueId],
    d: ValueId,
) -> Result<Gradients, OpError> {
    let table = b.ty(operands[0]).clone();
    let gradient = b.push_as(Op::Gradient(Gradient::Embed { over, padding }), &[operands[1], d], table)?;
    Ok(vec![Some(gradient), None])
}

/// `x` along the dimensions of `like` that it lacks.
fn expanded_to(b: &mut FunctionBuilder<'_>, x: ValueId, like: &TensorType) -> Result<ValueId, OpError> {
    if b.ty(x).dims == like.dims {
        Ok(x)
    } else {
        b.push_as(Op::Expand, &[x], TensorType::new(like.dtype, like.dims.iter().copied()))
    }
}
