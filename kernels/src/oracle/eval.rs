//! One operation on local tensors: dispatch to its loops.

use ithaca_ir::ops::{Binary, Gradient, Loss, Optimizer, Unary};
use ithaca_ir::{DType, Op, Space};

use super::value::{Elements, Operand, ResultSpec, Value};
use super::{
    attention, experts, gradients, loss, merge, norms, optimizer, parts, products, random, rows, window,
};
use crate::error::RunError;
use crate::positions;
use crate::real::Real;
use crate::tensor::{Offsets, Tensor, extents, length};

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
    let Some(first) = wanted.first() else {
        return Err(RunError::invalid(format!("`{}` has no result", op.name())));
    };
    for (i, operand) in operands.iter().enumerate() {
        check_size(op, operand)?;
        for (result, other) in wanted.iter().enumerate() {
            fits(space, op, (i, operand), (result, other))?;
        }
    }
    let values = match op {
        Op::Attention(a) => {
            let rows = attention::attention(space, a, operands)?;
            vec![rows.o, rows.lse]
        }
        Op::AttentionBackward(a) => attention::attention_backward(space, a, operands)?,
        Op::Gradient(Gradient::RmsNorm { over, eps, offset }) => {
            norms::rms_norm(space, *over, (*eps, *offset), operands, wanted)?
        }
        Op::Gradient(Gradient::RmsScale { over, eps }) => {
            norms::rms_scale(space, over, *eps, operands, wanted)?
        }
        Op::Gradient(Gradient::LayerNorm { over, eps }) => {
            norms::layer_norm(space, *over, *eps, operands, wanted)?
        }
        Op::Gradient(Gradient::Sink) => match wanted {
            [_, _, logits] => gradients::sink(operands, logits.ty, &logits.region)?,
            _ => return Err(RunError::invalid("`sink_backward` has three results")),
        },
        Op::Loss(Loss::CrossEntropy { over, ignore }) => {
            loss::cross_entropy(space, (*over, *ignore), operands)?
        }
        Op::Optimizer(Optimizer::AdamW(adamw)) => optimizer::adamw(adamw, operands)?,
        Op::Merge => merge::merge(operands).map(|rows| vec![rows.o, rows.lse])?,
        Op::MergeParts { .. } => merge::merge_parts(operands).map(|rows| vec![rows.o, rows.lse])?,
        Op::Sink => merge::sink(operands).map(|rows| vec![rows.o, rows.lse])?,
        Op::Experts(op) => return experts::experts(space, op, operands, wanted),
        op => return one(space, op, operands, first).map(|value| vec![value]),
    };
    into_results(op, values, wanted)
}

