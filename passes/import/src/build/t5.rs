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
use ithaca_ir::ops::cache::{DECODED, SOURCE};
use ithaca_ir::ops::{Attention, AttentionDims, Cache, RelativeBias, Sides};
use ithaca_ir::{DType, Dim, DimId, FuncId, Mask, Module, Op, Space, TensorType, ValueId};

use super::body::{Body, Built, Continued, Linear, Program, Tensors};
use super::dims::{PageDims, cache_dims};
use super::drops::{Drops, Place};
use crate::spec::{NormForm, T5};
use crate::workload::{Logits, Mode, Workload};

const TABLE: &str = "shared.weight";

/// The dimensions of both stacks.
#[derive(Clone, Copy)]
struct Dims {
    b: DimId,
    /// Tokens of the encoder.
    s: DimId,
    m: DimId,
    h: DimId,
    d: DimId,
    f: DimId,
    v: DimId,
    r: DimId,
    /// Tokens of caches, where sequences are continued.
    c: Option<DimId>,
    /// Of caches in pages.
    pages: Option<PageDims>,
}

/// The program of a T5.
///
/// Where sequences are continued, the encoder reads whole prompts, of which each has a length of its own, and the decoder starts
/// with one token. The keys and values of its attention to the encoder are cached once: later steps have no encoder.
pub(super) fn module(t5: &T5, name: &str, workload: &Workload, dtype: DType, drops: Drops) -> Built<Module> {
    let mut space = Space::default();
    let mut dim = |name: &str, size: u64| space.dims.push(Dim::new(name, size));
    let has_encoder = workload.mode != Mode::Decode;
    let b = dim("b", workload.batch);
    let of_encoder = has_encoder.then(|| dim("s", workload.sequence));
    let t = dim("t", T5::target(workload));
    let s = of_encoder.unwrap_or(t);
    let (m, h, d) = (dim("m", t5.sizes.hidden), dim("h", t5.sizes.heads), dim("d", t5.sizes.head_dim));
    let (f, v, r) = (dim("f", t5.sizes.ffn), dim("v", t5.sizes.vocab), dim("r", t5.buckets));
    let (c, pages) = cache_dims(&mut space, workload);
    let dims = Dims { b, s, m, h, d, f, v, r, c, pages };
    let cache = workload.cache_type.unwrap_or(dtype);
    let tensors = Tensors { dtype, cache, heads: [h; 2], width: d, input_major: false };
    let mut program = Program::new(space, tensors, drops);
    let encoder = Stack { t5, dims, name: "encoder", tokens: s };
    let decoder = Stack { t5, dims, name: "decoder", tokens: t };

    let encoding = has_encoder.then(|| encoder.functions(&mut program)).transpose()?;
    let embed_target = program.function("embed_decoder", |f| decoder.embed(f))?;
    let decoder_block = program.function("decoder_block", |f| {
        let x = decoder.stream(f, "x");
        let encoded = has_encoder.then(|| encoder.stream(f, "encoded"));
        let source = c.map(|_| Source::take(f, &dims, has_encoder));
        f.take_layer_key()?;
        let x = decoder.attend_itself(f, (Mask::Causal, Sides::Before, None), x)?;
        let x = match (source.zip(c), encoded) {
            (Some((source, capacity)), _) => decoder.attend_source(f, x, (source, encoded, capacity))?,
            (None, Some(encoded)) => decoder.attend_encoder(f, x, encoded)?,
            (None, None) => x,
        };
        let x = decoder.mlp(f, 2, x)?;
        f.returns(x, "y")
    })?;
    let head = program.function("head", |f| decoder.head(f, workload.logits))?;
    program.function("main", |f| {
        let new = c.map(|_| f.advance(b, pages)).transpose()?;
        let prompts = f.continued;
        let source = encoding.map(|_| f.input("input_ids", [b, s])).transpose()?;
        let target = match new {
            None => f.input("decoder_input_ids", [b, t])?,
            Some(_) if has_encoder => f.every(t5.first as f64, &[b, t])?,
            Some(_) => f.tokens(Mode::Decode, [b, t])?,
        };
        f.make_key()?;
        let encoded = match (encoding, source) {
            (Some([embed, block, norm]), Some(ids)) => {
                let lengths = prompts.map(|prompts| prompts.end);
                let x = f.call_with_key(Place::Embedding, embed, 0..1, &[ids])?;
                let arguments = Vec::from_iter([x].into_iter().chain(lengths));
                let x = f.call_with_key(Place::Block, block, 0..t5.sizes.layers, &arguments)?;
                let encoded = f.call_with_key(Place::Embedding, norm, 0..1, &[x])?;
                f.name(encoded, Some("encoded"));
                Some(encoded)
            }
            _ => None,
        };
        let lengths = match (new, prompts) {
            (Some(new), Some(prompts)) => Source::advance(f, b, new, (prompts, has_encoder))?,
            _ => Vec::new(),
        };
        let y = f.call_with_key(Place::Embedding, embed_target, 0..1, &[target])?;
        let arguments = Vec::from_iter([y].into_iter().chain(encoded).chain(lengths.iter().copied()));
        let y = f.call_with_key(Place::Block, decoder_block, 0..t5.decoder_layers, &arguments)?;
        let arguments = Vec::from_iter([y].into_iter().chain(lengths.iter().copied().take(2)));
        let logits = f.call_with_key(Place::Embedding, head, 0..1, &arguments)?;
        let mut outputs = vec![f.result(logits, "logits")];
        if let Some(new) = new {
            let token = f.next_token(new, logits, [b, v])?;
            outputs.push(f.result(token, "token"));
        }
        Ok(outputs)
    })?;
    Ok(program.finish(name))
}

