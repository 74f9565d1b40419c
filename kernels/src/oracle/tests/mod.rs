//! Every operation against values taken by hand or computed in another way.

pub(crate) mod adjoints;
pub(crate) mod distributed;
mod experts;
mod gradients;
pub(crate) mod movements;
mod sharded;
mod steps;

use ithaca_ir::module::Output;
use ithaca_ir::ops::{Attention, AttentionDims, Binary, Binding, Direction, Pairs, Rotary, Scaling, Unary};
use ithaca_ir::{
    Arena, DType, Dim, DimId, FunctionBuilder, Level, Mask, Mesh, Module, Op, Space, TensorType, ValueId,
};

use super::{run, run_ranks};
use crate::error::RunError;
use crate::store::Tensors;
use crate::tensor::Tensor;

const F: DType = DType::F64;

pub(crate) fn module(
    level: Level,
    space: Space,
    build: impl FnOnce(&mut FunctionBuilder<'_>) -> ValueId,
) -> Module {
    let functions = Arena::new();
    let mut builder = FunctionBuilder::new("main", &space, &functions);
    let value = build(&mut builder);
    let main = builder.finish([Output { name: Some("out".into()), value }]);
    Module { level, name: "test".into(), pipeline: vec![], space, functions: [main].into_iter().collect() }
}

pub(crate) fn space(dims: &[(&str, u64)]) -> Space {
    Space { dims: dims.iter().map(|&(n, s)| Dim::new(n, s)).collect(), mesh: Mesh::single() }
}

pub(crate) fn source(b: &mut FunctionBuilder<'_>, name: &str, dtype: DType, dims: &[DimId]) -> ValueId {
    b.weight(Binding::named(name), TensorType::new(dtype, dims.iter().copied())).unwrap()
}

/// Runs `op` on tensors over the named dimensions and returns the elements of the result.
fn apply(
    space: &Space,
    op: Op,
    operands: &[(&str, DType, &[f64])],
    result: Option<&str>,
) -> Result<Vec<f64>, RunError> {
    let dims_of =
        |names: &str| -> Vec<DimId> { names.split_whitespace().map(|n| space.dim(n).unwrap()).collect() };
    let mut tensors = Tensors::new();
    for (i, (dims, _, data)) in operands.iter().enumerate() {
        let shape = dims_of(dims).iter().map(|&d| space.size(d) as usize).collect();
        tensors.insert(i.to_string(), Tensor::new(shape, data.to_vec()));
    }
    let module = module(Level::Program, space.clone(), |b| {
        let values: Vec<ValueId> = operands
            .iter()
            .enumerate()
            .map(|(i, (dims, dtype, _))| source(b, &i.to_string(), *dtype, &dims_of(dims)))
            .collect();
        let declared: Vec<TensorType> =
            result.iter().map(|dims| TensorType::new(operands[0].1, dims_of(dims))).collect();
        b.node(op, &values, &declared).unwrap()[0]
    });
    run::<f64>(&module, &tensors, &Tensors::new()).map(|outputs| outputs["out"].data.clone())
}

pub(crate) fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (x, y) in found.iter().zip(expected) {
        assert!((x - y).abs() <= 1e-12 * y.abs().max(1.0), "{found:?} is not {expected:?}");
    }
}

/// Numbers without a pattern, between -1 and 1.
pub(crate) fn noise(n: usize, seed: u64) -> Vec<f64> {
    (0..n as u64).map(|i| ((i * 37 + seed * 101 + 13) as f64 * 0.717).sin()).collect()
}

#[test]
fn einsum_multiplies_matrices_and_sums_what_is_left_out() {
    let space = space(&[("i", 2), ("j", 2), ("k", 3)]);
    let (x, y) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 2.0, 0.0, 1.0, 1.0]);
    let product = apply(&space, Op::Einsum, &[("i k", F, &x), ("j k", F, &y)], Some("i j")).unwrap();
    close(&product, &[7.0, 5.0, 16.0, 11.0]);
    let transposed = apply(&space, Op::Einsum, &[("i k", F, &x), ("j k", F, &y)], Some("j i")).unwrap();
    close(&transposed, &[7.0, 16.0, 5.0, 11.0]);
    let sum = apply(&space, Op::Einsum, &[("i k", F, &x), ("j k", F, &y)], Some("i")).unwrap();
    close(&sum, &[12.0, 27.0]);
}