/// Real results in their shapes; an attention that returns its output alone drops the other result.
pub(crate) fn into_results<T: Real>(
    op: &Op,
    values: Vec<Vec<T>>,
    wanted: &[ResultSpec<'_>],
) -> Result<Vec<Value<T>>, RunError> {
    let tensor = |(data, wanted): (Vec<T>, &ResultSpec<'_>)| {
        let shape = extents(&wanted.region);
        if shape.iter().product::<usize>() == data.len() {
            Ok(Value::Real(Tensor::new(shape, data)))
        } else {
            Err(RunError::invalid(format!("`{}` gives another shape than its type", op.name())))
        }
    };
    if wanted.len() > values.len() {
        Err(RunError::invalid(format!("`{}` does not have {} results", op.name(), wanted.len())))
    } else {
        values.into_iter().zip(wanted).map(tensor).collect()
    }
}

/// An operation with one result.
fn one<T: Real>(
    space: &Space,
    op: &Op,
    operands: &[Operand<'_, T>],
    ResultSpec { ty, region }: &ResultSpec<'_>,
) -> Result<Value<T>, RunError> {
    let shape = extents(region);
    let real = |data: Vec<T>| {
        if shape.iter().product::<usize>() == data.len() {
            Ok(Value::Real(Tensor::new(shape.clone(), data)))
        } else {
            Err(RunError::invalid(format!("`{}` gives another shape than its type", op.name())))
        }
    };
    match op {
        Op::Positions => {
            let dim = ty.dims[0];
            let valid = space.dims[space.sequence(dim)].valid;
            let position = |i: u64| if i < valid { i32::try_from(i).unwrap_or(i32::MAX) } else { 0 };
            let positions = positions::sequence_positions(space, dim, region[0].clone());
            Ok(Value::Int(Tensor::new(shape, positions.into_iter().map(position).collect())))
        }
        Op::Fill { value } => {
            let value = T::from_f64(*value);
            Ok(Value::Real(Tensor::filled(shape, value)))
        }
        Op::Sum => real(products::sum(&operands[0], ty, region)?),
        Op::Expand => real(products::expand(&operands[0], ty, region)?),
        Op::Gradient(Gradient::Unary(f)) => {
            let (x, d) = (operands[0].real()?, operands[1].real()?);
            real(x.iter().zip(d).map(|(&x, &d)| d * gradients::slope(*f, x)).collect())
        }
        Op::Gradient(Gradient::Embed { over, padding }) => {
            real(gradients::embed(space, (*over, *padding), operands, ty, region)?)
        }
        Op::Gradient(Gradient::CrossEntropy { over, ignore }) => {
            real(loss::cross_entropy_backward(space, (*over, *ignore), operands)?)
        }
        Op::Loss(Loss::Pick { over, ignore }) => real(loss::pick(space, (*over, *ignore), operands)?),
        Op::Loss(Loss::Valid { ignore }) => real(loss::valid(space, *ignore, &operands[0])?),
        Op::Optimizer(Optimizer::ClipFactor { max_norm }) => {
            real(optimizer::clip_factor(*max_norm, &operands[0])?)
        }
        Op::Einsum => real(products::einsum(&operands[0], &operands[1], ty, region)?),
        Op::Embed { over, .. } => {
            real(products::embed(space, *over, &operands[0], &operands[1], ty, region)?)
        }
        Op::Unary(f) => real(operands[0].real()?.iter().map(|&x| unary(*f, x)).collect()),
        Op::Scale { factor } => {
            let factor = T::from_f64(*factor);
            real(operands[0].real()?.iter().map(|&x| x * factor).collect())
        }
        Op::Binary(f) => {
            let (x, y) = (operands[0].real()?, operands[1].real()?);
            let offsets = Offsets::new(shape.clone(), operands[1].strides_in(ty), 0);
            real(x.iter().zip(offsets).map(|(&x, i)| binary(*f, x, y[i])).collect())
        }
        Op::Cast { to } => Ok(cast(operands[0].elements, *to, shape)),
        Op::RmsNorm { over, eps, offset } => {
            real(rows::rms_norm(space, *over, (*eps, *offset), operands, ty)?)
        }
        Op::RmsScale { over, eps } => real(rows::rms_scale(space, over, *eps, operands)?),
        Op::LayerNorm { over, eps } => real(rows::layer_norm(space, *over, *eps, operands, ty)?),
        Op::Softmax { over } => real(rows::softmax(space, *over, &operands[0])?),
        Op::Gradient(Gradient::Softmax { over }) => {
            real(norms::softmax(space, *over, &operands[0], &operands[1])?)
        }
        Op::Random(random) => random::random(space, random, operands, (ty, region)),
        Op::Rotary(rotary) => real(rows::rotary(rotary, &operands[0], &operands[1], ty)?),
        Op::Accumulate => real(merge::accumulate(operands[0].real()?, operands[1].real()?)?),
        Op::Scores { attention: a, .. } => {
            let columns = shape.last().copied().unwrap_or(0);
            real(attention::scores(space, a, operands, columns)?)
        }
        Op::RowLse { over, parts: _ } => real(loss::row_lse(space, &operands[0], *over)?),
        Op::Weigh { attention: a, .. } => real(attention::weigh(space, a, operands)?),
        Op::Window(window) => real(window::window(window, operands, ty, &shape)?),
        Op::Repeat { from, to } => real(products::repeat(space, *from, *to, &operands[0], ty, region)?),
        Op::SumCopies { from, to } => {
            real(products::sum_copies(space, *from, *to, &operands[0], ty, region)?)
        }
        Op::Take { to } => {
            let held = operands[0].held();
            Ok(match operands[0].elements {
                Elements::Real(x) => Value::Real(Tensor::new(shape, parts::take(space, *to, held, x)?)),
                Elements::Int(x) => Value::Int(Tensor::new(shape, parts::take(space, *to, held, x)?)),
            })
        }
        Op::Join { to } => {
            let first = operands[0].ty;
            Ok(match operands[0].elements {
                Elements::Real(_) => {
                    let all = operands.iter().map(Operand::real).collect::<Result<Vec<_>, _>>()?;
                    Value::Real(Tensor::new(shape, parts::join(space, *to, (first, &all), (ty, region))?))
                }
                Elements::Int(_) => {
                    let all = operands.iter().map(Operand::int).collect::<Result<Vec<_>, _>>()?;
                    Value::Int(Tensor::new(shape, parts::join(space, *to, (first, &all), (ty, region))?))
                }
            })
        }
        Op::Slice { .. } => {
            let held = &operands[0].region;
            Ok(match operands[0].elements {
                Elements::Real(x) => {
                    Value::Real(Tensor::new(shape, crate::tensor::read_part(held, x, region)))
                }
                Elements::Int(x) => Value::Int(Tensor::new(shape, crate::tensor::read_part(held, x, region))),
            })
        }
        Op::Attention(_)
        | Op::AttentionBackward(_)
        | Op::Merge
        | Op::MergeParts { .. }
        | Op::Sink
        | Op::Gradient(
            Gradient::RmsNorm { .. }
            | Gradient::RmsScale { .. }
            | Gradient::LayerNorm { .. }
            | Gradient::Sink,
        )
        | Op::Loss(Loss::CrossEntropy { .. })
        | Op::Optimizer(Optimizer::AdamW(_))
        | Op::Experts(_) => Err(RunError::invalid(format!("`{}` has several results", op.name()))),
        Op::Param(_)
        | Op::Input(_)
        | Op::State(_)
        | Op::Assign { .. }
        | Op::Call { .. }
        | Op::Reshard
        | Op::Coalesced(_)
        | Op::AllToAll { .. }
        | Op::AllGather { .. }
        | Op::ReduceScatter { .. }
        | Op::AllReduce { .. }
        | Op::Permute
        | Op::Fetch { .. }
        | Op::FetchSum { .. } => {
            Err(RunError::invalid(format!("`{}` is not computed by a rank alone", op.name())))
        }
    }
}

/// An operand has the elements of its region.
fn check_size<T: Real>(op: &Op, operand: &Operand<'_, T>) -> Result<(), RunError> {
    let n: usize = operand.shape().iter().product();
    let held = match operand.elements {
        Elements::Real(data) => data.len(),
        Elements::Int(data) => data.len(),
    };
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
        Op::Attention(_) if matches!(i, 1 | 2) => return Ok(()),
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

/// A function of one element.
pub fn unary<T: Real>(f: Unary, x: T) -> T {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match f {
        Unary::Silu => x.through(|x| x * sigmoid(x)),
        Unary::Gelu => x.through(|x| 0.5 * x * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2))),
        Unary::GeluTanh => x.through(|x| {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            0.5 * x * (1.0 + (root * (x + 0.044_715 * x * x * x)).tanh())
        }),
        Unary::QuickGelu => x.through(|x| x * sigmoid(1.702 * x)),
        // Written so that NaN stays NaN.
        Unary::Relu => {
            if x < T::ZERO {
                T::ZERO
            } else {
                x
            }
        }
        Unary::Tanh => x.through(f64::tanh),
    }
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
