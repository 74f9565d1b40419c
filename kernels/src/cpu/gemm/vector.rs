//! Products of a vector and a matrix: to pack the matrix would take longer than to read it.

use super::view::View;
use crate::cpu::simd::Update;

/// Sums of a dot product that run beside each other.
const LANES: usize = 16;

/// `c ← alpha · x b` or `c ← c + alpha · x b`, x being of `k` elements and b `k × n`; elements of x and of c are steps
/// apart.
pub(super) fn product(
    (k, n): (usize, usize),
    alpha: f32,
    (x, x_view): (&[f32], View),
    (b, b_view): (&[f32], View),
    (c, c_view): (&mut [f32], View),
    update: Update,
) {
    let x: Vec<f32> = (0..k).map(|p| x[x_view.start + p * x_view.column]).collect();
    let mut sums = vec![0.0f32; n];
    if b_view.row == 1 || n == 1 {
        for (j, sum) in sums.iter_mut().enumerate() {
            let start = b_view.start + j * b_view.column;
            *sum = match b_view.row {
                1 => dot(&x, &b[start..start + k]),
                row => x.iter().enumerate().map(|(p, x)| x * b[start + p * row]).sum(),
            };
        }
    } else {
        for (p, &x) in x.iter().enumerate() {
            let start = b_view.start + p * b_view.row;
            match b_view.column {
                1 => sums.iter_mut().zip(&b[start..start + n]).for_each(|(sum, b)| *sum += x * b),
                column => {
                    sums.iter_mut().enumerate().for_each(|(j, sum)| *sum += x * b[start + j * column]);
                }
            }
        }
    }
    for (j, sum) in sums.into_iter().enumerate() {
        let c = &mut c[c_view.start + j * c_view.column];
        match update {
            Update::Overwrite => *c = alpha * sum,
            Update::Accumulate => *c += alpha * sum,
        }
    }
}

/// The sum of products, in lanes and then of lanes.
fn dot(x: &[f32], y: &[f32]) -> f32 {
    let whole = x.len() / LANES * LANES;
    let mut sums = [0.0f32; LANES];
    for (x, y) in x[..whole].chunks_exact(LANES).zip(y.chunks_exact(LANES)) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    let rest: f32 = x[whole..].iter().zip(&y[whole..]).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + rest
}
