//! Blocks of the families with layer norms, rotary positions and an MLP without gate.
//!
//! ```text
//! y  = x + dense · attention(rotary(q), rotary(k), v)    of layer_norm(x)
//! y += down · activation(up · z)                         of layer_norm(y), or of layer_norm(x) where both are parallel
//! ```

use ithaca_ir::module::Output;
use ithaca_ir::{Function, FunctionBuilder, Op, ValueId};

use super::cx::{Cx, LAYER};
use super::dims::Dims;
use super::drops::{Key, Place};
use super::gated;
use super::tensors::Built;
use crate::spec::{Kind, Residual};

/// The names of a family's tensors, and how it stores projections.
pub(super) struct Layout {
    layer: &'static str,
    projections: Projections,
    up: &'static str,
    down: &'static str,
}

enum Projections {
    /// A matrix each.
    Apart,
    /// Queries, keys and values of a head next to each other, head after head.
    Interleaved,
}

pub(super) const STARCODER2: Layout =
    Layout { layer: LAYER, projections: Projections::Apart, up: "mlp.c_fc", down: "mlp.c_proj" };

pub(super) const GPT_NEOX: Layout = Layout {
    layer: "gpt_neox.layers.{layer}",
    projections: Projections::Interleaved,
    up: "mlp.dense_h_to_4h",
    down: "mlp.dense_4h_to_h",
};

pub(super) fn block(
    cx: &Cx<'_>,
    kind: &Kind,
    layout: &Layout,
    mut f: FunctionBuilder<'_>,
) -> Built<Function> {
    let Dims { b, s, m, .. } = cx.dims;
    let layer = layout.layer;
    let x = f.param(cx.tensors.ty(&[b, s, m]), Some("x"));
    let key = cx.drops.layer_key(&mut f)?;

    let normed = cx.layer_norm(&mut f, x, &format!("{layer}.input_layernorm"))?;
    let out = match layout.projections {
        Projections::Apart => gated::attend(cx, (kind, key), &mut f, normed)?,
        Projections::Interleaved => attend_interleaved(cx, (kind, key), layer, &mut f, normed)?,
    };
    let out = cx.drops.drop(&mut f, key, Place::Block, out)?;
    let attended = f.add(x, out)?;
    f.name(attended, Some("attended"));

    let read = match cx.spec.residual {
        Residual::Serial => attended,
        Residual::Parallel => x,
    };
    let normed = cx.layer_norm(&mut f, read, &format!("{layer}.post_attention_layernorm"))?;
    let out = mlp(cx, layout, &mut f, normed)?;
    let out = cx.drops.drop(&mut f, key, Place::Block, out)?;
    let x = f.add(attended, out)?;
    f.name(x, Some("y"));
    Ok(f.finish([Output { name: None, value: x }]))
}

/// Attention whose projections are `query_key_value`, rows `[heads, 3, width]`, and `dense`.
fn attend_interleaved(
    cx: &Cx<'_>,
    (kind, key): (&Kind, Key),
    layer: &str,
    f: &mut FunctionBuilder<'_>,
    x: ValueId,
) -> Built<ValueId> {
    let Dims { b, s, m, h, d, .. } = cx.dims;
    let (heads, width, n) = (cx.spec.heads, cx.spec.head_dim, cx.spec.hidden);
    let name = format!("{layer}.attention.query_key_value");
    let mut qkv = [x; 3];
    for (i, part) in (0..).zip(&mut qkv) {
        let window = vec![0..heads, i..i + 1, 0..width, 0..n];
        let weight = format!("{name}.weight");
        let stored = vec![3 * heads * width, n];
        let weight = cx.tensors.view(f, &weight, stored, vec![heads, 3, width, n], window, &[h, d, m])?;
        *part = f.einsum(x, weight, &[b, s, h, d])?;
        if cx.spec.bias.qkv {
            let window = vec![0..heads, i..i + 1, 0..width];
            let (bias, stored) = (format!("{name}.bias"), vec![3 * heads * width]);
            let bias = cx.tensors.view(f, &bias, stored, vec![heads, 3, width], window, &[h, d])?;
            *part = f.add(*part, bias)?;
        }
    }
    let qkv = cx.rotate(f, kind, qkv)?;
    let mixed = cx.attention(f, (kind, key), qkv)?;
    f.name(mixed, Some("mixed"));
    let name = format!("{layer}.attention.dense");
    let weight = cx.tensors.weight(f, &format!("{name}.weight"), &[m, h, d])?;
    let out = f.einsum(mixed, weight, &[b, s, m])?;
    match cx.spec.bias.out {
        true => cx.tensors.biased(f, out, &name, &[m]),
        false => Ok(out),
    }
}

/// `down · activation(up · x)`.
fn mlp(cx: &Cx<'_>, layout: &Layout, f: &mut FunctionBuilder<'_>, x: ValueId) -> Built<ValueId> {
    let Dims { b, s, m, f: ffn, .. } = cx.dims;
    let mut y = x;
    for (part, from, to) in [(layout.up, m, ffn), (layout.down, ffn, m)] {
        if part == layout.down {
            y = f.push(Op::Unary(cx.activation()), &[y])?;
        }
        let name = format!("{}.{part}", layout.layer);
        let weight = cx.tensors.weight(f, &format!("{name}.weight"), &[to, from])?;
        y = f.einsum(y, weight, &[b, s, to])?;
        if cx.spec.bias.mlp {
            y = cx.tensors.biased(f, y, &name, &[to])?;
        }
    }
    Ok(y)
}
