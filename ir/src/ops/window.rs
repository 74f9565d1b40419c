//! Parts of a dimension: two tensors side by side, and a window of one.
//!
//! Latent attention needs them: its keys have a part for each head and a rotated part that heads share.

use smallvec::smallvec;

use crate::builder::FunctionBuilder;
use crate::dim::DimId;
use crate::handles::ValueId;
use crate::ops::check::need_float;
use crate::ops::error::{OpError, ensure};
use crate::ops::table::op::Op;
use crate::ops::table::window::Window;
use crate::rule::{FactorKind, FactorRule, Factors};
use crate::space::Space;
use crate::types::TensorType;

impl Window {
    pub(super) fn infer(&self, space: &Space, operands: &[&TensorType]) -> Result<TensorType, OpError> {
        let name = self.name();
        let shape = |message: String| OpError::new("V05", format!("`{name}`: {message}"));
        for ty in operands {
            need_float(name, ty.dtype)?;
        }
        let x = operands[0];
        let Some((&last, front)) = x.dims.split_last() else {
            return Err(shape("x has a last dimension".to_owned()));
        };
        let result = match self {
            Window::Concat { over } => {
                let y = operands[1];
                let Some((&behind, rows)) = y.dims.split_last() else {
                    return Err(shape("y has a last dimension".to_owned()));
                };
                ensure!(x.dtype == y.dtype, "V04", "`{name}` of {} and {}", x.dtype, y.dtype);
                let kept: Vec<DimId> = front.iter().copied().filter(|d| rows.contains(d)).collect();
                if kept != rows || behind == last {
                    return Err(shape(
                        "y has dimensions of x, in their order, and a last one of its own".to_owned(),
                    ));
                }
                let (n, m, all) = (space.size(last), space.size(behind), space.size(*over));
                if n + m != all {
                    return Err(shape(format!("{n} and {m} elements are {}, not {all}", n + m)));
                }
                *over
            }
            Window::Cut { to, start } => {
                let (n, all) = (space.size(*to), space.size(last));
                if start.checked_add(n).is_none_or(|end| end > all) {
                    return Err(shape(format!("{n} elements from {start} on are more than {all}")));
                }
                *to
            }
        };
        if front.contains(&result) || result == last {
            return Err(shape("the last dimension of the result is a new one".to_owned()));
        }
        Ok(TensorType::new(x.dtype, front.iter().copied().chain([result])))
    }

    /// The last dimensions stay whole, the others are parallel.
    pub(super) fn rule(operands: &[&TensorType], result: &TensorType) -> FactorRule {
        let front = &result.dims[..result.dims.len() - 1];
        let mut factors: Factors = (0..front.len()).collect();
        let mut kinds: smallvec::SmallVec<[FactorKind; 8]> =
            front.iter().map(|_| FactorKind::Parallel).collect();
        let mut of_operands: smallvec::SmallVec<[Factors; 4]> = smallvec![];
        for ty in operands {
            kinds.push(FactorKind::Whole);
            let last = kinds.len() - 1;
            let factor = |d: &DimId| front.iter().position(|f| f == d).unwrap_or(last);
            of_operands.push(ty.dims.iter().map(factor).collect());
        }
        kinds.push(FactorKind::Whole);
        factors.push(kinds.len() - 1);
        FactorRule { factors: kinds, operands: of_operands, results: smallvec![factors] }
    }

    /// The gradients of the operands: windows of that of the result, summed over the dimensions that y lacks.
    ///
    /// # Errors
    /// `V32` for `cut` of less than all, which occurs in backward passes only.
    pub fn adjoint(
        &self,
        b: &mut FunctionBuilder<'_>,
        operands: &[ValueId],
        d: ValueId,
    ) -> Result<Vec<Option<ValueId>>, OpError> {
        match self {
            Window::Concat { .. } => {
                let mut start = 0;
                let mut gradients = Vec::with_capacity(operands.len());
                for &operand in operands {
                    let ty = TensorType::new(b.ty(operand).dtype, b.ty(operand).dims.iter().copied());
                    let to = *ty.dims.last().expect("inference saw a last dimension");
                    let mut part = b.push(Op::Window(Window::Cut { to, start }), &[d])?;
                    start += b.space().size(to);
                    if b.ty(part).dims != ty.dims {
                        part = b.push_as(Op::Sum, &[part], ty)?;
                    }
                    gradients.push(Some(part));
                }
                Ok(gradients)
            }
            // All of a dimension under another name goes back by the same way.
            Window::Cut { .. } => {
                let from = *b.ty(operands[0]).dims.last().expect("inference saw a last dimension");
                let to = *b.ty(d).dims.last().expect("inference saw a last dimension");
                ensure!(
                    b.space().size(from) == b.space().size(to),
                    "V32",
                    "a gradient reaches `cut` of less than all, which has no adjoint"
                );
                Ok(vec![Some(b.push(Op::Window(Window::Cut { to: from, start: 0 }), &[d])?)])
            }
        }
    }
}
