//! The blocked product of two matrices.

use std::sync::{Mutex, PoisonError};

use super::buffer::Buffer;
use super::pack::pack;
use super::vector;
use super::view::View;
use crate::cpu::simd::{LhsLayout, Simd, Update};
use crate::cpu::threads::Threads;

/// Summed products of a block. A panel of the right matrix streams from the second cache: half as many, for which it stays in
/// the first, cost 10 % by reading and writing the result twice as often.
const DEPTH: usize = 512;

/// Rows of a block, a multiple of the rows of every machine: the left matrix stays in the second cache.
const HEIGHT: usize = 240;

/// Columns of a block, a multiple of the columns of every machine.
const WIDTH: usize = 2048;

/// A matrix that is read.
pub(in crate::cpu) type Matrix<'a> = (&'a [f32], View);

/// `c ← alpha · a b` or `c ← c + alpha · a b`, a being `m × k` and b `k × n`.
///
/// Each element sums its products in the same order, in blocks of [`DEPTH`], whatever the number of threads.
///
/// # Panics
/// When a view does not lie in its slice: a bug of the caller.
pub(in crate::cpu) fn multiply(
    (m, k, n): (usize, usize, usize),
    alpha: f32,
    (a, a_view): Matrix<'_>,
    (b, b_view): Matrix<'_>,
    (c, c_view): (&mut [f32], View),
    update: Update,
    threads: Threads,
) {
    assert!(a_view.lies_in(m, k, a.len()), "the left matrix lies in its slice");
    assert!(b_view.lies_in(k, n, b.len()), "the right matrix lies in its slice");
    assert!(c_view.lies_in(m, n, c.len()), "the result lies in its slice");
    if m == 0 || n == 0 {
        return;
    }
    if m == 1 {
        return vector::product((k, n), alpha, (a, a_view), (b, b_view), (c, c_view), update);
    }
    if n == 1 {
        let (x, matrix, to) = (b_view.transposed(), a_view.transposed(), c_view.transposed());
        return vector::product((k, m), alpha, (b, x), (a, matrix), (c, to), update);
    }
    // Small products write rows: the result's neighbours have to be columns.
    if c_view.column != 1 && (c_view.row == 1 || m > n) {
        let (left, right) = ((b, b_view.transposed()), (a, a_view.transposed()));
        return oriented((n, k, m), alpha, left, right, (c, c_view.transposed()), update, threads);
    }
    oriented((m, k, n), alpha, (a, a_view), (b, b_view), (c, c_view), update, threads);
}

/// The product, rows shared out among threads where there are enough, columns otherwise.
fn oriented(
    (m, k, n): (usize, usize, usize),
    alpha: f32,
    (a, a_view): Matrix<'_>,
    (b, b_view): Matrix<'_>,
    (c, c_view): (&mut [f32], View),
    update: Update,
    threads: Threads,
) {
    let simd = Simd::of_machine();
    let threads = threads.worth(2 * m * k * n);
    // Rows in a row of memory, each before the next, can be cut apart.
    let rows_are_apart = c_view.column == 1 && c_view.row >= n;
    if threads == Threads::ONE {
        let mut spare = Spare::packed();
        return serial(simd, &mut spare.0, (m, k, n), alpha, (a, a_view), (b, b_view), (c, c_view), update);
    }
    if rows_are_apart && m >= threads.count() * 2 * simd.rows {
        let step = m.div_ceil(threads.count()).next_multiple_of(simd.rows);
        let parts = cut(c, c_view, m, step);
        threads.map(parts, Spare::packed, |spare, (first, c)| {
            let rows = step.min(m - first);
            let (a, to) = ((a, a_view.from(first, 0)), View { start: 0, ..c_view });
            serial(simd, &mut spare.0, (rows, k, n), alpha, a, (b, b_view), (c, to), update);
        });
        return;
    }
    // Columns are computed beside the result and then put there.
    let step = n.div_ceil(threads.count()).next_multiple_of(simd.columns);
    let firsts: Vec<usize> = (0..n).step_by(step).collect();
    let before = &*c;
    let parts = threads.map(firsts.clone(), Spare::packed, |spare, first| {
        let columns = step.min(n - first);
        let mut part = vec![0.0; m * columns];
        if update == Update::Accumulate {
            for (row, part) in part.chunks_mut(columns).enumerate() {
                get(before, c_view.from(row, first), part);
            }
        }
        let (b, to) = ((b, b_view.from(0, first)), View { start: 0, row: columns, column: 1 });
        serial(simd, &mut spare.0, (m, k, columns), alpha, (a, a_view), b, (&mut part, to), update);
        part
    });
    for (first, part) in firsts.into_iter().zip(parts) {
        for (row, part) in part.chunks(step.min(n - first)).enumerate() {
            put(c, c_view.from(row, first), part);
        }
    }
}

