//! Conversion between numbers and their bytes on a device.

use ithaca_ir::DType;

use crate::store::Stored;

/// The bytes of `numbers`; the caller has checked that integers are integers.
pub(super) fn write(dtype: DType, numbers: &[f64]) -> Vec<u8> {
    match dtype {
        DType::Bool => numbers.iter().map(|&x| u8::from(x != 0.0)).collect(),
        _ => Stored::of(dtype).encode(numbers),
    }
}

/// The numbers of `bytes`, in single precision.
pub(super) fn read(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    // A truth value is a byte on a device, and a word of 32 bits in a file.
    let stored = if dtype == DType::Bool { Stored::U8 } else { Stored::of(dtype) };
    stored.decode(bytes).into_iter().map(|x| x as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_a_round_trip() {
        for dtype in DType::ALL {
            let bytes = write(dtype, &[1.0, 0.0]);
            assert_eq!(bytes.len() as u64, 2 * dtype.bytes());
            assert_eq!(read(dtype, &bytes), [1.0, 0.0]);
        }
        let third = 1.0 / 3.0;
        let nearest = half::bf16::from_f64(third).to_f32();
        assert_eq!(read(DType::BF16, &write(DType::BF16, &[third])), [nearest]);
    }
}
