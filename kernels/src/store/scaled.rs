//! Weights of eight bits with a scale for each block of them.
//!
//! DeepSeek-V3 and others store a matrix in `F8_E4M3` beside `…_scale_inv`, a number for each block of 128 × 128 elements by which
//! they are multiplied. The program reads the products.

use super::error::StoreError;
use super::source::TensorSource;
use crate::tensor::Tensor;

/// Rows and columns of a block.
const BLOCK: usize = 128;

/// The name of the scales of a weight.
pub(super) fn scales_of(name: &str) -> String {
    format!("{name}_scale_inv")
}

/// `weight`, as `source` has it under `name`, times its scales if there are any.
///
/// # Errors
/// [`StoreError::Shape`] for scales that are not one for each block.
pub(super) fn unscaled(
    source: &impl TensorSource,
    name: &str,
    mut weight: Tensor<f64>,
) -> Result<Tensor<f64>, StoreError> {
    let name = scales_of(name);
    let (Some(found), &[rows, columns]) = (source.shape(&name), &weight.shape[..]) else { return Ok(weight) };
    let expected = [rows, columns].map(|n| n.div_ceil(BLOCK) as u64);
    if found != expected {
        let store = source.description();
        return Err(StoreError::Shape { store, name, found, expected: expected.to_vec() });
    }
    let scales = source.read(&name)?.data;
    let blocks = columns.div_ceil(BLOCK);
    for (row, values) in weight.data.chunks_exact_mut(columns.max(1)).enumerate() {
        let scales = &scales[row / BLOCK * blocks..][..blocks];
        for (block, scale) in values.chunks_mut(BLOCK).zip(scales) {
            block.iter_mut().for_each(|x| *x *= scale);
        }
    }
    Ok(weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{MODEL_PREFIXES, Renamed, Tensors};

    #[test]
    fn each_block_has_its_scale() {
        let (rows, columns) = (130, 300);
        let weight = Tensor::new(vec![rows, columns], vec![2.0; rows * columns]);
        let scales = Tensor::new(vec![2, 3], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let name = "model.layers.0.mlp.down_proj.weight";
        let source: Tensors = [(name, weight.clone()), (&scales_of(name), scales)].into_iter().collect();
        let read = Renamed::new(&source, &MODEL_PREFIXES).read(name).unwrap();
        for (row, column, scale) in
            [(0, 0, 1.0), (127, 128, 2.0), (127, 299, 3.0), (128, 127, 4.0), (129, 256, 6.0)]
        {
            assert_eq!(read.data[row * columns + column], 2.0 * scale, "{row} {column}");
        }
        let short = Tensor::new(vec![1, 3], vec![1.0; 3]);
        let source: Tensors = [(name, weight), (&scales_of(name), short)].into_iter().collect();
        let error = Renamed::new(&source, &[]).read(name).unwrap_err();
        assert!(matches!(&error, StoreError::Shape { expected, .. } if expected == &[2, 3]), "{error}");
    }
}
