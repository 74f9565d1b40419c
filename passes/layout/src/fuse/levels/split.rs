//! Replaces one axis by two.

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::Axis;
use ithaca_ir::{AxisId, Mesh, Module, Op, TensorType};

use super::order::LastAxis;

/// Why an axis cannot be split, if it cannot.
pub(super) fn obstacle(module: &Module, axis: AxisId) -> Option<&'static str> {
    let space = &module.space;
    for function in module.functions.values() {
        for value in function.values.values() {
            let layout = &value.ty.layout;
            if layout.moved.iter().any(|moved| moved.axis == axis) {
                return Some("parts move along it step by step");
            }
            if layout.at.is_some_and(|at| at.axis == axis) {
                return Some("it has pipeline stages");
            }
            let fetches = value.ty.dims.iter().zip(&layout.split);
            let mut fetches = fetches.filter(|(_, axes)| axes.contains(&axis));
            if fetches.any(|(&d, _)| space.dims[d].fetched.is_some()) {
                return Some("tokens are fetched along it");
            }
        }
        for node in &function.nodes {
            let mut is_along = false;
            each_axis_mut(&mut node.op.clone(), &mut |a| {
                is_along |= a == axis;
                a
            });
            if is_along {
                return Some("collectives along it are already chosen");
            }
            if matches!(&node.op, Op::Call { stage: Some(stage), .. } if stage.along == Some(axis)) {
                return Some("it has pipeline stages");
            }
        }
    }
    None
}

/// The module with each group of `inside` consecutive ranks along `axis` on a separate axis.
pub(super) fn split(module: &Module, axis: AxisId, inside: u64, last_axes: &[LastAxis]) -> Module {
    let mut module = module.clone();
    module.space.mesh = mesh(&module.space.mesh, axis, inside);
    for function in module.functions.values_mut() {
        function.retype(|ty| retype(ty, axis, last_axes));
        for node in &mut function.nodes {
            each_axis_mut(&mut node.op, &mut |a| moved(a, axis));
            if let Op::Call { stage: Some(stage), .. } = &mut node.op {
                stage.along = stage.along.map(|a| moved(a, axis));
            }
        }
    }
    module
}

/// Replaces each axis of a collective or of a slice.
fn each_axis_mut(op: &mut Op, new: &mut dyn FnMut(AxisId) -> AxisId) {
    match op {
        Op::AllToAll { axis, .. } | Op::Slice { axis, .. } => *axis = new(*axis),
        Op::AllGather { axis, .. } | Op::ReduceScatter { axis, .. } | Op::AllReduce { axis } => {
            *axis = axis.map(new);
        }
        _ => {}
    }
}

fn mesh(mesh: &Mesh, axis: AxisId, inside: u64) -> Mesh {
    let mut axes = Vec::new();
    let free = |name: String| match mesh.axis(&name) {
        Some(_) => format!("{name}_"),
        None => name,
    };
    for (id, Axis { name, size }) in mesh.axes.iter() {
        if id == axis {
            axes.push((free(format!("{name}_across")), size / inside));
            axes.push((free(format!("{name}_inside")), inside));
        } else {
            axes.push((name.clone(), *size));
        }
    }
    Mesh::new(axes)
}

/// The new index of another axis after `axis` is split.
fn moved(other: AxisId, axis: AxisId) -> AxisId {
    AxisId::new(other.index() + usize::from(other > axis))
}

fn retype(ty: &mut TensorType, axis: AxisId, last_axes: &[LastAxis]) {
    let (across, inside) = (AxisId::new(axis.index()), AxisId::new(axis.index() + 1));
    let layout = &mut ty.layout;
    for (dim, axes) in ty.dims.iter().zip(&mut layout.split) {
        let pair = match last_axes[dim.index()] {
            LastAxis::Across => [inside, across],
            LastAxis::Inside => [across, inside],
        };
        *axes = replaced(axes, axis, pair);
    }
    layout.partial = replaced(&layout.partial, axis, [across, inside]);
    layout.partial.sort_unstable();
    layout.moved.iter_mut().for_each(|m| m.axis = moved(m.axis, axis));
    layout.at.iter_mut().for_each(|at| at.axis = moved(at.axis, axis));
}

fn replaced(axes: &AxisList, axis: AxisId, pair: [AxisId; 2]) -> AxisList {
    let mut new = AxisList::new();
    for &a in axes {
        if a == axis {
            new.extend(pair);
        } else {
            new.push(moved(a, axis));
        }
    }
    new
}
