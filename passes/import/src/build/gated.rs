//! Blocks of the families with root-mean-square norms, gated MLP and rotary positions.
//!
//! ```text
//! x += o_proj · attention(rotary(norm(q)), rotary(norm(k)), v)    of rms_norm(x)
//! x += down · (activation(gate) · up)                             of rms_norm(x)
//! ```
//!
//! Some families have norms behind attention and MLP too, or there only.

use ithaca_ir::module::Output;
use ithaca_ir::ops::Binary;
use ithaca_ir::{DType, DimId, Function, FunctionBuilder, Op, ValueId};

use super::cx::{Cx, LAYER};
use super::dims::Dims;
use super::drops::{Key, Place};
use super::tensors::Built;
use super::{experts, latent};
use crate::spec::{Family, Kind, Mlp, QkNorm};

/// The names of a block's norms, where it has them.
struct Norms {
    before_attention: Option<&'static str>,
    after_attention: Option<&'static str>,
    before_mlp: Option<&'static str>,
    after_mlp: Option<&'static str>,
}

impl Norms {
    fn of(family: Family) -> Self {
        let before = Norms {
            before_attention: Some("input_layernorm"),
            after_attention: None,
            before_mlp: Some("post_attention_layernorm"),
            after_mlp: None,
        };
        let after = (Some("post_attention_layernorm"), Some("post_feedforward_layernorm"));
        match family {
            Family::Olmo2 => Norms {
                before_attention: None,
                after_attention: after.0,
                before_mlp: None,
                after_mlp: after.1,
            },
            Family::Gemma2 => Norms {
                before_mlp: Some("pre_feedforward_layernorm"),
                after_attention: after.0,
                after_mlp: after.1,
                ..before
            },
            Family::Llama
            | Family::Mistral
            | Family::Qwen2
            | Family::Qwen3
            | Family::Phi3
            | Family::Starcoder2
            | Family::GptNeox
            | Family::Gpt2
            | Family::Mixtral
            | Family::Qwen3Moe
            | Family::DeepseekV3 => before,
        }
    }
}

pub(super) fn block(cx: &Cx<'_>, kind: &Kind, mut f: FunctionBuilder<'_>) -> Built<Function> {
    let Dims { b, s, m, .. } = cx.dims;
    let norms = Norms::of(cx.spec.family);
    let norm = |f: &mut FunctionBuilder<'_>, x: ValueId, name: Option<&str>| match name {
        Some(name) => cx.rms_norm(f, x, &format!("{LAYER}.{name}.weight"), m),
        None => Ok(x),
    };
    let x = f.param(cx.tensors.ty(&[b, s, m]), Some("x"));
    let key = cx.drops.layer_key(&mut f)?;

    let normed = norm(&mut f, x, norms.before_attention)?;
    let out = match cx.dims.latent {
        Some(dims) => latent::attend(cx, dims, (kind, key), &mut f, normed)?,
        None => attend(cx, (kind, key), &mut f, normed)?,
    };
    let out = norm(&mut f, out, norms.after_attention)?;
    let out = cx.drops.drop(&mut f, key, Place::Block, out)?;
    let x = f.add(x, out)?;
    f.name(x, Some("attended"));

    let normed = norm(&mut f, x, norms.before_mlp)?;
    let out = match (kind.mlp, &cx.spec.experts, cx.dims.experts) {
        (Mlp::Experts, Some(spec), Some(dims)) => experts::mlp(cx, spec, dims, &mut f, normed)?,
        (Mlp::Experts | Mlp::Dense, _, _) => mlp(cx, &mut f, normed)?,
    };
    let out = norm(&mut f, out, norms.after_mlp)?;
    let out = cx.drops.drop(&mut f, key, Place::Block, out)?;
    let x = f.add(x, out)?;
    f.name(x, Some("y"));
    Ok(f.finish([Output { name: None, value: x }]))
}

/// Attention with its projections, `[b s m]` to `[b s m]`.
pub(super) fn attend(
    cx: &Cx<'_>,
    (kind, key): (&Kind, Key),
    f: &mut FunctionBuilder<'_>,
    x: ValueId,
) -> Built<ValueId> {
    let Dims { b, s, m, h, d, .. } = cx.dims;
    let qkv = projections(cx, kind, f, x)?;
    let mixed = cx.attention(f, (kind, key), qkv)?;
    f.name(mixed, Some("mixed"));
    let name = format!("{LAYER}.self_attn.o_proj");
    let weight = cx.tensors.weight(f, &format!("{name}.weight"), &[m, h, d])?;
    let out = f.einsum(mixed, weight, &[b, s, m])?;
    match cx.spec.bias.out {
        true => cx.tensors.biased(f, out, &name, &[m]),
        false => Ok(out),
    }
}

