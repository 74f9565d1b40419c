//! Every kind of machine that this one can be, against `f64`.

use super::{LhsLayout, STRIDE, Simd, Update};

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as f32 / u32::MAX as f32 - 0.5
    };
    (0..n).map(|_| next()).collect()
}

#[test]
fn small_products_are_products() {
    for simd in Simd::available() {
        for (rows, k) in (1..=simd.rows).flat_map(|rows| [0, 1, 7, 40].map(|k| (rows, k))) {
            let (tile, b) = (numbers(simd.rows * STRIDE, 1), numbers(k * simd.columns, 2));
            // The same matrix with rows as neighbours.
            let turned: Vec<f32> = (0..k * rows).map(|i| tile[(i % rows) * STRIDE + i / rows]).collect();
            let before = numbers(rows * (simd.columns + 3), 3);
            for update in [Update::Overwrite, Update::Accumulate] {
                let run = |left: LhsLayout<'_>| {
                    let mut c = before.clone();
                    simd.product((rows, k), 0.5, left, &b, &mut c, simd.columns + 3, update);
                    c
                };
                let found = run(LhsLayout::Tile(&tile));
                assert_eq!(found, run(LhsLayout::Neighbours(&turned, rows)), "{}", simd.name);
                for (i, j) in (0..rows).flat_map(|i| (0..simd.columns).map(move |j| (i, j))) {
                    let sum: f64 = (0..k)
                        .map(|p| f64::from(tile[i * STRIDE + p]) * f64::from(b[p * simd.columns + j]))
                        .sum();
                    let at = i * (simd.columns + 3) + j;
                    let expected =
                        0.5 * sum + if update == Update::Accumulate { f64::from(before[at]) } else { 0.0 };
                    assert!((f64::from(found[at]) - expected).abs() < 1e-6, "{} {rows}×{k}", simd.name);
                }
            }
        }
    }
}

#[test]
fn powers_of_two_are_within_units_in_the_last_place() {
    for simd in Simd::available() {
        let exponents: Vec<f32> =
            (-148_000..12_700).map(|i| i as f32 * 0.01).filter(|x| *x > -126.0).collect();
        let mut found = exponents.clone();
        let sum = simd.exponentials(&mut found, 1.0, 0.0);
        for (x, found) in exponents.iter().zip(&found) {
            let expected = f64::from(*x).exp2();
            let error = (f64::from(*found) - expected).abs() / expected;
            assert!(error < 2e-7, "{}: 2^{x} is {found}, {error}", simd.name);
        }
        assert!(sum.is_finite() || sum == f32::INFINITY);
        let mut ends = [f32::NEG_INFINITY, -151.0, 0.0, 1.0, f32::NAN];
        simd.exponentials(&mut ends, 1.0, 0.0);
        assert_eq!(ends[..4], [0.0, 0.0, 1.0, 2.0], "{}", simd.name);
        assert!(ends[4].is_nan());
    }
}

#[test]
fn tangents_are_within_units_in_the_last_place() {
    for simd in Simd::available() {
        let arguments: Vec<f32> = (-12_000..12_000).map(|i| i as f32 * 0.001).collect();
        let mut found = arguments.clone();
        simd.tanh(&mut found, 1.0);
        for (x, found) in arguments.iter().zip(&found) {
            let expected = f64::from(*x).tanh();
            let error = (f64::from(*found) - expected).abs();
            assert!(error <= 4e-7 * expected.abs(), "{}: tanh {x} is {found}, {expected}", simd.name);
        }
        let mut none = [f32::NAN];
        simd.tanh(&mut none, 1.0);
        assert!(none[0].is_nan());
    }
}

#[test]
fn rows_of_any_length_are_handled_whole() {
    for simd in Simd::available() {
        for n in 0..40 {
            let row = numbers(n, 4);
            let greatest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(simd.max(&row), greatest);
            let (mut p, mut d) = (row.clone(), numbers(n, 5));
            let expected: Vec<(f64, f64)> = p
                .iter()
                .zip(&d)
                .map(|(&p, &d)| {
                    let p = (f64::from(p) - 0.25).exp2();
                    (p, p * (f64::from(d) - 0.5))
                })
                .collect();
            simd.gradients(&mut p, &mut d, 0.25, 0.5);
            for ((p, d), (expected_p, expected_d)) in p.iter().zip(&d).zip(expected) {
                assert!((f64::from(*p) - expected_p).abs() < 1e-6);
                assert!((f64::from(*d) - expected_d).abs() < 1e-6);
            }
            let mut scaled = row.clone();
            simd.multiply(&mut scaled, 3.0);
            assert_eq!(scaled, row.iter().map(|x| 3.0 * x).collect::<Vec<_>>());
        }
    }
}
