//! Attention in tiles against plain loops in double precision, in every storage, and against itself on more threads.

use half::bf16;
use ithaca_ir::ops::{Attention, AttentionDims, Dropout, Keyed, RelativeBias, Returns, Sides};
use ithaca_ir::order::Order;
use ithaca_ir::{DType, Dim, Mask, Op, Space, TensorType};

use super::{Threads, noise, space};
use crate::cpu::attention::{Incoming, Problem, backward, forward};
use crate::cpu::gemm::Element;
use crate::oracle::attention::{Bias, Extent};
use crate::oracle::eval::eval;
use crate::oracle::{Elements, Operand, ResultSpec, Value};
use crate::tensor::whole;

/// Sequences, queries, keys, heads, key/value heads, width of keys and of values; whole tiles and blocks and parts of them.
const SIZES: [(&str, u64); 8] =
    [("b", 2), ("s", 112), ("t", 272), ("h", 4), ("g", 2), ("d", 12), ("e", 20), ("r", 8)];

/// Numbers that `bf16` has exactly, so that all storages hold the same.
fn numbers(n: u64, seed: u64) -> Vec<f32> {
    noise(n as usize, seed).into_iter().map(|x| bf16::from_f64(2.0 * x).to_f32()).collect()
}

/// Results of both passes: o and lse, dq, dk, dv and the gradient of the bias.
type Results = Vec<Vec<f64>>;

struct Case {
    space: Space,
    attention: Attention,
    tys: Vec<TensorType>,
    data: Vec<Vec<f32>>,
    d_o: Vec<f32>,
}

impl Case {
    fn new(mask: Mask, change: impl Fn(&Space, &mut Attention), order: impl Fn(&mut Dim)) -> Self {
        let mut space = space(&SIZES);
        for name in ["s", "t"] {
            let dim = space.dim(name).unwrap();
            order(&mut space.dims[dim]);
        }
        let dim = |name: &str| space.dim(name).unwrap();
        let [heads, kv_heads, queries, keys, width] = ["h", "g", "s", "t", "d"].map(dim);
        let dims = AttentionDims { heads, kv_heads, queries, keys, width };
        let mut attention = Attention { returns: Returns::WithLse, ..Attention::new(dims, mask, 0.3) };
        change(&space, &mut attention);
        let ty = |dims: &str| TensorType::new(DType::F32, dims.split(' ').map(dim).collect::<Vec<_>>());
        let mut tys = vec![ty("b s h d"), ty("b t g d"), ty("b t g e")];
        if attention.bias.is_some() {
            tys.push(ty("r h"));
        }
        let length = |ty: &TensorType| space.shape(ty).iter().product::<u64>();
        let data = tys.iter().zip(1..).map(|(ty, seed)| numbers(length(ty), seed)).collect();
        let d_o = numbers(length(&ty("b s h e")), 9);
        Self { attention, tys, data, d_o, space }
    }

    fn ty(&self, dims: &str) -> TensorType {
        let dims = dims.split(' ').map(|name| self.space.dim(name).unwrap());
        TensorType::new(DType::F32, dims.collect::<Vec<_>>())
    }

    /// By plain loops.
    fn oracle(&self) -> Results {
        let wide = |data: &[f32]| data.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let data: Vec<Vec<f64>> = self.data.iter().map(|x| wide(x)).collect();
        let run = |op: Op, operands: &[(&TensorType, &[f64])], results: &[&TensorType]| -> Results {
            let operands: Vec<Operand<'_, f64>> = operands
                .iter()
                .map(|(ty, data)| Operand {
                    ty,
                    region: whole(&self.space.shape(ty)),
                    elements: Elements::Real(data),
                })
                .collect();
            let wanted: Vec<ResultSpec<'_>> =
                results.iter().map(|ty| ResultSpec { ty, region: whole(&self.space.shape(ty)) }).collect();
            let values = eval(&self.space, &op, &operands, &wanted).unwrap();
            values
                .into_iter()
                .map(|value| match value {
                    Value::Real(t) => t.data,
                    Value::Int(_) => panic!("attention gives real numbers"),
                })
                .collect()
        };
        let (rows, outputs) = (self.ty("b s h"), self.ty("b s h e"));
        let mut operands: Vec<(&TensorType, &[f64])> =
            self.tys.iter().zip(&data).map(|(ty, data)| (ty, data.as_slice())).collect();
        let mut found = run(Op::Attention(self.attention.clone()), &operands, &[&outputs, &rows]);
        let d_o = wide(&self.d_o);
        let delta: Vec<f64> = d_o
            .chunks(20)
            .zip(found[0].chunks(20))
            .map(|(d, o)| d.iter().zip(o).map(|(d, o)| d * o).sum())
            .collect();
        let lse = found[1].clone();
        operands.splice(3..3, [(&outputs, d_o.as_slice()), (&rows, &lse), (&rows, &delta)]);
        let results: Vec<&TensorType> = self.tys.iter().collect();
        found.extend(run(Op::AttentionBackward(self.attention.clone()), &operands, &results));
        found
    }

