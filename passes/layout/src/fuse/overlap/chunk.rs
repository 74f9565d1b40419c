//! Chunks a region: repeats each operation for each chunk, in software-pipelined order.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::module::{FuncId, Function, Node};
use ithaca_ir::ops::{Binding, OpError, Target};
use ithaca_ir::{Arena, DimId, Op, Part, Space, TensorType, ValueId};
use ithaca_pass::rebuild::Copy;

use super::region::Region;
use crate::parts::part;

/// For each chunk, the part of each cut dimension.
pub(super) type Cuts = Vec<BTreeMap<DimId, DimId>>;

/// Declares the parts of a region's dimensions.
pub(super) fn declare(space: &mut Space, region: &Region, chunks: u64) -> Cuts {
    let cut = |space: &mut Space, index: u64| {
        let part = |&of: &DimId| (of, part(space, Part { of, index, count: chunks, runs: region.runs }));
        region.dims.iter().map(part).collect()
    };
    (0..chunks).map(|index| cut(space, index)).collect()
}

/// Chunks the region of `function`. Operations that do not depend on the region come before it, the others after it.
///
/// # Errors
/// An invariant that a chunk violates: the region was not parallel in its dimension.
pub(super) fn cut(
    space: &Space,
    functions: &Arena<FuncId, Function>,
    function: &Function,
    region: &Region,
    cuts: &Cuts,
) -> Result<Function, OpError> {
    let mut copy = Copy::of(function, space, functions);
    let inside: BTreeSet<usize> = region.nodes.iter().copied().collect();
    let later = later(function, &inside);
    for (i, node) in function.nodes.iter().enumerate() {
        if !inside.contains(&i) && !later.contains(&i) {
            copy.node(node)?;
        }
    }
    chunks(&mut copy, region, &inside, cuts)?;
    for i in later {
        copy.node(&function.nodes[i])?;
    }
    Ok(copy.finish())
}

/// The operations outside that depend on the region, or follow such an operation with effects.
fn later(function: &Function, inside: &BTreeSet<usize>) -> BTreeSet<usize> {
    let mut late_values: BTreeSet<ValueId> = BTreeSet::new();
    let mut late: BTreeSet<usize> = BTreeSet::new();
    let mut written: Vec<(Target, &Binding)> = Vec::new();
    let mut read: Vec<(Target, &Binding)> = Vec::new();
    for (i, node) in function.nodes.iter().enumerate() {
        let is_inside = inside.contains(&i);
        let home = match &node.op {
            Op::Param(binding) => Some((Target::Param, binding)),
            Op::State(binding) => Some((Target::State, binding)),
            Op::Assign { target, binding } => Some((*target, binding)),
            _ => None,
        };
        let writes = matches!(node.op, Op::Assign { .. });
        let is_call = matches!(node.op, Op::Call { .. });
        let ordered = home.is_some_and(|home| written.contains(&home) || (writes && read.contains(&home)));
        // A call may have any effect.
        let after_a_call = !late.is_empty() && is_call;
        let needs = node.operands.iter().any(|v| late_values.contains(v));
        if is_inside || needs || ordered || after_a_call {
            late_values.extend(&node.results);
            if !is_inside {
                late.insert(i);
                match home {
                    Some(home) if writes => written.push(home),
                    Some(home) => read.push(home),
                    None => {}
                }
            }
        }
    }
    late
}

/// The chunks of a region in the order of execution, and their joined results.
fn chunks(
    copy: &mut Copy<'_>,
    region: &Region,
    inside: &BTreeSet<usize>,
    cuts: &Cuts,
) -> Result<(), OpError> {
    let function = copy.values.source;
    let communicates = |i: usize| function.nodes[i].op.is_communication();
    // Consecutive operations on one stream. A collective joins the earliest phase possible.
    let phases: Vec<&[usize]> = region.nodes.chunk_by(|&a, &b| communicates(a) == communicates(b)).collect();
    let mut own: Vec<BTreeMap<ValueId, ValueId>> = vec![BTreeMap::new(); cuts.len()];
    let last = phases.len() + cuts.len() - 1;
    for step in 0..last {
        // In each step, communication is issued before computation.
        for communication in [true, false] {
            for (c, cut) in cuts.iter().enumerate() {
                let phase = step.checked_sub(c).and_then(|p| phases.get(p)).copied().unwrap_or_default();
                for &i in phase.iter().filter(|&&i| communicates(i) == communication) {
                    node(copy, &function.nodes[i], cut, &mut own[c])?;
                }
            }
        }
    }
    let outside = function.nodes.iter().enumerate().filter(|(i, _)| !inside.contains(i));
    let mut used: BTreeSet<ValueId> = outside.flat_map(|(_, node)| node.operands.iter().copied()).collect();
    used.extend(function.outputs.iter().map(|output| output.value));
    for &value in region.nodes.iter().flat_map(|&i| &function.nodes[i].results) {
        if !used.contains(&value) {
            continue;
        }
        let dim = function.ty(value).dims.iter().find(|d| region.dims.contains(d));
        let to = *dim.expect("every result of a region has its dimension");
        let parts: Vec<ValueId> = own.iter().map(|values| values[&value]).collect();
        let joined = copy.b.push(Op::Join { to }, &parts)?;
        copy.set_all(&[value], &[joined]);
    }
    Ok(())
}

/// One operation of one chunk; `own` has the values of the chunk.
fn node(
    copy: &mut Copy<'_>,
    node: &Node,
    cut: &BTreeMap<DimId, DimId>,
    own: &mut BTreeMap<ValueId, ValueId>,
) -> Result<(), OpError> {
    let function = copy.values.source;
    let mut operands = Vec::with_capacity(node.operands.len());
    for &operand in &node.operands {
        operands.push(match own.entry(operand) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                let outside = copy.values[operand];
                let part = function.ty(operand).dims.iter().find_map(|d| cut.get(d));
                *new.insert(match part {
                    Some(&to) => copy.b.push(Op::Take { to }, &[outside])?,
                    None => outside,
                })
            }
        });
    }
    let new = |dim: &mut DimId| *dim = cut.get(dim).copied().unwrap_or(*dim);
    let mut op = node.op.clone();
    op.each_dim_mut(&mut { new });
    let declared = node.results.iter().map(|&v| {
        let mut ty = function.ty(v).clone();
        ty.dims.iter_mut().for_each(new);
        ty
    });
    let declared: Vec<TensorType> = declared.collect();
    let results = copy.b.node(op, &operands, &declared)?;
    own.extend(node.results.iter().copied().zip(results));
    Ok(())
}
