//! BERT: norms after attention and MLP, biases everywhere, full attention.
//!
//! ```text
//! x = layer_norm(x + dense · attention(q, k, v))          of x
//! x = layer_norm(x + output · activation(intermediate · x))
//! ```
//!
//! Dimensions beside the common ones: `p` positions, `y` token types, `n` the output width of the head's product, equal
//! to `m`.

use ithaca_ir::module::Output;
use ithaca_ir::ops::{Attention, AttentionDims, Unary, Window};
use ithaca_ir::{DType, Dim, DimId, Mask, Module, Op, Space, TensorType, ValueId};

use super::body::{Body, Built, Linear, Program, Tensors};
use super::dims::Dims;
use super::drops::{Drops, Place};
use crate::spec::{Bert, BertHead, NormForm, Sizes, usual_scale};
use crate::workload::Workload;

struct Cx<'a> {
    bert: &'a Bert,
    dims: Dims,
    /// Token types.
    y: DimId,
    /// The output width of the head's product.
    n: DimId,
}

/// The program of a BERT.
pub(super) fn module(
    bert: &Bert,
    name: &str,
    workload: &Workload,
    dtype: DType,
    drops: Drops,
) -> Built<Module> {
    let Sizes { hidden, layers, max_positions, .. } = bert.sizes;
    let mut space = Space::default();
    let dims = Dims::of_sizes(&mut space, &bert.sizes, Some(max_positions), workload);
    let [y, n] = [("y", bert.types), ("n", hidden)].map(|(name, size)| space.dims.push(Dim::new(name, size)));
    let Dims { b, s, .. } = dims;
    let tensors = Tensors { dtype, cache: dtype, heads: [dims.h; 2], width: dims.d, input_major: false };
    let mut program = Program::new(space, tensors, drops);
    let cx = Cx { bert, dims, y, n };
    let embed = program.function("embed", |f| cx.embed(f))?;
    let block = program.function("block", |f| cx.block(f))?;
    let head = program.function("head", |f| match bert.head {
        BertHead::Pooler => cx.pooler(f),
        BertHead::MaskedLm => cx.masked_lm(f),
    })?;
    program.function("main", |f| {
        let inputs = [f.input("input_ids", [b, s])?, f.input("token_type_ids", [b, s])?];
        f.make_key()?;
        let x = f.call_with_key(Place::Embedding, embed, 0..1, &inputs)?;
        let x = f.call_with_key(Place::Block, block, 0..layers, &[x])?;
        let results = f.call(head, 0..1, &[x])?;
        let names: &[&str] = match bert.head {
            BertHead::Pooler => &["last_hidden_state", "pooler_output"],
            BertHead::MaskedLm => &["logits"],
        };
        Ok(results.iter().zip(names).map(|(&value, name)| f.result(value, name)).collect::<Vec<_>>())
    })?;
    Ok(program.finish(name))
}

