//! T5: an encoder and a decoder with sequences of different lengths.
//!
//! ```text
//! x += o · attention(q, k, v)              of rms_norm(x), scores biased by relative position
//! y += o · attention(q, k of x, v of x)    of rms_norm(y), in the decoder, x being the encoder's output
//! x += wo · activation(wi · x)             of rms_norm(x), or wo · (activation(wi_0 · x) · (wi_1 · x))
//! ```
//!
//! Dimensions beside the common ones: `t` tokens of the decoder, `r` buckets of relative positions. The bias tables
//! belong to the first layer of each stack, and every layer of the stack reads them. Scores are not scaled.

use ithaca_ir::module::Output;
use ithaca_ir::ops::{Attention, AttentionDims, RelativeBias, Sides};
use ithaca_ir::{DType, Dim, DimId, Mask, Module, Op, Space, TensorType, ValueId};

use super::body::{Body, Built, Linear, Program, Tensors};
use super::drops::{Drops, Place};
use crate::spec::{NormForm, T5};
use crate::workload::{Logits, Workload};

const TABLE: &str = "shared.weight";

/// The dimensions of both stacks.
#[derive(Clone, Copy)]
struct Dims {
    b: DimId,
    /// Tokens of the encoder.
    s: DimId,
    /// Tokens of the decoder.
    t: DimId,
    m: DimId,
    h: DimId,
    d: DimId,
    f: DimId,
    v: DimId,
    r: DimId,
}

/// The program of a T5.
pub(super) fn module(t5: &T5, name: &str, workload: &Workload, dtype: DType, drops: Drops) -> Built<Module> {
    let mut space = Space::default();
    let mut dim = |name: &str, size: u64| space.dims.push(Dim::new(name, size));
    let dims = Dims {
        b: dim("b", workload.batch),
        s: dim("s", workload.sequence),
        t: dim("t", T5::target(workload)),
        m: dim("m", t5.sizes.hidden),
        h: dim("h", t5.sizes.heads),
        d: dim("d", t5.sizes.head_dim),
        f: dim("f", t5.sizes.ffn),
        v: dim("v", t5.sizes.vocab),
        r: dim("r", t5.buckets),
    };
    let Dims { b, s, t, .. } = dims;
    let tensors = Tensors { dtype, cache: dtype, heads: [dims.h; 2], width: dims.d, input_major: false };
    let mut program = Program::new(space, tensors, drops);
    let encoder = Stack { t5, dims, name: "encoder", tokens: s };
    let decoder = Stack { t5, dims, name: "decoder", tokens: t };

    let embed_source = program.function("embed_encoder", |f| encoder.embed(f))?;
    let encoder_block = program.function("encoder_block", |f| {
        let x = encoder.stream(f, "x");
        f.take_layer_key()?;
        let bias = (Mask::Full, Sides::Both);
        let x = encoder.attend_itself(f, bias, x)?;
        let x = encoder.mlp(f, 1, x)?;
        f.returns(x, "y")
    })?;
    let encoder_norm = program.function("encoder_norm", |f| {
        let x = encoder.stream(f, "x");
        let encoded = encoder.last_norm(f, x)?;
        f.returns(encoded, "encoded")
    })?;
    let embed_target = program.function("embed_decoder", |f| decoder.embed(f))?;
    let decoder_block = program.function("decoder_block", |f| {
        let x = decoder.stream(f, "x");
        let encoded = encoder.stream(f, "encoded");
        f.take_layer_key()?;
        let bias = (Mask::Causal, Sides::Before);
        let x = decoder.attend_itself(f, bias, x)?;
        let x = decoder.attend_encoder(f, x, encoded)?;
        let x = decoder.mlp(f, 2, x)?;
        f.returns(x, "y")
    })?;
    let head = program.function("head", |f| decoder.head(f, workload.logits))?;
    program.function("main", |f| {
        let (source, target) = (f.input("input_ids", [b, s])?, f.input("decoder_input_ids", [b, t])?);
        f.make_key()?;
        let x = f.call_with_key(Place::Embedding, embed_source, 0..1, &[source])?;
        let x = f.call_with_key(Place::Block, encoder_block, 0..t5.sizes.layers, &[x])?;
        let encoded = f.call_with_key(Place::Embedding, encoder_norm, 0..1, &[x])?;
        f.name(encoded, Some("encoded"));
        let y = f.call_with_key(Place::Embedding, embed_target, 0..1, &[target])?;
        let y = f.call_with_key(Place::Block, decoder_block, 0..t5.decoder_layers, &[y, encoded])?;
        let logits = f.call_with_key(Place::Embedding, head, 0..1, &[y])?;
        Ok([f.result(logits, "logits")])
    })?;
    Ok(program.finish(name))
}

/// One of the two stacks.
#[derive(Clone, Copy)]
struct Stack<'a> {
    t5: &'a T5,
    dims: Dims,
    /// The prefix of its tensors' names.
    name: &'static str,
    /// Its tokens.
    tokens: DimId,
}

