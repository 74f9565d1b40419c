//! BERT: norms behind what they norm, biases everywhere, every token sees every other.
//!
//! ```text
//! x = layer_norm(x + dense · attention(q, k, v))          of x
//! x = layer_norm(x + output · activation(intermediate · x))
//! ```
//!
//! Dimensions beside those of all models: `p` positions, `y` types of token, `n` the width behind the head's own product,
//! as wide as `m`.

use ithaca_ir::entity::Arena;
use ithaca_ir::module::Output;
use ithaca_ir::ops::{Attention, AttentionDims, Binary, Binding, OpError, Unary, Window};
use ithaca_ir::{
    DType, Dim, DimId, FuncId, Function, FunctionBuilder, Level, Mask, Module, Op, Space, TensorType, ValueId,
};

use super::drops::{Drops, Place};
use super::tensors::Built;
use super::tensors::Tensors;
use crate::spec::{Bert, BertHead};
use crate::workload::Workload;

#[derive(Clone, Copy)]
struct Dims {
    b: DimId,
    s: DimId,
    m: DimId,
    h: DimId,
    d: DimId,
    f: DimId,
    v: DimId,
    p: DimId,
    y: DimId,
    n: DimId,
}

struct Cx<'a> {
    bert: &'a Bert,
    dims: Dims,
    tensors: Tensors,
    drops: Drops,
}

/// The program of a BERT.
pub(super) fn module(bert: &Bert, name: &str, workload: &Workload, drops: Drops) -> Result<Module, OpError> {
    let mut space = Space::default();
    let mut dim = |name: &str, size: u64| space.dims.push(Dim::new(name, size));
    let dims = Dims {
        b: dim("b", workload.batch),
        s: dim("s", workload.sequence),
        m: dim("m", bert.hidden),
        h: dim("h", bert.heads),
        d: dim("d", bert.head_dim()),
        f: dim("f", bert.ffn),
        v: dim("v", bert.vocab),
        p: dim("p", bert.positions),
        y: dim("y", bert.types),
        n: dim("n", bert.hidden),
    };
    let dtype = workload.dtype.unwrap_or(bert.dtype);
    let tensors = Tensors { dtype, heads: [dims.h; 2], width: dims.d };
    let cx = Cx { bert, dims, tensors, drops };
    let mut functions: Arena<FuncId, Function> = Arena::new();
    let embed = functions.push(cx.embed(&space)?);
    let block = functions.push(cx.block(&space)?);
    let head = functions.push(match bert.head {
        BertHead::Pooler => cx.pooler(&space)?,
        BertHead::MaskedLm { tied } => cx.masked_lm(&space, tied)?,
    });
    let main = cx.main(&space, &functions, [embed, block, head])?;
    functions.push(main);
    Ok(Module { level: Level::Program, name: name.to_owned(), pipeline: Vec::new(), space, functions })
}

