//! What is no number.

use ithaca_ir::DType;

use super::view::{Cx, View, reals, signed, step, storage};
use crate::cuda::arguments::{Address, Reals, Walk, arguments};
use crate::cuda::error::CudaError;

impl Cx<'_> {
    /// Launches what finds the first element of a tensor that is no number, in row-major order: of `n` elements the one
    /// that comes i-th is left as `n - i` at `found`, which is zero before. Gives `n`.
    pub(in crate::cuda) fn find_nan(&self, view: View<'_>, found: Address) -> Result<i64, CudaError> {
        let local = self.local(view.ty);
        let mut walk = Walk::<1>::default();
        match view.cut() {
            None => step(&mut walk, local.size, [1])?,
            Some(_) => {
                for (&dim, &extent) in view.ty.dims.iter().zip(&local.extents) {
                    for (steps, strides) in self.legs(dim, extent, [view])? {
                        step(&mut walk, steps, strides)?;
                    }
                }
            }
        }
        self.launch("find_nan", local.size, arguments![reals(view), found, walk, local.size])?;
        Ok(local.size)
    }

    /// As [`find_nan`](Self::find_nan), of `n` elements of a wire.
    pub(in crate::cuda) fn find_nan_in_wire(
        &self,
        (at, dtype): (Address, DType),
        n: u64,
        found: Address,
    ) -> Result<i64, CudaError> {
        let n = signed(n);
        let mut walk = Walk::<1>::default();
        step(&mut walk, n, [1])?;
        self.launch("find_nan", n, arguments![Reals { data: at, storage: storage(dtype) }, found, walk, n])?;
        Ok(n)
    }
}