#[test]
fn embed_looks_up_rows_and_refuses_others() {
    let space = space(&[("v", 3), ("m", 2), ("s", 2)]);
    let v = space.dim("v").unwrap();
    let table = [0.0, 1.0, 10.0, 11.0, 20.0, 21.0];
    let op = Op::Embed { over: v, padding: None };
    let look = |ids: &[f64]| apply(&space, op.clone(), &[("v m", F, &table), ("s", DType::I32, ids)], None);
    close(&look(&[2.0, 0.0]).unwrap(), &[20.0, 21.0, 0.0, 1.0]);
    assert!(matches!(look(&[3.0, 0.0]), Err(RunError::TokenOutOfRange { value: 3, rows: 3, .. })));
    assert!(matches!(look(&[0.0, -1.0]), Err(RunError::TokenOutOfRange { value: -1, .. })));
}

#[test]
fn functions_of_one_element() {
    let space = space(&[("i", 2)]);
    let at = |f: Unary| apply(&space, Op::Unary(f), &[("i", F, &[1.0, -2.0])], None).unwrap();
    // Reference values from tables of the normal and the logistic distribution.
    close(&at(Unary::Silu), &[0.731_058_578_630_004_9, -0.238_405_844_044_235_16]);
    close(&at(Unary::Gelu), &[0.841_344_746_068_542_9, -0.045_500_263_896_358_42]);
    close(&at(Unary::QuickGelu), &[1.0 / (1.0 + (-1.702f64).exp()), -2.0 / (1.0 + 3.404f64.exp())]);
    close(&at(Unary::Relu), &[1.0, 0.0]);
    close(&at(Unary::Tanh), &[1f64.tanh(), -(2f64.tanh())]);
    let approximate = at(Unary::GeluTanh);
    assert!((approximate[0] - 0.841_191_990_608_306_2).abs() < 1e-12, "{approximate:?}");
}

#[test]
fn functions_of_two_elements_broadcast_by_name() {
    let space = space(&[("i", 2), ("j", 2)]);
    let both = |f| {
        let x = ("i j", F, &[1.0, 2.0, 3.0, 4.0][..]);
        apply(&space, Op::Binary(f), &[x, ("i", F, &[10.0, 20.0])], None).unwrap()
    };
    close(&both(Binary::Add), &[11.0, 12.0, 23.0, 24.0]);
    close(&both(Binary::Sub), &[-9.0, -8.0, -17.0, -16.0]);
    close(&both(Binary::Mul), &[10.0, 20.0, 60.0, 80.0]);
    let scaled = apply(&space, Op::Scale { factor: 0.5 }, &[("j", F, &[1.0, 3.0])], None).unwrap();
    close(&scaled, &[0.5, 1.5]);
    let cast = apply(&space, Op::Cast { to: F }, &[("j", DType::I32, &[7.0, -3.0])], None).unwrap();
    close(&cast, &[7.0, -3.0]);
}

#[test]
fn norms() {
    let space = space(&[("s", 1), ("m", 2)]);
    let over = space.dim("m").unwrap();
    let x = ("s m", F, &[3.0, 1.0][..]);
    let rms = apply(&space, Op::RmsNorm { over, eps: 4.0, offset: 0.0 }, &[x, ("m", F, &[1.0, 2.0])], None)
        .unwrap();
    close(&rms, &[1.0, 2.0 / 3.0]);
    let raised = Op::RmsNorm { over, eps: 4.0, offset: 1.0 };
    close(&apply(&space, raised, &[x, ("m", F, &[1.0, 2.0])], None).unwrap(), &[2.0, 1.0]);
    let layer = Op::LayerNorm { over, eps: 3.0 };
    let normed = apply(&space, layer, &[x, ("m", F, &[2.0, 2.0]), ("m", F, &[0.0, 5.0])], None).unwrap();
    close(&normed, &[1.0, 4.0]);
}