    /// In tiles.
    fn tiled<E: Element>(&self, stored: impl Fn(&[f32]) -> Vec<E>, threads: Threads) -> Results {
        let [q, k, v] = [0, 1, 2].map(|i| stored(&self.data[i]));
        let regions: Vec<_> = self.tys.iter().map(|ty| whole(&self.space.shape(ty))).collect();
        let held = |i: usize| (&self.tys[i], &regions[i]);
        let x = Extent::new(&self.space, &self.attention, held(0), held(1), held(2)).unwrap();
        let operand = self.attention.bias.map(|_| Operand {
            ty: &self.tys[3],
            region: regions[3].clone(),
            elements: Elements::Real(self.data[3].as_slice()),
        });
        let bias = Bias::new(&self.space, &self.attention, &x, operand.as_ref()).unwrap();
        let problem = Problem { attention: &self.attention, x: &x, q: &q, k: &k, v: &v, bias };
        let rows = forward(&problem, threads);
        let d_o = stored(&self.d_o);
        let delta: Vec<f32> = self
            .d_o
            .chunks(20)
            .zip(rows.o.chunks(20))
            .map(|(d, o)| d.iter().zip(o).map(|(d, o)| d * o).sum())
            .collect();
        let gradients = backward(&problem, Incoming { d_o: &d_o, lse: &rows.lse, delta: &delta }, threads);
        [rows.o, rows.lse, gradients.dq, gradients.dk, gradients.dv]
            .into_iter()
            .chain(gradients.d_bias)
            .map(|data| data.into_iter().map(f64::from).collect())
            .collect()
    }
}

fn cases() -> Vec<(&'static str, Case)> {
    let window = |left, right| Mask::Window { left, right };
    let nothing = |_: &Space, _: &mut Attention| {};
    let as_it_is = |_: &mut Dim| {};
    let zigzag = |dim: &mut Dim| dim.order = Order::Zigzag { parts: 2 };
    let striped = |dim: &mut Dim| dim.order = Order::Striped { parts: 4, block: 1 };
    let dropout = Dropout { rate: 0.25, seed: 3, keyed: Keyed::Position };
    let biased = |sides: Sides| {
        move |space: &Space, attention: &mut Attention| {
            let buckets = space.dim("r").unwrap();
            attention.bias = Some(RelativeBias { buckets, max_distance: 50, sides });
        }
    };
    let all = |space: &Space, attention: &mut Attention| {
        biased(Sides::Both)(space, attention);
        attention.softcap = Some(1.5);
        attention.dropout = Some(dropout);
    };
    let sinks = || Mask::Any(vec![window(Some(40), Some(0)), Mask::Sinks(3)]);
    let documents = || Mask::Documents(vec![0, 1, 100, 101, 272]);
    let causal = || window(None, Some(0));
    vec![
        ("full", Case::new(Mask::Full, nothing, as_it_is)),
        ("causal", Case::new(causal(), nothing, as_it_is)),
        ("causal, zigzag", Case::new(causal(), nothing, zigzag)),
        ("causal, striped", Case::new(causal(), nothing, striped)),
        ("nothing for some", Case::new(Mask::CausalAtEnd { queries: 350, keys: 300 }, nothing, as_it_is)),
        ("window and sinks", Case::new(sinks(), nothing, as_it_is)),
        ("documents, zigzag", Case::new(documents(), nothing, zigzag)),
        ("bias", Case::new(causal(), biased(Sides::Before), as_it_is)),
        ("bias, striped", Case::new(Mask::Full, biased(Sides::Both), striped)),
        ("softcap", Case::new(causal(), |_, a| a.softcap = Some(0.8), as_it_is)),
        ("dropout", Case::new(causal(), move |_, a| a.dropout = Some(dropout), zigzag)),
        ("all", Case::new(sinks(), all, zigzag)),
    ]
}

#[test]
fn tiles_agree_with_plain_loops_in_every_storage() {
    // A sum of n products is known to n halves of an ulp of the sum of their sizes; longest are those of the bias, over
    // all pairs, of queries and keys else. Sizes are near one.
    let unit = f64::from(f32::EPSILON) / 2.0;
    let bound = |name: &str| unit * if name.contains("bias") || name == "all" { 4096.0 } else { 512.0 };
    for (name, case) in cases() {
        let expected = case.oracle();
        let narrow = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect();
        let (single, brain) = (case.tiled(<[f32]>::to_vec, Threads::ONE), case.tiled(narrow, Threads::ONE));
        assert_eq!(single, brain, "{name}: storages hold the same numbers");
        for (i, (found, expected)) in single.iter().zip(&expected).enumerate() {
            assert_eq!(found.len(), expected.len(), "{name}");
            let greatest = expected.iter().filter(|x| x.is_finite()).fold(1.0, |m: f64, x| m.max(x.abs()));
            for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
                let near = found == expected || (found - expected).abs() <= bound(name) * greatest;
                assert!(near, "{name}, result {i}, element {at}: {found} for {expected}");
            }
        }
    }
}

#[test]
fn threads_change_nothing() {
    for (name, case) in cases() {
        let one = case.tiled(<[f32]>::to_vec, Threads::ONE);
        assert_eq!(one, case.tiled(<[f32]>::to_vec, Threads::new(2)), "{name}");
        assert_eq!(one, case.tiled(<[f32]>::to_vec, Threads::new(5)), "{name}");
    }
}

#[test]
fn rows_seen_together_are_those_seen_one_by_one() {
    for (name, case) in cases() {
        let regions: Vec<_> = case.tys.iter().map(|ty| whole(&case.space.shape(ty))).collect();
        let held = |i: usize| (&case.tys[i], &regions[i]);
        let x = Extent::new(&case.space, &case.attention, held(0), held(1), held(2)).unwrap();
        for queries in [0..x.queries, 17..101] {
            let together = x.seen_by_each(&case.attention.mask, queries.clone());
            let one_by_one: Vec<_> = queries.map(|query| x.seen(&case.attention.mask, query)).collect();
            assert_eq!(together, one_by_one, "{name}");
        }
    }
}
