//! Dense tensors in row-major order, and the index arithmetic that every loop here uses.

use std::ops::Range;

use ithaca_ir::boxes::Region;
use serde::{Deserialize, Serialize};

/// A dense tensor, row-major.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct Tensor<T> {
    /// Elements of each dimension, outermost first.
    pub shape: Vec<usize>,
    /// The elements; as many as the shape says.
    pub data: Vec<T>,
}

impl<T: Copy> Tensor<T> {
    /// A tensor of these elements.
    ///
    /// # Panics
    /// When the shape has another number of elements: a bug of the caller.
    pub fn new(shape: Vec<usize>, data: Vec<T>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "a tensor has the elements of its shape");
        Self { shape, data }
    }

    /// A tensor with every element `value`.
    pub fn filled(shape: Vec<usize>, value: T) -> Self {
        let n = shape.iter().product();
        Self { shape, data: vec![value; n] }
    }

    /// The same shape with `f` of each element.
    pub fn map<U: Copy>(&self, f: impl FnMut(T) -> U) -> Tensor<U> {
        Tensor { shape: self.shape.clone(), data: self.data.iter().copied().map(f).collect() }
    }
}

/// Outputs of a run by name, in the order of the program.
pub type Outputs<T> = indexmap::IndexMap<String, Tensor<T>>;

/// Row-major strides of a shape.
pub fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

/// Offsets of a strided view, in row-major order of its shape.
///
/// A stride of zero repeats, which is how a dimension that a tensor lacks is broadcast.
#[derive(Clone, Debug)]
pub struct Offsets {
    shape: Vec<usize>,
    strides: Vec<usize>,
    index: Vec<usize>,
    offset: usize,
    remaining: usize,
}

impl Offsets {
    /// The offsets of `shape` with `strides`, from `start`.
    pub fn new(shape: Vec<usize>, strides: Vec<usize>, start: usize) -> Self {
        assert_eq!(shape.len(), strides.len(), "a view has a stride for each dimension");
        let remaining = shape.iter().product();
        Self { index: vec![0; shape.len()], shape, strides, offset: start, remaining }
    }

    /// The offsets of the elements of `part` in a dense tensor that holds `whole`, in row-major order of `part`.
    ///
    /// # Panics
    /// When `part` is not empty and is not inside `whole`: a bug of the caller.
    pub fn of_part(whole: &Region, part: &Region) -> Self {
        let shape = extents(part);
        let strides = strides(&extents(whole));
        if shape.contains(&0) {
            return Self::new(shape, strides, 0);
        }
        let inside = whole.iter().zip(part).all(|(w, p)| w.start <= p.start && p.end <= w.end);
        assert!(inside, "part {part:?} is inside {whole:?}");
        let start =
            whole.iter().zip(part).zip(&strides).map(|((w, p), s)| index(p.start - w.start) * s).sum();
        Self::new(shape, strides, start)
    }
}

impl Iterator for Offsets {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.remaining == 0 {
            return None;
        }
        let current = self.offset;
        self.remaining -= 1;
        for d in (0..self.shape.len()).rev() {
            self.index[d] += 1;
            self.offset += self.strides[d];
            if self.index[d] < self.shape[d] {
                break;
            }
            self.offset -= self.strides[d] * self.shape[d];
            self.index[d] = 0;
        }
        Some(current)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

impl ExactSizeIterator for Offsets {}

/// The elements of `part`, row-major, from a tensor that holds `whole`.
pub fn read_part<T: Copy>(whole: &Region, data: &[T], part: &Region) -> Vec<T> {
    Offsets::of_part(whole, part).map(|i| data[i]).collect()
}

/// Puts `block`, the elements of `part` in row-major order, where they belong in a tensor that holds `whole`.
pub fn write_part<T: Copy>(whole: &Region, data: &mut [T], part: &Region, block: &[T]) {
    for (i, &x) in Offsets::of_part(whole, part).zip(block) {
        data[i] = x;
    }
}

/// The elements of the regions of `block`, one after another, from a tensor that holds `whole`.
pub fn read_block<T: Copy>(whole: &Region, data: &[T], block: &[Region]) -> Vec<T> {
    block.iter().flat_map(|part| read_part(whole, data, part)).collect()
}

/// Combines the elements of the regions of `block`, one after another, with those of a tensor that holds `whole`.
pub fn merge_block<T: Copy>(
    whole: &Region,
    data: &mut [T],
    block: &[Region],
    elements: &[T],
    merge: impl Fn(T, T) -> T,
) {
    let mut rest = elements;
    for part in block {
        let offsets = Offsets::of_part(whole, part);
        let (here, after) = rest.split_at(offsets.len().min(rest.len()));
        for (i, &x) in offsets.zip(here) {
            data[i] = merge(data[i], x);
        }
        rest = after;
    }
}

/// The shape of a region.
pub fn extents(region: &Region) -> Vec<usize> {
    region.iter().map(length).collect()
}

/// The region of a whole tensor.
pub fn whole(shape: &[u64]) -> Region {
    shape.iter().map(|&n| 0..n).collect()
}

/// Elements of a range.
pub fn length(range: &Range<u64>) -> usize {
    index(range.end.saturating_sub(range.start))
}

/// A size as an index.
///
/// # Panics
/// On machines whose addresses are narrower than the size; a size in memory is always indexable.
pub fn index(n: u64) -> usize {
    usize::try_from(n).expect("sizes in memory fit an index")
}

/// The index of the `i`-th element of a tensor of this shape, row-major.
pub fn unravel(shape: &[u64], i: u64) -> Vec<u64> {
    place_in(&whole(shape), i)
}

/// The index in the whole tensor of element `i`, in row-major order, of a region.
pub fn place_in(region: &Region, i: u64) -> Vec<u64> {
    let shape = extents(region);
    let along = region.iter().zip(shape.iter().zip(strides(&shape)));
    along.map(|(part, (&n, stride))| part.start + i / stride as u64 % n as u64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_read_and_written_back() {
        let whole = vec![2..5, 10..14];
        let data: Vec<i32> = (0..12).collect();
        let part = vec![3..5, 11..13];
        let block = read_part(&whole, &data, &part);
        assert_eq!(block, [5, 6, 9, 10]);
        let mut copy = vec![0; 12];
        write_part(&whole, &mut copy, &part, &block);
        assert_eq!(copy, [0, 0, 0, 0, 0, 5, 6, 0, 0, 9, 10, 0]);
    }

    #[test]
    fn broadcasting_is_a_stride_of_zero() {
        let offsets: Vec<usize> = Offsets::new(vec![2, 3], vec![0, 1], 4).collect();
        assert_eq!(offsets, [4, 5, 6, 4, 5, 6]);
    }

    #[test]
    fn a_scalar_has_one_offset_and_an_empty_view_none() {
        assert_eq!(Offsets::new(vec![], vec![], 0).count(), 1);
        assert_eq!(Offsets::of_part(&vec![0..4, 0..2], &vec![9..9, 0..2]).count(), 0);
    }
}