#[test]
fn a_norm_over_two_dimensions_in_parts() {
    let space = space(&[("s", 2), ("h", 2), ("d", 2)]);
    let over = ["h", "d"].map(|n| space.dim(n).unwrap()).to_vec();
    let x = [1.0, 3.0, 5.0, 1.0, 0.0, 2.0, 0.0, 0.0];
    let operand = ("s h d", F, &x[..]);
    let squares = apply(&space, Op::Einsum, &[operand, operand], Some("s")).unwrap();
    close(&squares, &[36.0, 4.0]);
    let weight = [1.0, 2.0, 3.0, 4.0];
    let op = Op::RmsScale { over, eps: 0.0 };
    let scaled = apply(&space, op, &[operand, ("s", F, &squares), ("h d", F, &weight)], None).unwrap();
    close(&scaled, &[1.0 / 3.0, 2.0, 5.0, 4.0 / 3.0, 0.0, 4.0, 0.0, 0.0]);
}

#[test]
fn scores_are_capped_before_the_softmax() {
    let space = space(&[("s", 2), ("h", 1), ("d", 1), ("k", 1)]);
    let Op::Attention(attention) = attention_op(&space, "h", "s", Mask::Full) else { unreachable!() };
    let op = Op::Attention(Attention { softcap: Some(2.0), ..attention });
    let (q, k, v) = ([3.0, -1.0], [1.0, -2.0], [1.0, 5.0]);
    let found = apply(&space, op, &[("s h d", F, &q), ("s h d", F, &k), ("s h d", F, &v)], None).unwrap();
    let expected = q.map(|q| {
        let weight = k.map(|k: f64| (2.0 * (0.7 * q * k / 2.0).tanh()).exp());
        (weight[0] * v[0] + weight[1] * v[1]) / (weight[0] + weight[1])
    });
    close(&found, &expected);
}

#[test]
fn a_norm_over_padding_is_refused() {
    let mut space = space(&[("s", 1)]);
    let over = space.dims.push(Dim { valid: 1, ..Dim::new("m", 2) });
    let module = module(Level::Program, space, |b| {
        let x = source(b, "x", F, &[over]);
        let w = source(b, "x", F, &[over]);
        b.push(Op::RmsNorm { over, eps: 0.0, offset: 0.0 }, &[x, w]).unwrap()
    });
    let weights: Tensors = [("x", Tensor::new(vec![1], vec![1.0]))].into_iter().collect();
    assert!(matches!(run::<f64>(&module, &weights, &weights), Err(RunError::Unsupported(_))));
}

#[test]
fn rotary_is_a_complex_product_under_each_scaling() {
    let space = space(&[("s", 3), ("h", 2), ("d", 10)]);
    let x = noise(60, 1);
    let positions = [0.0, 5.0, 70.0];
    let yarn = Scaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original: 16.0,
        attention: 1.25,
        truncate: true,
    };
    let llama = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
    for scaling in [Scaling::None, Scaling::Linear { factor: 2.0 }, llama, yarn] {
        let turn = Direction::Forward;
        let rotary = Rotary {
            over: space.dim("d").unwrap(),
            width: 8,
            theta: 100.0,
            scaling,
            turn,
            pairs: Pairs::default(),
        };
        let op = Op::Rotary(rotary.clone());
        let found = apply(&space, op, &[("s h d", F, &x), ("s", DType::I32, &positions)], None).unwrap();
        for (row, (x, y)) in x.chunks(10).zip(found.chunks(10)).enumerate() {
            let position = positions[row / 2];
            for (i, f) in rotary.frequencies().iter().enumerate() {
                // As the polar form: the pair keeps its length up to the amplitude and turns by the angle.
                let (length, angle) = (x[i].hypot(x[i + 4]), x[i + 4].atan2(x[i]) + position * f);
                let length = length * rotary.amplitude();
                close(&[y[i], y[i + 4]], &[length * angle.cos(), length * angle.sin()]);
            }
            close(&y[8..], &x[8..]);
        }
    }
}

