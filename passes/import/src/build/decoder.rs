//! Decoders: `@embed`, a function per kind of block, `@head` and `@main`.
//!
//! ```text
//! x = embed(ids)
//! x += out · attention(rotary(norm(q)), rotary(norm(k)), v)    of norm(x)
//! x += down · activation(up · x)                               of norm(x), or of the x before attention
//! logits = head · norm(x)
//! ```
//! The up of a gated MLP is `activation(gate · x) · (up · x)`, without a further activation. Some families also have
//! norms after attention and MLP, or only there.

use ithaca_ir::module::Output;
use ithaca_ir::ops::{Unary, cast, sums_in};
use ithaca_ir::{DType, DimId, Module, Op, Space, TensorType, ValueId};

use super::body::{Body, Built, Linear, Program, Stored, Tensors};
use super::cx::Decoder;
use super::dims::Dims;
use super::drops::{Drops, Place};
use super::{experts, latent};
use crate::spec::{EmbeddingFactor, Kind, Mlp, MlpLayout, Projections, QkNorm, Residual, Sizes, Spec};
use crate::workload::Workload;

/// The program of a decoder.
pub(super) fn module(
    spec: &Spec,
    name: &str,
    workload: &Workload,
    dtype: DType,
    drops: Drops,
) -> Built<Module> {
    let mut space = Space::default();
    let dims = Dims::declare(&mut space, spec, workload);
    let input_major = spec.layout.input_major;
    let cache = workload.cache_type.unwrap_or(dtype);
    let tensors = Tensors { dtype, cache, heads: [dims.h, dims.k], width: dims.d, input_major };
    let mut program = Program::new(space, tensors, drops);
    let decoder = Decoder { spec, dims, logits: workload.logits, documents: workload.documents.as_ref() };

    let embed = program.function("embed", |f| decoder.embed(f))?;
    let mut blocks = Vec::new();
    for kind in &spec.kinds {
        let name = match spec.kinds.len() {
            1 => "block".to_owned(),
            _ => format!("block_{}", kind.label),
        };
        blocks.push(program.function(name, |f| decoder.block(kind, f))?);
    }
    let head = program.function("head", |f| decoder.head(f))?;
    program.function("main", |f| {
        let new = dims.c.map(|_| f.advance(dims.b, dims.pages)).transpose()?;
        let ids = f.tokens(workload.mode, [dims.b, dims.s])?;
        f.make_key()?;
        let mut x = f.call_with_key(Place::Embedding, embed, 0..1, &f.with_lengths(&[ids]))?;
        for (kind, layers) in &spec.runs {
            x = f.call_with_key(Place::Block, blocks[*kind], layers.clone(), &f.with_lengths(&[x]))?;
        }
        let arguments = f.with_lengths(&[x]);
        let logits = f.call(head, 0..1, &arguments)?[0];
        let mut outputs = vec![f.result(logits, "logits")];
        if let Some(new) = new {
            let token = f.next_token(new, logits, [dims.b, dims.v])?;
            outputs.push(f.result(token, "token"));
        }
        Ok(outputs)
    })?;
    Ok(program.finish(name))
}

