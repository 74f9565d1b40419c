//! Blocks of GPT-2: layer norms, biases everywhere, matrices stored `[input, output]`.
//!
//! ```text
//! x += c_proj · attention(q, k, v)        of c_attn · layer_norm(x), which holds queries, keys and values
//! x += c_proj · activation(c_fc · x)      of layer_norm(x)
//! ```

use ithaca_ir::module::Output;
use ithaca_ir::{Function, FunctionBuilder, Op, ValueId};

use super::cx::Cx;
use super::dims::Dims;
use super::drops::Place;
use super::tensors::Built;
use crate::spec::Kind;

const LAYER: &str = "transformer.h.{layer}";

pub(super) fn block(cx: &Cx<'_>, kind: &Kind, mut f: FunctionBuilder<'_>) -> Built<Function> {
    let Dims { b, s, m, h, d, f: ffn, .. } = cx.dims;
    let x = f.param(cx.tensors.ty(&[b, s, m]), Some("x"));
    let key = cx.drops.layer_key(&mut f)?;

    let normed = cx.layer_norm(&mut f, x, &format!("{LAYER}.ln_1"))?;
    let qkv = projections(cx, &mut f, normed)?;
    let mixed = cx.attention(&mut f, (kind, key), qkv)?;
    f.name(mixed, Some("mixed"));
    let weight = cx.tensors.weight(&mut f, &format!("{LAYER}.attn.c_proj.weight"), &[h, d, m])?;
    let out = f.einsum(mixed, weight, &[b, s, m])?;
    let bias = cx.tensors.weight(&mut f, &format!("{LAYER}.attn.c_proj.bias"), &[m])?;
    let out = f.add(out, bias)?;
    let out = cx.drops.drop(&mut f, key, Place::Block, out)?;
    let x = f.add(x, out)?;
    f.name(x, Some("attended"));

    let normed = cx.layer_norm(&mut f, x, &format!("{LAYER}.ln_2"))?;
    let weight = cx.tensors.weight(&mut f, &format!("{LAYER}.mlp.c_fc.weight"), &[m, ffn])?;
    let inner = f.einsum(normed, weight, &[b, s, ffn])?;
    let bias = cx.tensors.weight(&mut f, &format!("{LAYER}.mlp.c_fc.bias"), &[ffn])?;
    let inner = f.add(inner, bias)?;
    let inner = f.push(Op::Unary(cx.activation()), &[inner])?;
    let weight = cx.tensors.weight(&mut f, &format!("{LAYER}.mlp.c_proj.weight"), &[ffn, m])?;
    let out = f.einsum(inner, weight, &[b, s, m])?;
    let bias = cx.tensors.weight(&mut f, &format!("{LAYER}.mlp.c_proj.bias"), &[m])?;
    let out = f.add(out, bias)?;
    let out = cx.drops.drop(&mut f, key, Place::Block, out)?;
    let x = f.add(x, out)?;
    f.name(x, Some("y"));
    Ok(f.finish([Output { name: None, value: x }]))
}

/// Queries, keys and values, `[b s h d]`: thirds of the columns of `c_attn`.
fn projections(cx: &Cx<'_>, f: &mut FunctionBuilder<'_>, x: ValueId) -> Built<[ValueId; 3]> {
    let Dims { b, s, m, h, d, .. } = cx.dims;
    let n = cx.spec.hidden;
    let mut out = [x; 3];
    for (i, part) in ["q", "k", "v"].into_iter().enumerate() {
        let columns = n * i as u64..n * (i as u64 + 1);
        let name = format!("{LAYER}.attn.c_attn");
        let window = vec![0..n, columns.clone()];
        let weight = cx.tensors.window(f, &format!("{name}.weight"), vec![n, 3 * n], window, &[m, h, d])?;
        let y = f.einsum(x, weight, &[b, s, h, d])?;
        let bias = cx.tensors.window(f, &format!("{name}.bias"), vec![3 * n], vec![columns], &[h, d])?;
        out[i] = f.add(y, bias)?;
        f.name(out[i], Some(part));
    }
    Ok(out)
}
