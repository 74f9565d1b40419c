//! T5: two stacks over sequences of their own length.
//!
//! ```text
//! x += o · attention(q, k, v)              of rms_norm(x), scores biased by relative position
//! y += o · attention(q, k of x, v of x)    of rms_norm(y), in the decoder, x being the encoder's output
//! x += wo · activation(wi · x)             of rms_norm(x), or wo · (activation(wi_0 · x) · (wi_1 · x))
//! ```
//!
//! Dimensions beside those of all models: `t` tokens of the decoder, `r` buckets of relative positions. The tables of
//! biases belong to the first layer of each stack, and every layer of it reads them. Scores are not scaled.

use ithaca_ir::entity::Arena;
use ithaca_ir::module::Output;
use ithaca_ir::ops::{Attention, AttentionDims, Binary, Binding, OpError, RelativeBias, Sides};
use ithaca_ir::{
    DType, Dim, DimId, FuncId, Function, FunctionBuilder, Level, Mask, Module, Op, Space, TensorType, ValueId,
};

use super::drops::{Drops, Key, Place};
use super::tensors::Built;
use super::tensors::Tensors;
use crate::spec::T5;
use crate::workload::Workload;

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

struct Cx<'a> {
    t5: &'a T5,
    dims: Dims,
    tensors: Tensors,
    drops: Drops,
}

/// One of the two stacks.
#[derive(Clone, Copy)]
enum Stack {
    Encoder,
    Decoder,
}

impl Stack {
    fn name(self) -> &'static str {
        match self {
            Stack::Encoder => "encoder",
            Stack::Decoder => "decoder",
        }
    }
}

/// The program of a T5.
pub(super) fn module(t5: &T5, name: &str, workload: &Workload, drops: Drops) -> Result<Module, OpError> {
    let mut space = Space::default();
    let mut dim = |name: &str, size: u64| space.dims.push(Dim::new(name, size));
    let dims = Dims {
        b: dim("b", workload.batch),
        s: dim("s", workload.sequence),
        t: dim("t", T5::target(workload)),
        m: dim("m", t5.hidden),
        h: dim("h", t5.heads),
        d: dim("d", t5.head_dim),
        f: dim("f", t5.ffn),
        v: dim("v", t5.vocab),
        r: dim("r", t5.buckets),
    };
    let dtype = workload.dtype.unwrap_or(t5.dtype);
    let tensors = Tensors { dtype, heads: [dims.h; 2], width: dims.d };
    let cx = Cx { t5, dims, tensors, drops };
    let mut functions: Arena<FuncId, Function> = Arena::new();
    let mut add = |built: Built<Function>| built.map(|f| functions.push(f));
    let calls = Calls {
        embed: add(cx.embed(&space, Stack::Encoder))?,
        block: add(cx.encoder_block(&space))?,
        norm: add(cx.encoder_norm(&space))?,
        embed_target: add(cx.embed(&space, Stack::Decoder))?,
        block_target: add(cx.decoder_block(&space))?,
        head: add(cx.head(&space))?,
    };
    let main = cx.main(&space, &functions, &calls)?;
    functions.push(main);
    Ok(Module { level: Level::Program, name: name.to_owned(), pipeline: Vec::new(), space, functions })
}

/// The functions that `@main` calls, in order.
struct Calls {
    embed: FuncId,
    block: FuncId,
    norm: FuncId,
    embed_target: FuncId,
    block_target: FuncId,
    head: FuncId,
}

