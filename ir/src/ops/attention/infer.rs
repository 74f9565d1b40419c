//! The operands and layouts that attention takes, forward and backward, and the types of its results.

use std::ops::Range;

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::layout::Layout;
use crate::mesh::{AxisId, Rank};
use crate::ops::attention::{BACKWARD, FORWARD};
use crate::ops::cache::check_scales;
use crate::ops::check::{need_float, refuse};
use crate::ops::context::Types;
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::random::need_key;
use crate::ops::table::attention::{Attention, RelativeBias, Returns, Sides};
use crate::order::joined;
use crate::rule::RuleViolation;
use crate::space::Space;
use crate::types::TensorType;

pub(in crate::ops) fn infer(
    a: &Attention,
    space: &Space,
    operands: &[&TensorType],
) -> Result<Types, OpError> {
    check(a, space, operands)?;
    let [q, k, v] = [operands[0], operands[1], operands[2]];
    check_layouts(a, space, "attention", [q, k, v])?;
    if let (Some(bias), Some(operand)) = (a.bias, operands.get(3)) {
        check_bias(a, bias, space, q, operand)?;
    }
    let alone = a.key_axes_alone(q, k);
    let mut results = a.results(q, v);
    for ty in &mut results {
        for i in 0..ty.dims.len() {
            let dim = ty.dims[i];
            ty.layout.split[i] = if Some(dim) == a.parts {
                alone.iter().copied().collect()
            } else {
                q.axes_of(dim).iter().copied().collect()
            };
        }
        ty.layout.moved.clone_from(&q.layout.moved);
    }
    Ok(results)
}

pub(in crate::ops) fn infer_backward(
    a: &Attention,
    space: &Space,
    operands: &[&TensorType],
) -> Result<Types, OpError> {
    ensure!(!a.starts, "V32", "a gradient reaches attention on a cache, which has no adjoint");
    ensure!(
        !a.ends,
        "V32",
        "a gradient reaches attention of sequences with ends of their own, which has no adjoint"
    );
    check(a, space, operands)?;
    let [q, k, v, d_o, lse, delta] = [0, 1, 2, 3, 4, 5].map(|i| operands[i]);
    check_layouts(a, space, "attention_backward", [q, k, v])?;
    if let (Some(bias), Some(operand)) = (a.bias, operands.get(6)) {
        check_bias(a, bias, space, q, operand)?;
    }
    let e = a.value_width(v);
    let output: Vec<DimId> = q.dims.iter().map(|&d| if d == a.width { e } else { d }).collect();
    let rows: Vec<DimId> = q.dims.iter().copied().filter(|&d| d != a.width).collect();
    for (ty, dims, name) in [(d_o, &output, "d_o"), (lse, &rows, "lse"), (delta, &rows, "delta")] {
        ensure!(
            ty.dims.as_slice() == dims.as_slice(),
            "V05",
            "`{name}` of `attention_backward` has not the dimensions of the output"
        );
        let alike = dims.iter().all(|&d| ty.axes_of(d) == q.axes_of(d));
        if !alike || ty.layout.moved != q.layout.moved || !ty.layout.partial.is_empty() {
            bail!("V07", "`{name}` of `attention_backward` lies otherwise than the queries");
        }
    }
    let float = |ty: &TensorType| match a.returns {
        Returns::Part => DType::F32,
        Returns::Output | Returns::WithLse => ty.dtype,
    };
    let result = |ty: &TensorType, pending: Vec<AxisId>| {
        let mut layout = ty.layout.clone();
        layout.partial = pending.into_iter().collect();
        layout.partial.sort_unstable();
        TensorType { dtype: float(ty), dims: ty.dims.clone(), layout }
    };
    let keys = k.axes_of(a.keys);
    let queries_alone: Vec<AxisId> = match a.movement {
        // A movement brings every gradient home.
        Some(_) => Vec::new(),
        None => q.axes_of(a.queries).iter().copied().filter(|x| !keys.contains(x)).collect(),
    };
    let keys_alone = match a.movement {
        Some(_) => Vec::new(),
        None => a.key_axes_alone(q, k),
    };
    let mut results: Types =
        smallvec![result(q, keys_alone), result(k, queries_alone.clone()), result(v, queries_alone)];
    if let (Some(_), Some(bias)) = (a.bias, operands.get(6)) {
        // A rank sums over the sequences, queries and keys that it has; a movement shows its queries every key.
        let front = q.layout.split[..q.dims.len() - 3].iter().flatten();
        let keys = k.axes_of(a.keys).iter().filter(|_| a.movement.is_none());
        let mut pending: Vec<AxisId> = front.chain(q.axes_of(a.queries)).chain(keys).copied().collect();
        pending.sort_unstable();
        pending.dedup();
        let layout = Layout { partial: pending.into_iter().collect(), ..bias.layout.clone() };
        results.push(TensorType { dtype: DType::F32, dims: bias.dims.clone(), layout });
    }
    Ok(results)
}

