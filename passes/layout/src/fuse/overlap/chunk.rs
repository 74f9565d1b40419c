//! Cuts a region: each operation once for each chunk, in the order of a pipeline.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, Output};
use ithaca_ir::ops::{Binding, OpError, Target};
use ithaca_ir::{Arena, DimId, FunctionBuilder, Op, Part, Space, TensorType, ValueId};

use super::region::Region;
use crate::parts::part;

/// For each chunk the part of each dimension that it has.
pub(super) type Cuts = Vec<BTreeMap<DimId, DimId>>;

/// Declares the parts of a region's dimensions.
pub(super) fn declare(space: &mut Space, region: &Region, chunks: u64) -> Cuts {
    let cut = |space: &mut Space, index: u64| {
        let part = |&of: &DimId| (of, part(space, Part { of, index, count: chunks, runs: region.runs }));
        region.dims.iter().map(part).collect()
    };
    (0..chunks).map(|index| cut(space, index)).collect()
}

/// `function` with the region cut. What does not depend on the region stands before it, the rest behind.
///
/// # Errors
/// An invariant that a chunk breaks: the region was not parallel in its dimension.
pub(super) fn cut(
    space: &Space,
    functions: &Arena<FuncId, Function>,
    function: &Function,
    region: &Region,
    cuts: &Cuts,
) -> Result<Function, OpError> {
    let mut b = FunctionBuilder::like(function, space, functions);
    let mut map = Values::of(function);
    for &param in &function.params {
        let name = function.values[param].name.as_deref();
        map.set(param, b.param(function.ty(param).clone(), name));
    }
    let inside: BTreeSet<usize> = region.nodes.iter().copied().collect();
    let later = later(function, &inside);
    for (i, node) in function.nodes.iter().enumerate() {
        if !inside.contains(&i) && !later.contains(&i) {
            copy(&mut b, function, node, &mut map)?;
        }
    }
    chunks(&mut b, function, (region, cuts), &mut map)?;
    for (i, node) in function.nodes.iter().enumerate().filter(|(i, _)| later.contains(i)) {
        debug_assert!(!inside.contains(&i), "what is cut stands in no other place");
        copy(&mut b, function, node, &mut map)?;
    }
    let output = |o: &Output| Output { name: o.name.clone(), value: map.get(o.value) };
    let outputs: Vec<Output> = function.outputs.iter().map(output).collect();
    Ok(b.finish(outputs))
}

/// Values of the new function by those of the old one.
struct Values(Vec<Option<ValueId>>);

impl Values {
    fn of(function: &Function) -> Self {
        Self(vec![None; function.values.len()])
    }

    fn get(&self, old: ValueId) -> ValueId {
        self.0[old.index()].expect("values are made before they are used")
    }

    fn set(&mut self, old: ValueId, new: ValueId) {
        self.0[old.index()] = Some(new);
    }
}

fn copy(
    b: &mut FunctionBuilder<'_>,
    function: &Function,
    node: &Node,
    map: &mut Values,
) -> Result<(), OpError> {
    let operands: Vec<ValueId> = node.operands.iter().map(|&v| map.get(v)).collect();
    let declared: Vec<TensorType> = node.results.iter().map(|&v| function.ty(v).clone()).collect();
    let results = b.node(node.op.clone(), &operands, &declared)?;
    for (&old, &new) in node.results.iter().zip(&results) {
        b.name(new, function.values[old].name.as_deref());
        map.set(old, new);
    }
    Ok(())
}

/// The operations outside that need something of the region, or come after one of these where something is written.
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
        // A call may write anything.
        let behind_a_call = !late.is_empty() && is_call;
        let needs = node.operands.iter().any(|v| late_values.contains(v));
        if is_inside || needs || ordered || behind_a_call {
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

/// The chunks of a region, one operation after another as streams shall run them, and what they give joined.
fn chunks(
    b: &mut FunctionBuilder<'_>,
    function: &Function,
    (region, cuts): (&Region, &Cuts),
    map: &mut Values,
) -> Result<(), OpError> {
    let phases = phases(function, &region.nodes);
    let mut own: Vec<Values> = cuts.iter().map(|_| Values::of(function)).collect();
    let last = phases.len() + cuts.len() - 1;
    for step in 0..last {
        // What travels is sent off before anything is computed in this step.
        for kind in [Kind::Travels, Kind::Computes] {
            for (c, cut) in cuts.iter().enumerate() {
                let phase = step.checked_sub(c).and_then(|p| phases.get(p)).filter(|p| p.kind == kind);
                for &i in phase.map_or(&[][..], |p| &p.nodes) {
                    node(b, function, &function.nodes[i], cut, (map, &mut own[c]))?;
                }
            }
        }
    }
    let made: Vec<ValueId> =
        region.nodes.iter().flat_map(|&i| function.nodes[i].results.iter().copied()).collect();
    let inside: BTreeSet<usize> = region.nodes.iter().copied().collect();
    for value in made {
        let used = function
            .nodes
            .iter()
            .enumerate()
            .any(|(i, n)| !inside.contains(&i) && n.operands.contains(&value));
        if !used && !function.outputs.iter().any(|o| o.value == value) {
            continue;
        }
        let ty = function.ty(value);
        let dim = ty.dims.iter().find(|d| region.dims.contains(d));
        let to = *dim.expect("every result of a region has its dimension");
        let parts: Vec<ValueId> = own.iter().map(|values| values.get(value)).collect();
        let joined = b.push(Op::Join { to }, &parts)?;
        b.name(joined, function.values[value].name.as_deref());
        map.set(value, joined);
    }
    Ok(())
}

/// One operation of one chunk.
fn node(
    b: &mut FunctionBuilder<'_>,
    function: &Function,
    node: &Node,
    cut: &BTreeMap<DimId, DimId>,
    (map, own): (&Values, &mut Values),
) -> Result<(), OpError> {
    let mut operands = Vec::with_capacity(node.operands.len());
    for &operand in &node.operands {
        if own.0[operand.index()].is_none() {
            let outside = map.get(operand);
            let part = function.ty(operand).dims.iter().find_map(|d| cut.get(d));
            let taken = match part {
                Some(&to) => b.push(Op::Take { to }, &[outside])?,
                None => outside,
            };
            own.set(operand, taken);
        }
        operands.push(own.get(operand));
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
    let results = b.node(op, &operands, &declared)?;
    for (&old, &result) in node.results.iter().zip(&results) {
        own.set(old, result);
    }
    Ok(())
}

/// What a phase does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Travels,
    Computes,
}

/// Operations that follow each other on one stream.
struct Phase {
    kind: Kind,
    nodes: Vec<usize>,
}

/// The operations of a region, cut where communication turns to computation and back. A collective goes with the earliest
/// phase that it can.
fn phases(function: &Function, nodes: &[usize]) -> Vec<Phase> {
    let mut phases: Vec<Phase> = Vec::new();
    for &i in nodes {
        let kind = match function.nodes[i].op.is_communication() {
            true => Kind::Travels,
            false => Kind::Computes,
        };
        match phases.last_mut() {
            Some(phase) if phase.kind == kind => phase.nodes.push(i),
            _ => phases.push(Phase { kind, nodes: vec![i] }),
        }
    }
    phases
}
