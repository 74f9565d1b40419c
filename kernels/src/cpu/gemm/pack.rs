//! Packing: a matrix in the order in which small products read it.

use half::bf16;

use super::buffer::Buffer;
use super::view::View;

/// A number as memory has it.
pub trait Element: Copy + Sync {
    /// The number.
    fn number(self) -> f32;
}

impl Element for f32 {
    fn number(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    fn number(self) -> f32 {
        self.to_f32()
    }
}

/// Elements of `k × n` packed in panels of `width` columns.
fn packed_length(width: usize, (k, n): (usize, usize)) -> usize {
    n.next_multiple_of(width) * k
}

/// Packs a matrix of `k` rows and `n` columns in panels of `width` columns: panel after panel its rows, those of the last
/// panel filled up with zeros.
///
/// # Panics
/// When the view does not lie in `data`: a bug of the caller.
pub(in crate::cpu) fn pack<E: Element>(
    out: &mut Buffer,
    width: usize,
    (k, n): (usize, usize),
    data: &[E],
    view: View,
) {
    assert!(view.lies_in(k, n, data.len()), "the matrix lies in its slice");
    let out = out.resize(packed_length(width, (k, n)));
    if k == 0 {
        return;
    }
    for (panel, out) in out.chunks_exact_mut(width * k).enumerate() {
        let first = panel * width;
        let columns = width.min(n - first);
        if columns < width {
            out.fill(0.0);
        }
        let start = view.start + first * view.column;
        match (view.row, view.column) {
            (row, 1) => {
                for (i, out) in out.chunks_exact_mut(width).enumerate() {
                    let line = &data[start + i * row..][..columns];
                    out.iter_mut().zip(line).for_each(|(out, x)| *out = x.number());
                }
            }
            (1, column) => {
                for (j, line) in (0..columns).map(|j| (j, &data[start + j * column..][..k])) {
                    let places = out[j..].iter_mut().step_by(width);
                    places.zip(line).for_each(|(out, x)| *out = x.number());
                }
            }
            (row, column) => {
                for (i, out) in out.chunks_exact_mut(width).enumerate() {
                    for (j, out) in out.iter_mut().enumerate().take(columns) {
                        *out = data[start + i * row + j * column].number();
                    }
                }
            }
        }
    }
}
