//! Steps of an optimizer: AdamW (Loshchilov and Hutter, arXiv 1711.05101), and clipping by the global norm.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::ops::elementwise::need_float;
use crate::ops::{OpError, Types, unplaced};
use crate::rule::{FactorKind, FactorRule};
use crate::types::TensorType;

/// Operations of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// `w, g, m, v, step, clip → w, m, v`: one step with decoupled weight decay, element by element.
    ///
    /// `g` times the scalar `clip` is the gradient; `m` and `v` are its running moments; the scalar `step` counts from 1.
    /// `w`, `m` and `v` have one type, `f32` or `f64`; `g` may be narrower.
    AdamW(AdamW),
    /// `squares → min(1, max_norm / (sqrt(squares) + 1e-6))`, of a scalar.
    ClipFactor {
        /// The largest norm that is left as it is.
        max_norm: f64,
    },
}

/// Constants of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay; a step multiplies weights by `1 − lr · weight_decay`.
    pub weight_decay: f64,
}

impl AdamW {
    /// How far one step may move an element of a weight, decay aside: the learning rate, and more where the first moment
    /// forgets sooner than the root of the second (Kingma and Ba, arXiv 1412.6980, section 2.1).
    pub fn reach(&self) -> f64 {
        self.lr * ((1.0 - self.beta1) / (1.0 - self.beta2).sqrt()).max(1.0)
    }
}

impl Optimizer {
    /// The name in the text form.
    pub fn name(&self) -> &'static str {
        match self {
            Optimizer::AdamW(_) => "adamw",
            Optimizer::ClipFactor { .. } => "clip_factor",
        }
    }

    /// The result types, their layouts left to the rule.
    pub(super) fn infer(&self, operands: &[&TensorType]) -> Result<Types, OpError> {
        let name = self.name();
        for ty in operands {
            need_float(name, ty.dtype)?;
        }
        match self {
            Optimizer::AdamW(_) => {
                let [w, g, m, v, step, clip] = [0, 1, 2, 3, 4, 5].map(|i| operands[i]);
                let wide = matches!(w.dtype, DType::F32 | DType::F64);
                let alike = [m, v].iter().all(|ty| ty.dims == w.dims && ty.dtype == w.dtype);
                let scalars = [step, clip].iter().all(|ty| ty.dims.is_empty() && ty.dtype == w.dtype);
                if !wide || !alike || g.dims != w.dims || !scalars {
                    let message = format!(
                        "`{name}` takes weights and two moments of one type, f32 or f64, a gradient of the same \
                         dimensions, and two scalars"
                    );
                    return Err(OpError::new("V05", message));
                }
                Ok(smallvec![unplaced(w), unplaced(w), unplaced(w)])
            }
            Optimizer::ClipFactor { .. } => match operands[0].dims.is_empty() {
                true => Ok(smallvec![unplaced(operands[0])]),
                false => Err(OpError::new("V05", format!("`{name}` is of a scalar"))),
            },
        }
    }

    /// The factor rule: every element by itself.
    pub(super) fn rule(operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        let dims: Vec<&[DimId]> = results.iter().map(|ty| ty.dims.as_slice()).collect();
        FactorRule::by_name(operands, &dims, |_| FactorKind::Parallel)
    }
}
