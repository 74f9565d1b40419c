//! Tensors in wires, as contiguous rows.

use std::ops::Range;

use ithaca_ir::strided::Strided;

use crate::tensor::index;

/// The contiguous rows of a tensor of this shape: their ranges in the dense tensor and in the wire.
pub(super) fn rows(strided: &Strided, shape: &[usize]) -> Vec<(Range<usize>, Range<usize>)> {
    let start = index(strided.start);
    let Some(cut) = strided.cut else {
        let n = shape.iter().product();
        return vec![(0..n, start..start + n)];
    };
    // A block is dense: the dimensions before the cut one repeat a row.
    let row = index(cut.len) * shape[cut.place + 1..].iter().product::<usize>();
    let blocks = shape[cut.place] / index(cut.len).max(1);
    let outer: usize = shape[..cut.place].iter().product();
    let at = |o: usize, block: usize| start + block * index(cut.stride) + o * row;
    (0..outer * blocks)
        .map(|n| (n * row..(n + 1) * row, at(n / blocks, n % blocks)))
        .map(|(dense, first)| (dense, first..first + row))
        .collect()
}

#[cfg(test)]
mod tests {
    use ithaca_ir::strided::Cut;

    use super::*;

    #[test]
    fn rows_are_where_blocks_are() {
        let strided =
            Strided { start: 100, strides: vec![6, 3, 1], cut: Some(Cut { place: 1, len: 2, stride: 40 }) };
        let found = rows(&strided, &[2, 4, 3]);
        assert_eq!(found, [(0..6, 100..106), (6..12, 140..146), (12..18, 106..112), (18..24, 146..152)]);
        let dense = Strided { start: 7, strides: vec![3, 1], cut: None };
        assert_eq!(rows(&dense, &[2, 3]), [(0..6, 7..13)]);
    }
}
