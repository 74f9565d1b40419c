//! A mixture of experts in place of the MLP.
//!
//! ```text
//! gates, choices = route(router · x)
//! y = combine(down · (activation(gate · slots) · (up · slots)), gates) + shared(x)    of slots = dispatch(x)
//! ```

use ithaca_ir::ops::experts::{Deal, Experts, Route, Shared, Slots};
use ithaca_ir::ops::{cast, sums_in};
use ithaca_ir::{DimId, Op, ValueId};

use super::body::{Body, Built, Linear};
use super::cx::Decoder;
use super::dims::{Dims, ExpertDims};
use crate::spec::ExpertSpec;

/// `[b s m]` to `[b s m]`.
pub(super) fn mlp(
    cx: &Decoder<'_>,
    spec: &ExpertSpec,
    dims: ExpertDims,
    f: &mut Body<'_>,
    x: ValueId,
) -> Built<ValueId> {
    let Dims { m, .. } = cx.dims;
    let (module, activation) = (cx.name(cx.spec.layout.experts), cx.spec.sizes.activation);
    let [gates, choices] = route(cx, spec, dims, f, x, &module)?;
    let ExpertDims { e: experts, n: top, shared, .. } = dims;
    let deal = Deal { experts, top, shared, bound: dims.bound };
    let places = f.push(Op::Experts(Experts::Deal(deal)), &[choices])?;
    f.name(places, Some("places"));
    let slots = Slots { experts, top, shared };
    let filled = f.push(Op::Experts(Experts::Dispatch(slots)), &[places, x])?;
    f.name(filled, Some("slots"));

    let product = |f: &mut Body<'_>, x: ValueId, part: &str, [to, from]: [DimId; 2]| {
        let name = format!("{module}.experts.{{expert}}.{part}.weight");
        let weight = f.weight(&name, &[dims.e, to, from])?;
        let Shared { batches, groups, slots, .. } = shared;
        f.einsum(x, weight, &[experts, batches, groups, slots, to])
    };
    let [gate, up, down] = cx.spec.layout.expert;
    let gate = product(f, filled, gate, [dims.x, m])?;
    let up = product(f, filled, up, [dims.x, m])?;
    let inner = f.gated(activation, gate, up)?;
    let done = product(f, inner, down, [m, dims.x])?;
    let out = f.push(Op::Experts(Experts::Combine(slots)), &[places, done, gates])?;

    // The network that all tokens share.
    let Some(y) = dims.y else { return Ok(out) };
    let product = |f: &mut Body<'_>, x: ValueId, part: &str, [to, from]: [DimId; 2]| {
        let name = cx.name(&format!("mlp.shared_experts.{part}_proj"));
        f.linear(x, Linear { name: &name, to: &[to], from: &[from], bias: false })
    };
    let gate = product(f, x, "gate", [y, m])?;
    let up = product(f, x, "up", [y, m])?;
    let inner = f.gated(activation, gate, up)?;
    let shared = product(f, inner, "down", [m, y])?;
    f.add(out, shared)
}

/// Gates and choices, `[b s n]`.
fn route(
    cx: &Decoder<'_>,
    spec: &ExpertSpec,
    dims: ExpertDims,
    f: &mut Body<'_>,
    mut x: ValueId,
    module: &str,
) -> Built<[ValueId; 2]> {
    let Dims { m, .. } = cx.dims;
    let dtype = f.tensors.dtype;
    let wide = sums_in(dtype);
    let mut weight = f.weight(&format!("{module}.gate.weight"), &[dims.r, m])?;
    if spec.biased {
        // This router computes in f32; the others use the tokens' type.
        (x, weight) = (cast(f, x, wide)?, cast(f, weight, wide)?);
    }
    let logits = f.product(x, weight)?;
    let logits = cast(f, logits, wide)?;
    f.name(logits, Some("router"));
    let mut operands = vec![logits];
    if spec.biased {
        let bias = f.weight(&format!("{module}.gate.e_score_correction_bias"), &[dims.r])?;
        operands.push(cast(f, bias, wide)?);
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
    let gates = if spec.rounded_gates { cast(f, routed[0], dtype)? } else { routed[0] };
    for (value, name) in [(gates, "gates"), (routed[1], "choices")] {
        f.name(value, Some(name));
    }
    Ok([gates, routed[1]])
}
