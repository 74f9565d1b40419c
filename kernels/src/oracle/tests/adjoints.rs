//! The adjoint of every operation against finite differences in `f64`, and the same programs on ranks.
//!
//! A case is the body of a program. Its outputs are weighed by inputs `g.…` and summed; the slope of the sum by each input
//! is the expected result of the adjoints, chained from the last node to the first.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::Output;
use ithaca_ir::ops::Binding;
use ithaca_ir::{Arena, DType, FunctionBuilder, Level, Module, Op, TensorType, ValueId, text, verify};

use super::noise;
use crate::oracle::run;
use crate::store::{TensorSource, Tensors};
use crate::tensor::Tensor;

/// Sizes of the dimensions; the last ones have padding.
const SIZES: [&str; 3] = [
    "dim b = 2\ndim s = 4\ndim t = 6\ndim m = 4\ndim h = 4 granule 2\ndim k = 2\ndim r = 4 copies k\ndim d = 6\ndim e = 4\ndim u = 6\ndim v = 8\n",
    "dim b = 1\ndim s = 6\ndim t = 2\ndim m = 2\ndim h = 6 granule 3\ndim k = 2\ndim r = 8 copies k\ndim d = 4\ndim e = 2\ndim u = 8\ndim v = 4\n",
    "dim b = 2\ndim s = 6 valid 5\ndim t = 4 valid 3\ndim m = 4\ndim h = 2\ndim k = 2\ndim r = 4 copies k\ndim d = 4\ndim e = 6 valid 5\ndim u = 4\ndim v = 8 valid 7\n",
];

