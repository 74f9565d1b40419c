//! The search for NaN.

use ithaca_ir::DType;

use super::view::{Cx, View, reals, step, storage};
use crate::argument::{Pointer, arguments};
use crate::error::LowerError;
use crate::structs::{Reals, Walk};

impl Cx<'_> {
    /// Launches the search for the first NaN of a tensor, in row-major order: for element `i` of `n` it leaves `n - i` at
    /// `found`, which is zero before.
    pub(crate) fn find_nan(&self, view: View<'_>, found: Pointer) -> Result<(), LowerError> {
        let local = self.local(view.ty);
        let mut walk = Walk::<1>::default();
        if view.cut().is_none() {
            step(&mut walk, local.size, [1])?;
        } else {
            for (&dim, &extent) in view.ty.dims.iter().zip(&local.extents) {
                for (steps, strides) in self.legs(dim, extent, [view])? {
                    step(&mut walk, steps, strides)?;
                }
            }
        }
        self.launch("find_nan", local.size, arguments![reals(view), found, walk, local.size])
    }

    /// As [`find_nan`](Self::find_nan), of `n` elements of a wire.
    pub(crate) fn find_nan_in_wire(
        &self,
        (at, dtype): (Pointer, DType),
        n: i64,
        found: Pointer,
    ) -> Result<(), LowerError> {
        let mut walk = Walk::<1>::default();
        step(&mut walk, n, [1])?;
        self.launch("find_nan", n, arguments![Reals { data: at, storage: storage(dtype) }, found, walk, n])
    }
}