pub(crate) fn attention_op(space: &Space, kv: &str, keys: &str, mask: Mask) -> Op {
    let dim = |name: &str| space.dim(name).unwrap();
    let dims = AttentionDims {
        heads: dim("h"),
        kv_heads: dim(kv),
        queries: dim("s"),
        keys: dim(keys),
        width: dim("d"),
    };
    Op::Attention(Attention::new(dims, mask, 0.7))
}

/// Attention by the whole matrix of scores, masked ones being minus infinity.
fn dense(
    mask: &Mask,
    (b, s, t, h, g, d): (usize, usize, usize, usize, usize, usize),
    qkv: [&[f64]; 3],
) -> Vec<f64> {
    let [q, k, v] = qkv;
    let mut out = Vec::new();
    for (bi, qi, hi) in (0..b * s * h).map(|i| (i / (s * h), i / h % s, i % h)) {
        let gi = hi * g / h;
        let weight = |ki: usize| {
            if mask.allows(qi as u64, ki as u64) {
                let at = |c| q[((bi * s + qi) * h + hi) * d + c] * k[((bi * t + ki) * g + gi) * d + c];
                (0.7 * (0..d).map(at).sum::<f64>()).exp()
            } else {
                0.0
            }
        };
        let total: f64 = (0..t).map(weight).sum();
        for c in 0..d {
            let sum: f64 = (0..t).map(|ki| weight(ki) * v[((bi * t + ki) * g + gi) * d + c]).sum();
            out.push(if total == 0.0 { 0.0 } else { sum / total });
        }
    }
    out
}

#[test]
fn attention_is_the_dense_softmax() {
    let (b, s, t, h, g, d) = (2, 5, 7, 4, 2, 3);
    let mut space = space(&[("b", 2), ("s", 5), ("t", 7), ("g", 2), ("d", 3)]);
    space.dims.push(Dim { granule: 2, ..Dim::new("h", 4) });
    let (q, k, v) = (noise(b * s * h * d, 1), noise(b * t * g * d, 2), noise(b * t * g * d, 3));
    let window = |left, right| Mask::Window { left, right };
    for mask in [
        Mask::Full,
        window(None, Some(0)),
        Mask::CausalAtEnd { queries: 5, keys: 7 },
        window(Some(2), Some(0)),
        window(Some(0), None),
        window(None, Some(2)),
        Mask::Any(vec![window(Some(1), Some(0)), Mask::Sinks(2), Mask::Prefix(1)]),
        // The third and fourth query see nothing.
        Mask::All(vec![Mask::Blocks { size: 2, rows: vec![vec![0, 2], vec![], vec![1, 3]] }, Mask::Full]),
    ] {
        let op = attention_op(&space, "g", "t", mask.clone());
        let operands = [("b s h d", F, &q[..]), ("b t g d", F, &k), ("b t g d", F, &v)];
        let found = apply(&space, op, &operands, None).unwrap();
        close(&found, &dense(&mask, (b, s, t, h, g, d), [&q, &k, &v]));
    }
}

#[test]
fn padded_keys_are_not_seen() {
    let mut space = space(&[("s", 2), ("h", 1), ("d", 1)]);
    space.dims.push(Dim { valid: 2, ..Dim::new("t", 3) });
    let dims: Vec<DimId> = ["t", "h", "d"].map(|n| space.dim(n).unwrap()).to_vec();
    let op = attention_op(&space, "h", "t", Mask::Full);
    let q = [space.dim("s").unwrap(), dims[1], dims[2]];
    let module = module(Level::Program, space, |b| {
        let q = source(b, "q", F, &q);
        let k = source(b, "k", F, &dims);
        let v = source(b, "v", F, &dims);
        b.push(op, &[q, k, v]).unwrap()
    });
    let tensor = |data: [f64; 2]| Tensor::new(vec![2, 1, 1], data.to_vec());
    let weights: Tensors = [("q", tensor([0.0, 0.0])), ("k", tensor([1.0, 2.0])), ("v", tensor([4.0, 6.0]))]
        .into_iter()
        .collect();
    close(&run::<f64>(&module, &weights, &weights).unwrap()["out"].data, &[5.0, 5.0]);
}