/// The rows of a result in groups of `step`, each with its first.
fn cut(c: &mut [f32], view: View, m: usize, step: usize) -> Vec<(usize, &mut [f32])> {
    let mut rest = &mut c[view.start..];
    let mut parts = Vec::new();
    for first in (0..m).step_by(step) {
        let length = if first + step < m { step * view.row } else { rest.len() };
        let (part, after) = rest.split_at_mut(length);
        parts.push((first, part));
        rest = after;
    }
    parts
}

/// Puts a row where it belongs.
fn put(c: &mut [f32], at: View, row: &[f32]) {
    for (j, &x) in row.iter().enumerate() {
        c[at.start + j * at.column] = x;
    }
}

/// Gets a row from where it is.
fn get(c: &[f32], at: View, row: &mut [f32]) {
    for (j, x) in row.iter_mut().enumerate() {
        *x = c[at.start + j * at.column];
    }
}

/// Memory for packed blocks.
#[derive(Default)]
struct Packed {
    left: Buffer,
    right: Buffer,
    edge: Vec<f32>,
}

/// Packed blocks of earlier products, for the next: new memory costs a small product more than its packing.
static SPARE: Mutex<Vec<Packed>> = Mutex::new(Vec::new());

/// Packed blocks that return to [`SPARE`].
struct Spare(Packed);

impl Spare {
    fn packed() -> Self {
        Self(SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default())
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        SPARE.lock().unwrap_or_else(PoisonError::into_inner).push(std::mem::take(&mut self.0));
    }
}

/// The product in one thread.
#[expect(clippy::too_many_arguments, reason = "a matrix product has three sizes and three matrices")]
fn serial(
    simd: &Simd,
    packed: &mut Packed,
    (m, k, n): (usize, usize, usize),
    alpha: f32,
    (a, a_view): Matrix<'_>,
    (b, b_view): Matrix<'_>,
    (c, c_view): (&mut [f32], View),
    update: Update,
) {
    let (rows, columns) = (simd.rows, simd.columns);
    packed.edge.resize(rows * columns, 0.0);
    for first_column in (0..n).step_by(WIDTH) {
        let width = WIDTH.min(n - first_column);
        // A product over nothing is zero: one block without depth says so.
        for (depth, first) in (0..k.max(1)).step_by(DEPTH).map(|first| (DEPTH.min(k - first), first)) {
            let update = if first == 0 { update } else { Update::Accumulate };
            pack(&mut packed.right, columns, (depth, width), b, b_view.from(first, first_column));
            for first_row in (0..m).step_by(HEIGHT) {
                let height = HEIGHT.min(m - first_row);
                let turned = a_view.from(first_row, first).transposed();
                pack(&mut packed.left, rows, (depth, height), a, turned);
                for (p, panel) in (0..width).step_by(columns).enumerate() {
                    let right = &packed.right.get()[p * depth * columns..(p + 1) * depth * columns];
                    let n_columns = columns.min(width - panel);
                    for (g, group) in (0..height).step_by(rows).enumerate() {
                        let left = LhsLayout::Neighbours(&packed.left.get()[g * depth * rows..], rows);
                        let n_rows = rows.min(height - group);
                        let at = c_view.from(first_row + group, first_column + panel);
                        if n_columns == columns && c_view.column == 1 {
                            let c = &mut c[at.start..];
                            simd.product((n_rows, depth), alpha, left, right, c, c_view.row, update);
                            continue;
                        }
                        // What is no whole panel is computed beside the result, by the same operations.
                        let edge = &mut packed.edge;
                        for (i, edge) in edge.chunks_mut(columns).enumerate().take(n_rows) {
                            get(c, at.from(i, 0), &mut edge[..n_columns]);
                        }
                        simd.product((n_rows, depth), alpha, left, right, edge, columns, update);
                        for (i, edge) in edge.chunks(columns).enumerate().take(n_rows) {
                            put(c, at.from(i, 0), &edge[..n_columns]);
                        }
                    }
                }
            }
        }
    }
}
