//! Latent attention: queries, keys and values are projections of narrow latents; a separate part of each head is
//! rotated (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//!
//! ```text
//! q = [plain | rotary(rotated)]                of q_b · norm(q_a · x)
//! k = [plain | rotary(rotated of all heads)]   of kv_b · norm(c), and of x        c = kv_a · x
//! ```
//! Every head has its own keys and values, so attention has as many key/value heads as query heads.

use ithaca_ir::ops::Window;
use ithaca_ir::{DimId, Op, ValueId};

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
    let parts = [dims.plain, dims.value];
    let [plain_k, v] = of_heads(h, f, &name("kv_b_proj.weight"), parts, (latent, dims.keys))?;

    let [turned_q, turned_k] = f.rotate(kind.rotary.as_ref(), (dims.rotated, s), [rotated_q, rotated_k])?;
    let q = f.push(Op::Window(Window::Concat { over: d }), &[plain_q, turned_q])?;
    let k = f.push(Op::Window(Window::Concat { over: d }), &[plain_k, turned_k])?;
    let mixed = cx.mix(kind, f, [q, k, v])?;
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
    let [heads, first, second, columns] = [h, parts[0], parts[1], from].map(|d| f.space().size(d));
    let all = first + second;
    let mut out = [x; 2];
    for (i, (part, rows)) in parts.into_iter().zip([0..first, first..all]).enumerate() {
        let stored = Stored::part([heads, all, columns], [0..heads, rows, 0..columns]);
        let stored = stored.in_tensor([heads * all, columns]);
        let weight = f.stored(name, stored, &[h, part, from])?;
        out[i] = f.product(x, weight)?;
    }
    Ok(out)
}
