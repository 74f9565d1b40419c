//! The inside of attention: operations of a backward pass that only serve it, and values that are read inside it, outside
//! it, or on both sides.
//!
//! `delta`, the sum of `d_o · o`, is a number for each query and head; computed where attention takes place, nothing
//! travels for it but `d_o`, which attention needs there anyway.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Node, ValueId};
use ithaca_ir::ops::Op;

/// The nodes and values of a function that belong to attention.
#[derive(Clone, Debug)]
pub(super) struct Inner {
    /// For each node whether it only serves attention, and is computed inside.
    nodes: Vec<bool>,
    /// For each value its readers.
    reads: Vec<Reads>,
}

/// On which side of attention a value is read by operations of its function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reads {
    /// By attention or by operations that only serve it.
    pub(super) inside: bool,
    /// By anything else.
    pub(super) outside: bool,
}

/// Which operand of `attention_backward` has no life outside it.
const DELTA: usize = 5;

impl Inner {
    /// The nodes and values of `function` that belong to attention.
    pub(super) fn of(function: &Function) -> Self {
        let mut nodes = vec![false; function.nodes.len()];
        let mut reads = vec![Reads::default(); function.values.len()];
        let mut own = vec![false; function.values.len()];
        for output in &function.outputs {
            own[output.value.index()] = true;
        }
        for node in &function.nodes {
            if is_attention(&node.op) {
                let delta = matches!(node.op, Op::AttentionBackward(_)).then_some(DELTA);
                let others = node.operands.iter().enumerate().filter(|&(i, _)| Some(i) != delta);
                others.for_each(|(_, v)| own[v.index()] = true);
            }
        }
        for (i, node) in function.nodes.iter().enumerate().rev() {
            let serves = |v: &ValueId| {
                let Reads { inside, outside } = reads[v.index()];
                inside && !outside && !own[v.index()]
            };
            nodes[i] = by_rows(node) && node.results.iter().all(serves);
            let inside = nodes[i] || is_attention(&node.op);
            for operand in &node.operands {
                let reads = &mut reads[operand.index()];
                *if inside { &mut reads.inside } else { &mut reads.outside } = true;
            }
        }
        Self { nodes, reads }
    }

    /// Whether the node only serves attention.
    pub(super) fn serves(&self, node: usize) -> bool {
        self.nodes[node]
    }

    /// The readers of `value`.
    pub(super) fn reads(&self, value: ValueId) -> Reads {
        self.reads[value.index()]
    }
}

/// Whether a node computes each row of a query and a head by itself, so that it may be computed in any layout of rows.
fn by_rows(node: &Node) -> bool {
    matches!(
        node.op,
        Op::Einsum | Op::Sum | Op::Binary(_) | Op::Scale { .. } | Op::Cast { .. } | Op::Fill { .. }
    )
}

/// Whether an operation is attention, forward or backward.
pub(super) fn is_attention(op: &Op) -> bool {
    matches!(op, Op::Attention(_) | Op::AttentionBackward(_))
}
