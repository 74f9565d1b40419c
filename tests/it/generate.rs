//! Random programs, and random ways to distribute them.
//!
//! Every choice is read from a list of numbers ([`Choices`]).

mod distribute;

use ithaca_ir::mesh::Mesh;
use ithaca_ir::ops::{
    Attention, AttentionDims, Binary, Binding, Direction, Fused, Pairs, Rotary, Scaling, Unary,
};
use ithaca_ir::{
    Arena, DType, Dim, DimId, Function, FunctionBuilder, Level, Mask, Module, Op, Space, TensorType, ValueId,
};
use ithaca_ir::{FuncId, module::Output};

use crate::fuzz::Choices;
pub(crate) use distribute::distribute;

/// Whether values change their element type on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Precision {
    /// Every real number has this type.
    Only(DType),
    /// Some values are cast.
    Mixed,
}

#[derive(Clone, Copy)]
struct Dims {
    b: DimId,
    s: DimId,
    m: DimId,
    f: DimId,
    v: DimId,
    h: DimId,
    k: DimId,
    d: DimId,
    kr: DimId,
}

fn dims(space: &mut Space, choices: &mut Choices) -> Dims {
    let mut add = |dim: Dim| space.dims.push(dim);
    let b = add(Dim::new("b", choices.one_of(&[1, 2])));
    let size = choices.one_of(&[4, 6, 8, 12]);
    let padding = if choices.once_in(3) { 1 } else { 0 };
    let uneven = choices.once_in(3);
    let s = add(Dim { valid: size - padding, uneven, ..Dim::new("s", size) });
    let m = add(Dim::new("m", choices.one_of(&[4, 6, 8])));
    let f = add(Dim::new("f", choices.one_of(&[6, 8, 12])));
    let v = add(Dim { uneven: choices.once_in(2), ..Dim::new("v", choices.one_of(&[5, 8, 12])) });
    let (n_kv, group) = (choices.one_of(&[2, 1, 3, 4]), choices.one_of(&[1, 2, 3]));
    let uneven = choices.once_in(3);
    let h = add(Dim { granule: group, uneven, ..Dim::new("h", n_kv * group) });
    let k = add(Dim { uneven, ..Dim::new("k", n_kv) });
    let d = add(Dim::new("d", choices.one_of(&[2, 4, 6])));
    let times = choices.one_of(&[2, 3]);
    let kr = add(Dim { granule: times, uneven, copies: Some(k), ..Dim::new("kr", n_kv * times) });
    Dims { b, s, m, f, v, h, k, d, kr }
}

/// A random program: `main`, which calls up to two blocks over up to three layers.
pub(crate) fn program(choices: &mut Choices, precision: Precision) -> Module {
    let mut space = Space::default();
    let dims = dims(&mut space, choices);
    let mut functions: Arena<FuncId, Function> = Arena::new();
    let dtype = match precision {
        Precision::Only(dtype) => dtype,
        Precision::Mixed => choices.one_of(&[DType::F32, DType::BF16, DType::F64]),
    };
    let stream = TensorType::new(dtype, [dims.b, dims.s, dims.m]);
    let positions = TensorType::new(DType::I32, [dims.s]);
    for i in 0..choices.below(3) {
        let mut builder = FunctionBuilder::new(format!("block{i}"), &space, &functions);
        let x = builder.param(stream.clone(), Some("x"));
        let positions = builder.param(positions.clone(), Some("positions"));
        let mut body = Body { builder, dims, dtype, precision, positions, pool: vec![x], prefix: "{layer}." };
        let y = body.grow(choices, 1);
        let outputs = [Output { name: None, value: y }];
        let function = body.builder.finish(outputs);
        functions.push(function);
    }
    let builder = FunctionBuilder::new("main", &space, &functions);
    let function = main_function(choices, builder, dims, precision, &stream, &functions);
    functions.push(function);
    let pipeline = (0..choices.below(3)).map(|i| format!("pass-{i}{{text=\"\\\"\n{i}\"}}")).collect();
    Module { level: Level::Program, name: "random \"one\"".to_owned(), pipeline, space, functions }
}