/// What a decoder that continues sequences knows of those that the encoder read.
#[derive(Clone, Copy)]
struct Source {
    /// Where the encoder's tokens go in the caches, in the step that reads them.
    read: Option<Continued>,
    /// The pages of caches, if they are in pages.
    table: Option<(ValueId, PageDims)>,
    /// The position of the last token of each sequence.
    last: ValueId,
}

impl Source {
    /// Advances the lengths of the decoder's sequences; returns the arguments that [`take`](Self::take) takes.
    fn advance(
        f: &mut Body<'_>,
        b: DimId,
        new: ValueId,
        (prompts, has_encoder): (Continued, bool),
    ) -> Built<Vec<ValueId>> {
        let start = f.state(DECODED, b)?;
        let grown = if has_encoder { f.every(1.0, &[b])? } else { new };
        let end = f.push(Op::Cache(Cache::Advance), &[start, grown])?;
        f.write(DECODED, end)?;
        let mut arguments = vec![start, end];
        arguments.extend(prompts.table.map(|(table, _)| table));
        if has_encoder {
            let before = f.every(-1.0, &[b])?;
            let last = f.push(Op::Cache(Cache::Advance), &[prompts.end, before])?;
            f.write(SOURCE, last)?;
            arguments.extend([last, prompts.start, prompts.end]);
        } else {
            arguments.push(f.state(SOURCE, b)?);
        }
        Ok(arguments)
    }

    /// Takes the lengths of sequences as parameters.
    fn take(f: &mut Body<'_>, dims: &Dims, has_encoder: bool) -> Self {
        f.take_lengths(dims.b, dims.pages);
        let table = f.continued.and_then(|continued| continued.table);
        let last = f.numbers(dims.b, "source");
        let read = has_encoder.then(|| {
            let [start, end] = ["source_start", "source_end"].map(|name| f.numbers(dims.b, name));
            Continued { start, end, table }
        });
        Self { read, table, last }
    }
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