#[test]
fn repeat_copies_each_element_in_a_row() {
    let mut space = space(&[("g", 2), ("d", 2)]);
    let from = space.dim("g").unwrap();
    let to = space.dims.push(Dim { copies: Some(from), ..Dim::new("r", 4) });
    let found = apply(&space, Op::Repeat { from, to }, &[("g d", F, &[1.0, 2.0, 3.0, 4.0])], None).unwrap();
    close(&found, &[1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]);
}

#[test]
fn a_call_runs_its_layers_in_order() {
    let space = space(&[("i", 1)]);
    let i = space.dim("i").unwrap();
    let mut functions = Arena::new();
    let mut b = FunctionBuilder::new("block", &space, &functions);
    let x = b.param(TensorType::new(F, [i]), None);
    let w = source(&mut b, "w.{layer}", F, &[i]);
    let doubled = b.push(Op::Scale { factor: 2.0 }, &[x]).unwrap();
    let sum = b.add(doubled, w).unwrap();
    let block = b.finish([Output { name: None, value: sum }]);
    let block = functions.push(block);
    let mut b = FunctionBuilder::new("main", &space, &functions);
    let x = source(&mut b, "x", F, &[i]);
    let y = b.call(block, 1..4, &[x]).unwrap()[0];
    let main = b.finish([Output { name: Some("out".into()), value: y }]);
    functions.push(main);
    let module = Module { level: Level::Program, name: "t".into(), pipeline: vec![], space, functions };
    let one = |x: f64| Tensor::new(vec![1], vec![x]);
    let weights: Tensors =
        [("x", one(1.0)), ("w.1", one(10.0)), ("w.2", one(20.0)), ("w.3", one(30.0))].into_iter().collect();
    // ((1·2 + 10)·2 + 20)·2 + 30
    close(&run::<f64>(&module, &weights, &weights).unwrap()["out"].data, &[118.0]);
}

/// Sequence of 5 on 2 ranks and 3 key/value groups on 2 ranks: every extent uneven.
pub(crate) fn ulysses(level: Level) -> Module {
    let ranks = level != Level::Program;
    let mut space = space(&[("b", 1), ("m", 6), ("d", 2)]);
    let s = space.dims.push(Dim { uneven: true, valid: 4, ..Dim::new("s", 5) });
    let h = space.dims.push(Dim { uneven: true, granule: 2, ..Dim::new("h", 6) });
    let g = space.dims.push(Dim { uneven: true, ..Dim::new("g", 3) });
    if ranks {
        space.mesh = Mesh::new([("u", 2)]);
    }
    let [b, m, d] = ["b", "m", "d"].map(|n| space.dim(n).unwrap());
    let u = space.mesh.axis("u");
    let op = attention_op(&space, "g", "s", Mask::Causal);
    module(level, space, |f| {
        let mut ty = TensorType::new(F, [b, s, m]);
        if let Some(u) = u {
            ty = ty.split(s, [u]);
        }
        let x = f.weight(Binding::named("x"), ty).unwrap();
        let project = |f: &mut FunctionBuilder<'_>, name: &str, heads: DimId| {
            let w = source(f, name, F, &[heads, d, m]);
            let y = f.einsum(x, w, &[b, s, heads, d]).unwrap();
            match u {
                Some(axis) => f.push(Op::all_to_all(axis, heads, s), &[y]).unwrap(),
                None => y,
            }
        };
        let (q, k, v) = (project(f, "q", h), project(f, "k", g), project(f, "v", g));
        let o = f.push(op, &[q, k, v]).unwrap();
        let w = match u {
            Some(u) => f.weight(Binding::named("o"), TensorType::new(F, [h, d, m]).split(h, [u])).unwrap(),
            None => source(f, "o", F, &[h, d, m]),
        };
        let y = f.einsum(o, w, &[b, s, m]).unwrap();
        let Some(axis) = u else { return y };
        let y = f.push(Op::ReduceScatter { axis: axis.into(), dim: s }, &[y]).unwrap();
        let whole = TensorType::new(F, [b, s, m]);
        match level {
            Level::Sharded => f.push_as(Op::Reshard, &[y], whole).unwrap(),
            Level::Program | Level::PerRank => {
                f.push(Op::AllGather { axis: axis.into(), dim: s }, &[y]).unwrap()
            }
        }
    })
}

