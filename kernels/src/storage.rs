//! The rounding of numbers of narrow types.

use half::{bf16, f16};
use ithaca_ir::DType;
use ithaca_ir::ops::random::mix;

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
            (Storage::AsTyped, DType::F8E4M3) => f8e4m3,
        };
        data.iter_mut().for_each(|x| *x = x.through(round));
    }
}

/// The rounding of the values of a run of the oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Every value is rounded as the storage says.
    Nearest(Storage),
    /// Weights, states and inputs are, as they are stored so; computed values are not.
    Sources(Storage),
    /// As `Nearest`, and each computed value then moves by a unit in its last place, down or up, or not at all, at random by the
    /// seed: a sample of the errors that rounding can cause, also where it happens to cause none.
    Random(Storage, u64),
}

impl Rounding {
    /// Rounds the `at`th value of a run; `is_source` for one that the run reads.
    pub(crate) fn keep<T: Real>(self, dtype: DType, data: &mut [T], (at, is_source): (u64, bool)) {
        match self {
            Rounding::Sources(_) if !is_source => {}
            Rounding::Nearest(storage) | Rounding::Sources(storage) => storage.keep(dtype, data),
            Rounding::Random(storage, seed) => {
                storage.keep(dtype, data);
                if is_source {
                    return;
                }
                let unit = match (storage, dtype) {
                    (Storage::AsTyped, DType::BF16) => UNITS[0],
                    (Storage::AsTyped, DType::F16) => UNITS[1],
                    (Storage::AsTyped, DType::F8E4M3) => UNITS[2],
                    _ => T::EPSILON,
                };
                let key = mix(mix(seed, 0), at);
                for (i, x) in data.iter_mut().enumerate() {
                    let bits = mix(key, i as u64) >> 62;
                    let by = [-unit, 0.0, 0.0, unit][bits as usize];
                    *x = x.through(|x| x + by * x);
                }
                storage.keep(dtype, data);
            }
        }
    }
}

/// The distance of neighbouring numbers near one: of bf16, of f16, and of f8e4m3.
const UNITS: [f64; 3] = [1.0 / 128.0, 1.0 / 1024.0, 1.0 / 8.0];

/// The largest number of [`DType::F8E4M3`].
const F8_MOST: f64 = 448.0;

/// The factor of the numbers of eight bits that a row of a cache is kept as: its largest magnitude becomes the largest number.
pub fn scale_of_row<T: Real>(row: &[T]) -> T {
    let most = row.iter().fold(0.0, |most, x| x.to_f64().abs().max(most));
    T::from_f64(if most > 0.0 { most / F8_MOST } else { 1.0 })
}

/// The nearest number of eight bits, of two that are as near the even one; the largest where `x` is beyond it.
fn f8e4m3(x: f64) -> f64 {
    if !x.is_finite() {
        return if x.is_nan() { x } else { F8_MOST.copysign(x) };
    }
    // Numbers below 2^-6 have its distances.
    let exponent = if x == 0.0 { -6 } else { (x.abs().log2().floor() as i32).max(-6) };
    let unit = 2f64.powi(exponent - 3);
    ((x / unit).round_ties_even() * unit).clamp(-F8_MOST, F8_MOST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Stored;

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

    #[test]
    fn eight_bits_round_to_the_numbers_of_the_stored_format() {
        let numbers = (-3000..3000).map(|i| f64::from(i) * f64::from(i).abs() * 6e-5);
        let numbers: Vec<f64> = numbers.chain([0.0, 464.0, 1.0625, 1.1875, 2f64.powi(-10)]).collect();
        let mut data = numbers.clone();
        Storage::AsTyped.keep(DType::F8E4M3, &mut data);
        assert_eq!(data, Stored::F8.decode(&Stored::F8.encode(&numbers)));
    }
}
