//! A mixture of experts in place of the MLP.
//!
//! ```text
//! gates, choices = route(router · x)
//! y = combine(down · (activation(gate · slots) · (up · slots)), gates) + shared(x)    of slots = dispatch(x)
//! ```

use ithaca_ir::ops::experts::{Deal, Experts, Gates, Route, Shared, Slots};
use ithaca_ir::ops::{cast, sums_in};
use ithaca_ir::{DimId, Op, ValueId};

use super::body::{Body, Built, Linear, Stored};
use super::cx::Decoder;
use super::dims::{Dims, ExpertDims};
use crate::spec::{ExpertSpec, ExpertTensors};

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
    let logits = logits(cx, spec, dims, f, x, &module)?;
    let [mut gates, choices] = route(spec, dims, f, &logits, spec.gates)?;
    let mut read = x;
    if spec.gated_inputs {
        // The share of the only expert of a token is one.
        let Dims { b, s, m, .. } = cx.dims;
        read = f.einsum(x, gates, &[b, s, m])?;
        [gates, _] = route(spec, dims, f, &logits, Gates::Shares)?;
    }
    let ExpertDims { e: experts, n: top, shared, .. } = dims;
    let deal = Deal { experts, top, shared, bound: dims.bound };
    let places = f.push(Op::Experts(Experts::Deal(deal)), &[choices])?;
    f.name(places, Some("places"));
    let slots = Slots { experts, top, shared };
    let filled = f.push(Op::Experts(Experts::Dispatch(slots)), &[places, read])?;
    f.name(filled, Some("slots"));

    let ones = dims.one.map(|one| filled_slots(cx, dims, f, places, one)).transpose()?;
    let experts = Matrices { cx, dims, module: &module, ones };
    let [gate, up] = experts.gate_and_up(f, filled)?;
    let inner = match spec.limit {
        None => f.gated(activation, gate, up)?,
        Some(limit) => {
            let gate = f.push(Op::Clamp { min: None, max: Some(limit) }, &[gate])?;
            let up = f.push(Op::Clamp { min: Some(-limit), max: Some(limit) }, &[up])?;
            let one = f.one(&[])?;
            let up = f.add(up, one)?;
            f.gated(activation, gate, up)?
        }
    };
    let done = experts.down(f, inner)?;
    let out = f.push(Op::Experts(Experts::Combine(slots)), &[places, done, gates])?;

    // The network that all tokens share.
    let Some(y) = dims.y else { return Ok(out) };
    let product = |f: &mut Body<'_>, x: ValueId, part: &str, [to, from]: [DimId; 2]| {
        let name = cx.name(&format!("{}.{part}_proj", cx.spec.layout.shared));
        f.linear(x, Linear { name: &name, to: &[to], from: &[from], bias: false })
    };
    let gate = product(f, x, "gate", [y, m])?;
    let up = product(f, x, "up", [y, m])?;
    let inner = f.gated(activation, gate, up)?;
    let shared = product(f, inner, "down", [m, y])?;
    f.add(out, shared)
}

/// `[e p g c one]`: one in each slot that has a token, zero in the others.
fn filled_slots(
    cx: &Decoder<'_>,
    dims: ExpertDims,
    f: &mut Body<'_>,
    places: ValueId,
    one: DimId,
) -> Built<ValueId> {
    let ExpertDims { e: experts, n: top, shared, .. } = dims;
    let ones = f.one(&[cx.dims.b, cx.dims.s, one])?;
    let filled = f.push(Op::Experts(Experts::Dispatch(Slots { experts, top, shared })), &[places, ones])?;
    f.name(filled, Some("filled"));
    Ok(filled)
}

/// The matrices of all experts.
struct Matrices<'a> {
    cx: &'a Decoder<'a>,
    dims: ExpertDims,
    module: &'a str,
    /// One in each slot that has a token, of experts with biases.
    ones: Option<ValueId>,
}

