//! A mixture of experts in place of the MLP.
//!
//! ```text
//! gates, choices = route(router · x)
//! y = combine(down · (activation(gate · slots) · (up · slots)), gates) + shared(x)    of slots = dispatch(x)
//! ```

use ithaca_ir::ops::Binary;
use ithaca_ir::ops::experts::{Capacity, Experts, Route, Slots};
use ithaca_ir::{DType, DimId, FunctionBuilder, Op, ValueId};

use super::cx::{Cx, LAYER};
use super::dims::{self, ExpertDims};
use super::tensors::Built;
use crate::spec::{ExpertSpec, Family};

/// Names of an expert's matrices: gate, up, down.
fn names(family: Family) -> (String, [&'static str; 3]) {
    match family {
        Family::Mixtral => (format!("{LAYER}.block_sparse_moe"), ["w1", "w3", "w2"]),
        Family::Llama
        | Family::Mistral
        | Family::Qwen2
        | Family::Qwen3
        | Family::Phi3
        | Family::Gemma2
        | Family::Olmo2
        | Family::Starcoder2
        | Family::GptNeox
        | Family::Gpt2
        | Family::Qwen3Moe
        | Family::DeepseekV3 => (format!("{LAYER}.mlp"), ["gate_proj", "up_proj", "down_proj"]),
    }
}

/// `[b s m]` to `[b s m]`.
pub(super) fn mlp(
    cx: &Cx<'_>,
    spec: &ExpertSpec,
    dims: ExpertDims,
    f: &mut FunctionBuilder<'_>,
    x: ValueId,
) -> Built<ValueId> {
    let dims::Dims { b, s, m, .. } = cx.dims;
    let (module, [gate, up, down]) = names(cx.spec.family);
    let [gates, choices] = route(cx, spec, dims, f, x, &module)?;
    let capacity = dims.bound.map(|[groups, slots]| Capacity { sequence: s, groups, slots });
    let slots = Slots { experts: dims.e, top: dims.n, capacity };
    let filled = f.push(Op::Experts(Experts::Dispatch(slots)), &[choices, x])?;
    f.name(filled, Some("slots"));

    let weight = |f: &mut FunctionBuilder<'_>, part: &str, rows: DimId, columns: DimId| {
        let name = format!("{module}.experts.{{expert}}.{part}.weight");
        cx.tensors.weight(f, &name, &[dims.e, rows, columns])
    };
    let tokens = |last: DimId| match dims.bound {
        None => vec![dims.e, b, s, last],
        Some([groups, slots]) => vec![dims.e, b, groups, slots, last],
    };
    let w = weight(f, gate, dims.x, m)?;
    let gate = f.einsum(filled, w, &tokens(dims.x))?;
    let w = weight(f, up, dims.x, m)?;
    let up = f.einsum(filled, w, &tokens(dims.x))?;
    let gate = f.push(Op::Unary(cx.activation()), &[gate])?;
    let inner = f.push(Op::Binary(Binary::Mul), &[gate, up])?;
    let w = weight(f, down, m, dims.x)?;
    let done = f.einsum(inner, w, &tokens(m))?;
    let out = f.push(Op::Experts(Experts::Combine(slots)), &[choices, done, gates])?;
    match dims.y {
        None => Ok(out),
        Some(y) => {
            let shared = shared(cx, f, x, y)?;
            f.add(out, shared)
        }
    }
}

/// Gates and choices, `[b s n]`.
fn route(
    cx: &Cx<'_>,
    spec: &ExpertSpec,
    dims: ExpertDims,
    f: &mut FunctionBuilder<'_>,
    x: ValueId,
    module: &str,
) -> Built<[ValueId; 2]> {
    let dims::Dims { b, s, m, .. } = cx.dims;
    let wide = match cx.tensors.dtype {
        DType::F64 => DType::F64,
        DType::F32 | DType::BF16 | DType::F16 | DType::I32 | DType::Bool => DType::F32,
    };
    let cast = |f: &mut FunctionBuilder<'_>, x: ValueId| match f.ty(x).dtype == wide {
        true => Ok(x),
        false => f.push(Op::Cast { to: wide }, &[x]),
    };
    let mut weight = cx.tensors.weight(f, &format!("{module}.gate.weight"), &[dims.r, m])?;
    let mut x = x;
    let biased = cx.spec.family == Family::DeepseekV3;
    if biased {
        // Its router computes in single precision, the others' in the type of the tokens.
        (x, weight) = (cast(f, x)?, cast(f, weight)?);
    }
    let logits = f.einsum(x, weight, &[b, s, dims.r])?;
    let logits = cast(f, logits)?;
    f.name(logits, Some("router"));
    let mut operands = vec![logits];
    if biased {
        let bias = cx.tensors.weight(f, &format!("{module}.gate.e_score_correction_bias"), &[dims.r])?;
        operands.push(cast(f, bias)?);
    }
    let route = Route {
        over: dims.r,
        top: dims.n,
        scoring: spec.scoring,
        gates: spec.gates,
        scale: spec.scale,
        groups: spec.groups,
    };
    let routed = f.node(Op::Experts(Experts::Route(route)), &operands, &[])?;
    let mut gates = routed[0];
    if cx.spec.family == Family::Qwen3Moe && wide != cx.tensors.dtype {
        gates = f.push(Op::Cast { to: cx.tensors.dtype }, &[gates])?;
    }
    for (value, name) in [(gates, "gates"), (routed[1], "choices")] {
        f.name(value, Some(name));
    }
    Ok([gates, routed[1]])
}

/// The network that all tokens share.
fn shared(cx: &Cx<'_>, f: &mut FunctionBuilder<'_>, x: ValueId, y: DimId) -> Built<ValueId> {
    let dims::Dims { b, s, m, .. } = cx.dims;
    let name = |part: &str| format!("{LAYER}.mlp.shared_experts.{part}_proj.weight");
    let w = cx.tensors.weight(f, &name("gate"), &[y, m])?;
    let gate = f.einsum(x, w, &[b, s, y])?;
    let w = cx.tensors.weight(f, &name("up"), &[y, m])?;
    let up = f.einsum(x, w, &[b, s, y])?;
    let gate = f.push(Op::Unary(cx.activation()), &[gate])?;
    let inner = f.push(Op::Binary(Binary::Mul), &[gate, up])?;
    let w = cx.tensors.weight(f, &name("down"), &[m, y])?;
    f.einsum(inner, w, &[b, s, m])
}