/// Roles, sizes and numbers, whatever the layouts.
fn check(a: &Attention, space: &Space, operands: &[&TensorType]) -> Result<(), OpError> {
    let [q, k, v] = [operands[0], operands[1], operands[2]];
    let &Attention { heads, kv_heads, queries, keys, width, scale, softcap, .. } = a;
    need_float("attention", q.dtype)?;
    // A cache may have a type of its own.
    let is_cache =
        |ty: &TensorType| if a.scaled { ty.dtype == DType::F8E4M3 } else { ty.dtype.is_arithmetic() };
    let converts = a.starts && k.dtype == v.dtype && is_cache(k);
    if !converts && (q.dtype != k.dtype || q.dtype != v.dtype) {
        bail!("V04", "`attention` of {}, {} and {}", q.dtype, k.dtype, v.dtype);
    }
    let shape = |message: &str| Err(OpError::new("V05", format!("`attention`: {message}")));
    let tail = |ty: &TensorType, roles: [DimId; 2]| {
        let n = ty.dims.len();
        n >= 3 && ty.dims[n - 3..n - 1] == roles
    };
    if !tail(q, [queries, heads]) || q.dims.last() != Some(&width) {
        return shape("q must end in (queries, heads, width)");
    }
    if !tail(k, [keys, kv_heads]) || k.dims.last() != Some(&width) {
        return shape("k must end in (keys, kv_heads, width)");
    }
    if !tail(v, [keys, kv_heads]) {
        return shape("v must end in (keys, kv_heads, value width)");
    }
    let front = |ty: &TensorType| ty.dims[..ty.dims.len() - 3].to_vec();
    if front(q) != front(k) || front(q) != front(v) {
        return shape("q, k and v differ in the dimensions in front");
    }
    let (hq, hkv) = (&space.dims[heads], &space.dims[kv_heads]);
    if hkv.size == 0 || hq.size % hkv.size != 0 {
        let message = format!(
            "{} query heads `{}` are not a multiple of {} key/value heads `{}`",
            hq.size, hq.name, hkv.size, hkv.name
        );
        return Err(OpError::new("V20", message));
    }
    let group = hq.size / hkv.size;
    ensure!(
        hq.granule == group * hkv.granule,
        "V21",
        "`{}` splits by {} heads, but {} of them share a key/value head: declare granule {}",
        hq.name,
        hq.granule,
        group,
        group * hkv.granule
    );
    ensure!(scale.is_finite(), "V05", "`attention` is scaled by {scale}");
    if let Some(cap) = softcap.filter(|&cap| !(cap.is_finite() && cap > 0.0)) {
        bail!("V05", "the scores of `attention` cannot be capped at {cap}");
    }
    if let Some(d) = a.dropout.filter(|d| !(d.rate.is_finite() && (0.0..1.0).contains(&d.rate))) {
        bail!("V05", "`attention` cannot drop a share of {} of its weights", d.rate);
    }
    let is_backward = operands.len() >= BACKWARD && !a.starts && !a.ends;
    let more = operands.len() - if is_backward { BACKWARD } else { FORWARD };
    let key = a.key_operand(operands.len());
    ensure!(
        more == usize::from(a.bias.is_some())
            + usize::from(a.starts)
            + usize::from(a.ends)
            + 2 * usize::from(a.scaled)
            + usize::from(key.is_some() && a.dropout.is_some()),
        "V01",
        "`attention` has an operand behind the others where it has a bias, one for the positions of first queries or for the \
         ends of sequences, two for the scales of keys and values, one for the key of its dropout, and no other"
    );
    ensure!(
        a.starts || !(a.scaled || a.wraps),
        "V05",
        "`attention` has scales and rings of keys that are of a cache"
    );
    ensure!(!(a.starts && a.ends), "V05", "`attention` on a cache has no ends of sequences");
    if let Some(end) = a.end_operand() {
        check_lengths(q, operands[end])?;
        ensure!(a.dropout.is_none(), "V05", "`attention` of sequences with ends of their own has no dropout");
    }
    if let Some(start) = a.start_operand() {
        check_start(a, space, q, operands[start])?;
    }
    if let Some(scales) = a.scale_operands() {
        check_scales("attention", k, operands[scales[0]])?;
        check_scales("attention", v, operands[scales[1]])?;
    }
    if let Some(key) = key {
        need_key("attention", operands[key])?;
    }
    ensure!(
        a.parts.is_none() || a.returns == Returns::Part,
        "V05",
        "`attention` has `parts` where it returns a part, and only there"
    );
    let keys = &space.dims[space.sequence(keys)];
    crate::mask::check(&a.mask, if a.starts { keys } else { &space.dims[queries] }, keys)
}

