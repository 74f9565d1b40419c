//! The search for the cheapest sequence of collectives between two layouts.
//!
//! Layouts are the nodes of a graph, collectives its edges, seconds on the cluster their length; the search is
//! Dijkstra's. An axis that splits the source and the target travels by all-to-all or permute: gathering along it only
//! to slice again would hold the whole on every rank, and send it. Where that leaves no path, gathering everything and
//! slicing always is one.

use std::collections::BTreeMap;

use ithaca_ir::layout::{AxisList, Layout};
use ithaca_ir::mesh::{Axes, AxisId};
use ithaca_ir::ops::collective::apply;
use ithaca_ir::ops::experts::Rows;
use ithaca_ir::ops::{Context as OpContext, Op};
use ithaca_ir::{Arena, DimId, Space, TensorType, message};
use ithaca_pass::Prices;

/// One collective of a conversion.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The collective.
    pub op: Op,
    /// The type after it.
    pub to: TensorType,
}

/// Added to every step, in seconds, so that of two equally fast ways the shorter one is taken.
const STEP: f64 = 1e-9;

/// The cheapest sequence of collectives from `from` to `to`, which differ in their layouts only.
///
/// Of equally cheap sequences the first in the order of the search is taken, so the answer is reproducible.
pub fn convert(space: &Space, from: &TensorType, to: &TensorType, prices: &dyn Prices) -> Vec<Step> {
    if from == to {
        return Vec::new();
    }
    let found = search(space, from, to, prices, Regather::Never);
    found
        .or_else(|| search(space, from, to, prices, Regather::Allowed))
        .expect("gathering and slicing leads everywhere")
}

/// A conversion as text: its collectives, in order.
pub(super) fn write(space: &Space, steps: &[Step]) -> String {
    let steps: Vec<String> = steps.iter().map(|step| spelled(space, &step.op)).collect();
    steps.join("; ")
}

/// The inverse of [`write`]; `None` for a text that does not lead from `from` to `to`.
pub(super) fn read(space: &Space, from: &TensorType, to: &TensorType, text: &str) -> Option<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    for step in text.split("; ").filter(|step| !step.is_empty()) {
        let here = steps.last().map_or(from, |step| &step.to);
        let moves = moves(space, here, from, to, Regather::Allowed);
        let (op, to) = moves.into_iter().find(|(op, _)| spelled(space, op) == step)?;
        steps.push(Step { op, to });
    }
    let reached = steps.last().map_or(from, |step| &step.to);
    (reached == to).then_some(steps)
}

/// A collective as the member of a message is spelled: `all_to_all(axis=u, split=h, concat=s)`.
fn spelled(space: &Space, op: &Op) -> String {
    let functions = Arena::new();
    let attrs = op.attrs(OpContext { space, functions: &functions }.names());
    let attrs: Vec<String> = attrs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    if attrs.is_empty() { op.name().to_owned() } else { format!("{}({})", op.name(), attrs.join(", ")) }
}

/// Whether an axis that splits the source may be gathered along and sliced again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Regather {
    Never,
    Allowed,
}

fn search(
    space: &Space,
    from: &TensorType,
    to: &TensorType,
    prices: &dyn Prices,
    regather: Regather,
) -> Option<Vec<Step>> {
    let mut best: BTreeMap<Layout, (f64, Option<(Layout, Op)>)> = BTreeMap::new();
    // Nearest first, then in order of discovery; the bits of positive numbers have their order.
    let mut queue: BTreeMap<(u64, u64), Layout> = BTreeMap::new();
    let mut order = 0u64;
    best.insert(from.layout.clone(), (0.0, None));
    queue.insert((0, order), from.layout.clone());
    while let Some(((bits, _), layout)) = queue.pop_first() {
        let seconds = f64::from_bits(bits);
        if layout == to.layout {
            break;
        }
        if seconds > best[&layout].0 {
            continue;
        }
        let here = from.with_layout(layout.clone());
        for (op, next) in moves(space, &here, from, to, regather) {
            let total = seconds + STEP + prices.collective_seconds(space, &op, &here, &next);
            let known = best.get(&next.layout).map_or(f64::INFINITY, |b| b.0);
            if total < known {
                best.insert(next.layout.clone(), (total, Some((layout.clone(), op))));
                order += 1;
                queue.insert((total.to_bits(), order), next.layout);
            }
        }
    }
    let mut steps = Vec::new();
    let mut layout = to.layout.clone();
    while let Some((_, Some((before, op)))) = best.get(&layout) {
        steps.push(Step { op: op.clone(), to: from.with_layout(layout) });
        layout = before.clone();
    }
    steps.reverse();
    (!steps.is_empty()).then_some(steps)
}

