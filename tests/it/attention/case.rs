//! One attention with everything that decides how it is computed and distributed, and the programs it becomes.

use ithaca_ir::module::Output;
use ithaca_ir::ops::{Attention, AttentionDims, Binding, Dropout, Random, RelativeBias, Returns};
use ithaca_ir::{
    Arena, DType, Diagnostics, Dim, FuncId, Function, FunctionBuilder, Level, Mask, Module, Op, Space,
    TensorType, ValueId,
};
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::pipeline;

/// An attention and a way to distribute it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// A strategy or a product of strategies, empty for the whole program.
    pub(crate) strategy: String,
    /// Mesh axes, major to minor.
    pub(crate) mesh: Vec<(&'static str, u64)>,
    /// More options of `shard`, each as `key=value`.
    pub(crate) options: Vec<&'static str>,
    /// Sequences of the batch.
    pub(crate) batch: u64,
    /// Queries; keys too in self-attention.
    pub(crate) queries: u64,
    /// Keys of cross-attention.
    pub(crate) keys: Option<u64>,
    /// Key/value heads.
    pub(crate) kv_heads: u64,
    /// Query heads of each.
    pub(crate) group: u64,
    /// Width of a head.
    pub(crate) width: u64,
    /// Width of a value where it is another dimension.
    pub(crate) value_width: Option<u64>,
    /// Which keys a query sees.
    pub(crate) mask: Mask,
    /// Factor of the scores.
    pub(crate) scale: f64,
    /// Bound of the scores.
    pub(crate) softcap: Option<f64>,
    /// Buckets of a relative bias; the dimension is filled in.
    pub(crate) bias: Option<Buckets>,
    /// Dropped weights.
    pub(crate) dropout: Option<Dropout>,
    /// The seed of the key that weights are dropped by; where there is none, by the seed of dropout alone.
    pub(crate) key: Option<u64>,
    /// Whether learned logits enter the denominators.
    pub(crate) sink: bool,
    /// Element type of q, k, v and the gradient of the output.
    pub(crate) dtype: DType,
    /// What is computed.
    pub(crate) extent: Extent,
}

/// How far a program goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// The output alone, as models have it.
    Output,
    /// The output and the logarithm of the sum of exponentials.
    Forward,
    /// These and the gradients of q, k and v.
    Backward,
}

/// A relative bias of so many buckets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buckets {
    pub(crate) n: u64,
    pub(crate) max_distance: u64,
    pub(crate) sides: ithaca_ir::ops::Sides,
}