/// Queries, keys and values, `[b s heads d]`; positions are turned into queries and keys.
fn projections(cx: &Cx<'_>, kind: &Kind, f: &mut FunctionBuilder<'_>, x: ValueId) -> Built<[ValueId; 3]> {
    let Dims { b, s, h, k: kv, d, .. } = cx.dims;
    let mut out = [x; 3];
    for (i, (part, heads)) in [("q", h), ("k", kv), ("v", kv)].into_iter().enumerate() {
        let weight = projection_weight(cx, f, part, heads)?;
        let y = f.einsum(x, weight, &[b, s, heads, d])?;
        let name = format!("{LAYER}.self_attn.{part}_proj");
        out[i] = match cx.spec.bias.qkv {
            true => cx.tensors.biased(f, y, &name, &[heads, d])?,
            false => y,
        };
    }
    let [mut q, mut k, v] = out;
    let names = ["q", "k"].map(|part| format!("{LAYER}.self_attn.{part}_norm.weight"));
    match cx.spec.qk_norm {
        QkNorm::None => {}
        QkNorm::Head => {
            q = cx.rms_norm(f, q, &names[0], d)?;
            k = cx.rms_norm(f, k, &names[1], d)?;
        }
        QkNorm::Projection => {
            q = projection_norm(cx, f, q, &names[0], h)?;
            k = projection_norm(cx, f, k, &names[1], kv)?;
        }
    }
    cx.rotate(f, kind, [q, k, v])
}

/// A norm over all heads of a token. The squares are summed by themselves, so ranks that hold some of the heads exchange
/// one number for each token, and not the heads.
fn projection_norm(
    cx: &Cx<'_>,
    f: &mut FunctionBuilder<'_>,
    x: ValueId,
    name: &str,
    heads: DimId,
) -> Built<ValueId> {
    let Dims { b, s, d, .. } = cx.dims;
    let weight = cx.tensors.weight(f, name, &[heads, d])?;
    let wide = match cx.tensors.dtype {
        DType::F64 | DType::F32 => x,
        DType::BF16 | DType::F16 | DType::I32 | DType::Bool => f.push(Op::Cast { to: DType::F32 }, &[x])?,
    };
    let squares = f.einsum(wide, wide, &[b, s])?;
    f.push(Op::RmsScale { over: vec![heads, d], eps: cx.spec.eps }, &[x, squares, weight])
}

/// The matrix of queries, keys or values: a tensor of its own, or rows of a fused one (queries, keys, values).
fn projection_weight(cx: &Cx<'_>, f: &mut FunctionBuilder<'_>, part: &str, heads: DimId) -> Built<ValueId> {
    let Dims { m, d, .. } = cx.dims;
    let dims = [heads, d, m];
    match cx.spec.family {
        Family::Phi3 => {
            let (q, kv) = (cx.spec.heads * cx.spec.head_dim, cx.spec.kv_heads * cx.spec.head_dim);
            let rows = match part {
                "q" => 0..q,
                "k" => q..q + kv,
                _ => q + kv..q + 2 * kv,
            };
            let name = format!("{LAYER}.self_attn.qkv_proj.weight");
            let stored = vec![q + 2 * kv, cx.spec.hidden];
            cx.tensors.window(f, &name, stored, vec![rows, 0..cx.spec.hidden], &dims)
        }
        Family::Llama
        | Family::Mistral
        | Family::Qwen2
        | Family::Qwen3
        | Family::Gemma2
        | Family::Olmo2
        | Family::Starcoder2
        | Family::GptNeox
        | Family::Gpt2
        | Family::Mixtral
        | Family::Qwen3Moe
        | Family::DeepseekV3 => cx.tensors.weight(f, &format!("{LAYER}.self_attn.{part}_proj.weight"), &dims),
    }
}

/// `down · (activation(gate · x) * (up · x))`.
fn mlp(cx: &Cx<'_>, f: &mut FunctionBuilder<'_>, x: ValueId) -> Built<ValueId> {
    let Dims { b, s, m, f: ffn, .. } = cx.dims;
    let mut parts = [x; 2];
    for (i, part) in ["gate", "up"].into_iter().enumerate() {
        let name = format!("{LAYER}.mlp.{part}_proj");
        let weight = match cx.spec.family {
            Family::Phi3 => {
                let (rows, columns) = (cx.spec.ffn, cx.spec.hidden);
                let start = rows * i as u64;
                let window = vec![start..start + rows, 0..columns];
                let name = format!("{LAYER}.mlp.gate_up_proj.weight");
                cx.tensors.window(f, &name, vec![2 * rows, columns], window, &[ffn, m])?
            }
            Family::Llama
            | Family::Mistral
            | Family::Qwen2
            | Family::Qwen3
            | Family::Gemma2
            | Family::Olmo2
            | Family::Starcoder2
            | Family::GptNeox
            | Family::Gpt2
            | Family::Mixtral
            | Family::Qwen3Moe
            | Family::DeepseekV3 => cx.tensors.weight(f, &format!("{name}.weight"), &[ffn, m])?,
        };
        let y = f.einsum(x, weight, &[b, s, ffn])?;
        parts[i] = match cx.spec.bias.mlp {
            true => cx.tensors.biased(f, y, &name, &[ffn])?,
            false => y,
        };
    }
    let [gate, up] = parts;
    let gate = f.push(Op::Unary(cx.activation()), &[gate])?;
    let inner = f.push(Op::Binary(Binary::Mul), &[gate, up])?;
    let name = format!("{LAYER}.mlp.down_proj");
    let weight = cx.tensors.weight(f, &format!("{name}.weight"), &[m, ffn])?;
    let out = f.einsum(inner, weight, &[b, s, m])?;
    match cx.spec.bias.mlp {
        true => cx.tensors.biased(f, out, &name, &[m]),
        false => Ok(out),
    }
}