/// Name and body of each case; `X[…]` is an input of real numbers.
const CASES: &[(&str, &str)] = &[
    ("einsum", "%x = X[b s m]\n%w = X[e m]\n%z = einsum %x, %w : f64[b s e]\nreturn z = %z"),
    (
        "einsum of an outer product",
        "%x = X[b s m]\n%w = X[s e]\n%z = einsum %x, %w : f64[e s m b]\nreturn z = %z",
    ),
    (
        "einsum that sums each operand by itself",
        "%x = X[s m b]\n%w = X[h e b]\n%z = einsum %x, %w : f64[e m]\nreturn z = %z",
    ),
    ("einsum of one tensor with itself", "%x = X[b s m]\n%z = einsum %x, %x : f64[s b]\nreturn z = %z"),
    ("sum", "%x = X[b s m]\n%z = sum %x : f64[b m]\n%y = sum %x : f64[]\nreturn z = %z, y = %y"),
    ("expand", "%x = X[b m]\n%z = expand %x : f64[b s m]\n%y = mul %z, %z : f64[b s m]\nreturn y = %y"),
    ("embed", "%w = X[v m]\n%i = I[b s]\n%z = embed %w, %i {over=v} : f64[b s m]\nreturn z = %z"),
    ("silu", "%x = X[b m]\n%z = silu %x : f64[b m]\nreturn z = %z"),
    ("gelu", "%x = X[b m]\n%z = gelu %x : f64[b m]\nreturn z = %z"),
    ("gelu_tanh", "%x = X[b m]\n%z = gelu_tanh %x : f64[b m]\nreturn z = %z"),
    ("quick_gelu", "%x = X[b m]\n%z = quick_gelu %x : f64[b m]\nreturn z = %z"),
    ("relu", "%x = X[b m]\n%z = relu %x : f64[b m]\nreturn z = %z"),
    ("tanh", "%x = X[b m]\n%z = tanh %x : f64[b m]\nreturn z = %z"),
    ("add", "%x = X[b s m]\n%y = X[b m]\n%z = add %x, %y : f64[b s m]\nreturn z = %z"),
    ("add of other order", "%x = X[b s m]\n%y = X[m b]\n%z = add %x, %y : f64[b s m]\nreturn z = %z"),
    ("sub", "%x = X[b s m]\n%y = X[]\n%z = sub %x, %y : f64[b s m]\nreturn z = %z"),
    ("mul", "%x = X[b s m]\n%y = X[m s]\n%z = mul %x, %y : f64[b s m]\nreturn z = %z"),
    ("mul of one tensor with itself", "%x = X[b s]\n%z = mul %x, %x : f64[b s]\nreturn z = %z"),
    ("div", "%x = X[b s m]\n%y = X[s]\n%z = div %x, %y : f64[b s m]\nreturn z = %z"),
    ("div alike", "%x = X[b m]\n%y = X[b m]\n%z = div %x, %y : f64[b m]\nreturn z = %z"),
    ("log_add_exp", "%x = X[b s]\n%y = X[s]\n%z = log_add_exp %x, %y : f64[b s]\nreturn z = %z"),
    ("scale", "%x = X[b s]\n%z = scale %x {factor=-0.3} : f64[b s]\nreturn z = %z"),
    (
        "cast",
        "%x = X[b s]\n%y = cast %x {to=f32} : f32[b s]\n%z = cast %y {to=f64} : f64[b s]\nreturn z = %z",
    ),
    (
        "rms_norm",
        "%x = X[b s h d]\n%w = X[h d]\n%z = rms_norm %x, %w {over=d, eps=0.01, offset=1.0} : f64[b s h d]\nreturn z = %z",
    ),
    (
        "rms_scale",
        "%x = X[b s h d]\n%w = X[h d]\n%q = einsum %x, %x : f64[b s]\n%z = rms_scale %x, %q, %w {over=[h, d], eps=0.01} : f64[b s h d]\nreturn z = %z",
    ),
    (
        "layer_norm",
        "%x = X[b s m]\n%w = X[m]\n%c = X[m]\n%z = layer_norm %x, %w, %c {over=m, eps=0.01} : f64[b s m]\nreturn z = %z",
    ),
    (
        "layer_norm with another bias",
        "%x = X[b s m]\n%w = X[m]\n%c = X[s m]\n%z = layer_norm %x, %w, %c {over=m, eps=0.01} : f64[b s m]\nreturn z = %z",
    ),
    ("softmax", "%x = X[b s m]\n%z = softmax %x {over=m} : f64[b s m]\nreturn z = %z"),
    ("softmax over the first", "%x = X[m b s]\n%z = softmax %x {over=m} : f64[m b s]\nreturn z = %z"),
    (
        "dropout",
        "%x = X[b s m]\n%c = key {seed=3} : i32[]\n%n = I[]\n%k = fold_in %c, %n : i32[]\n%o = layer_key %k : i32[]\n%y = dropout_mask %o {rate=0.4, seed=5} : bool[b s m]\n%z = dropout %x, %y {rate=0.4} : f64[b s m]\nreturn z = %z",
    ),
    (
        "rotary of a part",
        "%x = X[b s h d]\n%p = positions : i32[s]\n%z = rotary %x, %p {over=d, width=2, theta=10.0, scaling=none} : f64[b s h d]\nreturn z = %z",
    ),
    (
        "rotary with yarn",
        "%x = X[b s h d]\n%p = positions : i32[s]\n%z = rotary %x, %p {over=d, width=4, theta=100.0, scaling=yarn(factor=4.0, beta_fast=32.0, beta_slow=1.0, original=16.0, attention=1.25, truncate=true)} : f64[b s h d]\nreturn z = %z",
    ),
    (
        "rotary back",
        "%x = X[b s h d]\n%p = I[b s]\n%z = rotary %x, %p {over=d, width=4, theta=10.0, scaling=linear(factor=2.0), turn=back} : f64[b s h d]\nreturn z = %z",
    ),
    (
        "attention, grouped",
        "%q = X[b s h d]\n%k = X[b s k d]\n%v = X[b s k e]\n%z, %l = attention %q, %k, %v {heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=causal, scale=0.6, returns=with_lse} : f64[b s h e], f32[b s h]\nreturn z = %z",
    ),
    (
        "attention with a cap, a window and a gradient of lse",
        "%q = X[b s h d]\n%k = X[b s k d]\n%v = X[b s k e]\n%z, %l = attention %q, %k, %v {heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=window(left=2, right=0) | sinks(1), scale=0.6, softcap=0.8, returns=with_lse} : f64[b s h e], f32[b s h]\n%w = cast %l {to=f64} : f64[b s h]\nreturn z = %z, w = %w",
    ),
    (
        "attention with a gradient of lse alone",
        "%q = X[b s h d]\n%k = X[b s k d]\n%v = X[b s k e]\n%z, %l = attention %q, %k, %v {heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=causal, scale=0.6, returns=with_lse} : f64[b s h e], f32[b s h]\n%w = cast %l {to=f64} : f64[b s h]\nreturn w = %w",
    ),
    (
        "attention to other keys with a bias",
        "%q = X[b s h d]\n%k = X[b t k d]\n%v = X[b t k e]\n%c = X[u h]\n%z, %l = attention %q, %k, %v, %c {heads=h, kv_heads=k, queries=s, keys=t, width=d, mask=full, bias=relative(buckets=u, max_distance=6, sides=both), scale=0.6, softcap=1.5, returns=with_lse} : f64[b s h e], f32[b s h]\nreturn z = %z",
    ),
    (
        "attention with a bias before and dropout",
        "%q = X[b s h d]\n%k = X[b s k d]\n%v = X[b s k d]\n%c = X[u h]\n%z, %l = attention %q, %k, %v, %c {heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=causal, bias=relative(buckets=u, max_distance=9, sides=before), dropout=uniform(rate=0.4, seed=7, keyed=position), scale=0.6, returns=with_lse} : f64[b s h d], f32[b s h]\nreturn z = %z",
    ),
    (
        "attention with a bias and dropout from a key",
        "%q = X[b s h d]\n%k = X[b s k d]\n%v = X[b s k d]\n%c = X[u h]\n%r = key {seed=3} : i32[]\n%z, %l = attention %q, %k, %v, %c, %r {heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=causal, bias=relative(buckets=u, max_distance=9, sides=before), dropout=uniform(rate=0.4, seed=7, keyed=position), scale=0.6, returns=with_lse} : f64[b s h d], f32[b s h]\nreturn z = %z",
    ),
    (
        "attention with dropout from a key",
        "%q = X[b s h d]\n%k = X[b s k d]\n%v = X[b s k d]\n%r = key {seed=3} : i32[]\n%z, %l = attention %q, %k, %v, %r {heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=causal, dropout=uniform(rate=0.4, seed=7, keyed=position), scale=0.6, returns=with_lse} : f64[b s h d], f32[b s h]\nreturn z = %z",
    ),
    (
        "attention of one tensor",
        "%q = X[b s k d]\n%z, %l = attention %q, %q, %q {heads=k, kv_heads=k, queries=s, keys=s, width=d, mask=causal, scale=0.6, returns=with_lse} : f64[b s k d], f32[b s k]\nreturn z = %z",
    ),
    (
        "sink",
        "%q = X[b s h d]\n%k = X[b s k d]\n%v = X[b s k e]\n%c = X[h]\n%z, %l = attention %q, %k, %v {heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=causal, scale=0.6, returns=with_lse} : f64[b s h e], f32[b s h]\n%o, %n = sink %z, %l, %c : f64[b s h e], f32[b s h]\nreturn o = %o",
    ),
    (
        "sink with a gradient of lse",
        "%o0 = X[b s h e]\n%x = X[b s h]\n%l = cast %x {to=f32} : f32[b s h]\n%c = X[h]\n%o, %n = sink %o0, %l, %c : f64[b s h e], f32[b s h]\n%w = cast %n {to=f64} : f64[b s h]\nreturn o = %o, w = %w",
    ),
    ("accumulate", "%x = X[b s]\n%y = X[b s]\n%z = accumulate %x, %y : f64[b s]\nreturn z = %z"),
    (
        "repeat",
        "%x = X[b k d]\n%y = repeat %x {from=k, to=r} : f64[b r d]\n%z = einsum %y, %y : f64[b d]\nreturn z = %z",
    ),
    (
        "sum_copies",
        "%x = X[b k d]\n%y = repeat %x {from=k, to=r} : f64[b r d]\n%w = mul %y, %y : f64[b r d]\n%z = sum_copies %w {from=r, to=k} : f64[b k d]\nreturn z = %z",
    ),
    (
        "cross_entropy",
        "%x = X[b s v]\n%i = I[b s]\n%z, %l = cross_entropy %x, %i {over=v, ignore=-100} : f64[b s], f64[b s]\nreturn z = %z",
    ),
    (
        "cross_entropy of logits in another order",
        "%x = X[v b s]\n%i = I[b s]\n%z, %l = cross_entropy %x, %i {over=v, ignore=1} : f64[b s], f64[b s]\nreturn z = %z",
    ),
    ("pick", "%x = X[b s v]\n%i = I[b s]\n%z = pick %x, %i {over=v, ignore=-100} : f64[b s]\nreturn z = %z"),
    (
        "mean over valid tokens",
        "%x = X[b s m]\n%w = X[v m]\n%y = einsum %x, %w : f64[b s v]\n%i = I[b s]\n%n, %l = cross_entropy %y, %i {over=v, ignore=-100} : f64[b s], f64[b s]\n%one = valid %i {ignore=-100} : f32[b s]\n%count = sum %one : f32[]\n%c = cast %count {to=f64} : f64[]\n%t = sum %n : f64[]\n%z = div %t, %c : f64[]\nreturn z = %z",
    ),
    (
        "a block",
        "%x = X[b s m]\n%n = X[m]\n%y = rms_norm %x, %n {over=m, eps=0.01} : f64[b s m]\n%wq = X[h d m]\n%q0 = einsum %y, %wq : f64[b s h d]\n%p = positions : i32[s]\n%q = rotary %q0, %p {over=d, width=4, theta=10.0, scaling=none} : f64[b s h d]\n%wk = X[k d m]\n%k = einsum %y, %wk : f64[b s k d]\n%o, %l = attention %q, %k, %k {heads=h, kv_heads=k, queries=s, keys=s, width=d, mask=causal, scale=0.5, returns=with_lse} : f64[b s h d], f32[b s h]\n%wo = X[m h d]\n%a = einsum %o, %wo : f64[b s m]\n%r = add %x, %a : f64[b s m]\n%wu = X[e m]\n%g = einsum %r, %wu : f64[b s e]\n%f = silu %g : f64[b s e]\n%wd = X[m e]\n%dn = einsum %f, %wd : f64[b s m]\n%z = add %r, %dn : f64[b s m]\nreturn z = %z",
    ),
];