/// Weights of [`ulysses`].
pub(crate) fn ulysses_weights() -> Tensors {
    let sizes = [
        ("x", vec![1, 4, 6]),
        ("q", vec![6, 2, 6]),
        ("k", vec![3, 2, 6]),
        ("v", vec![3, 2, 6]),
        ("o", vec![6, 2, 6]),
    ];
    sizes
        .into_iter()
        .enumerate()
        .map(|(i, (name, shape))| (name, Tensor::new(shape.clone(), noise(shape.iter().product(), i as u64))))
        .collect()
}

#[test]
fn ranks_with_uneven_parts_give_the_whole() {
    let weights = ulysses_weights();
    let whole = run::<f64>(&ulysses(Level::Program), &weights, &weights).unwrap();
    assert_eq!(whole["out"].shape, [1, 4, 6]);
    for level in [Level::PerRank, Level::Sharded] {
        let ranks = run_ranks::<f64>(&ulysses(level), &weights, &weights).unwrap();
        close(&ranks["out"].data, &whole["out"].data);
    }
    assert!(matches!(run::<f64>(&ulysses(Level::PerRank), &weights, &weights), Err(RunError::Level { .. })));
}

#[test]
fn sums_slices_and_permutes_over_ranks() {
    let mut space = space(&[("i", 4), ("k", 3)]);
    space.dims.push(Dim { uneven: true, ..Dim::new("j", 3) });
    space.mesh = Mesh::new([("a", 2), ("t", 2)]);
    let [i, j, k] = ["i", "j", "k"].map(|n| space.dim(n).unwrap());
    let (a, t) = (space.mesh.axis("a").unwrap(), space.mesh.axis("t").unwrap());
    let module = module(Level::PerRank, space, |b| {
        let x = b.weight(Binding::named("x"), TensorType::new(F, [i, j]).split(j, [t])).unwrap();
        let w = b.weight(Binding::named("w"), TensorType::new(F, [j, k]).split(j, [t])).unwrap();
        let y = b.einsum(x, w, &[i, k]).unwrap();
        let y = b.push(Op::AllReduce { axis: t.into() }, &[y]).unwrap();
        let y = b.push(Op::Slice { axis: a, dim: i }, &[y]).unwrap();
        let y = b.push(Op::Slice { axis: t, dim: i }, &[y]).unwrap();
        let turned = TensorType::new(F, [i, k]).split(i, [t, a]);
        b.push_as(Op::Permute, &[y], turned).unwrap()
    });
    let (x, w) = (noise(12, 1), noise(9, 2));
    let weights: Tensors =
        [("x", Tensor::new(vec![4, 3], x.clone())), ("w", Tensor::new(vec![3, 3], w.clone()))]
            .into_iter()
            .collect();
    let expected: Vec<f64> =
        (0..12).map(|n| (0..3).map(|j| x[n / 3 * 3 + j] * w[j * 3 + n % 3]).sum()).collect();
    close(&run_ranks::<f64>(&module, &weights, &weights).unwrap()["out"].data, &expected);
}
