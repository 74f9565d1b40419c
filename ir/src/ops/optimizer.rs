//! Steps of an optimizer: AdamW (Loshchilov and Hutter, arXiv 1711.05101), and clipping by the global norm.

use smallvec::smallvec;

use crate::dtype::DType;
use crate::ops::check::{need_float, unplaced};
use crate::ops::context::Types;
use crate::ops::error::{OpError, ensure};
use crate::ops::table::training::{AdamW, Optimizer};
use crate::types::TensorType;

impl AdamW {
    /// How far one step may move an element of a weight, decay aside: the learning rate, and more where the first moment
    /// forgets sooner than the root of the second (Kingma and Ba, arXiv 1412.6980, section 2.1).
    pub fn reach(&self) -> f64 {
        self.lr * ((1.0 - self.beta1) / (1.0 - self.beta2).sqrt()).max(1.0)
    }
}

impl Optimizer {
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
            Optimizer::ClipFactor { .. } => {
                ensure!(operands[0].dims.is_empty(), "V05", "`{name}` is of a scalar");
                Ok(smallvec![unplaced(operands[0])])
            }
        }
    }
}
