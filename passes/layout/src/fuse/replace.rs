//! Operations of a function that one operation replaces.

use std::collections::BTreeSet;

use ithaca_ir::module::{Function, ValueId};
use ithaca_ir::{Diagnostics, Op};
use ithaca_pass::Context;
use ithaca_pass::rebuild::Copy;

use super::graph::Graph;

/// An operation that replaces several.
pub(super) struct Replacement {
    pub(super) op: Op,
    pub(super) operands: Vec<ValueId>,
    /// The values that its results become.
    pub(super) results: Vec<ValueId>,
    /// The nodes whose results these are; none of them depends on another.
    pub(super) nodes: Vec<usize>,
    /// Nodes whose results these alone use.
    pub(super) before: Vec<usize>,
}

/// The function with those of the replacements, which have no node in common, that no order of nodes forbids.
///
/// # Errors
/// Those of building a function.
pub(super) fn replaced(
    function: &Function,
    replacements: Vec<Replacement>,
    mut copy: Copy<'_>,
    cx: &mut Context<'_>,
) -> Result<Function, Diagnostics> {
    let graph = Graph::of(function);
    let priority: Vec<usize> = (0..function.nodes.len()).collect();
    let mut units: Vec<Vec<usize>> = priority.iter().map(|&i| vec![i]).collect();
    let (mut groups, mut made): (Vec<Vec<usize>>, Vec<Replacement>) = (Vec::new(), Vec::new());
    for replacement in replacements {
        groups.push(replacement.nodes.clone());
        match graph.order(&groups, &priority).filter(|_| cx.rewrite()) {
            Some(order) => {
                units = order;
                made.push(replacement);
            }
            None => drop(groups.pop()),
        }
    }
    let gone: BTreeSet<usize> = made.iter().flat_map(|made| made.before.iter().copied()).collect();
    for unit in units.into_iter().filter(|unit| !gone.contains(&unit[0])) {
        match made.iter().find(|made| made.nodes.contains(&unit[0])) {
            None => copy.node(&function.nodes[unit[0]])?,
            Some(Replacement { op, operands, results, .. }) => {
                let operands: Vec<ValueId> = operands.iter().map(|&v| copy.values[v]).collect();
                copy.node_as(op.clone(), &operands, results)?;
            }
        }
    }
    Ok(copy.finish())
}