impl Stack<'_> {
    /// A residual stream as a parameter.
    fn stream(&self, f: &mut Body<'_>, name: &str) -> ValueId {
        f.stream(&[self.dims.b, self.tokens, self.dims.m], name)
    }

    /// Token ids to the residual stream, by the table that both stacks share.
    fn embed(&self, f: &mut Body<'_>) -> Built<[Output; 1]> {
        let Dims { b, m, v, .. } = self.dims;
        let ids = f.param(TensorType::new(DType::I32, [b, self.tokens]), Some("ids"));
        f.take_key(Place::Embedding);
        let x = f.embed(TABLE, [v, m], None, ids)?;
        let x = f.drop(Place::Embedding, x)?;
        f.returns(x, "x")
    }

    /// The stream plus its self-attention: full in the encoder, causal in the decoder.
    fn attend_itself(&self, f: &mut Body<'_>, (mask, sides): (Mask, Sides), x: ValueId) -> Built<ValueId> {
        let Dims { h, r, .. } = self.dims;
        let normed = self.norm(f, x, &self.layer("0.layer_norm"))?;
        let name = self.layer("0.SelfAttention");
        let [q, k, v] = self.projections(f, &name, [normed, normed, normed])?;
        let table = format!("{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", self.name);
        let table = f.weight(&table, &[r, h])?;
        f.name(table, Some("bias"));
        let mut attention = self.attention(self.tokens, mask);
        attention.bias = Some(RelativeBias { buckets: r, max_distance: self.t5.max_distance, sides });
        let mixed = f.attend("mixed", attention, &[q, k, v, table])?[0];
        self.output(f, &name, x, mixed, "attended")
    }

    /// The decoder's stream plus its attention to the encoder's output.
    fn attend_encoder(&self, f: &mut Body<'_>, x: ValueId, encoded: ValueId) -> Built<ValueId> {
        let normed = self.norm(f, x, &self.layer("1.layer_norm"))?;
        let name = self.layer("1.EncDecAttention");
        let qkv = self.projections(f, &name, [normed, encoded, encoded])?;
        let mixed = f.attend("crossed", self.attention(self.dims.s, Mask::Full), &qkv)?[0];
        self.output(f, &name, x, mixed, "informed")
    }

    /// The name of a part of a layer.
    fn layer(&self, part: &str) -> String {
        format!("{}.block.{{layer}}.layer.{part}", self.name)
    }

    fn attention(&self, keys: DimId, mask: Mask) -> Attention {
        let Dims { h, d, .. } = self.dims;
        let dims = AttentionDims { heads: h, kv_heads: h, queries: self.tokens, keys, width: d };
        Attention::new(dims, mask, 1.0)
    }

    /// The projections to queries, keys and values, each with its own input.
    fn projections(&self, f: &mut Body<'_>, name: &str, mut x: [ValueId; 3]) -> Built<[ValueId; 3]> {
        let Dims { m, h, d, .. } = self.dims;
        for (x, part) in x.iter_mut().zip(["q", "k", "v"]) {
            *x = linear(f, *x, &format!("{name}.{part}"), &[h, d], &[m])?;
            f.name(*x, Some(part));
        }
        Ok(x)
    }

    /// The stream plus the output projection of an attention.
    fn output(&self, f: &mut Body<'_>, name: &str, x: ValueId, mixed: ValueId, sum: &str) -> Built<ValueId> {
        let Dims { m, h, d, .. } = self.dims;
        let out = linear(f, mixed, &format!("{name}.o"), &[m], &[h, d])?;
        f.residual(x, out, sum)
    }

    /// The stream plus its MLP, which is part `index` of a layer.
    fn mlp(&self, f: &mut Body<'_>, index: u64, x: ValueId) -> Built<ValueId> {
        let Dims { m, f: ffn, .. } = self.dims;
        let name = |part: &str| self.layer(&format!("{index}.{part}"));
        let normed = self.norm(f, x, &name("layer_norm"))?;
        let up = |f: &mut Body<'_>, part: &str| {
            linear(f, normed, &name(&format!("DenseReluDense.{part}")), &[ffn], &[m])
        };
        let inner = if self.t5.gated {
            let (gate, inner) = (up(f, "wi_0")?, up(f, "wi_1")?);
            f.gated(self.t5.sizes.activation, gate, inner)?
        } else {
            let inner = up(f, "wi")?;
            f.push(Op::Unary(self.t5.sizes.activation), &[inner])?
        };
        let inner = f.drop(Place::Block, inner)?;
        let out = linear(f, inner, &name("DenseReluDense.wo"), &[m], &[ffn])?;
        f.residual(x, out, "y")
    }

    /// The norm after the last layer, with its dropout.
    fn last_norm(&self, f: &mut Body<'_>, x: ValueId) -> Built<ValueId> {
        f.take_key(Place::Embedding);
        let x = self.norm(f, x, &format!("{}.final_layer_norm", self.name))?;
        f.drop(Place::Embedding, x)
    }

    fn norm(&self, f: &mut Body<'_>, x: ValueId, name: &str) -> Built<ValueId> {
        f.norm((NormForm::Rms { offset: 0.0 }, self.t5.sizes.eps), x, name, self.dims.m)
    }

    /// The last norm and the logits.
    fn head(&self, f: &mut Body<'_>, logits: Logits) -> Built<[Output; 1]> {
        let Dims { m, v, .. } = self.dims;
        let x = self.stream(f, "x");
        let x = f.with_logits(logits, x, self.tokens)?;
        let mut x = self.last_norm(f, x)?;
        if self.t5.scaled {
            x = f.push(Op::Scale { factor: (self.t5.sizes.hidden as f64).powf(-0.5) }, &[x])?;
        }
        let weight = f.weight(if self.t5.sizes.tied { TABLE } else { "lm_head.weight" }, &[v, m])?;
        let logits = f.product(x, weight)?;
        f.returns(logits, "logits")
    }
}

/// A product without a bias.
fn linear(f: &mut Body<'_>, x: ValueId, name: &str, to: &[DimId], from: &[DimId]) -> Built<ValueId> {
    f.linear(x, Linear { name, to, from, bias: false })
}