/// The collectives that may be applied to `here` on the way to `to`, with the types they lead to.
fn moves(
    space: &Space,
    here: &TensorType,
    from: &TensorType,
    to: &TensorType,
    regather: Regather,
) -> Vec<(Op, TensorType)> {
    let mut ops = Vec::new();
    let used = |axis: AxisId| here.layout.axes().any(|a| a == axis);
    // A dimension that is split in the same way on both ends stays as it is.
    let changes = |i: usize| from.layout.split[i] != to.layout.split[i];
    let dims: Vec<DimId> =
        here.dims.iter().enumerate().filter(|&(i, _)| changes(i)).map(|(_, &d)| d).collect();
    let wanted = |axis: AxisId| to.layout.axes().any(|a| a == axis);
    for (i, &dim) in here.dims.iter().enumerate().filter(|&(i, _)| changes(i)) {
        let Some(&axis) = here.layout.split[i].last() else { continue };
        ops.extend(dims.iter().filter(|&&d| d != dim).map(|&split| Op::all_to_all(axis, split, dim)));
        ops.extend(
            jointly(&here.layout.split[i], &to.layout.split[i]).map(|axis| Op::AllGather { axis, dim }),
        );
    }
    for &axis in here.layout.partial.iter().filter(|a| !to.layout.partial.contains(a)) {
        ops.extend(dims.iter().map(|&dim| Op::ReduceScatter { axis: axis.into(), dim }));
        ops.push(Op::AllReduce { axis: axis.into() });
    }
    // A sum over several axes sends less when it is scattered over one, summed over the others in parts, and gathered:
    // as much as one sum over all ranks would.
    let summed: Vec<AxisId> =
        from.layout.partial.iter().copied().filter(|a| !to.layout.partial.contains(a)).collect();
    if summed.len() > 1 {
        for (i, &dim) in here.dims.iter().enumerate().filter(|&(i, _)| !changes(i)) {
            let pending = summed.iter().filter(|a| here.layout.partial.contains(a));
            ops.extend(pending.map(|&axis| Op::ReduceScatter { axis: axis.into(), dim }));
            let scattered = here.layout.split[i].last().filter(|a| summed.contains(a));
            ops.extend(scattered.map(|&axis| Op::AllGather { axis: axis.into(), dim }));
        }
        // Or in one message among the ranks of all these axes.
        let pending: AxisList = here.layout.partial.iter().copied().filter(|a| summed.contains(a)).collect();
        ops.extend(Axes::new(&pending).filter(|axes| axes.len() > 1).map(|axis| Op::AllReduce { axis }));
        for (i, &dim) in here.dims.iter().enumerate() {
            let joined = to.layout.split[i].strip_prefix(&here.layout.split[i][..]).unwrap_or_default();
            let n = joined.iter().take_while(|axis| pending.contains(axis)).count();
            ops.extend(
                (2..=n).filter_map(|n| Some(Op::ReduceScatter { axis: Axes::new(&joined[..n])?, dim })),
            );
        }
    }
    let splits_source = |axis: AxisId| from.layout.split.iter().any(|axes| axes.contains(&axis));
    let sliceable =
        |&a: &AxisId| !used(a) && wanted(a) && (regather == Regather::Allowed || !splits_source(a));
    for axis in space.mesh.axes.ids().filter(sliceable) {
        ops.extend(dims.iter().map(|&dim| Op::Slice { axis, dim }));
    }
    let mut moves: Vec<(Op, TensorType)> = ops
        .into_iter()
        .filter_map(|op| apply(&op, space, here).ok().map(|next| (op, next)))
        .filter(|(_, next)| splits(space, next))
        .collect();
    let all_rows = |(op, next): &(Op, TensorType)| match *op {
        Op::AllToAll { axis, split, concat, .. } if message::counts_rows(space, op, here, next) => {
            Some((Op::AllToAll { axis, split, concat, rows: Rows::All }, next.clone()))
        }
        _ => None,
    };
    moves.extend(moves.iter().filter_map(all_rows).collect::<Vec<_>>());
    if permutes(space, here, to) {
        moves.push((Op::Permute, to.clone()));
    }
    moves
}

