//! Latent attention: queries, keys and values are projections of narrow latents; a separate part of each head is
//! rotated (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//!
//! ```text
//! q = [plain | rotary(rotated)]                of q_b · norm(q_a · x)
//! k = [plain | rotary(rotated of all heads)]   of kv_b · norm(c), and of x        c = kv_a · x
//! ```
//! Every head has its own keys and values, so attention has as many key/value heads as query heads.
//!
//! Steps that continue sequences keep latents, not keys and values. Attention is then over one key/value head, which all heads
//! share: the part of `kv_b` that makes keys is applied to queries, that of values to what attention gives (section 2.1.2).
//!
//! ```text
//! q = [kv_b · plain | rotary(rotated)]     cache = [norm(c) | rotary(rotated of all heads)]     v = kv_b · attention(q, cache, cache)
//! ```

use std::ops::Range;

use ithaca_ir::ops::{AttentionDims, Window};
use ithaca_ir::{DimId, Op, TensorType, ValueId};

use super::body::{Body, Built, Linear, Stored};
use super::cx::Decoder;
use super::dims::{Dims, LatentDims};
use crate::spec::{Kind, NormForm};

/// The library's norms of latents have their own epsilon.
const NORM: (NormForm, f64) = (NormForm::Rms { offset: 0.0 }, 1e-6);

/// Attention with its projections, `[b s m]` to `[b s m]`.
pub(super) fn attend(
    cx: &Decoder<'_>,
    dims: LatentDims,
    kind: &Kind,
    f: &mut Body<'_>,
    x: ValueId,
) -> Built<ValueId> {
    let Dims { s, m, h, d, .. } = cx.dims;
    let name = |part: &str| cx.name(&format!("self_attn.{part}"));

    let (from, latent, projection) = match dims.queries {
        None => (x, m, "q_proj.weight"),
        Some(queries) => {
            let (to, bias) = (&[queries], cx.spec.bias.qkv);
            let latent = f.linear(x, Linear { name: &name("q_a_proj"), to, from: &[m], bias })?;
            (f.norm(NORM, latent, &name("q_a_layernorm"), queries)?, queries, "q_b_proj.weight")
        }
    };
    let parts = [dims.plain, dims.rotated];
    let [plain_q, rotated_q] = of_heads(h, f, &name(projection), parts, (from, latent))?;

    let [latent, rotated_k] = latents(cx, dims, f, &name("kv_a_proj_with_mqa"), x)?;
    let latent = f.norm(NORM, latent, &name("kv_a_layernorm"), dims.keys)?;
    let [turned_q, turned_k] = f.rotate(kind.rotary.as_ref(), (dims.rotated, s), [rotated_q, rotated_k])?;
    let (weight, parts) = (name("kv_b_proj.weight"), [dims.plain, dims.value]);
    let concat = |over| Op::Window(Window::Concat { over });
    let mixed = match (f.continued, cx.dims.c, dims.cached) {
        (Some(continued), Some(capacity), Some([head, width])) => {
            let b = cx.dims.b;
            let [to_keys, to_values] = weights_of_heads(h, f, &weight, parts, dims.keys)?;
            let q = f.einsum(plain_q, to_keys, &[b, s, h, dims.keys])?;
            let q = f.push(concat(width), &[q, turned_q])?;
            let row = f.push(concat(width), &[latent, turned_k])?;
            let ty = TensorType::new(f.ty(row).dtype, [b, s, head, width]);
            let row = f.push_as(Op::Expand, &[row], ty)?;
            let of_attention = AttentionDims { heads: h, kv_heads: head, queries: s, keys: s, width };
            let attention = cx.attention(kind, of_attention);
            let cache = cx.dims.cache_of(&kind.mask, capacity);
            let mixed = f.attend_cached(attention, (continued, cache), &[q], &[("latent", row)])?[0];
            let mixed = f.push(Op::Window(Window::Cut { to: dims.keys, start: 0 }), &[mixed])?;
            f.einsum(mixed, to_values, &[b, s, h, dims.value])?
        }
        _ => {
            let [plain_k, v] = of_heads(h, f, &weight, parts, (latent, dims.keys))?;
            let q = f.push(concat(d), &[plain_q, turned_q])?;
            let k = f.push(concat(d), &[plain_k, turned_k])?;
            cx.mix(kind, f, [q, k, v])?
        }
    };
    let [rows, heads, width] = [m, h, dims.value].map(|d| f.space().size(d));
    let stored = Stored { shape: vec![rows, heads * width], ..Stored::default() };
    let weight = f.stored(&name("o_proj.weight"), stored, &[m, h, dims.value])?;
    let out = f.product(mixed, weight)?;
    if !cx.spec.bias.out {
        return Ok(out);
    }
    let bias = f.weight(&name("o_proj.bias"), &[m])?;
    f.add(out, bias)
}

/// The latent of keys and values, and the rotated part of keys: rows of one product with `x`.
fn latents(
    cx: &Decoder<'_>,
    dims: LatentDims,
    f: &mut Body<'_>,
    name: &str,
    x: ValueId,
) -> Built<[ValueId; 2]> {
    let m = cx.dims.m;
    let [n, rotated, columns] = [dims.keys, dims.rotated, m].map(|d| f.space().size(d));
    let mut latents = [x; 2];
    for (i, (part, rows)) in [(dims.keys, 0..n), (dims.rotated, n..n + rotated)].into_iter().enumerate() {
        let stored = Stored::part([n + rotated, columns], [rows.clone(), 0..columns]);
        let weight = f.stored(&format!("{name}.weight"), stored, &[part, m])?;
        latents[i] = f.product(x, weight)?;
        if cx.spec.bias.qkv {
            let stored = Stored::part([n + rotated], [rows]);
            let bias = f.stored(&format!("{name}.bias"), stored, &[part])?;
            latents[i] = f.add(latents[i], bias)?;
        }
    }
    Ok(latents)
}

/// Both parts of all heads: products of `x` with rows of the matrix `name`, whose columns are dimension `from`.
fn of_heads(
    h: DimId,
    f: &mut Body<'_>,
    name: &str,
    parts: [DimId; 2],
    (x, from): (ValueId, DimId),
) -> Built<[ValueId; 2]> {
    let [first, second] = weights_of_heads(h, f, name, parts, from)?;
    Ok([f.product(x, first)?, f.product(x, second)?])
}

/// The rows of both parts of all heads of the matrix `name`, whose columns are dimension `from`.
fn weights_of_heads(
    h: DimId,
    f: &mut Body<'_>,
    name: &str,
    parts: [DimId; 2],
    from: DimId,
) -> Built<[ValueId; 2]> {
    let [heads, first, second, columns] = [h, parts[0], parts[1], from].map(|d| f.space().size(d));
    let all = first + second;
    let mut weight = |part: DimId, rows: Range<u64>| {
        let stored = Stored::part([heads, all, columns], [0..heads, rows, 0..columns]);
        f.stored(name, stored.in_tensor([heads * all, columns]), &[h, part, from])
    };
    Ok([weight(parts[0], 0..first)?, weight(parts[1], first..all)?])
}
