//! Several operations as one kernel.

use ithaca_ir::ops::Fused;

use super::view::{Cx, RowsAlong, View};
use crate::argument::arguments;
use crate::error::LowerError;

impl Cx<'_> {
    pub(crate) fn fused(&self, fused: &Fused, x: &[View<'_>], z: &[View<'_>]) -> Result<(), LowerError> {
        let (name, first) = (fused.name(), x[0]);
        match *fused {
            Fused::Gated { of } => {
                self.elementwise(name, first, arguments![of as i32, x[0].at, x[1].at, z[0].at])
            }
            Fused::GatedBackward { of } => {
                let tensors = arguments![of as i32, x[0].at, x[1].at, x[2].at, z[0].at, z[1].at];
                self.elementwise(name, first, tensors)
            }
            Fused::AddRmsNorm { over, eps, offset } => {
                let RowsAlong { walk, n, width, strides: [sx, sw] } = self.rows(over, [first.ty, x[2].ty])?;
                let arguments = arguments![
                    x[0].at, x[1].at, x[2].at, z[0].at, z[1].at, walk, n, width, sx, sw, eps, offset
                ];
                self.launch_of(name, first.ty, n, arguments)
            }
            Fused::AddLayerNorm { over, eps } => {
                let rows = self.rows(over, [first.ty, x[2].ty, x[3].ty])?;
                let RowsAlong { walk, n, width, strides: [sx, sw, sb] } = rows;
                let arguments = arguments![
                    x[0].at, x[1].at, x[2].at, x[3].at, z[0].at, z[1].at, walk, n, width, sx, sw, sb, eps
                ];
                self.launch_of(name, first.ty, n, arguments)
            }
        }
    }
}