/// Positions of first queries, or ends, by sequence.
fn check_lengths(q: &TensorType, lengths: &TensorType) -> Result<(), OpError> {
    ensure!(lengths.dtype == DType::I32, "V04", "`attention` takes positions of i32, not {}", lengths.dtype);
    ensure!(
        lengths.dims.as_slice() == &q.dims[..q.dims.len() - 3],
        "V05",
        "the positions of first queries, or the ends of sequences, have the dimensions in front of the queries"
    );
    let alike = lengths.layout.split.iter().eq(&q.layout.split[..lengths.dims.len()]);
    ensure!(
        alike && lengths.layout.partial.is_empty(),
        "V07",
        "the positions of first queries, or the ends of sequences, are split otherwise than the sequences"
    );
    Ok(())
}

/// An attention on a cache.
fn check_start(a: &Attention, space: &Space, q: &TensorType, start: &TensorType) -> Result<(), OpError> {
    check_lengths(q, start)?;
    if a.wraps {
        check_ring(a, space)?;
    }
    ensure!(a.dropout.is_none(), "V05", "`attention` on a cache has no dropout");
    ensure!(
        a.queries != a.keys && space.dims[a.keys].fetched.is_none(),
        "V05",
        "`attention` on a cache has keys of a dimension of their own"
    );
    Ok(())
}

/// A ring has what queries of a step see, and the tokens that the step writes.
fn check_ring(a: &Attention, space: &Space) -> Result<(), OpError> {
    let of_window = a.mask.band().filter(|band| band[0] >= 0).map(|[left, _]| left.unsigned_abs());
    let of_chunk = || a.mask.band_in_chunks().map(|(_, size)| size.saturating_sub(1));
    let Some(left) = of_window.or_else(of_chunk) else {
        bail!("V05", "`attention` on a ring needs a mask that is a window or has chunks, not {:?}", a.mask);
    };
    let [queries, tokens] = [a.queries, a.keys].map(|dim| space.dims[dim].valid);
    let needed = left + queries;
    ensure!(
        tokens >= needed,
        "V05",
        "a ring of {tokens} tokens lacks room for a window of {} and a step of {queries}: it needs {needed}",
        left + 1
    );
    Ok(())
}

