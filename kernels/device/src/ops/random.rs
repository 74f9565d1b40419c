//! Numbers drawn at random, and dropout.

use ithaca_ir::ops::Random;

use super::view::{Cx, View, reals};
use crate::argument::{Layer, arguments};
use crate::error::LowerError;
use crate::structs::{MOST_DIMS, Places};

impl Cx<'_> {
    pub(crate) fn random(&self, random: &Random, x: &[View<'_>], z: View<'_>) -> Result<(), LowerError> {
        let one = 1_i64;
        match (random, x) {
            (Random::Key { seed }, _) => self.launch("first_key", 1, arguments![*seed, z.at, one]),
            (Random::FoldIn, [key, number]) if number.ty.dtype.is_float() => {
                self.launch("fold_in_real", 1, arguments![key.at, reals(*number), z.at, one])
            }
            (Random::FoldIn, [key, number]) => {
                self.launch("fold_in", 1, arguments![key.at, number.at, z.at, one])
            }
            (Random::LayerKey, [key]) => self.launch("layer_key", 1, arguments![key.at, Layer, z.at, one]),
            (Random::DropoutMask { rate, seed }, [key, ..]) => {
                let local = self.local(z.ty);
                let mut places = Places::default();
                for (d, &dim) in z.ty.dims.iter().enumerate() {
                    if d >= MOST_DIMS || self.space.dims[dim].part.is_some() {
                        let what = "a dropout mask over parts of a dimension, or over too many dimensions";
                        return LowerError::unsupported(what);
                    }
                    places.extent[d] = local.extents[d];
                    places.stride[d] = local.strides[d];
                    places.positions[d] = self.sequence(z.ty, dim)?;
                    places.n += 1;
                }
                self.launch(
                    "dropout_mask",
                    local.size,
                    arguments![key.at, *seed, *rate, places, z.at, local.size],
                )
            }
            (Random::Dropout { rate }, [x, mask]) => {
                self.elementwise("dropout", *x, arguments![x.at, mask.at, z.at, 1.0 / (1.0 - rate)])
            }
            (Random::FoldIn | Random::LayerKey | Random::DropoutMask { .. } | Random::Dropout { .. }, _) => {
                LowerError::unsupported(format!("`{}` of {} operands", random.name(), x.len()))
            }
        }
    }
}