impl Cx<'_> {
    /// What the library puts in front of the names of the encoder's tensors.
    fn prefix(&self) -> &'static str {
        match self.bert.head {
            BertHead::Pooler => "",
            BertHead::MaskedLm { .. } => "bert.",
        }
    }

    fn embedding(&self) -> String {
        format!("{}embeddings.word_embeddings.weight", self.prefix())
    }

    fn stream(&self) -> TensorType {
        let Dims { b, s, m, .. } = self.dims;
        self.tensors.ty(&[b, s, m])
    }

    /// `@embed`: tokens, their types and positions to the residual stream.
    fn embed(&self, space: &Space) -> Built<Function> {
        let Dims { b, s, m, v, p, y, .. } = self.dims;
        let none = Arena::new();
        let mut f = FunctionBuilder::new("embed", space, &none);
        let ty = TensorType::new(DType::I32, [b, s]);
        let ids = f.param(ty.clone(), Some("input_ids"));
        let types = f.param(ty, Some("token_type_ids"));
        let key = self.drops.key(&mut f, Place::Embedding);
        let positions = self.positions(&mut f)?;
        let table = self.tensors.weight(&mut f, &self.embedding(), &[v, m])?;
        let mut x = f.push(Op::Embed { over: v, padding: self.bert.padding }, &[table, ids])?;
        for (part, over, ids) in [("token_type", y, types), ("position", p, positions)] {
            let name = format!("{}embeddings.{part}_embeddings.weight", self.prefix());
            let table = self.tensors.weight(&mut f, &name, &[over, m])?;
            let embedded = f.push(Op::Embed { over, padding: None }, &[table, ids])?;
            x = f.add(x, embedded)?;
        }
        let x = self.norm(&mut f, x, &format!("{}embeddings.LayerNorm", self.prefix()), m)?;
        let x = self.drops.drop(&mut f, key, Place::Embedding, x)?;
        f.name(x, Some("x"));
        Ok(f.finish([Output { name: None, value: x }]))
    }

    fn positions(&self, f: &mut FunctionBuilder<'_>) -> Built<ValueId> {
        let positions = f.push_as(Op::Positions, &[], TensorType::new(DType::I32, [self.dims.s]))?;
        f.name(positions, Some("positions"));
        Ok(positions)
    }

    fn block(&self, space: &Space) -> Built<Function> {
        let Dims { b, s, m, h, d, f: ffn, .. } = self.dims;
        let none = Arena::new();
        let mut f = FunctionBuilder::new("block", space, &none);
        let layer = format!("{}encoder.layer.{{layer}}", self.prefix());
        let x = f.param(self.stream(), Some("x"));
        let key = self.drops.layer_key(&mut f)?;

        let mut qkv = [x; 3];
        for (part, name) in qkv.iter_mut().zip(["query", "key", "value"]) {
            *part = self.dense(&mut f, x, &format!("{layer}.attention.self.{name}"), &[h, d], &[m])?;
            f.name(*part, name.get(..1));
        }
        let dims = AttentionDims { heads: h, kv_heads: h, queries: s, keys: s, width: d };
        let scale = 1.0 / (self.bert.head_dim() as f64).sqrt();
        let mixed = self.drops.attend(&mut f, key, Attention::new(dims, Mask::Full, scale), &qkv)?;
        f.name(mixed, Some("mixed"));
        let name = format!("{layer}.attention.output");
        let out = self.dense(&mut f, mixed, &format!("{name}.dense"), &[m], &[h, d])?;
        let out = self.drops.drop(&mut f, key, Place::Block, out)?;
        let x = f.add(x, out)?;
        let x = self.norm(&mut f, x, &format!("{name}.LayerNorm"), m)?;
        f.name(x, Some("attended"));

        let inner = self.dense(&mut f, x, &format!("{layer}.intermediate.dense"), &[ffn], &[m])?;
        let inner = f.push(Op::Unary(self.bert.activation), &[inner])?;
        let name = format!("{layer}.output");
        let out = self.dense(&mut f, inner, &format!("{name}.dense"), &[m], &[ffn])?;
        let out = self.drops.drop(&mut f, key, Place::Block, out)?;
        let x = f.add(x, out)?;
        let x = self.norm(&mut f, x, &format!("{name}.LayerNorm"), m)?;
        f.name(x, Some("y"));
        debug_assert_eq!(f.ty(x).dims.as_slice(), [b, s, m], "a block returns the stream");
        Ok(f.finish([Output { name: None, value: x }]))
    }

    /// `@head`: the first token through a product and tanh; the stream comes out too.
    fn pooler(&self, space: &Space) -> Built<Function> {
        let Dims { b, m, n, .. } = self.dims;
        let none = Arena::new();
        let mut f = FunctionBuilder::new("head", space, &none);
        let x = f.param(self.stream(), Some("x"));
        let first = self.is_first(&mut f)?;
        let first = f.einsum(x, first, &[b, m])?;
        f.name(first, Some("first"));
        let pooled = self.dense(&mut f, first, "pooler.dense", &[n], &[m])?;
        let pooled = f.push(Op::Unary(Unary::Tanh), &[pooled])?;
        f.name(pooled, Some("pooled"));
        Ok(f.finish([Output { name: None, value: x }, Output { name: None, value: pooled }]))
    }

    /// `[s]`: one for the token at position zero, and zero for the others.
    ///
    /// It is made of positions, so it is right whatever the order of tokens, and a product with it leaves the sequence
    /// split. No operation makes constants, but log(exp(x) + exp(x)) is x + log 2: above zero for the first position
    /// only, and tanh of enough times that is exactly one.
    fn is_first(&self, f: &mut FunctionBuilder<'_>) -> Built<ValueId> {
        // log 2 · 64 is beyond where tanh is one in every element type.
        const ENOUGH: f64 = 64.0;
        let positions = self.positions(f)?;
        let x = f.push(Op::Cast { to: DType::F32 }, &[positions])?;
        let x = f.push(Op::Scale { factor: -1.0 }, &[x])?;
        let x = f.push(Op::Binary(Binary::LogAddExp), &[x, x])?;
        let x = f.push(Op::Unary(Unary::Relu), &[x])?;
        let x = f.push(Op::Scale { factor: ENOUGH }, &[x])?;
        let mut x = f.push(Op::Unary(Unary::Tanh), &[x])?;
        if self.tensors.dtype != DType::F32 {
            x = f.push(Op::Cast { to: self.tensors.dtype }, &[x])?;
        }
        f.name(x, Some("is_first"));
        Ok(x)
    }

    /// `@head`: a score for each token of the vocabulary.
    fn masked_lm(&self, space: &Space, tied: bool) -> Built<Function> {
        let Dims { b, s, m, v, n, .. } = self.dims;
        let none = Arena::new();
        let mut f = FunctionBuilder::new("head", space, &none);
        let x = f.param(self.stream(), Some("x"));
        let name = "cls.predictions.transform";
        let x = self.dense(&mut f, x, &format!("{name}.dense"), &[n], &[m])?;
        let x = f.push(Op::Unary(self.bert.activation), &[x])?;
        let x = self.norm(&mut f, x, &format!("{name}.LayerNorm"), n)?;
        let (x, table, bias) = match tied {
            // The embedding's table knows the width of the stream, and one tensor has one type.
            true => {
                let x = f.push(Op::Window(Window::Cut { to: m, start: 0 }), &[x])?;
                (x, self.embedding(), "cls.predictions.bias")
            }
            // The library ties the bias with the table, or neither.
            false => (x, "cls.predictions.decoder.weight".to_owned(), "cls.predictions.decoder.bias"),
        };
        let width = if tied { m } else { n };
        let table = self.tensors.weight(&mut f, &table, &[v, width])?;
        let logits = f.einsum(x, table, &[b, s, v])?;
        let bias = self.tensors.weight(&mut f, bias, &[v])?;
        let logits = f.add(logits, bias)?;
        f.name(logits, Some("logits"));
        Ok(f.finish([Output { name: None, value: logits }]))
    }

    /// A product that takes dimensions `from` of `x` to dimensions `to`, and its bias.
    fn dense(
        &self,
        f: &mut FunctionBuilder<'_>,
        x: ValueId,
        name: &str,
        to: &[DimId],
        from: &[DimId],
    ) -> Built<ValueId> {
        let weight: Vec<DimId> = to.iter().chain(from).copied().collect();
        let weight = self.tensors.weight(f, &format!("{name}.weight"), &weight)?;
        let kept = f.ty(x).dims.iter().copied().filter(|d| !from.contains(d));
        let dims: Vec<DimId> = kept.chain(to.iter().copied()).collect();
        let y = f.einsum(x, weight, &dims)?;
        self.tensors.biased(f, y, name, to)
    }

    fn norm(&self, f: &mut FunctionBuilder<'_>, x: ValueId, name: &str, over: DimId) -> Built<ValueId> {
        let weight = self.tensors.weight(f, &format!("{name}.weight"), &[over])?;
        let bias = self.tensors.weight(f, &format!("{name}.bias"), &[over])?;
        f.push(Op::LayerNorm { over, eps: self.bert.eps }, &[x, weight, bias])
    }

    fn main(
        &self,
        space: &Space,
        functions: &Arena<FuncId, Function>,
        [embed, block, head]: [FuncId; 3],
    ) -> Built<Function> {
        let Dims { b, s, .. } = self.dims;
        let mut f = FunctionBuilder::new("main", space, functions);
        let mut inputs = Vec::new();
        for name in ["input_ids", "token_type_ids"] {
            let ty = TensorType::new(DType::I32, [b, s]);
            let ids = f.push_as(Op::Input(Binding::named(name)), &[], ty)?;
            f.name(ids, Some(name));
            inputs.push(ids);
        }
        let key = self.drops.first_key(&mut f)?;
        let x = f.call(embed, 0..1, &self.drops.with_key(&inputs, key, Place::Embedding))?[0];
        let block_arguments = self.drops.with_key(&[x], key, Place::Block);
        let x = f.call(block, 0..self.bert.layers, &block_arguments)?[0];
        let results = f.call(head, 0..1, &[x])?;
        let names: &[&str] = match self.bert.head {
            BertHead::Pooler => &["last_hidden_state", "pooler_output"],
            BertHead::MaskedLm { .. } => &["logits"],
        };
        for (&value, name) in results.iter().zip(names) {
            f.name(value, Some(name));
        }
        let output = |(&value, name): (&ValueId, &&str)| Output { name: Some((*name).to_owned()), value };
        Ok(f.finish(results.iter().zip(names).map(output)))
    }
}