fn main_function(
    choices: &mut Choices,
    mut builder: FunctionBuilder<'_>,
    dims: Dims,
    precision: Precision,
    stream: &TensorType,
    functions: &Arena<FuncId, Function>,
) -> Function {
    let ids = TensorType::new(DType::I32, [dims.b, dims.s]);
    let tokens = builder.push_as(Op::Input(Binding::named("input_ids")), &[], ids).unwrap();
    let positions = TensorType::new(DType::I32, [dims.s]);
    let positions = builder.push_as(Op::Positions { padding: 0 }, &[], positions).unwrap();
    let table = TensorType::new(stream.dtype, [dims.v, dims.m]);
    let table = builder.weight(Binding::named("table"), table).unwrap();
    let x = builder.push(Op::Embed { over: dims.v, padding: None }, &[table, tokens]).unwrap();
    let dtype = stream.dtype;
    let mut body = Body { builder, dims, dtype, precision, positions, pool: vec![x], prefix: "" };
    let mut x = body.grow(choices, 3);
    for callee in functions.ids() {
        let layers = choices.below(2) as u64..3;
        x = body.builder.call(callee, layers, &[x, positions]).unwrap()[0];
        body.pool.push(x);
    }
    let y = body.grow(choices, 3);
    let mut outputs = vec![Output { name: Some("y".to_owned()), value: y }];
    for i in 0..choices.below(3) {
        let value = choices.one_of(&body.pool);
        outputs.push(Output { name: Some(format!("more.{i}")), value });
    }
    body.builder.finish(outputs)
}

struct Body<'a> {
    builder: FunctionBuilder<'a>,
    dims: Dims,
    dtype: DType,
    precision: Precision,
    positions: ValueId,
    /// Values of real numbers.
    pool: Vec<ValueId>,
    prefix: &'static str,
}