pub(super) fn parse(sizes: &str, body: &str) -> Module {
    let mut text = format!("ithaca 1 program\nmodel \"case\"\n{sizes}\nfunc @main() {{\n");
    for line in body.lines() {
        let source = |marker: &str, dtype: &str| {
            line.replace(
                &format!("= {marker}["),
                &format!("= input {{name=\"{}\"}} : {dtype}[", &line[1..line.find(' ').unwrap_or(1)]),
            )
        };
        let line = if line.contains("= X[") { source("X", "f64") } else { source("I", "i32") };
        text += &format!("  {line}\n");
    }
    super::distributed::module(&(text + "}\n"))
}

/// A tensor for every input: noise, and integers below the smallest table, every third one to be ignored.
pub(super) fn tensors(module: &Module, ignored: f64) -> Tensors {
    let main = &module.functions[module.main().unwrap()];
    let mut tensors = Tensors::new();
    for (i, node) in main.nodes.iter().enumerate() {
        let Op::Input(binding) = &node.op else { continue };
        let ty = main.ty(node.result());
        let shape: Vec<usize> = ty.dims.iter().map(|&d| module.space.dims[d].valid as usize).collect();
        let n = shape.iter().product();
        let data = match ty.dtype {
            DType::I32 => (0..n).map(|i| if i % 3 == 1 { ignored } else { (i * 5 % 4) as f64 }).collect(),
            // Away from zero, where a quotient has no slope and relu a kink.
            _ => noise(n, i as u64).into_iter().map(|x| if x.abs() < 0.05 { 0.3 } else { 1.4 * x }).collect(),
        };
        tensors.insert(binding.name.clone(), Tensor::new(shape, data));
    }
    tensors
}

