//! Blocks of the families with root-mean-square norms, gated MLP and rotary positions.
//!
//! ```text
//! x += o_proj · attention(rotary(norm(q)), rotary(norm(k)), v)    of rms_norm(x)
//! x += down · (activation(gate) · up)                             of rms_norm(x)
//! ```

use ithaca_ir::module::Output;
use ithaca_ir::ops::{Binary, Rotary};
use ithaca_ir::{DimId, Function, FunctionBuilder, Op, ValueId};

use super::{Built, Cx, Dims};
use crate::import::family::Family;
use crate::import::spec::Kind;

const LAYER: &str = "model.layers.{layer}";

pub(super) fn block(cx: &Cx<'_>, kind: &Kind, mut f: FunctionBuilder<'_>) -> Built<Function> {
    let Dims { b, s, m, h, d, .. } = cx.dims;
    let x = f.param(cx.ty(&[b, s, m]), Some("x"));

    let normed = cx.rms_norm(&mut f, x, &format!("{LAYER}.input_layernorm.weight"), m)?;
    let qkv = projections(cx, kind, &mut f, normed)?;
    let mixed = cx.attention(&mut f, kind, qkv)?;
    f.name(mixed, Some("mixed"));
    let name = format!("{LAYER}.self_attn.o_proj");
    let weight = cx.weight(&mut f, &format!("{name}.weight"), &[m, h, d])?;
    let out = f.einsum(mixed, weight, &[b, s, m])?;
    let out = match cx.spec.bias.out {
        true => biased(cx, &mut f, out, &name, &[m])?,
        false => out,
    };
    let x = f.add(x, out)?;
    f.name(x, Some("attended"));

    let normed = cx.rms_norm(&mut f, x, &format!("{LAYER}.post_attention_layernorm.weight"), m)?;
    let out = mlp(cx, &mut f, normed)?;
    let x = f.add(x, out)?;
    f.name(x, Some("y"));
    Ok(f.finish([Output { name: None, value: x }]))
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
            true => biased(cx, f, y, &name, &[heads, d])?,
            false => y,
        };
    }
    let [mut q, mut k, v] = out;
    if cx.spec.qk_norm {
        q = cx.rms_norm(f, q, &format!("{LAYER}.self_attn.q_norm.weight"), d)?;
        k = cx.rms_norm(f, k, &format!("{LAYER}.self_attn.k_norm.weight"), d)?;
    }
    if let Some(rotary) = &kind.rotary {
        let positions = cx.positions(f)?;
        let op = Op::Rotary(Rotary {
            over: d,
            width: rotary.width,
            theta: rotary.theta,
            scaling: rotary.scaling.clone(),
        });
        q = f.push(op.clone(), &[q, positions])?;
        k = f.push(op, &[k, positions])?;
    }
    for (value, name) in [(q, "q"), (k, "k"), (v, "v")] {
        f.name(value, Some(name));
    }
    Ok([q, k, v])
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
            cx.window(f, &name, stored, vec![rows, 0..cx.spec.hidden], &dims)
        }
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 | Family::Gpt2 => {
            cx.weight(f, &format!("{LAYER}.self_attn.{part}_proj.weight"), &dims)
        }
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
                cx.window(f, &name, vec![2 * rows, columns], window, &[ffn, m])?
            }
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 | Family::Gpt2 => {
                cx.weight(f, &format!("{name}.weight"), &[ffn, m])?
            }
        };
        let y = f.einsum(x, weight, &[b, s, ffn])?;
        parts[i] = match cx.spec.bias.mlp {
            true => biased(cx, f, y, &name, &[ffn])?,
            false => y,
        };
    }
    let [gate, up] = parts;
    let gate = f.push(Op::Unary(cx.activation()), &[gate])?;
    let inner = f.push(Op::Binary(Binary::Mul), &[gate, up])?;
    let name = format!("{LAYER}.mlp.down_proj");
    let weight = cx.weight(f, &format!("{name}.weight"), &[m, ffn])?;
    let out = f.einsum(inner, weight, &[b, s, m])?;
    match cx.spec.bias.mlp {
        true => biased(cx, f, out, &name, &[m]),
        false => Ok(out),
    }
}

fn biased(
    cx: &Cx<'_>,
    f: &mut FunctionBuilder<'_>,
    x: ValueId,
    name: &str,
    dims: &[DimId],
) -> Built<ValueId> {
    let bias = cx.weight(f, &format!("{name}.bias"), dims)?;
    f.add(x, bias)
}