impl Case {
    /// Causal self-attention of `kv_heads · group` heads over `tokens` tokens, forward and backward.
    pub(crate) fn new(strategy: &str, mesh: &[(&'static str, u64)], tokens: u64) -> Self {
        Self {
            strategy: strategy.to_owned(),
            mesh: mesh.to_vec(),
            options: Vec::new(),
            batch: 1,
            queries: tokens,
            keys: None,
            kv_heads: 2,
            group: 2,
            width: 4,
            value_width: None,
            mask: Mask::Causal,
            scale: 0.5,
            softcap: None,
            bias: None,
            dropout: None,
            key: None,
            sink: false,
            dtype: DType::F32,
            extent: Extent::Backward,
        }
    }

    /// Number of keys.
    pub(crate) fn n_keys(&self) -> u64 {
        self.keys.unwrap_or(self.queries)
    }

    /// The passes to a per-rank program, as a pipeline.
    pub(crate) fn pipeline(&self) -> String {
        let axes = self.mesh.iter().map(|(name, size)| format!(",{name}={size}"));
        let options = self.options.iter().map(|o| format!(",{o}"));
        let options: String = axes.chain(options).collect();
        format!("shard{{strategy={}{options}}},lower-movements,lower-reshards", self.strategy)
    }

    /// What one rank runs.
    ///
    /// # Errors
    /// The refusal, or what the verifier says of a pass's result.
    pub(crate) fn per_rank(&self, whole: &Module) -> Result<Module, Diagnostics> {
        let passes = pipeline::parse(&self.pipeline()).map_err(|d| vec![d])?;
        run_passes(whole.clone(), &passes, &mut Context::new(&Volume), &mut Unwatched)
    }

    /// The whole program.
    pub(crate) fn whole(&self) -> Module {
        let mut space = Space::default();
        let mut dim = |dim: Dim| space.dims.push(dim);
        let b = dim(Dim::new("b", self.batch));
        let t = dim(Dim::new("t", self.queries));
        let s = self.keys.map_or(t, |n| dim(Dim::new("s", n)));
        let k = dim(Dim::new("k", self.kv_heads));
        let h = dim(Dim { granule: self.group, ..Dim::new("h", self.kv_heads * self.group) });
        let d = dim(Dim::new("d", self.width));
        let e = self.value_width.map_or(d, |n| dim(Dim::new("e", n)));
        let n = self.bias.map(|bias| dim(Dim::new("n", bias.n)));
        let dims = AttentionDims { heads: h, kv_heads: k, queries: t, keys: s, width: d };
        let attention = Attention {
            softcap: self.softcap,
            bias: self.bias.zip(n).map(|(bias, buckets)| RelativeBias {
                buckets,
                max_distance: bias.max_distance,
                sides: bias.sides,
            }),
            dropout: self.dropout,
            returns: match self.extent {
                Extent::Output => Returns::Output,
                Extent::Forward | Extent::Backward => Returns::WithLse,
            },
            ..Attention::new(dims, self.mask.clone(), self.scale)
        };

        let functions: Arena<FuncId, Function> = Arena::new();
        let mut f = Builder { b: FunctionBuilder::new("main", &space, &functions), dtype: self.dtype };
        let [q, key, v] = [("q", [b, t, h, d]), ("k", [b, s, k, d]), ("v", [b, s, k, e])]
            .map(|(name, dims)| f.input(name, &dims));
        let mut operands = vec![q, key, v];
        let bias = n.map(|n| f.weight("bias", DType::F32, &[n, h]));
        operands.extend(bias);
        let drawn = self.key.map(|seed| f.node(Op::Random(Random::Key { seed }), &[])[0]);
        operands.extend(drawn);
        let forward = f.node(Op::Attention(attention.clone()), &operands);
        let mut outputs = vec![("o", forward[0])];
        if self.extent != Extent::Output {
            let (mut o, mut lse) = (forward[0], forward[1]);
            if self.sink {
                let logits = f.weight("logits", DType::F32, &[h]);
                let with = f.node(Op::Sink, &[o, lse, logits]);
                (o, lse) = (with[0], with[1]);
            }
            outputs = vec![("o", o), ("lse", lse)];
            if self.extent == Extent::Backward {
                let d_o = f.input("d_o", &[b, t, h, e]);
                let (wide_d_o, wide_o) = (f.widened(d_o), f.widened(o));
                let delta = f.b.einsum(wide_d_o, wide_o, &[b, t, h]).unwrap();
                let mut operands = vec![q, key, v, d_o, lse, delta];
                operands.extend(bias);
                operands.extend(drawn);
                let gradients = f.node(Op::AttentionBackward(attention), &operands);
                outputs.extend(["dq", "dk", "dv", "dbias"].into_iter().zip(gradients));
            }
        }
        for &(name, value) in &outputs {
            f.b.name(value, Some(name));
        }
        let outputs = outputs.into_iter().map(|(name, value)| Output { name: Some(name.to_owned()), value });
        let main = f.b.finish(outputs);
        let mut module = Module {
            level: Level::Program,
            name: "attention".to_owned(),
            pipeline: Vec::new(),
            space,
            functions,
        };
        module.functions.push(main);
        module
    }
}

struct Builder<'a> {
    b: FunctionBuilder<'a>,
    dtype: DType,
}

impl Builder<'_> {
    fn input(&mut self, name: &str, dims: &[ithaca_ir::DimId]) -> ValueId {
        let ty = TensorType::new(self.dtype, dims.iter().copied());
        let value = self.b.push_as(Op::Input(Binding::named(name)), &[], ty).unwrap();
        self.b.name(value, Some(name));
        value
    }

    fn weight(&mut self, name: &str, dtype: DType, dims: &[ithaca_ir::DimId]) -> ValueId {
        let value =
            self.b.weight(Binding::named(name), TensorType::new(dtype, dims.iter().copied())).unwrap();
        self.b.name(value, Some(name));
        value
    }

    fn node(&mut self, op: Op, operands: &[ValueId]) -> Vec<ValueId> {
        let name = op.name();
        let results = self.b.node(op, operands, &[]);
        results.unwrap_or_else(|e| panic!("`{name}` of the drawn program: {e:?}")).to_vec()
    }

    /// In `f32` where the type is narrower.
    fn widened(&mut self, value: ValueId) -> ValueId {
        match self.b.ty(value).dtype {
            DType::F64 | DType::F32 => value,
            DType::BF16 | DType::F16 | DType::F8E4M3 | DType::I32 | DType::Bool => {
                self.b.push(Op::Cast { to: DType::F32 }, &[value]).unwrap()
            }
        }
    }
}
