//! Kernels whose threads share rows or columns, on shapes that small models lack: packs of neighbours, several warps to a row,
//! rows longer than registers, parts of rows that are summed apart.

use std::fs;

use ithaca_ir::verify::verify;
use ithaca_kernels::oracle;
use ithaca_kernels::store::RandomTensors;
use ithaca_passes::lower::lower;

use super::device::{distance, kernels_for, steps_on_device};
use super::distributed::module;
use super::{can_run, root};
use crate::tier;

/// The program of the GPU suite with tensors of type `t` and dimensions of these sizes; losses stay f32.
fn program(t: &str, sizes: &str) -> String {
    let size_of = |line: &str| {
        let dim = line.strip_prefix("dim ")?.split(' ').next()?;
        let size = sizes.split(' ').find_map(|size| size.strip_prefix(dim)?.strip_prefix('='));
        Some(format!("dim {dim} = {}", size.unwrap()))
    };
    let is_loss =
        |line: &str| ["%nll0", "%d_nll0", "%lse"].iter().any(|name| line.starts_with(&format!("  {name}")));
    let text = fs::read_to_string(root().join("tests/gpu/rows.ith")).unwrap();
    let line = |line: &str| match size_of(line) {
        Some(dim) => dim,
        None if is_loss(line) => line.to_owned(),
        None => line.replace("f32", t),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n") + "\n"
}

#[test]
fn shared_rows_and_columns_agree_with_the_oracle() {
    if !can_run() {
        return;
    }
    // Short rows of which a warp takes many, and sums in parts; rows of several warps; rows longer than registers; rows
    // that are no packs.
    let shapes = [
        "t=1040 m=8 v=12 h=3 d=16",
        "t=7 m=832 v=404 h=2 d=48",
        "t=3 m=8212 v=8224 h=1 d=32",
        "t=37 m=45 v=51 h=2 d=18",
    ];
    let types = [("f32", 1e-5), ("bf16", 2e-2)];
    let cases = types.iter().flat_map(|of| shapes.map(|shape| (of, shape)));
    for (&(t, tolerance), shape) in cases.take(if tier::is_full() { 8 } else { 2 }) {
        let whole = module(&program(t, shape));
        let sources = RandomTensors::of_module(&whole, 5);
        let schedule = lower(verify(&whole).unwrap()).unwrap();
        let kernels = kernels_for([&schedule]);
        let (found, _) = steps_on_device(shape, &schedule, &kernels, &sources, &sources, 1);
        for (output, expected) in oracle::run::<f64>(&whole, &sources, &sources).unwrap() {
            let distance = distance(&found[&output].map(f64::from), &expected);
            assert!(distance < tolerance, "{t} {shape}: {output} is {distance:.1e} off");
        }
    }
}