/// The program with inputs `g.…` for the gradients of its outputs, and outputs `d.…` for those of its inputs.
pub(super) fn differentiated(module: &Module) -> Module {
    let main = &module.functions[module.main().unwrap()];
    let functions = Arena::new();
    let mut b = FunctionBuilder::new("main", &module.space, &functions);
    for node in &main.nodes {
        let declared: Vec<TensorType> = node.results.iter().map(|&v| main.ty(v).clone()).collect();
        assert_eq!(b.node(node.op.clone(), &node.operands, &declared).unwrap(), node.results);
    }
    let mut gradients: Vec<Option<ValueId>> = vec![None; main.values.len()];
    let add = |b: &mut FunctionBuilder<'_>, sum: &mut Option<ValueId>, more: ValueId| {
        *sum = Some(sum.map_or(more, |sum| b.add(sum, more).unwrap()));
    };
    for output in &main.outputs {
        let name = format!("g.{}", output.name.as_deref().unwrap());
        let ty = b.ty(output.value).clone();
        let seed = b.push_as(Op::Input(Binding::named(name)), &[], ty).unwrap();
        add(&mut b, &mut gradients[output.value.index()], seed);
    }
    let mut outputs = Vec::new();
    for node in main.nodes.iter().rev() {
        let of_results: Vec<Option<ValueId>> = node.results.iter().map(|v| gradients[v.index()]).collect();
        if let (Op::Input(binding), Some(value)) = (&node.op, of_results[0]) {
            outputs.push(Output { name: Some(format!("d.{}", binding.name)), value });
        }
        let found = node.op.adjoint(&mut b, &node.operands, &node.results, &of_results).unwrap();
        assert_eq!(found.len(), node.operands.len());
        for (&operand, gradient) in node.operands.iter().zip(found) {
            let Some(gradient) = gradient else { continue };
            assert_eq!(b.ty(gradient), b.ty(operand), "the gradient of an operand of `{}`", node.op.name());
            add(&mut b, &mut gradients[operand.index()], gradient);
        }
    }
    let main = b.finish(outputs);
    let space = module.space.clone();
    Module { space, functions: [main].into_iter().collect(), ..module.emptied(Level::Program) }
}