impl Decoder<'_> {
    /// Takes the lengths of sequences where the step continues them.
    fn take_lengths(&self, f: &mut Body<'_>) {
        if self.dims.c.is_some() {
            f.take_lengths(self.dims.b, self.dims.pages);
        }
    }

    /// Token ids to the residual stream, with learned positions added.
    fn embed(&self, f: &mut Body<'_>) -> Built<[Output; 1]> {
        let Dims { b, s, m, v, p, .. } = self.dims;
        let Sizes { hidden, padding, .. } = self.spec.sizes;
        let ids = f.param(TensorType::new(DType::I32, [b, s]), Some("input_ids"));
        self.take_lengths(f);
        f.take_key(Place::Embedding);
        let mut x = f.embed(self.spec.layout.embedding, [v, m], padding, ids)?;
        if let Some(p) = p {
            let positions = f.positions(s)?;
            let embedded = f.embed("transformer.wpe.weight", [p, m], None, positions)?;
            x = f.add(x, embedded)?;
        }
        let factor = match self.spec.embedding {
            // The library computes the factor in f32 and rounds it to the table's element type.
            EmbeddingFactor::RootOfWidth => {
                rounded(rounded((hidden as f64).sqrt(), DType::F32), f.tensors.dtype)
            }
            EmbeddingFactor::Number(factor) => factor,
        };
        x = f.times(x, factor)?;
        x = f.drop(Place::Embedding, x)?;
        f.returns(x, "x")
    }

    fn block(&self, kind: &Kind, f: &mut Body<'_>) -> Built<[Output; 1]> {
        let Dims { b, s, m, .. } = self.dims;
        let norms = &self.spec.layout.norms;
        let norm = |f: &mut Body<'_>, x: ValueId, name: Option<&str>| match name {
            Some(name) => self.norm(f, x, &self.name(name), m),
            None => Ok(x),
        };
        let x = f.stream(&[b, s, m], "x");
        self.take_lengths(f);
        f.take_layer_key()?;

        let normed = norm(f, x, norms.before_attention)?;
        let out = match self.dims.latent {
            Some(dims) => latent::attend(self, dims, kind, f, normed)?,
            None => self.attend(kind, f, normed)?,
        };
        let out = norm(f, out, norms.after_attention)?;
        let out = f.times(out, self.spec.branch_factor)?;
        let attended = f.residual(x, out, "attended")?;

        let read = match self.spec.residual {
            Residual::Serial => attended,
            Residual::Parallel => x,
        };
        let normed = norm(f, read, norms.before_mlp)?;
        let out = match (kind.mlp, &self.spec.experts, self.dims.experts) {
            (Mlp::Experts, Some(spec), Some(dims)) => experts::mlp(self, spec, dims, f, normed)?,
            (Mlp::Experts | Mlp::Dense, _, _) => self.mlp(f, normed)?,
        };
        let out = norm(f, out, norms.after_mlp)?;
        let out = f.times(out, self.spec.branch_factor)?;
        let y = f.residual(attended, out, "y")?;
        f.returns(y, "y")
    }

    /// The last norm and the logits.
    fn head(&self, f: &mut Body<'_>) -> Built<[Output; 1]> {
        let Dims { b, s, m, v, .. } = self.dims;
        let layout = self.spec.layout;
        let x = f.stream(&[b, s, m], "x");
        self.take_lengths(f);
        let x = f.with_logits(self.logits, x, s)?;
        let normed = self.norm(f, x, layout.last_norm, m)?;
        let name = if self.spec.sizes.tied { layout.embedding } else { layout.head };
        let weight = f.weight(name, &[v, m])?;
        let mut logits = f.product(normed, weight)?;
        logits = f.times(logits, self.spec.logit_factor)?;
        if let Some(cap) = self.spec.logit_cap {
            logits = f.push(Op::Scale { factor: 1.0 / cap }, &[logits])?;
            logits = f.push(Op::Unary(Unary::Tanh), &[logits])?;
            logits = f.push(Op::Scale { factor: cap }, &[logits])?;
        }
        f.returns(logits, "logits")
    }

    /// Attention with its projections, `[b s m]` to `[b s m]`.
    fn attend(&self, kind: &Kind, f: &mut Body<'_>, x: ValueId) -> Built<ValueId> {
        let Dims { s, m, h, d, .. } = self.dims;
        let [q, k, v] = self.projections(f, x)?;
        let [mut q, mut k] = f.rotate(kind.rotary.as_ref(), (d, s), [q, k])?;
        if self.spec.qk_norm == QkNorm::Rotated && kind.rotary.is_some() {
            let ones = f.one(&[d])?;
            let norm = Op::RmsNorm { over: d, eps: self.spec.sizes.eps, offset: 0.0 };
            [q, k] = [f.push(norm.clone(), &[q, ones])?, f.push(norm, &[k, ones])?];
        }
        if let Some(growth) = kind.growth {
            q = f.grown(q, growth, s)?;
        }
        let mixed = self.mix(kind, f, [q, k, v])?;
        let (name, bias) = (self.name(self.spec.layout.attention_out), self.spec.bias.out);
        f.linear(mixed, Linear { name: &name, to: &[m], from: &[h, d], bias })
    }

    /// Queries, keys and values, `[b s heads d]`; queries and keys are normalised.
    fn projections(&self, f: &mut Body<'_>, x: ValueId) -> Built<[ValueId; 3]> {
        let Dims { m, h, k: kv, d, .. } = self.dims;
        let mut qkv = [x; 3];
        for (i, (part, heads)) in [("q", h), ("k", kv), ("v", kv)].into_iter().enumerate() {
            qkv[i] = match self.fused(i as u64) {
                None => {
                    let name = self.name(&format!("self_attn.{part}_proj"));
                    let bias = self.spec.bias.qkv;
                    f.linear(x, Linear { name: &name, to: &[heads, d], from: &[m], bias })?
                }
                Some((name, weight, bias)) => {
                    let dims = if f.tensors.input_major { [m, heads, d] } else { [heads, d, m] };
                    let weight = f.stored(&format!("{name}.weight"), weight, &dims)?;
                    let y = f.product(x, weight)?;
                    if self.spec.bias.qkv {
                        let bias = f.stored(&format!("{name}.bias"), bias, &[heads, d])?;
                        f.add(y, bias)?
                    } else {
                        y
                    }
                }
            };
        }
        let [q, k, v] = qkv;
        Ok([self.normalised(f, q, "q", h)?, self.normalised(f, k, "k", kv)?, v])
    }

    /// The part of a tensor of all three projections that projection `i` is, with its bias.
    fn fused(&self, i: u64) -> Option<(String, Stored, Stored)> {
        let Sizes { hidden: n, heads, kv_heads, head_dim: width, .. } = self.spec.sizes;
        let (q, kv) = (heads * width, kv_heads * width);
        let rows = match i {
            0 => 0..q,
            _ => q + (i - 1) * kv..q + i * kv,
        };
        let all = q + 2 * kv;
        let bias = Stored::part([all], [rows.clone()]);
        let (name, weight, bias) = match self.spec.layout.projections {
            Projections::Apart => return None,
            Projections::Rows(name) => (name, Stored::part([all, n], [rows, 0..n]), bias),
            Projections::Columns(name) => (name, Stored::part([n, all], [0..n, rows]), bias),
            Projections::HeadRows(name) => {
                let weight = Stored::part([heads, 3, width, n], [0..heads, i..i + 1, 0..width, 0..n]);
                let bias = Stored::part([heads, 3, width], [0..heads, i..i + 1, 0..width]);
                (name, weight.in_tensor([all, n]), bias.in_tensor([all]))
            }
        };
        Some((self.name(name), weight, bias))
    }

    /// Queries or keys after their norm, if there is one.
    fn normalised(&self, f: &mut Body<'_>, x: ValueId, part: &str, heads: DimId) -> Built<ValueId> {
        let Dims { b, s, d, .. } = self.dims;
        let name = self.name(&format!("self_attn.{part}_norm"));
        match self.spec.qk_norm {
            QkNorm::None | QkNorm::Rotated => Ok(x),
            QkNorm::Head => self.norm(f, x, &name, d),
            // The sum of squares is a separate operation, so ranks that hold some of the heads exchange one number per
            // token instead of the heads.
            QkNorm::Projection => {
                let weight = f.weight(&format!("{name}.weight"), &[heads, d])?;
                let dtype = sums_in(f.tensors.dtype);
                let wide = cast(f, x, dtype)?;
                let squares = f.einsum(wide, wide, &[b, s])?;
                let over = vec![heads, d];
                f.push(Op::RmsScale { over, eps: self.spec.sizes.eps }, &[x, squares, weight])
            }
        }
    }

    /// The MLP of all tokens, `[b s m]` to `[b s m]`.
    fn mlp(&self, f: &mut Body<'_>, x: ValueId) -> Built<ValueId> {
        let Dims { m, f: ffn, .. } = self.dims;
        let Sizes { activation, ffn: rows, hidden: columns, .. } = self.spec.sizes;
        let bias = self.spec.bias.mlp;
        let up = |f: &mut Body<'_>, part: &str| {
            f.linear(x, Linear { name: &self.name(part), to: &[ffn], from: &[m], bias })
        };
        let of_gated = |part: &str| format!("{}.{part}", self.spec.layout.gated);
        let (inner, down) = match self.spec.layout.mlp {
            MlpLayout::Gated => {
                let (gate, up) = (up(f, &of_gated("gate_proj"))?, up(f, &of_gated("up_proj"))?);
                (f.gated(activation, gate, up)?, of_gated("down_proj"))
            }
            MlpLayout::GatedRows => {
                let mut half = |start: u64| {
                    let stored = Stored::part([2 * rows, columns], [start..start + rows, 0..columns]);
                    let weight = f.stored(&self.name(&of_gated("gate_up_proj.weight")), stored, &[ffn, m])?;
                    f.product(x, weight)
                };
                let (gate, up) = (half(0)?, half(rows)?);
                (f.gated(activation, gate, up)?, of_gated("down_proj"))
            }
            MlpLayout::Plain([name, down]) => {
                let inner = up(f, name)?;
                (f.push(Op::Unary(activation), &[inner])?, down.to_owned())
            }
        };
        f.linear(inner, Linear { name: &self.name(&down), to: &[m], from: &[ffn], bias })
    }
}

/// `x` rounded to an element type, f32 at most; ties to even.
fn rounded(x: f64, dtype: DType) -> f64 {
    let digits = match dtype {
        DType::F64 | DType::F32 | DType::I32 | DType::Bool => 24,
        DType::F16 => 11,
        DType::BF16 => 8,
        DType::F8E4M3 => 4,
    };
    let unit = 2f64.powi(x.log2().floor() as i32 + 1 - digits);
    (x / unit).round_ties_even() * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_rounded_as_the_element_type_holds_them() {
        assert_eq!(rounded(3072f64.sqrt(), DType::BF16), 55.5);
        assert_eq!(rounded(3584f64.sqrt(), DType::BF16), 59.75);
        assert_eq!(rounded(3072f64.sqrt(), DType::F32), f64::from(3072f32.sqrt()));
        assert_eq!(rounded(64.0, DType::F16), 64.0);
    }
}
