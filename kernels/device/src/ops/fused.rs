//! Several operations as one kernel.

use ithaca_ir::ops::Fused;

use super::simple::NormOperands;
use super::training::{Centre, Norm};
use super::view::{Cx, View};
use crate::argument::arguments;
use crate::error::LowerError;

impl Cx<'_> {
    pub(crate) fn fused(&self, fused: &Fused, x: &[View<'_>], z: &[View<'_>]) -> Result<(), LowerError> {
        let (name, first) = (fused.name(), x[0]);
        let of = |bias| NormOperands { x: x[0], added: Some([x[1], z[0]]), weight: x[2], bias };
        match *fused {
            Fused::Gated { of } => {
                self.elementwise(name, first, arguments![of as i32, x[0].at, x[1].at, z[0].at])
            }
            Fused::GatedBackward { of } => {
                let tensors = arguments![of as i32, x[0].at, x[1].at, x[2].at, z[0].at, z[1].at];
                self.elementwise(name, first, tensors)
            }
            Fused::AddRmsNorm { over, eps, offset } => {
                let norm = Norm { centre: Centre::None, over, eps, offset };
                self.norm(norm, of(None), z[1])
            }
            Fused::AddLayerNorm { over, eps } => {
                let norm = Norm { centre: Centre::Mean, over, eps, offset: 0.0 };
                self.norm(norm, of(x.get(3).copied()), z[1])
            }
        }
    }
}