impl Cx<'_> {
    /// The tokens of a stack.
    fn tokens(&self, stack: Stack) -> DimId {
        match stack {
            Stack::Encoder => self.dims.s,
            Stack::Decoder => self.dims.t,
        }
    }

    /// The type of a stack's residual stream.
    fn stream(&self, stack: Stack) -> TensorType {
        self.tensors.ty(&[self.dims.b, self.tokens(stack), self.dims.m])
    }

    /// `@embed_encoder`, `@embed_decoder`: tokens to the residual stream, by one table.
    fn embed(&self, space: &Space, stack: Stack) -> Built<Function> {
        let Dims { b, m, v, .. } = self.dims;
        let none = Arena::new();
        let mut f = FunctionBuilder::new(format!("embed_{}", stack.name()), space, &none);
        let ids = f.param(TensorType::new(DType::I32, [b, self.tokens(stack)]), Some("ids"));
        let key = self.drops.key(&mut f, Place::Embedding);
        let table = self.tensors.weight(&mut f, TABLE, &[v, m])?;
        let x = f.push(Op::Embed { over: v, padding: None }, &[table, ids])?;
        let x = self.drops.drop(&mut f, key, Place::Embedding, x)?;
        f.name(x, Some("x"));
        Ok(f.finish([Output { name: None, value: x }]))
    }

    fn encoder_block(&self, space: &Space) -> Built<Function> {
        let none = Arena::new();
        let mut f = FunctionBuilder::new("encoder_block", space, &none);
        let x = f.param(self.stream(Stack::Encoder), Some("x"));
        let key = self.drops.layer_key(&mut f)?;
        let layer = "encoder.block.{layer}.layer";
        let x = self.attend_itself(&mut f, (Stack::Encoder, key), x)?;
        let x = self.mlp(&mut f, (Stack::Encoder, key), &format!("{layer}.1"), x)?;
        f.name(x, Some("y"));
        Ok(f.finish([Output { name: None, value: x }]))
    }

    /// `@encoder_norm`: what the decoder attends to.
    fn encoder_norm(&self, space: &Space) -> Built<Function> {
        let none = Arena::new();
        let mut f = FunctionBuilder::new("encoder_norm", space, &none);
        let x = f.param(self.stream(Stack::Encoder), Some("x"));
        let key = self.drops.key(&mut f, Place::Embedding);
        let encoded = self.norm(&mut f, x, "encoder.final_layer_norm")?;
        let encoded = self.drops.drop(&mut f, key, Place::Embedding, encoded)?;
        f.name(encoded, Some("encoded"));
        Ok(f.finish([Output { name: None, value: encoded }]))
    }

    fn decoder_block(&self, space: &Space) -> Built<Function> {
        let none = Arena::new();
        let mut f = FunctionBuilder::new("decoder_block", space, &none);
        let x = f.param(self.stream(Stack::Decoder), Some("x"));
        let encoded = f.param(self.stream(Stack::Encoder), Some("encoded"));
        let key = self.drops.layer_key(&mut f)?;
        let layer = "decoder.block.{layer}.layer";
        let x = self.attend_itself(&mut f, (Stack::Decoder, key), x)?;
        let x = self.attend_encoder(&mut f, (&format!("{layer}.1"), key), x, encoded)?;
        let x = self.mlp(&mut f, (Stack::Decoder, key), &format!("{layer}.2"), x)?;
        f.name(x, Some("y"));
        Ok(f.finish([Output { name: None, value: x }]))
    }

    /// The stream plus attention of its tokens to each other: to all in the encoder, to those before in the decoder.
    fn attend_itself(
        &self,
        f: &mut FunctionBuilder<'_>,
        (stack, key): (Stack, Key),
        x: ValueId,
    ) -> Built<ValueId> {
        let Dims { h, r, .. } = self.dims;
        let (mask, sides) = match stack {
            Stack::Encoder => (Mask::Full, Sides::Both),
            Stack::Decoder => (Mask::Causal, Sides::Before),
        };
        let tokens = self.tokens(stack);
        let layer = format!("{}.block.{{layer}}.layer.0", stack.name());
        let normed = self.norm(f, x, &format!("{layer}.layer_norm"))?;
        let name = format!("{layer}.SelfAttention");
        let qkv = [("q", tokens, normed), ("k", tokens, normed), ("v", tokens, normed)];
        let [q, k, v] = self.projections(f, &name, qkv)?;
        let table = format!("{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", stack.name());
        let table = self.tensors.weight(f, &table, &[r, h])?;
        f.name(table, Some("bias"));
        let mut attention = self.attention(tokens, tokens, mask);
        attention.bias = Some(RelativeBias { buckets: r, max_distance: self.t5.max_distance, sides });
        let mixed = self.drops.attend(f, key, attention, &[q, k, v, table])?;
        f.name(mixed, Some("mixed"));
        let out = self.output(f, &name, tokens, mixed)?;
        let out = self.drops.drop(f, key, Place::Block, out)?;
        let x = f.add(x, out)?;
        f.name(x, Some("attended"));
        Ok(x)
    }

    /// The decoder's stream plus attention of its tokens to all of the encoder's.
    fn attend_encoder(
        &self,
        f: &mut FunctionBuilder<'_>,
        (layer, key): (&str, Key),
        x: ValueId,
        encoded: ValueId,
    ) -> Built<ValueId> {
        let Dims { s, t, .. } = self.dims;
        let normed = self.norm(f, x, &format!("{layer}.layer_norm"))?;
        let name = format!("{layer}.EncDecAttention");
        let qkv = [("q", t, normed), ("k", s, encoded), ("v", s, encoded)];
        let qkv = self.projections(f, &name, qkv)?;
        let mixed = self.drops.attend(f, key, self.attention(t, s, Mask::Full), &qkv)?;
        f.name(mixed, Some("crossed"));
        let out = self.output(f, &name, t, mixed)?;
        let out = self.drops.drop(f, key, Place::Block, out)?;
        let x = f.add(x, out)?;
        f.name(x, Some("informed"));
        Ok(x)
    }

    fn attention(&self, queries: DimId, keys: DimId, mask: Mask) -> Attention {
        let Dims { h, d, .. } = self.dims;
        let dims = AttentionDims { heads: h, kv_heads: h, queries, keys, width: d };
        Attention::new(dims, mask, 1.0)
    }

    /// Three projections to heads, each of its own tokens.
    fn projections(
        &self,
        f: &mut FunctionBuilder<'_>,
        name: &str,
        parts: [(&str, DimId, ValueId); 3],
    ) -> Built<[ValueId; 3]> {
        let Dims { b, m, h, d, .. } = self.dims;
        let mut out = parts.map(|(_, _, x)| x);
        for (out, (part, tokens, x)) in out.iter_mut().zip(parts) {
            let weight = self.tensors.weight(f, &format!("{name}.{part}.weight"), &[h, d, m])?;
            *out = f.einsum(x, weight, &[b, tokens, h, d])?;
            f.name(*out, Some(part));
        }
        Ok(out)
    }

    fn output(
        &self,
        f: &mut FunctionBuilder<'_>,
        name: &str,
        tokens: DimId,
        mixed: ValueId,
    ) -> Built<ValueId> {
        let Dims { b, m, h, d, .. } = self.dims;
        let weight = self.tensors.weight(f, &format!("{name}.o.weight"), &[m, h, d])?;
        f.einsum(mixed, weight, &[b, tokens, m])
    }

    /// The stream plus the MLP of it.
    fn mlp(
        &self,
        f: &mut FunctionBuilder<'_>,
        (stack, key): (Stack, Key),
        layer: &str,
        x: ValueId,
    ) -> Built<ValueId> {
        let Dims { b, m, f: ffn, .. } = self.dims;
        let tokens = self.tokens(stack);
        let normed = self.norm(f, x, &format!("{layer}.layer_norm"))?;
        let up = |f: &mut FunctionBuilder<'_>, part: &str| {
            let name = format!("{layer}.DenseReluDense.{part}.weight");
            let weight = self.tensors.weight(f, &name, &[ffn, m])?;
            f.einsum(normed, weight, &[b, tokens, ffn])
        };
        let function = Op::Unary(self.t5.activation);
        let inner = match self.t5.gated {
            false => {
                let inner = up(f, "wi")?;
                f.push(function, &[inner])?
            }
            true => {
                let (gate, inner) = (up(f, "wi_0")?, up(f, "wi_1")?);
                let gate = f.push(function, &[gate])?;
                f.push(Op::Binary(Binary::Mul), &[gate, inner])?
            }
        };
        let inner = self.drops.drop(f, key, Place::Block, inner)?;
        let weight = self.tensors.weight(f, &format!("{layer}.DenseReluDense.wo.weight"), &[m, ffn])?;
        let out = f.einsum(inner, weight, &[b, tokens, m])?;
        let out = self.drops.drop(f, key, Place::Block, out)?;
        f.add(x, out)
    }

    fn norm(&self, f: &mut FunctionBuilder<'_>, x: ValueId, name: &str) -> Built<ValueId> {
        let over = self.dims.m;
        let weight = self.tensors.weight(f, &format!("{name}.weight"), &[over])?;
        f.push(Op::RmsNorm { over, eps: self.t5.eps, offset: 0.0 }, &[x, weight])
    }

    /// `@head`: the decoder's last norm, and a score for each token of the vocabulary.
    fn head(&self, space: &Space) -> Built<Function> {
        let Dims { b, t, m, v, .. } = self.dims;
        let none = Arena::new();
        let mut f = FunctionBuilder::new("head", space, &none);
        let x = f.param(self.stream(Stack::Decoder), Some("x"));
        let key = self.drops.key(&mut f, Place::Embedding);
        let x = self.norm(&mut f, x, "decoder.final_layer_norm")?;
        let mut x = self.drops.drop(&mut f, key, Place::Embedding, x)?;
        if self.t5.scaled {
            x = f.push(Op::Scale { factor: (self.t5.hidden as f64).powf(-0.5) }, &[x])?;
        }
        let name = if self.t5.tied { TABLE } else { "lm_head.weight" };
        let weight = self.tensors.weight(&mut f, name, &[v, m])?;
        let logits = f.einsum(x, weight, &[b, t, v])?;
        f.name(logits, Some("logits"));
        Ok(f.finish([Output { name: None, value: logits }]))
    }

    fn main(&self, space: &Space, functions: &Arena<FuncId, Function>, calls: &Calls) -> Built<Function> {
        let Dims { b, s, t, .. } = self.dims;
        let mut f = FunctionBuilder::new("main", space, functions);
        let mut input = |name: &str, tokens: DimId| {
            let ids = TensorType::new(DType::I32, [b, tokens]);
            let ids = f.push_as(Op::Input(Binding::named(name)), &[], ids)?;
            f.name(ids, Some(name));
            Ok::<_, OpError>(ids)
        };
        let (source, target) = (input("input_ids", s)?, input("decoder_input_ids", t)?);
        let key = self.drops.first_key(&mut f)?;
        let ends = |x: ValueId| self.drops.with_key(&[x], key, Place::Embedding);
        let inside = |x: &[ValueId]| self.drops.with_key(x, key, Place::Block);
        let x = f.call(calls.embed, 0..1, &ends(source))?[0];
        let x = f.call(calls.block, 0..self.t5.encoder_layers, &inside(&[x]))?[0];
        let encoded = f.call(calls.norm, 0..1, &ends(x))?[0];
        f.name(encoded, Some("encoded"));
        let y = f.call(calls.embed_target, 0..1, &ends(target))?[0];
        let y = f.call(calls.block_target, 0..self.t5.decoder_layers, &inside(&[y, encoded]))?[0];
        let logits = f.call(calls.head, 0..1, &ends(y))?[0];
        f.name(logits, Some("logits"));
        Ok(f.finish([Output { name: Some("logits".to_owned()), value: logits }]))
    }
}
