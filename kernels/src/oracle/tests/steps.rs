//! Loops over layers with stacks, and persistent tensors, against values taken by hand.

use ithaca_ir::{Module, text, verify};

use crate::Storage;
use crate::oracle::{Results, step};
use crate::store::{Layered, Tensors};
use crate::tensor::Tensor;

fn module(text: &str) -> Module {
    let module = text::parse(text).unwrap();
    verify::verify(&module).unwrap();
    assert_eq!(text::parse(&text::print(&module)).unwrap(), module);
    module
}

fn tensors(named: &[(&str, &[usize], &[f64])]) -> Tensors {
    named.iter().map(|&(n, shape, data)| (n, Tensor::new(shape.to_vec(), data.to_vec()))).collect()
}

/// Runs steps, each on the updates of the previous one.
fn steps(module: &Module, weights: &Tensors, n: usize) -> Vec<Results<f64>> {
    let mut kept = Tensors::new();
    (0..n)
        .map(|_| {
            let source = Layered::new(&kept, weights);
            let results = step::<f64>(module, &source, weights, Storage::Wide).unwrap();
            kept = Tensors::from(&results.kept);
            results
        })
        .collect()
}

const CHAIN: &str = r#"ithaca 1 program
model "a product of layers, and back"
dim l = 3
dim i = 2

func @forward(%x: f64[i]) {
  %w = param {name="w.{layer}"} : f64[i]
  %y = mul %x, %w : f64[i]
  return %y, %x
}

func @back(%acc: f64[i], %x: f64[i], %c: f64[i]) {
  %twice = scale %acc {factor=2.0} : f64[i]
  %sum = add %twice, %x : f64[i]
  %shifted = add %sum, %c : f64[i]
  return %shifted, %sum
}

func @main() {
  %x = input {name="x"} : f64[i]
  %c = input {name="c"} : f64[i]
  %y, %saved = call %x {callee=@forward, layers=4..7, over=l, carried=1} : f64[i], f64[l i]
  %z, %sums = call %c, %saved, %c {callee=@back, layers=4..7, over=l, carried=1, order=descending} : f64[i], f64[l i]
  return y = %y, saved = %saved, z = %z, sums = %sums
}
"#;

#[test]
fn stacks_are_in_order_of_layers_whichever_runs_first() {
    let weights = tensors(&[
        ("w.4", &[2], &[2.0, 3.0]),
        ("w.5", &[2], &[5.0, 7.0]),
        ("w.6", &[2], &[11.0, 13.0]),
        ("x", &[2], &[1.0, -1.0]),
        ("c", &[2], &[0.5, 0.25]),
    ]);
    let outputs = &steps(&module(CHAIN), &weights, 1)[0].outputs;
    assert_eq!(outputs["y"].data, [110.0, -273.0]);
    assert_eq!(outputs["saved"], Tensor::new(vec![3, 2], vec![1.0, -1.0, 2.0, -3.0, 10.0, -21.0]));
    // From the last layer: 2·0.5+10 = 11, 2·11.5+2 = 25, 2·25.5+1 = 52.
    assert_eq!(outputs["z"].data[0], 52.5);
    assert_eq!([0, 2, 4].map(|i| outputs["sums"].data[i]), [52.0, 25.0, 11.0]);
}

const NESTED: &str = r#"ithaca 1 program
model "a stack of stacks"
dim outer = 2
dim inner = 3

func @leaf(%x: f64[]) {
  %w = param {name="w.{layer}"} : f64[]
  %y = add %x, %w : f64[]
  return %y, %y
}

func @middle(%x: f64[]) {
  %y, %all = call %x {callee=@leaf, layers=0..3, over=inner, carried=1} : f64[], f64[inner]
  return %y, %all
}

func @main() {
  %x = input {name="x"} : f64[]
  %y, %all = call %x {callee=@middle, layers=0..2, over=outer, carried=1} : f64[], f64[outer inner]
  return y = %y, all = %all
}
"#;

#[test]
fn stacks_nest() {
    let weights =
        tensors(&[("w.0", &[], &[1.0]), ("w.1", &[], &[10.0]), ("w.2", &[], &[100.0]), ("x", &[], &[0.0])]);
    let outputs = &steps(&module(NESTED), &weights, 1)[0].outputs;
    assert_eq!(outputs["y"].data, [222.0]);
    assert_eq!(outputs["all"], Tensor::new(vec![2, 3], vec![1.0, 11.0, 111.0, 112.0, 122.0, 222.0]));
}

const STATES: &str = r#"ithaca 1 program
model "a sum that lasts, a weight that decays, windows of a fused tensor"
dim i = 2

func @update() {
  %m = state {name="sum.{layer}"} : f64[i]
  %w = param {name="w.{layer}"} : f64[i]
  %sum = add %m, %w : f64[i]
  assign %sum {target=state, name="sum.{layer}"}
  %half = scale %w {factor=0.5} : f64[i]
  assign %half {target=param, name="w.{layer}"}
  %seen = state {name="sum.{layer}"} : f64[i]
  %now = param {name="w.{layer}"} : f64[i]
  assign %seen {target=state, name="fused", stored=[3, 2], window=[0..1, 0..2]}
  assign %now {target=state, name="fused", stored=[3, 2], window=[2..3, 0..2]}
  return
}

func @look(%last: f64[i]) {
  %sum = state {name="sum.{layer}"} : f64[i]
  return %sum
}

func @main() {
  %zero = input {name="zero"} : f64[i]
  %before = call %zero {callee=@look, layers=0..2} : f64[i]
  call {callee=@update, layers=0..2}
  %after = call %zero {callee=@look, layers=0..2} : f64[i]
  return before = %before, after = %after
}
"#;

#[test]
fn later_reads_see_assignments_and_steps_go_on_from_what_was_kept() {
    let zero: &[f64] = &[0.0, 0.0];
    let weights = tensors(&[("w.0", &[2], &[8.0, 16.0]), ("w.1", &[2], &[4.0, 2.0]), ("zero", &[2], zero)]);
    let results = steps(&module(STATES), &weights, 3);
    let numbers = |name: &str| -> Vec<f64> { results.iter().map(|r| r.outputs[name].data[0]).collect() };
    assert_eq!(numbers("before"), [0.0, 4.0, 6.0]);
    assert_eq!(numbers("after"), [4.0, 6.0, 7.0]);
    let kept = &results[2].kept;
    assert_eq!(kept.keys().collect::<Vec<_>>(), ["fused", "sum.0", "sum.1", "w.0", "w.1"]);
    assert_eq!(kept["w.0"].data, [1.0, 2.0]);
    // Row 1 of the fused tensor belongs to no rank: it keeps its value from before the first step, zero.
    assert_eq!(kept["fused"], Tensor::new(vec![3, 2], vec![7.0, 3.5, 0.0, 0.0, 0.5, 0.25]));
}
