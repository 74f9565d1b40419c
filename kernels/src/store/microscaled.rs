//! Weights of four bits with a scale for each 32 of them (OCP Microscaling Formats, MXFP4).
//!
//! gpt-oss stores the matrices of its experts so: of a tensor `[experts, input, output]` there are `…_blocks`
//! `[experts, output, input / 32, 16]`, two elements in a byte, the lower half first, and `…_scales`
//! `[experts, output, input / 32]`, exponents of two above −127. The program reads the products.

use super::error::StoreError;
use super::source::TensorSource;
use crate::tensor::{Tensor, index};

/// Bytes of a block.
const BYTES: u64 = 16;

/// The numbers of four bits: a sign, two bits of exponent, one of fraction.
const NUMBERS: [f64; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The name of the blocks of a weight.
pub(super) fn blocks_of(name: &str) -> String {
    format!("{name}_blocks")
}

/// The shape of the weight that `source` has as blocks; `None` if it has none.
pub(super) fn shape(source: &impl TensorSource, name: &str) -> Option<Vec<u64>> {
    match source.shape(&blocks_of(name))?[..] {
        [experts, output, blocks, BYTES] => Some(vec![experts, blocks.checked_mul(2 * BYTES)?, output]),
        _ => None,
    }
}

/// The weight that `source` has as blocks, of this shape.
///
/// # Errors
/// [`StoreError::Shape`] for scales that are not one for each block; those of reading.
pub(super) fn read(source: &impl TensorSource, name: &str, shape: &[u64]) -> Result<Tensor<f64>, StoreError> {
    let blocks = source.read(&blocks_of(name))?;
    let scales = source.read(&format!("{name}_scales"))?;
    if scales.shape != blocks.shape[..3] {
        let sizes = |shape: &[usize]| shape.iter().map(|&n| n as u64).collect();
        return Err(StoreError::Shape {
            store: source.description(),
            name: format!("{name}_scales"),
            found: sizes(&scales.shape),
            expected: sizes(&blocks.shape[..3]),
        });
    }
    let shape: Vec<usize> = shape.iter().copied().map(index).collect();
    let (input, output) = (shape[1], shape[2]);
    let mut data = vec![0.0; shape.iter().product()];
    for (i, (bytes, scale)) in blocks.data.chunks_exact(index(BYTES)).zip(&scales.data).enumerate() {
        // Block i is of an expert, a column of its matrix, and a run of 32 rows.
        let (of_output, run) = (i / (input / 32), i % (input / 32));
        let (expert, column) = (of_output / output, of_output % output);
        let factor = 2f64.powi(*scale as i32 - 127);
        for (j, byte) in bytes.iter().enumerate() {
            let byte = *byte as usize;
            for (half, bits) in [byte & 15, byte >> 4].into_iter().enumerate() {
                let row = 32 * run + 2 * j + half;
                data[(expert * input + row) * output + column] = NUMBERS[bits & 15] * factor;
            }
        }
    }
    Ok(Tensor::new(shape, data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Renamed, Tensors};

    #[test]
    fn two_elements_are_in_a_byte_and_runs_of_inputs_have_a_scale() {
        let (experts, output, blocks) = (2, 3, 2);
        let n = experts * output * blocks;
        // Each byte has the numbers 1 and −6.
        let bytes = Tensor::new(vec![experts, output, blocks, 16], vec![f64::from(0xf2); n * 16]);
        let scales = Tensor::new(vec![experts, output, blocks], (0..n).map(|i| 127.0 + i as f64).collect());
        let name = "model.layers.0.mlp.experts.down_proj";
        let source: Tensors =
            [(blocks_of(name), bytes.clone()), (format!("{name}_scales"), scales)].into_iter().collect();
        let found = Renamed::new(&source, &[]).read(name).unwrap();
        assert_eq!(found.shape, [experts, 64, output]);
        for (expert, row, column, number) in
            [(0, 0, 0, 1.0), (0, 1, 0, -6.0), (0, 32, 0, 2.0), (0, 0, 1, 4.0), (1, 33, 2, -6.0 * 2048.0)]
        {
            assert_eq!(found.data[(expert * 64 + row) * output + column], number, "{expert} {row} {column}");
        }
        let scales = Tensor::new(vec![1], vec![127.0]);
        let source: Tensors =
            [(blocks_of(name), bytes), (format!("{name}_scales"), scales)].into_iter().collect();
        assert!(matches!(Renamed::new(&source, &[]).read(name), Err(StoreError::Shape { .. })));
    }
}
