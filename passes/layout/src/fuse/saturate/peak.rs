//! The peak memory of a function, from the lifetimes of its values.

use ithaca_ir::entity::Entity;
use ithaca_ir::{Function, Op, Space};

/// The maximum bytes that values of `function` occupy at once on the busiest rank, without weights, states, inputs and
/// arguments.
pub(super) fn peak_bytes(space: &Space, function: &Function) -> u64 {
    let mut last = vec![0; function.values.len()];
    for (n, node) in function.nodes.iter().enumerate() {
        node.operands.iter().for_each(|v| last[v.index()] = n);
    }
    function.outputs.iter().for_each(|o| last[o.value.index()] = function.nodes.len());
    let mut ends: Vec<u64> = vec![0; function.nodes.len() + 1];
    let (mut held, mut peak) = (0u64, 0u64);
    for (n, node) in function.nodes.iter().enumerate() {
        if !matches!(node.op, Op::Param(_) | Op::Input(_) | Op::State(_)) {
            for &v in &node.results {
                let bytes = space.max_local_bytes(function.ty(v));
                held = held.saturating_add(bytes);
                let end = &mut ends[last[v.index()].max(n)];
                *end = end.saturating_add(bytes);
            }
        }
        peak = peak.max(held);
        held = held.saturating_sub(ends[n]);
    }
    peak
}
