//! Conversion between numbers and their bytes on a device.

use half::{bf16, f16};
use ithaca_ir::DType;

use crate::store::Stored;

/// The bytes of `numbers`; the caller has checked that integers are integers.
pub(super) fn write(dtype: DType, numbers: impl Iterator<Item = f64>) -> Vec<u8> {
    match dtype {
        DType::F64 => numbers.flat_map(f64::to_ne_bytes).collect(),
        DType::F32 => numbers.flat_map(|x| (x as f32).to_ne_bytes()).collect(),
        DType::F16 => numbers.flat_map(|x| f16::from_f64(x).to_ne_bytes()).collect(),
        DType::BF16 => numbers.flat_map(|x| bf16::from_f64(x).to_ne_bytes()).collect(),
        DType::I32 => numbers.flat_map(|x| (x as i32).to_ne_bytes()).collect(),
        DType::F8E4M3 => Stored::F8.encode(&numbers.collect::<Vec<_>>()),
        DType::Bool => numbers.map(|x| u8::from(x != 0.0)).collect(),
    }
}

/// The numbers of `bytes`, in single precision.
pub(super) fn read(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F64 => words(bytes).map(|b| f64::from_ne_bytes(b) as f32).collect(),
        DType::F32 => words(bytes).map(f32::from_ne_bytes).collect(),
        DType::F16 => words(bytes).map(|b| f16::from_ne_bytes(b).to_f32()).collect(),
        DType::BF16 => words(bytes).map(|b| bf16::from_ne_bytes(b).to_f32()).collect(),
        DType::I32 => words(bytes).map(|b| i32::from_ne_bytes(b) as f32).collect(),
        DType::F8E4M3 => Stored::F8.decode(bytes).into_iter().map(|x| x as f32).collect(),
        DType::Bool => bytes.iter().map(|&b| f32::from(b)).collect(),
    }
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_a_round_trip() {
        for dtype in DType::ALL {
            let bytes = write(dtype, [1.0, 0.0].into_iter());
            assert_eq!(bytes.len() as u64, 2 * dtype.bytes());
            assert_eq!(read(dtype, &bytes), [1.0, 0.0]);
        }
        let third = 1.0 / 3.0;
        assert_eq!(
            read(DType::BF16, &write(DType::BF16, [third].into_iter())),
            [bf16::from_f64(third).to_f32()]
        );
    }
}