impl Cx<'_> {
    /// The name of an encoder's tensor.
    fn name(&self, part: &str) -> String {
        let prefix = match self.bert.head {
            BertHead::Pooler => "",
            BertHead::MaskedLm => "bert.",
        };
        format!("{prefix}{part}")
    }

    fn embedding(&self) -> String {
        self.name("embeddings.word_embeddings.weight")
    }

    fn stream(&self, f: &mut Body<'_>) -> ValueId {
        let Dims { b, s, m, .. } = self.dims;
        f.stream(&[b, s, m], "x")
    }

    /// Token ids, token types and positions to the residual stream.
    fn embed(&self, f: &mut Body<'_>) -> Built<[Output; 1]> {
        let Dims { b, s, m, v, p, .. } = self.dims;
        let ty = TensorType::new(DType::I32, [b, s]);
        let ids = f.param(ty.clone(), Some("input_ids"));
        let types = f.param(ty, Some("token_type_ids"));
        f.take_key(Place::Embedding);
        let positions = f.positions(s)?;
        let mut x = f.embed(&self.embedding(), [v, m], self.bert.sizes.padding, ids)?;
        let position = p.map(|p| ("position", p, positions));
        for (part, over, ids) in std::iter::once(("token_type", self.y, types)).chain(position) {
            let name = self.name(&format!("embeddings.{part}_embeddings.weight"));
            let embedded = f.embed(&name, [over, m], None, ids)?;
            x = f.add(x, embedded)?;
        }
        let x = self.norm(f, x, &self.name("embeddings.LayerNorm"), m)?;
        let x = f.drop(Place::Embedding, x)?;
        f.returns(x, "x")
    }

    fn block(&self, f: &mut Body<'_>) -> Built<[Output; 1]> {
        let Dims { s, m, h, d, f: ffn, .. } = self.dims;
        let name = |part: &str| self.name(&format!("encoder.layer.{{layer}}.{part}"));
        let x = self.stream(f);
        f.take_layer_key()?;

        let mut qkv = [x; 3];
        for (part, module) in qkv.iter_mut().zip(["query", "key", "value"]) {
            *part = dense(f, x, &name(&format!("attention.self.{module}")), &[h, d], &[m])?;
            f.name(*part, module.get(..1));
        }
        let dims = AttentionDims { heads: h, kv_heads: h, queries: s, keys: s, width: d };
        let scale = usual_scale(self.bert.sizes.head_dim);
        let mixed = f.attend("mixed", Attention::new(dims, Mask::Full, scale), &qkv)?[0];
        let out = dense(f, mixed, &name("attention.output.dense"), &[m], &[h, d])?;
        let x = self.normed_residual(f, x, out, (&name("attention.output.LayerNorm"), "attended"))?;

        let inner = dense(f, x, &name("intermediate.dense"), &[ffn], &[m])?;
        let inner = f.push(Op::Unary(self.bert.sizes.activation), &[inner])?;
        let out = dense(f, inner, &name("output.dense"), &[m], &[ffn])?;
        let x = self.normed_residual(f, x, out, (&name("output.LayerNorm"), "y"))?;
        f.returns(x, "y")
    }

    /// The norm of the stream plus a branch.
    fn normed_residual(
        &self,
        f: &mut Body<'_>,
        x: ValueId,
        branch: ValueId,
        (norm, name): (&str, &str),
    ) -> Built<ValueId> {
        let branch = f.drop(Place::Block, branch)?;
        let x = f.add(x, branch)?;
        let x = self.norm(f, x, norm, self.dims.m)?;
        f.name(x, Some(name));
        Ok(x)
    }

    /// The first token through a product and tanh; the stream is returned too.
    fn pooler(&self, f: &mut Body<'_>) -> Built<Vec<Output>> {
        let m = self.dims.m;
        let x = self.stream(f);
        let first = f.push(Op::Select { over: self.dims.s, position: 0 }, &[x])?;
        f.name(first, Some("first"));
        let pooled = dense(f, first, "pooler.dense", &[self.n], &[m])?;
        let pooled = f.push(Op::Unary(Unary::Tanh), &[pooled])?;
        f.name(pooled, Some("pooled"));
        Ok([x, pooled].map(|value| Output { name: None, value }).to_vec())
    }

    /// A score for each token of the vocabulary.
    fn masked_lm(&self, f: &mut Body<'_>) -> Built<Vec<Output>> {
        let (Dims { m, v, .. }, n) = (self.dims, self.n);
        let Sizes { activation, tied, .. } = self.bert.sizes;
        let x = self.stream(f);
        let x = dense(f, x, "cls.predictions.transform.dense", &[n], &[m])?;
        let x = f.push(Op::Unary(activation), &[x])?;
        let x = self.norm(f, x, "cls.predictions.transform.LayerNorm", n)?;
        let (x, width, table, bias) = if tied {
            // The embedding's table has dimension `m`, and one tensor has one type.
            let x = f.push(Op::Window(Window::Cut { to: m, start: 0 }), &[x])?;
            (x, m, self.embedding(), "cls.predictions.bias")
        } else {
            // The library ties the bias with the table, or neither.
            (x, n, "cls.predictions.decoder.weight".to_owned(), "cls.predictions.decoder.bias")
        };
        let table = f.weight(&table, &[v, width])?;
        let logits = f.product(x, table)?;
        let bias = f.weight(bias, &[v])?;
        let logits = f.add(logits, bias)?;
        f.returns(logits, "logits").map(Vec::from)
    }

    fn norm(&self, f: &mut Body<'_>, x: ValueId, name: &str, over: DimId) -> Built<ValueId> {
        f.norm((NormForm::Layer, self.bert.sizes.eps), x, name, over)
    }
}

fn dense(f: &mut Body<'_>, x: ValueId, name: &str, to: &[DimId], from: &[DimId]) -> Built<ValueId> {
    f.linear(x, Linear { name, to, from, bias: true })
}