/// The axes along which one message may gather a dimension that is split so: the innermost, or several down to those that stay.
fn jointly(split: &[AxisId], to: &[AxisId]) -> impl Iterator<Item = Axes> {
    let stays = split.iter().zip(to).take_while(|(a, b)| a == b).count().min(split.len() - 1);
    (stays..split.len()).rev().filter_map(|first| Axes::new(&split[first..]))
}

/// Whether every dimension may be split as the type says.
fn splits(space: &Space, ty: &TensorType) -> bool {
    ty.dims.iter().zip(&ty.layout.split).all(|(&d, axes)| space.can_split(d, axes))
}

/// Whether moving whole blocks leads from `here` to `to`: the same axes split, in another order or place.
fn permutes(space: &Space, here: &TensorType, to: &TensorType) -> bool {
    let axes = |ty: &TensorType| {
        let mut axes: Vec<AxisId> = ty.layout.split.iter().flatten().copied().collect();
        axes.sort_unstable();
        axes
    };
    let same_blocks = || space.max_local_shape(here) == space.max_local_shape(to);
    if here.layout == to.layout
        || here.layout.partial != to.layout.partial
        || axes(here) != axes(to)
        || !same_blocks()
    {
        return false;
    }
    let functions = Arena::new();
    let cx = OpContext { space, functions: &functions };
    Op::Permute.infer(cx, &[here], std::slice::from_ref(to)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ithaca_ir::{DType, Dim, Mesh, Rank};
    use ithaca_pass::Volume;

    fn space(axes: &[(&str, u64)], dims: &[(&str, u64)]) -> Space {
        let dims = dims.iter().map(|&(name, size)| Dim::new(name, size)).collect();
        Space { dims, mesh: Mesh::new(axes.iter().copied()) }
    }

    fn names(steps: &[Step]) -> Vec<&'static str> {
        steps.iter().map(|s| s.op.name()).collect()
    }

    #[test]
    fn heads_for_sequence_is_one_all_to_all() {
        let space = space(&[("u", 4)], &[("b", 1), ("s", 64), ("h", 8), ("d", 8)]);
        let [b, s, h, d] = ["b", "s", "h", "d"].map(|n| space.dim(n).unwrap());
        let u = space.mesh.axis("u").unwrap();
        let x = TensorType::new(DType::F32, [b, s, h, d]);
        let steps = convert(&space, &x.clone().split(s, [u]), &x.split(h, [u]), &Volume);
        assert_eq!(names(&steps), ["all_to_all"]);
    }

    #[test]
    fn a_pending_sum_is_scattered_where_the_target_is_split() {
        let space = space(&[("u", 2), ("t", 2)], &[("b", 1), ("s", 64), ("m", 8)]);
        let [b, s, m] = ["b", "s", "m"].map(|n| space.dim(n).unwrap());
        let [u, t] = ["u", "t"].map(|n| space.mesh.axis(n).unwrap());
        let x = TensorType::new(DType::F32, [b, s, m]).split(s, [u]);
        let pending = x.with_layout(x.layout.clone().with_partial(t));
        assert_eq!(names(&convert(&space, &pending, &x, &Volume)), ["all_reduce"]);
        assert_eq!(
            names(&convert(&space, &pending, &x.clone().split(s, [u, t]), &Volume)),
            ["reduce_scatter"]
        );
    }

    /// What several axes sum or split, one message among the ranks of all of them sums or gathers, unless parts of it cost less.
    #[test]
    fn several_axes_are_one_group() {
        let space = space(&[("dp", 2), ("u", 4)], &[("m", 64), ("n", 3)]);
        let [m, n] = ["m", "n"].map(|n| space.dim(n).unwrap());
        let [dp, u] = ["dp", "u"].map(|n| space.mesh.axis(n).unwrap());
        let whole = TensorType::new(DType::F32, [m, n]);
        let pending = whole.with_layout(whole.layout.clone().with_partial(dp).with_partial(u));
        let split = whole.clone().split(m, [u, dp]);
        let joint = Axes::new(&[u, dp]).unwrap();
        for (from, to, op, bytes) in [
            (&pending, &whole, Op::AllReduce { axis: Axes::new(&[dp, u]).unwrap() }, 2 * 7 * 64 * 3 * 4 / 8),
            (&pending, &split, Op::ReduceScatter { axis: joint, dim: m }, 7 * 64 * 3 * 4 / 8),
            (&split, &whole, Op::AllGather { axis: joint, dim: m }, 7 * 64 * 3 * 4 / 8),
        ] {
            assert_eq!(ithaca_ir::boxes::bytes_sent(&space, &op, from, to, Rank(0)), bytes);
            assert_eq!(convert(&space, from, to, &Volume), [Step { op, to: to.clone() }]);
        }
        struct DearGroups;
        impl Prices for DearGroups {
            fn collective_seconds(&self, space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> f64 {
                let joint = ithaca_ir::boxes::axes(space, op, from, to).len() > 1;
                if joint { 1e18 } else { Volume.collective_seconds(space, op, from, to) }
            }
        }
        let steps = convert(&space, &pending, &whole, &DearGroups);
        assert_eq!(names(&steps), ["reduce_scatter", "all_reduce", "all_gather"]);
        let before = std::iter::once(&pending).chain(steps.iter().map(|step| &step.to));
        let sent = before
            .zip(&steps)
            .map(|(from, step)| ithaca_ir::boxes::bytes_sent(&space, &step.op, from, &step.to, Rank(0)));
        assert_eq!(sent.sum::<u64>(), 2 * 7 * 64 * 3 * 4 / 8);
        let few = TensorType::new(DType::F32, [n]);
        let pending = few.with_layout(few.layout.clone().with_partial(dp).with_partial(u));
        assert_eq!(names(&convert(&space, &pending, &few, &DearGroups)), ["all_reduce", "all_reduce"]);
    }

    #[test]
    fn an_axis_moves_by_all_to_all_even_where_gathering_is_cheap() {
        struct DearMessages;
        impl Prices for DearMessages {
            fn collective_seconds(&self, _: &Space, op: &Op, _: &TensorType, _: &TensorType) -> f64 {
                if matches!(op, Op::AllToAll { .. }) { 1.0 } else { 1e-3 }
            }
        }
        let space = space(&[("u", 4)], &[("s", 64), ("h", 8)]);
        let [s, h] = ["s", "h"].map(|n| space.dim(n).unwrap());
        let u = space.mesh.axis("u").unwrap();
        let x = TensorType::new(DType::F32, [s, h]);
        let steps = convert(&space, &x.clone().split(s, [u]), &x.split(h, [u]), &DearMessages);
        assert_eq!(names(&steps), ["all_to_all"]);
    }

    /// Of few slots all rows are sent, where their counts would take longer; the choice is read again.
    #[test]
    fn counts_are_sent_where_they_save_time() {
        struct Counts(f64);
        impl Prices for Counts {
            fn collective_seconds(&self, space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> f64 {
                let is_counted = message::counts_rows(space, op, from, to);
                let share = if is_counted { space.expected_share(from) } else { 1.0 };
                share * 100.0 + if is_counted { self.0 } else { 0.0 }
            }
        }
        let mut space = space(&[("ep", 4)], &[("e", 8), ("p", 4), ("c", 10), ("m", 8)]);
        let [e, p, c, m] = ["e", "p", "c", "m"].map(|n| space.dim(n).unwrap());
        space.dims[c].ragged = Some(6);
        let ep = space.mesh.axis("ep").unwrap();
        let slots = TensorType::new(DType::F32, [e, p, c, m]);
        let (from, to) = (slots.clone().split(p, [ep]), slots.split(e, [ep]));
        for (counts, rows, text) in [
            (39.0, Rows::Filled, "all_to_all(axis=ep, split=e, concat=p)"),
            (41.0, Rows::All, "all_to_all(axis=ep, split=e, concat=p, rows=all)"),
        ] {
            let steps = convert(&space, &from, &to, &Counts(counts));
            let op = Op::AllToAll { axis: ep, split: e, concat: p, rows };
            assert_eq!(steps, [Step { op, to: to.clone() }]);
            assert_eq!(write(&space, &steps), text);
            assert_eq!(read(&space, &from, &to, text), Some(steps));
        }
    }

    #[test]
    fn another_order_of_axes_is_one_permute() {
        let space = space(&[("u", 2), ("t", 2)], &[("s", 64), ("m", 8)]);
        let [s, m] = ["s", "m"].map(|n| space.dim(n).unwrap());
        let [u, t] = ["u", "t"].map(|n| space.mesh.axis(n).unwrap());
        let x = TensorType::new(DType::F32, [s, m]);
        let steps = convert(&space, &x.clone().split(s, [u, t]), &x.split(s, [t, u]), &Volume);
        assert_eq!(names(&steps), ["permute"]);
    }
}
