//! Latent attention: queries, keys and values come from narrow latents, and a part of each head is rotated apart
//! (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//!
//! ```text
//! q = [plain | rotary(rotated)]                of q_b · norm(q_a · x)
//! k = [plain | rotary(rotated of all heads)]   of kv_b · norm(c), and of x        c = kv_a · x
//! ```
//! Every head has keys and values of its own, so attention is that of a model with as many key/value heads.

use std::ops::Range;

use ithaca_ir::ops::{Binding, Rotary, Turn, Window};
use ithaca_ir::{DimId, FunctionBuilder, Op, ValueId};

use super::cx::{Cx, LAYER};
use super::dims::{self, LatentDims};
use super::drops::Key;
use super::tensors::Built;
use crate::spec::Kind;

/// The library's norms of latents have an epsilon of their own.
const EPS: f64 = 1e-6;

/// Attention with its projections, `[b s m]` to `[b s m]`.
pub(super) fn attend(
    cx: &Cx<'_>,
    dims: LatentDims,
    (kind, key): (&Kind, Key),
    f: &mut FunctionBuilder<'_>,
    x: ValueId,
) -> Built<ValueId> {
    let dims::Dims { b, s, m, h, d, .. } = cx.dims;
    let name = |part: &str| format!("{LAYER}.self_attn.{part}");
    let size = |f: &FunctionBuilder<'_>, d: DimId| f.space().size(d);

    let (from, latent, projection) = match dims.queries {
        None => (x, m, "q_proj"),
        Some(queries) => {
            let weight = cx.tensors.weight(f, &name("q_a_proj.weight"), &[queries, m])?;
            let mut latent = f.einsum(x, weight, &[b, s, queries])?;
            if cx.spec.bias.qkv {
                latent = cx.tensors.biased(f, latent, &name("q_a_proj"), &[queries])?;
            }
            (norm(cx, f, latent, &name("q_a_layernorm.weight"), queries)?, queries, "q_b_proj")
        }
    };
    let parts = [dims.plain, dims.rotated];
    let mut of_queries = [x; 2];
    for (i, part) in parts.into_iter().enumerate() {
        let weight = of_heads(cx, f, &name(&format!("{projection}.weight")), (parts, i), latent)?;
        of_queries[i] = f.einsum(from, weight, &[b, s, h, part])?;
    }

    let (n, rotated) = (size(f, dims.keys), size(f, dims.rotated));
    let mut latents = [x; 2];
    for (i, (part, rows)) in [(dims.keys, 0..n), (dims.rotated, n..n + rotated)].into_iter().enumerate() {
        latents[i] = project(cx, f, x, (n + rotated, rows), part)?;
    }
    let [latent, shared] = latents;
    let latent = norm(cx, f, latent, &name("kv_a_layernorm.weight"), dims.keys)?;
    let parts = [dims.plain, dims.value];
    let mut of_latent = [x; 2];
    for (i, part) in parts.into_iter().enumerate() {
        let weight = of_heads(cx, f, &name("kv_b_proj.weight"), (parts, i), dims.keys)?;
        of_latent[i] = f.einsum(latent, weight, &[b, s, h, part])?;
    }
    let [plain, v] = of_latent;

    let [turned, shared] = rotate(cx, f, kind, dims.rotated, [of_queries[1], shared])?;
    let q = f.push(Op::Window(Window::Concat { over: d }), &[of_queries[0], turned])?;
    let k = f.push(Op::Window(Window::Concat { over: d }), &[plain, shared])?;
    for (value, name) in [(q, "q"), (k, "k"), (v, "v")] {
        f.name(value, Some(name));
    }
    let mixed = cx.attention(f, (kind, key), [q, k, v])?;
    f.name(mixed, Some("mixed"));
    let stored = vec![size(f, m), size(f, h) * size(f, dims.value)];
    let weight = cx.tensors.window(f, &name("o_proj.weight"), stored, Vec::new(), &[m, h, dims.value])?;
    let out = f.einsum(mixed, weight, &[b, s, m])?;
    match cx.spec.bias.out {
        true => cx.tensors.biased(f, out, &name("o_proj"), &[m]),
        false => Ok(out),
    }
}

/// Rows of the matrix that makes both latents from x, and what they make.
fn project(
    cx: &Cx<'_>,
    f: &mut FunctionBuilder<'_>,
    x: ValueId,
    (all, rows): (u64, Range<u64>),
    part: DimId,
) -> Built<ValueId> {
    let dims::Dims { b, s, m, .. } = cx.dims;
    let name = format!("{LAYER}.self_attn.kv_a_proj_with_mqa");
    let columns = f.space().size(m);
    let window = vec![rows.clone(), 0..columns];
    let weight = cx.tensors.window(f, &format!("{name}.weight"), vec![all, columns], window, &[part, m])?;
    let y = f.einsum(x, weight, &[b, s, part])?;
    match cx.spec.bias.qkv {
        false => Ok(y),
        true => {
            let window = std::iter::once(rows).collect();
            let binding = Binding { stored: vec![all], window, ..Binding::named(format!("{name}.bias")) };
            let bias = f.weight(binding, cx.tensors.ty(&[part]))?;
            f.add(y, bias)
        }
    }
}

/// Rows of a matrix from a latent to both parts of all heads: those of part `i`.
fn of_heads(
    cx: &Cx<'_>,
    f: &mut FunctionBuilder<'_>,
    name: &str,
    (parts, i): ([DimId; 2], usize),
    latent: DimId,
) -> Built<ValueId> {
    let h = cx.dims.h;
    let [heads, first, second, columns] = [h, parts[0], parts[1], latent].map(|d| f.space().size(d));
    let rows = if i == 0 { 0..first } else { first..first + second };
    let view = vec![heads, first + second, columns];
    let window = vec![0..heads, rows, 0..columns];
    cx.tensors.view(f, name, vec![heads * (first + second), columns], view, window, &[h, parts[i], latent])
}

fn norm(cx: &Cx<'_>, f: &mut FunctionBuilder<'_>, x: ValueId, name: &str, over: DimId) -> Built<ValueId> {
    let weight = cx.tensors.weight(f, name, &[over])?;
    f.push(Op::RmsNorm { over, eps: EPS, offset: 0.0 }, &[x, weight])
}

/// Queries and keys turned by their positions.
fn rotate(
    cx: &Cx<'_>,
    f: &mut FunctionBuilder<'_>,
    kind: &Kind,
    over: DimId,
    values: [ValueId; 2],
) -> Built<[ValueId; 2]> {
    let Some(rotary) = &kind.rotary else { return Ok(values) };
    let positions = cx.positions(f)?;
    let op = Op::Rotary(Rotary {
        over,
        width: rotary.width,
        theta: rotary.theta,
        scaling: rotary.scaling.clone(),
        pairs: rotary.pairs,
        turn: Turn::Forth,
    });
    let [q, k] = values;
    Ok([f.push(op.clone(), &[q, positions])?, f.push(op, &[k, positions])?])
}