    /// The functions of the encoder: the embedding, a layer, and the last norm.
    fn functions(&self, program: &mut Program) -> Built<[FuncId; 3]> {
        let embed = program.function("embed_encoder", |f| self.embed(f))?;
        let block = program.function("encoder_block", |f| {
            let x = self.stream(f, "x");
            let end = self.dims.c.map(|_| f.numbers(self.dims.b, "end"));
            f.take_layer_key()?;
            let x = self.attend_itself(f, (Mask::Full, Sides::Both, end), x)?;
            let x = self.mlp(f, 1, x)?;
            f.returns(x, "y")
        })?;
        let norm = program.function("encoder_norm", |f| {
            let x = self.stream(f, "x");
            let encoded = self.last_norm(f, x)?;
            f.returns(encoded, "encoded")
        })?;
        Ok([embed, block, norm])
    }

    /// The stream plus its self-attention: full in the encoder, up to `end` where sequences have ends, and causal in the decoder.
    fn attend_itself(
        &self,
        f: &mut Body<'_>,
        (mask, sides, end): (Mask, Sides, Option<ValueId>),
        x: ValueId,
    ) -> Built<ValueId> {
        let Dims { h, r, .. } = self.dims;
        let normed = self.norm(f, x, &self.layer("0.layer_norm"))?;
        let name = self.layer("0.SelfAttention");
        let [q, k, v] = self.projections(f, &name, [normed, normed, normed])?;
        let table = format!("{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", self.name);
        let table = f.weight(&table, &[r, h])?;
        f.name(table, Some("bias"));
        let mut attention = self.attention(self.tokens, mask);
        attention.bias = Some(RelativeBias { buckets: r, max_distance: self.t5.max_distance, sides });
        attention.ends = end.is_some();
        let mixed = match (f.continued, self.dims.c) {
            (Some(continued), Some(capacity)) => {
                let rows = [("key", k), ("value", v)];
                f.attend_cached(attention, (continued, (capacity, false)), &[q, table], &rows)?
            }
            _ => {
                let operands = [q, k, v, table].into_iter().chain(end);
                f.attend("mixed", attention, &Vec::from_iter(operands))?
            }
        };
        self.output(f, &name, x, mixed[0], "attended")
    }

    /// The decoder's stream plus its attention to the encoder's output.
    fn attend_encoder(&self, f: &mut Body<'_>, x: ValueId, encoded: ValueId) -> Built<ValueId> {
        let normed = self.norm(f, x, &self.layer("1.layer_norm"))?;
        let name = self.layer("1.EncDecAttention");
        let qkv = self.projections(f, &name, [normed, encoded, encoded])?;
        let mixed = f.attend("crossed", self.attention(self.dims.s, Mask::Full), &qkv)?[0];
        self.output(f, &name, x, mixed, "informed")
    }

    /// The same where sequences are continued: keys and values of the encoder's output are cached in the step that has it. A query
    /// stands at the last token of its source, so a causal mask shows it the whole source.
    fn attend_source(
        &self,
        f: &mut Body<'_>,
        x: ValueId,
        (source, encoded, capacity): (Source, Option<ValueId>, DimId),
    ) -> Built<ValueId> {
        let Dims { b, s, m, h, d, .. } = self.dims;
        let normed = self.norm(f, x, &self.layer("1.layer_norm"))?;
        let name = self.layer("1.EncDecAttention");
        let mut caches = Vec::new();
        for (cache, part) in [("cross_key", "k"), ("cross_value", "v")] {
            caches.push(match source.read.zip(encoded) {
                Some((read, encoded)) => {
                    let row = linear(f, encoded, &format!("{name}.{part}"), &[h, d], &[m])?;
                    f.appended(read, (cache, row), s, (capacity, false))?
                }
                None => f.filled(source.table, (cache, vec![b, capacity, h, d]), capacity)?,
            });
        }
        let q = linear(f, normed, &format!("{name}.q"), &[h, d], &[m])?;
        f.name(q, Some("q"));
        let attention = self.attention(s, Mask::Causal);
        let mixed =
            f.attend_caches("crossed", attention, (source.last, (capacity, false)), &[q], &caches)?[0];
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
        if self.dims.c.is_some() {
            f.take_lengths(self.dims.b, None);
        }
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