/// The cases of every size: name, program, the program with gradients, and inputs of both.
pub(crate) fn each(mut check: impl FnMut(&str, &Module, &Module, &Tensors)) {
    for (name, body) in CASES {
        for (i, sizes) in SIZES.iter().enumerate() {
            let program = parse(sizes, body);
            let ignored = if body.contains("ignore=-100") { -100.0 } else { 1.0 };
            let with_gradients = differentiated(&program);
            let name = format!("{name}, sizes {i}");
            if let Err(d) = verify::verify(&with_gradients) {
                panic!("{name}: {d:?}\n{}", text::print(&with_gradients));
            }
            check(&name, &program, &with_gradients, &tensors(&with_gradients, ignored));
        }
    }
}

#[test]
fn adjoints_are_slopes() {
    each(check_slopes);
}

/// The gradients of `with_gradients` are slopes of `program`.
pub(super) fn check_slopes(name: &str, program: &Module, with_gradients: &Module, tensors: &Tensors) {
    let loss = |tensors: &Tensors| -> f64 {
        let outputs = run::<f64>(program, tensors, tensors).unwrap_or_else(|e| panic!("{name}: {e}"));
        let weighed = |(output, z): (&String, &Tensor<f64>)| -> f64 {
            let g = tensors.read(&format!("g.{output}")).unwrap();
            z.data.iter().zip(&g.data).map(|(z, g)| z * g).sum()
        };
        outputs.iter().map(weighed).sum()
    };
    let found = run::<f64>(with_gradients, tensors, tensors).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(!found.is_empty());
    for (output, gradient) in &found {
        let input = &output[2..];
        let x = tensors.read(input).unwrap();
        assert_eq!(x.shape, gradient.shape, "{name}: {output}");
        for (i, &computed) in gradient.data.iter().enumerate().step_by(1 + x.data.len() / 24) {
            let moved = |by: f64| {
                let (mut x, mut tensors) = (x.clone(), tensors.clone());
                x.data[i] += by;
                tensors.insert(input, x);
                loss(&tensors)
            };
            let step = 1e-4;
            let slope = (8.0 * (moved(step) - moved(-step)) - (moved(2.0 * step) - moved(-2.0 * step)))
                / (12.0 * step);
            let near = (slope - computed).abs() <= 1e-8 * slope.abs().max(1.0);
            assert!(near, "{name}: {output}[{i}] is {computed}, the slope is {slope}");
        }
    }
}
