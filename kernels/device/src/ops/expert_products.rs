//! Products of few slots of experts, which read the weights of experts with a filled slot only: `expert_products.cuh`.

use ithaca_ir::TensorType;
use ithaca_ir::ops::experts::FEW_SLOTS;

use super::einsum::{Loop, Matmul, ONCE};
use super::view::{Cx, View};
use crate::argument::arguments;
use crate::catalogue::c_type;
use crate::error::LowerError;
use crate::few_slots::{BLOCK, COLUMNS, PACK, ROWS, kernel};
use crate::structs::ExpertProducts;

impl Cx<'_> {
    /// Launches the kernel for `z = x y` if one operand has the slots of experts, few of each; says whether it does.
    pub(super) fn expert_products(
        &self,
        found: &Matmul,
        [x, y]: [View<'_>; 2],
        z: View<'_>,
    ) -> Result<bool, LowerError> {
        let has_slots = |ty: &TensorType| {
            let mut dims = ty.dims.iter();
            dims.any(|&dim| self.space.dims[dim].ragged.is_some() && z.ty.has(dim))
        };
        let (slots, weights, of) = match (has_slots(x.ty), has_slots(y.ty)) {
            (true, false) => (x, y, [found.m, found.n, found.k]),
            (false, true) => (y, x, [found.n, found.m, found.k].map(Loop::swapped)),
            _ => return Ok(false),
        };
        let [rows, columns, inner] = of;
        let experts = match found.batch.as_slice() {
            [] => ONCE,
            [one] if has_slots(x.ty) => *one,
            [one] => one.swapped(),
            _ => return Ok(false),
        };
        let t = slots.ty.dtype;
        let is_in_rows = inner.y == 1;
        let (y_step, packed) = if is_in_rows { (columns.y, inner.extent) } else { (inner.y, columns.extent) };
        let apart = experts.x | rows.x | experts.y | y_step | packed | inner.extent;
        let fits = t.is_float()
            && t.bytes() == 2
            && z.ty.dtype == t
            && (1..=FEW_SLOTS.cast_signed()).contains(&rows.extent)
            && inner.x == 1
            && (is_in_rows || columns.y == 1)
            && columns.z == 1
            && apart % PACK == 0
            && self.is_aligned(slots.at)
            && self.is_aligned(weights.at);
        if !fits {
            return Ok(false);
        }
        let shape = ExpertProducts {
            rows: rows.extent,
            columns: columns.extent,
            inner: inner.extent,
            x_expert: experts.x,
            x_row: rows.x,
            y_expert: experts.y,
            y_step,
            z_expert: experts.z,
            z_row: rows.z,
        };
        let blocks =
            experts.extent * ((rows.extent + ROWS - 1) / ROWS) * ((columns.extent + COLUMNS - 1) / COLUMNS);
        let arguments = arguments![slots.at, weights.at, z.at, shape, blocks];
        self.launch_blocks(&kernel(c_type(t), is_in_rows), blocks, BLOCK, arguments)?;
        Ok(true)
    }
}
