//! The rounding of numbers of narrow types.

use half::{bf16, f16};
use ithaca_ir::DType;

use crate::real::Real;

/// The rounding of a number that is written to a value of a narrower type than a run computes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// It is not rounded: differences between programs are those of their order of operations.
    #[default]
    Wide,
    /// It is rounded to the value's type, to nearest even, as on a device with tensors of that type. Numbers within one
    /// operation are not rounded.
    AsTyped,
}

impl Storage {
    /// Rounds `data` to the precision of `dtype`.
    pub fn keep<T: Real>(self, dtype: DType, data: &mut [T]) {
        let round: fn(f64) -> f64 = match (self, dtype) {
            (Storage::Wide, _) | (Storage::AsTyped, DType::F64 | DType::I32 | DType::Bool) => return,
            (Storage::AsTyped, DType::F32) => |x| f64::from(x as f32),
            (Storage::AsTyped, DType::F16) => |x| f16::from_f64(x).to_f64(),
            (Storage::AsTyped, DType::BF16) => |x| bf16::from_f64(x).to_f64(),
        };
        data.iter_mut().for_each(|x| *x = x.through(round));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_types_round_to_nearest_and_even() {
        let kept = |storage: Storage, dtype| {
            let mut data = [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1e-9, f64::NEG_INFINITY];
            storage.keep(dtype, &mut data);
            data
        };
        let wide = kept(Storage::Wide, DType::BF16);
        assert_eq!(kept(Storage::AsTyped, DType::F64), wide);
        let bf16 = [1.0, 1.0, 1.0 + 4.0 / 256.0, 1.0, f64::NEG_INFINITY];
        assert_eq!(kept(Storage::AsTyped, DType::BF16), bf16);
        assert_eq!(kept(Storage::AsTyped, DType::F16)[..4], [wide[0], wide[1], wide[2], 1.0]);
        assert_eq!(kept(Storage::AsTyped, DType::F32)[..4], [wide[0], wide[1], wide[2], 1.0]);
    }
}