impl Matrices<'_> {
    /// Gate and up of the slots `x`, `[e p g c x]`.
    fn gate_and_up(&self, f: &mut Body<'_>, x: ValueId) -> Built<[ValueId; 2]> {
        let Self { cx, dims, .. } = self;
        let (width, m) = (dims.x, cx.dims.m);
        match cx.spec.layout.expert {
            ExpertTensors::Each([gate, up, _]) => {
                Ok([self.of_each(f, x, gate, [width, m])?, self.of_each(f, x, up, [width, m])?])
            }
            ExpertTensors::Alternating => {
                let [e, wide, hidden] = [dims.e, width, m].map(|dim| f.space().size(dim));
                let mut half = |i: u64| {
                    let window = [0..e, 0..hidden, 0..wide, i..i + 1];
                    let weight = Stored::part([e, hidden, wide, 2], window).in_tensor([e, hidden, 2 * wide]);
                    let bias = Stored::part([e, 1, wide, 2], [0..e, 0..1, 0..wide, i..i + 1]);
                    self.of_all(f, x, ("gate_up_proj", weight, bias.in_tensor([e, 2 * wide])), [m, width])
                };
                Ok([half(0)?, half(1)?])
            }
            ExpertTensors::Halves => {
                let [e, wide, hidden] = [dims.e, width, m].map(|dim| f.space().size(dim));
                let mut half = |i: u64| {
                    let window = [0..e, 0..hidden, i * wide..(i + 1) * wide];
                    let weight = Stored::part([e, hidden, 2 * wide], window);
                    self.of_all(f, x, ("gate_up_proj", weight, Stored::default()), [m, width])
                };
                Ok([half(0)?, half(1)?])
            }
        }
    }

    /// The results of the slots `x`, `[e p g c m]`.
    fn down(&self, f: &mut Body<'_>, x: ValueId) -> Built<ValueId> {
        let Self { cx, dims, .. } = self;
        let (width, m) = (dims.x, cx.dims.m);
        match cx.spec.layout.expert {
            ExpertTensors::Each([_, _, down]) => self.of_each(f, x, down, [m, width]),
            ExpertTensors::Halves => {
                let stored = (Stored::default(), Stored::default());
                self.of_all(f, x, ("down_proj", stored.0, stored.1), [width, m])
            }
            ExpertTensors::Alternating => {
                let [e, hidden] = [dims.e, m].map(|dim| f.space().size(dim));
                let bias = Stored::part([e, 1, hidden], [0..e, 0..1, 0..hidden]).in_tensor([e, hidden]);
                self.of_all(f, x, ("down_proj", Stored::default(), bias), [width, m])
            }
        }
    }

    /// The matrix `part` of each expert, applied to its slots.
    fn of_each(&self, f: &mut Body<'_>, x: ValueId, part: &str, [to, from]: [DimId; 2]) -> Built<ValueId> {
        let name = format!("{}.experts.{{expert}}.{part}.weight", self.module);
        let weight = f.weight(&name, &[self.dims.e, to, from])?;
        self.product(f, x, weight, to)
    }

    /// The matrices of one tensor of all experts, applied to their slots, and their biases. A slot without a token has no bias, so it
    /// stays zero.
    fn of_all(
        &self,
        f: &mut Body<'_>,
        x: ValueId,
        (part, weight, bias): (&str, Stored, Stored),
        [from, to]: [DimId; 2],
    ) -> Built<ValueId> {
        let Self { dims, module, .. } = self;
        let name = format!("{module}.experts.{part}");
        let weight = if weight.shape.is_empty() {
            f.weight(&name, &[dims.e, from, to])?
        } else {
            f.stored(&name, weight, &[dims.e, from, to])?
        };
        let y = self.product(f, x, weight, to)?;
        let (Some(one), Some(ones)) = (dims.one, self.ones) else { return Ok(y) };
        let bias = f.stored(&format!("{name}_bias"), bias, &[dims.e, one, to])?;
        let bias = self.product(f, ones, bias, to)?;
        f.add(y, bias)
    }

    fn product(&self, f: &mut Body<'_>, x: ValueId, weight: ValueId, to: DimId) -> Built<ValueId> {
        let Shared { batches, groups, slots, .. } = self.dims.shared;
        f.einsum(x, weight, &[self.dims.e, batches, groups, slots, to])
    }
}

/// The router's logits of all experts, `[b s r]`, and the bias that takes part in the choice.
fn logits(
    cx: &Decoder<'_>,
    spec: &ExpertSpec,
    dims: ExpertDims,
    f: &mut Body<'_>,
    mut x: ValueId,
    module: &str,
) -> Built<Vec<ValueId>> {
    let Dims { m, .. } = cx.dims;
    let dtype = f.tensors.dtype;
    let wide = sums_in(dtype);
    let router = cx.spec.layout.expert.router();
    let mut weight = f.weight(&format!("{module}.{router}.weight"), &[dims.r, m])?;
    if spec.wide_router {
        // This router computes in f32; the others use the tokens' type.
        (x, weight) = (cast(f, x, wide)?, cast(f, weight, wide)?);
    }
    let mut logits = f.product(x, weight)?;
    if spec.biases {
        let bias = f.weight(&format!("{module}.{router}.bias"), &[dims.r])?;
        logits = f.add(logits, bias)?;
    }
    let logits = cast(f, logits, wide)?;
    f.name(logits, Some("router"));
    let mut operands = vec![logits];
    if spec.biased {
        let bias = f.weight(&format!("{module}.{}", cx.spec.layout.bias_of_choice), &[dims.r])?;
        operands.push(cast(f, bias, wide)?);
    }
    Ok(operands)
}

/// Gates and choices, `[b s n]`.
fn route(
    spec: &ExpertSpec,
    dims: ExpertDims,
    f: &mut Body<'_>,
    logits: &[ValueId],
    gates: Gates,
) -> Built<[ValueId; 2]> {
    let dtype = f.tensors.dtype;
    let route = Route {
        over: dims.r,
        top: dims.n,
        scoring: spec.scoring,
        gates,
        scale: spec.scale,
        groups: spec.groups,
    };
    let routed = f.node(Op::Experts(Experts::Route(route)), logits, &[])?;
    let gates = if spec.rounded_gates { cast(f, routed[0], dtype)? } else { routed[0] };
    for (value, name) in [(gates, "gates"), (routed[1], "choices")] {
        f.name(value, Some(name));
    }
    Ok([gates, routed[1]])
}
