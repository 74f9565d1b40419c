//! Element types of files.

use ithaca_ir::DType;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// The element type of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stored {
    /// Double precision.
    F64,
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    BF16,
    /// 64-bit integers.
    I64,
    /// 32-bit integers.
    I32,
    /// Eight bits, four of them an exponent, without infinities.
    F8,
    /// Integers of eight bits from zero.
    U8,
}

/// The types in order, each with its name in the format.
const TYPES: [(Stored, Dtype); 8] = [
    (Stored::F64, Dtype::F64),
    (Stored::F32, Dtype::F32),
    (Stored::F16, Dtype::F16),
    (Stored::BF16, Dtype::BF16),
    (Stored::I64, Dtype::I64),
    (Stored::I32, Dtype::I32),
    (Stored::F8, Dtype::F8_E4M3),
    (Stored::U8, Dtype::U8),
];

impl Stored {
    /// The stored type of a program's `dtype`.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F64 => Stored::F64,
            DType::F32 => Stored::F32,
            DType::F16 => Stored::F16,
            DType::BF16 => Stored::BF16,
            DType::F8E4M3 => Stored::F8,
            DType::I32 | DType::Bool => Stored::I32,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        self.dtype().bitsize() / 8
    }

    /// The format's own name of the type.
    pub(super) fn dtype(self) -> Dtype {
        TYPES[self as usize].1
    }

    /// The type of that name in the format; `None` for one that is not supported.
    pub(super) fn parse(dtype: Dtype) -> Option<Self> {
        TYPES.into_iter().find(|(_, name)| *name == dtype).map(|(stored, _)| stored)
    }

    /// Numbers as little-endian elements, each rounded to the type.
    pub(crate) fn encode(self, data: &[f64]) -> Vec<u8> {
        fn each<const N: usize>(data: &[f64], f: impl Fn(f64) -> [u8; N]) -> Vec<u8> {
            data.iter().flat_map(|&x| f(x)).collect()
        }
        match self {
            Stored::F64 => each(data, f64::to_le_bytes),
            Stored::F32 => each(data, |x| (x as f32).to_le_bytes()),
            Stored::F16 => each(data, |x| half::f16::from_f64(x).to_le_bytes()),
            Stored::BF16 => each(data, |x| half::bf16::from_f64(x).to_le_bytes()),
            Stored::I64 => each(data, |x| (x as i64).to_le_bytes()),
            Stored::I32 => each(data, |x| (x as i32).to_le_bytes()),
            Stored::F8 => each(data, |x| [to_f8(x)]),
            Stored::U8 => each(data, |x| [x as u8]),
        }
    }

    /// Little-endian elements as numbers.
    pub(crate) fn decode(self, bytes: &[u8]) -> Vec<f64> {
        fn each<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            bytes.as_chunks::<N>().0.iter().map(|&b| f(b)).collect()
        }
        match self {
            Stored::F64 => each(bytes, f64::from_le_bytes),
            Stored::F32 => each(bytes, |b| f64::from(f32::from_le_bytes(b))),
            Stored::F16 => each(bytes, |b| half::f16::from_le_bytes(b).to_f64()),
            Stored::BF16 => each(bytes, |b| half::bf16::from_le_bytes(b).to_f64()),
            Stored::I64 => each(bytes, |b| i64::from_le_bytes(b) as f64),
            Stored::I32 => each(bytes, |b| f64::from(i32::from_le_bytes(b))),
            Stored::F8 => each(bytes, |[b]| of_f8(b)),
            Stored::U8 => each(bytes, |[b]| f64::from(b)),
        }
    }
}

/// The largest number of eight bits; beyond it there is none.
const F8_MOST: u8 = 0x7e;

/// The number that eight bits are (E4M3, bias 7): all ones are no number.
fn of_f8(bits: u8) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let size = match (exponent, bits & 7) {
        (15, 7) => f64::NAN,
        (0, _) => fraction / 8.0 * 2f64.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
    };
    if bits >> 7 == 1 { -size } else { size }
}

/// The nearest number of eight bits, of two that are as near the even one.
fn to_f8(x: f64) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7f;
    }
    let distance = |bits: u8| (of_f8(bits) - x.abs()).abs();
    let nearest =
        (0..=F8_MOST).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    sign | nearest.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_are_the_numbers_of_the_format() {
        let numbers = [
            (0x00, 0.0),
            (0x01, 2f64.powi(-9)),
            (0x08, 2f64.powi(-6)),
            (0x38, 1.0),
            (0x7e, 448.0),
            (0xb9, -1.125),
        ];
        for (bits, number) in numbers {
            assert_eq!(of_f8(bits), number);
            assert_eq!(to_f8(number), bits);
        }
        assert!(of_f8(0x7f).is_nan() && of_f8(0xff).is_nan());
        // Ties go to the even one, and what is too large to the largest.
        assert_eq!([1.0625, 1.1875, 1e6, -500.0].map(to_f8), [0x38, 0x3a, 0x7e, 0xfe]);
    }
}
