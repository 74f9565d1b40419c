//! Several operations as one kernel.

use ithaca_ir::ops::Fused;

use super::einsum::Epilogue;
use super::simple::NormOperands;
use super::training::{Centre, Norm};
use super::view::{Cx, View};
use crate::argument::{Pointer, arguments};
use crate::error::LowerError;

impl Cx<'_> {
    pub(crate) fn fused(&self, fused: &Fused, x: &[View<'_>], z: &[View<'_>]) -> Result<(), LowerError> {
        let (name, first) = (fused.name(), x[0]);
        let of = |bias| NormOperands { x: x[0], added: Some([x[1], z[0]]), weight: x[2], bias };
        match *fused {
            Fused::BiasProduct { of } => {
                let end = Epilogue { before: x.get(3).copied(), bias: Some(x[2]), of };
                self.einsum([x[0], x[1]], end, z[0])
            }
            Fused::ProductPair => {
                self.einsum([x[0], x[1]], Epilogue::default(), z[0])?;
                self.einsum([x[0], x[2]], Epilogue::default(), z[1])?;
                self.trace.pair();
                Ok(())
            }
            Fused::Gated { of, limit } => {
                let (limit, c) = gate(limit, x.get(2));
                self.elementwise(name, first, arguments![of as i32, limit, x[0].at, x[1].at, c, z[0].at])
            }
            Fused::GatedBackward { of, limit } => {
                let (limit, c) = gate(limit, x.get(3));
                let tensors = arguments![of as i32, limit, x[0].at, x[1].at, x[2].at, c, z[0].at, z[1].at];
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

/// The bound of a gate, infinite where there is none, and its number.
fn gate(limit: Option<f64>, c: Option<&View<'_>>) -> (f64, Pointer) {
    (limit.unwrap_or(f64::INFINITY), c.map_or(Pointer::NONE, |c| c.at))
}