/// Which axes may split what: see [`Attention`].
fn check_layouts(
    a: &Attention,
    space: &Space,
    name: &str,
    [q, k, v]: [&TensorType; 3],
) -> Result<(), OpError> {
    let dim_name = |d: DimId| space.dims[d].name.as_str();
    let conflict = |d: DimId| refuse(name, space, RuleViolation::Conflict(d));
    let not_whole = |d: DimId| Err(refuse(name, space, RuleViolation::NotWhole(d)));
    if let Some(i) = [q, k, v].iter().position(|ty| !ty.layout.partial.is_empty()) {
        return Err(refuse(name, space, RuleViolation::Pending(i)));
    }
    let front = q.dims.len() - 3;
    for i in 0..front {
        let axes = &q.layout.split[i];
        if *axes != k.layout.split[i] || *axes != v.layout.split[i] {
            return Err(conflict(q.dims[i]));
        }
    }
    let heads = q.axes_of(a.heads);
    if k.axes_of(a.kv_heads) != heads || v.axes_of(a.kv_heads) != heads {
        return Err(conflict(a.kv_heads));
    }
    if k.axes_of(a.keys) != v.axes_of(a.keys) || k.layout.moved != v.layout.moved {
        return Err(conflict(a.keys));
    }
    for ty in [q, k, v] {
        let width = ty.dims[ty.dims.len() - 1];
        if !ty.axes_of(width).is_empty() {
            return not_whole(width);
        }
    }
    let (queries, keys) = (q.axes_of(a.queries), k.axes_of(a.keys));
    // An axis splits one dimension; the two sequences may share axes, because a rank has a part of each.
    let elsewhere = |axis: &AxisId| q.layout.split[..front].iter().flatten().chain(heads).any(|b| b == axis);
    ensure!(
        !queries.iter().chain(keys).any(elsewhere),
        "V07",
        "`{name}`: an axis splits a sequence and another dimension"
    );
    let astray = |layout: &Layout, axes: &[AxisId]| layout.moved.iter().any(|m| !axes.contains(&m.axis));
    if astray(&q.layout, queries) || astray(&k.layout, keys) {
        bail!("V16", "`{name}` takes operands that moved along a sequence only");
    }
    let alone = a.key_axes_alone(q, k);
    match a.parts {
        Some(parts) if space.size(parts) != space.mesh.degree(&alone) || alone.is_empty() => {
            let message = format!(
                "`parts={}` of {} must tell apart the {} ranks that hold the same queries and other keys",
                dim_name(parts),
                space.size(parts),
                space.mesh.degree(&alone)
            );
            return Err(OpError::new("V05", message));
        }
        _ => {}
    }
    if keys.is_empty() || a.movement.is_some() {
        return Ok(());
    }
    if space.dims[a.keys].fetched.is_some() {
        return if queries == keys && q.layout.moved.is_empty() && k.layout.moved.is_empty() {
            check_reach(a, space, q, k)
        } else {
            Err(conflict(a.keys))
        };
    }
    match a.returns {
        Returns::Part if name == "attention" && !alone.is_empty() && a.parts.is_none() => Err(OpError::new(
            "V08",
            format!(
                "`{name}`: ranks with the same queries see other keys; their results need a dimension `parts`"
            ),
        )),
        Returns::Part => Ok(()),
        Returns::Output | Returns::WithLse => not_whole(a.keys),
    }
}

/// Every rank must have fetched every key that its queries see.
fn check_reach(a: &Attention, space: &Space, q: &TensorType, k: &TensorType) -> Result<(), OpError> {
    let axes = q.axes_of(a.queries);
    let of = space.sequence(a.keys);
    let n_keys = space.dims[of].valid;
    for rank in space.mesh.group_along(Rank(0), axes) {
        let queries = space.position_runs(a.queries, space.range(a.queries, axes, rank));
        let held = joined(space.sources(a.keys, space.range(a.keys, k.axes_of(a.keys), rank)));
        let covered = |r: &Range<u64>| {
            let before = held.partition_point(|h| h.start <= r.start);
            before.checked_sub(1).is_some_and(|i| r.end <= held[i].end)
        };
        let sequence = &space.dims[of];
        let is_held = |r: &Range<u64>| {
            sequence.order.indices(sequence.size, std::slice::from_ref(r)).iter().all(covered)
        };
        let reached = || queries.iter().flat_map(|run| a.mask.reach(run.positions(), 0..n_keys));
        // Neighbouring runs see nearly the same keys.
        if joined(reached().collect()).iter().all(is_held) {
            continue;
        }
        if let Some(missing) = reached().find(|r| !is_held(r)) {
            let message = format!(
                "rank {rank} has not fetched all of keys {}..{}, which its queries see",
                missing.start, missing.end
            );
            return Err(OpError::new("V26", message));
        }
    }
    Ok(())
}

fn check_bias(
    a: &Attention,
    bias: RelativeBias,
    space: &Space,
    q: &TensorType,
    operand: &TensorType,
) -> Result<(), OpError> {
    need_float("attention", operand.dtype)?;
    let fits = operand.dims.as_slice() == [bias.buckets, a.heads];
    ensure!(fits, "V05", "the bias of `attention` has the dimensions (buckets, heads)");
    let needed = match bias.sides {
        Sides::Both => 4,
        Sides::Before => 2,
    };
    let buckets = space.size(bias.buckets);
    if buckets < needed || bias.max_distance <= buckets / needed {
        bail!("V05", "a bias of {buckets} buckets cannot reach to distance {}", bias.max_distance);
    }
    let alike = operand.axes_of(a.heads) == q.axes_of(a.heads) && operand.axes_of(bias.buckets).is_empty();
    ensure!(
        alike && operand.layout.partial.is_empty(),
        "V07",
        "the bias of `attention` is split otherwise than its heads"
    );
    Ok(())
}
