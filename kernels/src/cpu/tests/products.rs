//! Matrix products of every orientation and size class against plain loops.

use super::{Threads, noise};
use crate::cpu::gemm::{Update, View, multiply};

fn numbers(n: usize, seed: u64) -> Vec<f32> {
    noise(n, seed).into_iter().map(|x| x as f32).collect()
}

/// Views of a matrix as rows, as columns, and with gaps between elements; each with its size.
fn views(rows: usize, columns: usize) -> [(View, usize); 3] {
    [
        (View { start: 3, row: columns + 2, column: 1 }, 3 + rows * (columns + 2)),
        (View { start: 0, row: 1, column: rows }, rows * columns),
        (View { start: 1, row: 2 * columns + 1, column: 2 }, 1 + rows * (2 * columns + 1)),
    ]
}

#[test]
fn products_of_every_orientation_agree_with_plain_loops() {
    // Less than a small product, and just above each size of a block.
    let sizes = [(1, 1, 1), (5, 0, 3), (13, 3, 33), (250, 257, 40), (7, 260, 70), (3, 2, 2060)];
    for ((m, k, n), update) in
        sizes.into_iter().flat_map(|sizes| [(sizes, Update::Overwrite), (sizes, Update::Accumulate)])
    {
        for i in 0..27 {
            let ((a_view, a_len), (b_view, b_len), (c_view, c_len)) =
                (views(m, k)[i % 3], views(k, n)[i / 3 % 3], views(m, n)[i / 9]);
            let (a, b, before) = (numbers(a_len + 1, 1), numbers(b_len + 1, 2), numbers(c_len + 1, 3));
            let mut c = before.clone();
            multiply((m, k, n), 0.5, (&a, a_view), (&b, b_view), (&mut c, c_view), update, Threads::ONE);
            let at = |view: View, i: usize, j: usize| view.start + i * view.row + j * view.column;
            let mut expected: Vec<f64> = before.iter().map(|&x| f64::from(x)).collect();
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let product = |p| f64::from(a[at(a_view, i, p)]) * f64::from(b[at(b_view, p, j)]);
                let sum = 0.5 * (0..k).map(product).sum::<f64>();
                let c = &mut expected[at(c_view, i, j)];
                *c = if update == Update::Accumulate { *c + sum } else { sum };
            }
            let worst = c.iter().zip(&expected).map(|(c, e)| (f64::from(*c) - e).abs()).fold(0.0, f64::max);
            // A sum of k products of numbers up to one is known to k halves of an ulp of k.
            let bound = ((k + 2) * (k + 2)) as f64 * f64::from(f32::EPSILON) / 2.0;
            assert!(worst < bound.min(1e-3), "{m}×{k}×{n}, views {i}: {worst}");
        }
    }
}

#[test]
fn threads_change_no_product() {
    // Rows are shared out of the first, columns of the others.
    for (m, k, n) in [(600, 300, 400), (9, 2000, 3000), (300, 400, 600)] {
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        let view = |row| View { start: 0, row, column: 1 };
        let run = |threads, c_view: View| {
            let mut c = numbers(m * n, 3);
            multiply(
                (m, k, n),
                0.5,
                (&a, view(k)),
                (&b, view(n)),
                (&mut c, c_view),
                Update::Accumulate,
                threads,
            );
            c
        };
        for c_view in [view(n), View { start: 0, row: 1, column: m }] {
            let one = run(Threads::ONE, c_view);
            assert_eq!(one, run(Threads::new(2), c_view), "{m}×{k}×{n}");
            assert_eq!(one, run(Threads::new(3), c_view), "{m}×{k}×{n}");
        }
    }
}
