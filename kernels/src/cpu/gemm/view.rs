//! Matrices in slices.

/// A matrix in a slice: where it starts, its stride from row to row and from column to column.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct View {
    /// The first element.
    pub(in crate::cpu) start: usize,
    /// From row to row.
    pub(in crate::cpu) row: usize,
    /// From column to column.
    pub(in crate::cpu) column: usize,
}

impl View {
    /// The same matrix with rows and columns exchanged.
    pub(in crate::cpu) fn transposed(self) -> Self {
        View { row: self.column, column: self.row, ..self }
    }

    /// The matrix from this row and column on.
    pub(super) fn from(self, row: usize, column: usize) -> Self {
        View { start: self.start + row * self.row + column * self.column, ..self }
    }

    /// Whether all elements of a matrix of this size are among the first `length`.
    pub(super) fn lies_in(self, rows: usize, columns: usize, length: usize) -> bool {
        let last = || self.start + (rows - 1) * self.row + (columns - 1) * self.column;
        rows == 0 || columns == 0 || last() < length
    }
}
