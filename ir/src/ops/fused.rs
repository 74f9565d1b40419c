//! Several operations as one kernel: result types and rules follow from the parts.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::ops::check::{need_float, unplaced};
use crate::ops::context::Types;
use crate::ops::elementwise::{flops_gradient, flops_unary};
use crate::ops::error::{OpError, ensure};
use crate::ops::norm;
use crate::ops::table::fused::Fused;
use crate::ops::table::op::Op;
use crate::rule::{FactorKind, FactorRule};
use crate::space::Space;
use crate::types::TensorType;

impl Fused {
    /// The result types, their layouts left to the rule.
    pub(super) fn infer(&self, space: &Space, operands: &[&TensorType]) -> Result<Types, OpError> {
        let (name, x) = (self.name(), operands[0]);
        need_float(name, x.dtype)?;
        let n_alike = if let Fused::GatedBackward { .. } = self { 3 } else { 2 };
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
            Fused::Gated { .. } => smallvec![unplaced(x)],
            Fused::GatedBackward { .. } | Fused::AddRmsNorm { .. } | Fused::AddLayerNorm { .. } => {
                smallvec![unplaced(x), unplaced(x)]
            }
        })
    }

    /// The factor rule: a normalised dimension stays whole.
    pub(super) fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        let whole = self.normalised();
        FactorRule::by_name(operands, results, |d| {
            if whole == Some(d) { FactorKind::Whole } else { FactorKind::Parallel }
        })
    }

    /// FLOPs for each element of the first operand, where the declaration does not state them.
    pub(super) fn flops(&self) -> u128 {
        match *self {
            Fused::Gated { of } => flops_unary(of) + 1,
            Fused::GatedBackward { of } => flops_unary(of) + flops_gradient(of) + 2,
            Fused::AddRmsNorm { .. } | Fused::AddLayerNorm { .. } => 0,
        }
    }

    fn normalised(&self) -> Option<DimId> {
        match *self {
            Fused::AddRmsNorm { over, .. } | Fused::AddLayerNorm { over, .. } => Some(over),
            Fused::Gated { .. } | Fused::GatedBackward { .. } => None,
        }
    }
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
