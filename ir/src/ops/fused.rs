//! Several operations as one kernel: result types and rules follow from the parts.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::ops::check::{need_float, only, unplaced};
use crate::ops::context::Types;
use crate::ops::elementwise::{flops_gradient, flops_unary};
use crate::ops::error::{OpError, ensure};
use crate::ops::table::fused::Fused;
use crate::ops::table::op::Op;
use crate::ops::{linear, norm};
use crate::rule::{FactorKind, FactorRule};
use crate::space::Space;
use crate::types::TensorType;

impl Fused {
    /// The result types, their layouts left to the rule.
    pub(super) fn infer(
        &self,
        space: &Space,
        operands: &[&TensorType],
        declared: &[TensorType],
    ) -> Result<Types, OpError> {
        let (name, x) = (self.name(), operands[0]);
        match self {
            Fused::BiasProduct { .. } => return Ok(smallvec![infer_bias(name, space, operands, declared)?]),
            Fused::ProductPair => return infer_pair(name, space, operands, declared),
            _ => {}
        }
        need_float(name, x.dtype)?;
        let n_alike = if let Fused::GatedBackward { .. } = self { 3 } else { 2 };
        if let (Fused::Gated { .. } | Fused::GatedBackward { .. }, Some(c)) = (self, operands.get(n_alike)) {
            let is_number = c.dims.is_empty() && c.dtype == x.dtype;
            ensure!(is_number, "V05", "the last operand of `{name}` is one number of the type of the others");
        }
        let is_alike = |y: &&TensorType| y.dims == x.dims && y.dtype == x.dtype;
        ensure!(
            operands[1..n_alike].iter().all(is_alike),
            "V05",
            "the first {n_alike} operands of `{name}` have one type"
        );
        if let Some(over) = self.normalised() {
            let norm: Vec<&TensorType> = [x].into_iter().chain(operands[2..].iter().copied()).collect();
            norm::infer(name, space, over, &norm)?;
        }
        Ok(match self {
            Fused::BiasProduct { .. } | Fused::Gated { .. } => smallvec![unplaced(x)],
            Fused::ProductPair
            | Fused::GatedBackward { .. }
            | Fused::AddRmsNorm { .. }
            | Fused::AddLayerNorm { .. } => {
                smallvec![unplaced(x), unplaced(x)]
            }
        })
    }

    /// The factor rule: a normalised dimension stays whole, and so does one that is summed before a bias is added.
    pub(super) fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        FactorRule::by_name(operands, results, |d| match self {
            Fused::BiasProduct { .. } if !results[0].has(d) => FactorKind::Whole,
            Fused::ProductPair if !results[0].has(d) => FactorKind::Sum,
            _ if self.normalised() == Some(d) => FactorKind::Whole,
            _ => FactorKind::Parallel,
        })
    }

    /// FLOPs, where the declaration does not state them.
    pub(super) fn flops(&self, space: &Space, operands: &[&TensorType], results: &[&TensorType]) -> u128 {
        let elements = |ty: &TensorType| u128::from(space.max_local_elements(ty));
        match *self {
            Fused::BiasProduct { of } => {
                let summands = operands.len() as u128 - 2;
                linear::flops_einsum(space, &operands[..2], results[0])
                    + elements(results[0]) * (summands + of.map_or(0, flops_unary))
            }
            Fused::ProductPair => 2 * linear::flops_einsum(space, &operands[..2], results[0]),
            // Three comparisons with bounds, and c.
            Fused::Gated { of, .. } => {
                elements(operands[0]) * (flops_unary(of) + if operands.len() > 2 { 5 } else { 1 })
            }
            Fused::GatedBackward { of, .. } => {
                let bounded = if operands.len() > 3 { 6 } else { 2 };
                elements(operands[0]) * (flops_unary(of) + flops_gradient(of) + bounded)
            }
            Fused::AddRmsNorm { .. } | Fused::AddLayerNorm { .. } => 0,
        }
    }

    fn normalised(&self) -> Option<DimId> {
        match *self {
            Fused::AddRmsNorm { over, .. } | Fused::AddLayerNorm { over, .. } => Some(over),
            Fused::BiasProduct { .. }
            | Fused::ProductPair
            | Fused::Gated { .. }
            | Fused::GatedBackward { .. } => None,
        }
    }
}

/// The type of a product with a bias, which has some of its dimensions.
fn infer_bias(
    name: &str,
    space: &Space,
    operands: &[&TensorType],
    declared: &[TensorType],
) -> Result<TensorType, OpError> {
    let (factors, bias, summand) = (&operands[..2], operands[2], operands.get(3));
    let ty = match summand {
        Some(z) => unplaced(z),
        None => unplaced(only(name, declared)?),
    };
    linear::infer_einsum(space, factors, std::slice::from_ref(&ty))?;
    ensure!(bias.dtype == ty.dtype, "V04", "`{name}` in {} with a bias in {}", ty.dtype, bias.dtype);
    let fits = bias.dims.len() < ty.dims.len() && bias.dims.iter().all(|&d| ty.has(d));
    ensure!(fits, "V05", "the bias of `{name}` has some of the dimensions of the product, not all or others");
    Ok(ty)
}

/// The types of two products of x; every rank has as much of both.
fn infer_pair(
    name: &str,
    space: &Space,
    operands: &[&TensorType],
    declared: &[TensorType],
) -> Result<Types, OpError> {
    let &[x, y, w] = operands else { unreachable!("operands are counted before") };
    let [z, v] = declared else {
        return Err(OpError::new("V01", format!("`{name}` has two results, whose types are stated")));
    };
    ensure!(y == w, "V05", "the second and the third operand of `{name}` have one type");
    ensure!(z.dims == v.dims && z.dtype == v.dtype, "V05", "the results of `{name}` have one type");
    let ty = linear::infer_einsum(space, &[x, y], std::slice::from_ref(z))?;
    Ok(smallvec![ty.clone(), ty])
}

impl Op {
    /// The dimension of a norm by weights, alone or after a sum.
    pub fn normalised(&self) -> Option<DimId> {
        match self {
            Op::RmsNorm { over, .. } | Op::LayerNorm { over, .. } => Some(*over),
            Op::Fused(fused) => fused.normalised(),
            _ => None,
        }
    }
}
