//! One operation on local tensors: dispatch to its loops.

use ithaca_ir::ops::attention::TABLE;
use ithaca_ir::ops::{Binary, Gradient, Loss, Optimizer};
use ithaca_ir::{DType, Op, Space};

use super::value::{Elements, LocalOp, Operand, ResultSpec, Value};
use super::{
    attention, cache, experts, fused, gradients, loss, merge, norms, optimizer, pages, parts, products,
    random, rotate_append, rows, unary, window,
};
use crate::error::RunError;
use crate::positions;
use crate::real::Real;
use crate::tensor::{Offsets, Tensor, length};

/// Computes `op`, anything but calls, parameters, inputs and communication, on the parts of one rank.
///
/// `wanted` are the results, of which the rank is to hold these regions.
///
/// # Errors
/// [`RunError::TokenOutOfRange`] for a look-up outside its table, [`RunError::Unsupported`] for operations that are not implemented,
/// [`RunError::Invalid`] for operands that do not fit, which a verified program does not have.
pub fn eval<T: Real>(
    space: &Space,
    op: &Op,
    operands: &[Operand<'_, T>],
    wanted: &[ResultSpec<'_>],
) -> Result<Vec<Value<T>>, RunError> {
    if operands.len() < *op.info().operands.start() {
        return Err(RunError::invalid(format!("`{}` has {} operands", op.name(), operands.len())));
    }
    if wanted.is_empty() {
        return Err(RunError::invalid(format!("`{}` has no result", op.name())));
    }
    for (i, operand) in operands.iter().enumerate() {
        check_size(op, operand)?;
        for (result, other) in wanted.iter().enumerate() {
            fits(space, op, (i, operand), (result, other))?;
        }
    }
    let call = LocalOp { space, op, operands, results: wanted };
    let x = operands;
    let values = match op {
        Op::Positions { padding } => {
            let padding = i32::try_from(*padding).unwrap_or(i32::MAX);
            let (dim, held) = (call.result().ty.dims[0], call.result().region[0].clone());
            let valid = space.dims[space.sequence(dim)].valid;
            let position = |i: u64| if i < valid { i32::try_from(i).unwrap_or(i32::MAX) } else { padding };
            let positions = positions::sequence_positions(space, dim, held).into_iter().map(position);
            return Ok(vec![Value::Int(call.tensor(0, positions.collect())?)]);
        }
        Op::Cast { to } => return Ok(vec![cast(x[0].elements, *to, call.shape())]),
        Op::Random(random) => return Ok(vec![random::random(&call, random)?]),
        Op::Take { to } => return Ok(vec![parts::take(&call, *to)?]),
        Op::Join { to } => return Ok(vec![parts::join(&call, *to)?]),
        Op::Slice { .. } => {
            let places = Offsets::of_part(&x[0].region, &call.result().region);
            return Ok(vec![x[0].elements.gather(call.shape(), places)]);
        }
        Op::Expand => {
            let places = Offsets::new(call.shape(), x[0].strides_in(call.result().ty), 0);
            return Ok(vec![x[0].elements.gather(call.shape(), places)]);
        }
        Op::Experts(op) => return experts::experts(&call, op),
        Op::Cache(op) => return cache::cache(&call, op),
        Op::RotateAppend(rotated) => return rotate_append::rotate_append(&call, rotated),
        Op::Fill { value } => vec![vec![T::from_f64(*value); call.shape().iter().product()]],
        Op::Sum => vec![products::sum(&call)?],
        Op::Select { over, position } => vec![products::select(&call, *over, *position)?],
        Op::Einsum => {
            let ResultSpec { ty, region } = call.result();
            vec![products::einsum(&x[0], &x[1], ty, region)?]
        }
        Op::AccumulateProduct => {
            let ResultSpec { ty, region } = call.result();
            let product = products::einsum(&x[0], &x[1], ty, region)?;
            vec![call.real(2)?.iter().zip(product).map(|(&before, product)| before + product).collect()]
        }
        Op::Embed { over, .. } => vec![products::embed(&call, *over)?],
        Op::Gradient(Gradient::Embed { over, padding }) => vec![gradients::embed(&call, *over, *padding)?],
        Op::Repeat { from, to } => vec![products::repeat(&call, *from, *to)?],
        Op::SumCopies { from, to } => vec![products::sum_copies(&call, *from, *to)?],
        Op::Window(window) => vec![window::window(&call, window)?],
        Op::Unary(f) => vec![call.real(0)?.iter().map(|&x| unary::unary(*f, x)).collect()],
        Op::Gradient(Gradient::Unary(f)) => {
            vec![call.real(0)?.iter().zip(call.real(1)?).map(|(&x, &d)| d * unary::slope(*f, x)).collect()]
        }
        Op::Scale { factor } => vec![call.real(0)?.iter().map(|&x| x * T::from_f64(*factor)).collect()],
        Op::Clamp { min, max } => {
            let bounds: [Option<T>; 2] = [*min, *max].map(|bound| bound.map(T::from_f64));
            vec![call.real(0)?.iter().map(|&x| unary::clamp(bounds, x)).collect()]
        }
        Op::Gradient(Gradient::Clamp { min, max }) => {
            let bounds: [Option<T>; 2] = [*min, *max].map(|bound| bound.map(T::from_f64));
            let each = call.real(0)?.iter().zip(call.real(1)?);
            let is_beyond =
                |x: T| bounds[0].is_some_and(|min| x < min) || bounds[1].is_some_and(|max| x > max);
            vec![each.map(|(&x, &d)| if is_beyond(x) { T::ZERO } else { d }).collect()]
        }
        Op::Binary(f) => {
            let y = call.real(1)?;
            let offsets = Offsets::new(call.shape(), x[1].strides_in(call.result().ty), 0);
            vec![call.real(0)?.iter().zip(offsets).map(|(&x, i)| binary(*f, x, y[i])).collect()]
        }
        Op::Fused(fused) => fused::fused(&call, fused)?,
        Op::RmsNorm { over, eps, offset } => vec![rows::rms_norm(&call, *over, *eps, *offset)?],
        Op::Gradient(Gradient::RmsNorm { over, eps, offset }) => {
            norms::rms_norm(&call, *over, *eps, *offset)?
        }
        Op::RmsScale { over, eps } => vec![rows::rms_scale(&call, over, *eps)?],
        Op::Gradient(Gradient::RmsScale { over, eps }) => norms::rms_scale(&call, over, *eps)?,
        Op::LayerNorm { over, eps } => vec![rows::layer_norm(&call, *over, *eps)?],
        Op::Gradient(Gradient::LayerNorm { over, eps }) => norms::layer_norm(&call, *over, *eps)?,
        Op::Softmax { over } => vec![rows::softmax(&call, *over)?],
        Op::Gradient(Gradient::Softmax { over }) => vec![norms::softmax(&call, *over)?],
        Op::Rotary(rotary) => vec![rows::rotary(&call, rotary)?],
        Op::Loss(Loss::CrossEntropy { over, ignore }) => loss::cross_entropy(&call, (*over, *ignore))?,
        Op::Gradient(Gradient::CrossEntropy { over, ignore }) => {
            vec![loss::cross_entropy_backward(&call, (*over, *ignore))?]
        }
        Op::Loss(Loss::Pick { over, ignore }) => vec![loss::pick(&call, (*over, *ignore))?],
        Op::Loss(Loss::Valid { ignore }) => vec![loss::valid(&call, *ignore)?],
        Op::RowLse { over, parts: _ } => vec![loss::row_lse(&call, *over)?],
        Op::Optimizer(Optimizer::AdamW(adamw)) => optimizer::adamw(&call, adamw)?,
        Op::Optimizer(Optimizer::ClipFactor { max_norm }) => vec![optimizer::clip_factor(&call, *max_norm)?],
        Op::Attention(a) => attention::attention(&call, a)?,
        Op::AttendPages { attention: a, pages, slots } => {
            pages::with_gathered(space, (a, [*pages, *slots]), x, |operands| {
                attention::attention(&LocalOp { space, op, operands, results: wanted }, a)
            })?
        }
        Op::AttentionBackward(a) => attention::attention_backward(&call, a)?,
        Op::Scores { attention: a, .. } => vec![attention::scores(&call, a)?],
        Op::Weigh { attention: a, .. } => vec![attention::weigh(&call, a)?],
        Op::Merge => merge::merge(&call)?,
        Op::MergeParts { .. } => merge::merge_parts(&call)?,
        Op::Accumulate => vec![merge::accumulate(&call)?],
        Op::Sink => merge::sink(&call)?,
        Op::Gradient(Gradient::Sink) => gradients::sink(&call)?,
        op => return Err(RunError::invalid(format!("`{}` is not computed by a rank alone", op.name()))),
    };
    into_results(op, values, wanted)
}

/// Real results in their shapes; an attention that returns its output alone drops the other result.
pub(crate) fn into_results<T: Real>(
    op: &Op,
    values: Vec<Vec<T>>,
    wanted: &[ResultSpec<'_>],
) -> Result<Vec<Value<T>>, RunError> {
    if wanted.len() > values.len() {
        return Err(RunError::invalid(format!("`{}` does not have {} results", op.name(), wanted.len())));
    }
    values.into_iter().zip(wanted).map(|(data, wanted)| wanted.tensor(op, data).map(Value::Real)).collect()
}

/// An operand has the elements of its region.
fn check_size<T: Real>(op: &Op, operand: &Operand<'_, T>) -> Result<(), RunError> {
    let (n, held) = (operand.shape().iter().product::<usize>(), operand.elements.n());
    if n == held {
        Ok(())
    } else {
        Err(RunError::invalid(format!(
            "an operand of `{}` has {held} elements where its type has {n}",
            op.name()
        )))
    }
}

/// A rank computes its part from equal parts: a dimension on both sides has the same range.
///
/// Exceptions are a slice, the second operand of a merge, of which a rank may hold nothing, and attention, where
/// queries and keys may be parts of one sequence and which checks its operands itself.
fn fits<T: Real>(
    space: &Space,
    op: &Op,
    (i, operand): (usize, &Operand<'_, T>),
    (result, wanted): (usize, &ResultSpec<'_>),
) -> Result<(), RunError> {
    let held_by_some = match op {
        Op::Attention(a) if a.is_of_keys(i) => return Ok(()),
        Op::AttendPages { attention: a, .. } if i > 0 && a.start_operand() != Some(i) && i != TABLE => {
            return Ok(());
        }
        Op::AttentionBackward(_) if i != result => return Ok(()),
        Op::Scores { .. } if i == 1 => return Ok(()),
        Op::Weigh { .. } if i == 2 => return Ok(()),
        Op::Merge => i >= 2,
        Op::Accumulate => i >= 1,
        _ => false,
    };
    if held_by_some && operand.shape().contains(&0) {
        return Ok(());
    }
    for (&d, held) in operand.ty.dims.iter().zip(&operand.region) {
        let Some(j) = wanted.ty.position(d) else { continue };
        let region = &wanted.region[j];
        let inside = match op {
            Op::Slice { .. } => region.is_empty() || (held.start <= region.start && region.end <= held.end),
            _ => length(held) == length(region) && (held.is_empty() || held.start == region.start),
        };
        if !inside {
            return Err(RunError::invalid(format!(
                "`{}` has `{}` as {held:?} in an operand and as {region:?} in its result",
                op.name(),
                space.dims[d].name
            )));
        }
    }
    Ok(())
}

fn binary<T: Real>(f: Binary, x: T, y: T) -> T {
    match f {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::LogAddExp => merge::log_add_exp(x, y),
    }
}

/// Conversion; to integers by cutting off the fraction, between real types without rounding, which is a matter of how
/// the result is stored.
fn cast<T: Real>(x: Elements<'_, T>, to: DType, shape: Vec<usize>) -> Value<T> {
    match (x, to.is_float()) {
        (Elements::Real(x), true) => Value::Real(Tensor::new(shape, x.to_vec())),
        (Elements::Real(x), false) => {
            Value::Int(Tensor::new(shape, x.iter().map(|x| x.to_f64() as i32).collect()))
        }
        (Elements::Int(x), true) => {
            Value::Real(Tensor::new(shape, x.iter().map(|&x| T::from_f64(f64::from(x))).collect()))
        }
        (Elements::Int(x), false) => Value::Int(Tensor::new(shape, x.to_vec())),
    }
}