impl Body<'_> {
    /// Adds operations and returns a value of the type of the stream.
    fn grow(&mut self, choices: &mut Choices, at_least: usize) -> ValueId {
        for _ in 0..at_least + choices.below(6) {
            let x = choices.one_of(&self.pool);
            let y = self.step(choices, x);
            if choices.once_in(3) {
                let name = format!("v{}", choices.below(40));
                self.builder.name(y, Some(&name));
            }
            self.pool.push(y);
        }
        let stream = [self.dims.b, self.dims.s, self.dims.m];
        let fits = |&&v: &&ValueId| {
            let ty = self.builder.ty(v);
            ty.dims.as_slice() == stream && ty.dtype == self.dtype
        };
        *self.pool.iter().rev().find(fits).expect("the pool starts with a value of the stream")
    }

    fn step(&mut self, choices: &mut Choices, x: ValueId) -> ValueId {
        let ty = self.builder.ty(x).clone();
        let Dims { b, s, m, f, v, h, k, d, kr } = self.dims;
        match choices.below(10) {
            1 => {
                let gated = Op::Fused(Fused::Gated {
                    of: choices.one_of(&Unary::ALL),
                    limit: choices.once_in(2).then_some(1.0),
                });
                let op = if choices.once_in(2) { gated } else { Op::Binary(choices.one_of(&Binary::ALL)) };
                self.builder.push(op, &[x, x]).unwrap()
            }
            2 => {
                let dims: Vec<DimId> = ty.dims.iter().copied().filter(|_| choices.once_in(2)).collect();
                let y = self.weight(choices, TensorType::new(ty.dtype, dims));
                self.builder.push(Op::Binary(choices.one_of(&Binary::ALL)), &[x, y]).unwrap()
            }
            3 => self.builder.push(Op::Scale { factor: choices.one_of(&[0.5, -2.0, 1e-3]) }, &[x]).unwrap(),
            4 => {
                // A mean over padding has no meaning.
                let space = self.builder.space();
                let whole = |d: &DimId| space.dims[*d].valid == space.dims[*d].size;
                let candidates: Vec<DimId> = ty.dims.iter().copied().filter(whole).collect();
                let Some(_) = candidates.first() else { return x };
                let over = choices.one_of(&candidates);
                let weight = self.weight(choices, TensorType::new(ty.dtype, [over]));
                let (eps, offset) = (1e-6, choices.one_of(&[0.0, 1.0]));
                let results = match choices.below(4) {
                    0 => self.builder.node(Op::RmsNorm { over, eps, offset }, &[x, weight], &[]),
                    1 => self.builder.node(Op::LayerNorm { over, eps: 1e-5 }, &[x, weight, weight], &[]),
                    2 => {
                        let op = Op::Fused(Fused::AddRmsNorm { over, eps, offset });
                        self.builder.node(op, &[x, x, weight], &[])
                    }
                    _ => {
                        let op = Op::Fused(Fused::AddLayerNorm { over, eps: 1e-5 });
                        self.builder.node(op, &[x, x, weight, weight], &[])
                    }
                };
                choices.one_of(&results.unwrap())
            }
            5 => {
                // A dimension is summed, or stays as one of the batch, and another one comes.
                let summed = choices.one_of(&ty.dims);
                let free: Vec<DimId> = [f, v, h, d, m, k].into_iter().filter(|&n| !ty.has(n)).collect();
                let Some(_) = free.first() else { return x };
                let new = choices.one_of(&free);
                let weight = self.weight(choices, TensorType::new(ty.dtype, [new, summed]));
                let dims: Vec<DimId> = ty.dims.iter().map(|&n| if n == summed { new } else { n }).collect();
                if choices.once_in(2) {
                    return self.builder.einsum(x, weight, &dims).unwrap();
                }
                // Summed dimensions must stay whole, so layouts move before the product.
                let bias = self.weight(choices, TensorType::new(ty.dtype, [new]));
                let of = choices.once_in(2).then(|| choices.one_of(&Unary::ALL));
                let product = TensorType::new(ty.dtype, dims);
                self.builder
                    .push_as(Op::Fused(Fused::BiasProduct { of }), &[x, weight, bias], product)
                    .unwrap()
            }
            6 if ty.dims.as_slice() == [b, s, m] => self.attention(choices, x),
            7 if self.precision == Precision::Mixed => {
                let to = choices.one_of(&[DType::F32, DType::BF16, DType::F16, DType::F64]);
                self.builder.push(Op::Cast { to }, &[x]).unwrap()
            }
            8 if ty.has(k) && !ty.has(kr) => self.builder.push(Op::Repeat { from: k, to: kr }, &[x]).unwrap(),
            8 if ty.dims.len() > 2 => {
                let over = choices.one_of(&ty.dims);
                let position = choices.below(self.builder.space().dims[over].valid as usize) as u64;
                self.builder.push(Op::Select { over, position }, &[x]).unwrap()
            }
            9 => self.norm_in_parts(choices, x),
            _ => self.builder.push(Op::Unary(choices.one_of(&Unary::ALL)), &[x]).unwrap(),
        }
    }

    /// A norm over one or two dimensions by the sum of squares, where one is left.
    fn norm_in_parts(&mut self, choices: &mut Choices, x: ValueId) -> ValueId {
        let ty = self.builder.ty(x).clone();
        let space = self.builder.space();
        let whole = |d: &DimId| space.dims[*d].valid == space.dims[*d].size;
        let mut over: Vec<DimId> = ty.dims.iter().copied().filter(whole).collect();
        over.truncate(ty.dims.len().saturating_sub(1).min(2));
        let Some(_) = over.first() else { return x };
        let wide = match ty.dtype {
            DType::F64 | DType::F32 => x,
            DType::BF16 | DType::F16 | DType::F8E4M3 | DType::I32 | DType::Bool => {
                self.builder.push(Op::Cast { to: DType::F32 }, &[x]).unwrap()
            }
        };
        let kept: Vec<DimId> = ty.dims.iter().copied().filter(|d| !over.contains(d)).collect();
        let squares = self.builder.einsum(wide, wide, &kept).unwrap();
        let weight = self.weight(choices, TensorType::new(ty.dtype, over.clone()));
        self.builder.push(Op::RmsScale { over, eps: 1e-6 }, &[x, squares, weight]).unwrap()
    }

    fn attention(&mut self, choices: &mut Choices, x: ValueId) -> ValueId {
        let Dims { b, s, m, h, k, d, .. } = self.dims;
        let dtype = self.builder.ty(x).dtype;
        let mut project = |heads: DimId| {
            let weight = self.weight(choices, TensorType::new(dtype, [heads, d, m]));
            self.builder.einsum(x, weight, &[b, s, heads, d]).unwrap()
        };
        let [mut q, mut key, value] = [project(h), project(k), project(k)];
        if choices.once_in(2) {
            let scaling = choices.one_of(&[
                Scaling::None,
                Scaling::Linear { factor: 2.0 },
                Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8.0 },
            ]);
            let rotary = Op::Rotary(Rotary {
                over: d,
                width: 2,
                theta: 100.0,
                scaling,
                pairs: Pairs::Halves,
                turn: Direction::Forward,
            });
            q = self.builder.push(rotary.clone(), &[q, self.positions]).unwrap();
            key = self.builder.push(rotary, &[key, self.positions]).unwrap();
        }
        let n = self.builder.space().dims[s].valid;
        let window = |left, right| Mask::Window { left, right };
        let mask = choices.one_of(&[
            Mask::Causal,
            Mask::Full,
            window(Some(2), Some(0)),
            window(None, Some(1)),
            Mask::CausalAtEnd { queries: n, keys: n },
            Mask::Any(vec![Mask::Causal, Mask::Prefix(2)]),
            Mask::Any(vec![window(Some(1), Some(0)), Mask::Sinks(1)]),
            Mask::All(vec![Mask::Documents(vec![0, 2, n]), Mask::Causal]),
            // The queries of the second block see nothing.
            Mask::All(vec![
                window(Some(3), Some(3)),
                Mask::Blocks { size: 1, rows: vec![vec![0, 2], vec![]] },
            ]),
            Mask::Any(vec![Mask::Global(1), Mask::Blocks { size: 2, rows: vec![vec![], vec![1]] }]),
        ]);
        let softcap = choices.one_of(&[None, Some(0.5)]);
        let mut roles =
            Attention::new(AttentionDims { heads: h, kv_heads: k, queries: s, keys: s, width: d }, mask, 0.7);
        roles.softcap = softcap;
        let o = self.builder.push(Op::Attention(roles), &[q, key, value]).unwrap();
        let weight = self.weight(choices, TensorType::new(dtype, [m, h, d]));
        self.builder.einsum(o, weight, &[b, s, m]).unwrap()
    }

    /// A weight that no other node reads, or a part of a larger stored one.
    fn weight(&mut self, choices: &mut Choices, ty: TensorType) -> ValueId {
        let function = self.builder.function();
        let name = format!("{}.{}w{}", function.name, self.prefix, function.values.len());
        let mut binding = Binding::named(name);
        let n: u64 =
            ty.dims.iter().map(|&d| ithaca_ir::ops::source::stored_size(self.builder.space(), d)).product();
        if choices.once_in(4) {
            binding.stored = vec![n + 3];
            binding.window.push(2..n + 2);
        } else if choices.once_in(4) {
            binding.stored = vec![3 * n];
            binding.view = vec![n, 3];
            binding.window = vec![0..n, 1..2];
        }
        self.builder.weight(binding, ty).unwrap()
    }
}

/// A mesh of at most 12 ranks.
pub(crate) fn mesh(choices: &mut Choices) -> Mesh {
    let axes: &[(&str, u64)] = choices.one_of(&[
        &[("u", 2)][..],
        &[],
        &[("u", 3)],
        &[("u", 4)],
        &[("r", 2), ("u", 2)],
        &[("r", 2), ("u", 3)],
        &[("dp", 2), ("r", 2), ("u", 2)],
    ]);
    Mesh::new(axes.iter().copied())
}
