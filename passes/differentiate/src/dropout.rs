//! Dropout of a program to differentiate: checks its keys, and removes it on request.

use ithaca_ir::module::{FuncId, Function, Node, ValueId};
use ithaca_ir::ops::{Attention, OpError, Random};
use ithaca_ir::{Diagnostics, Module, Op};
use ithaca_pass::rebuild::rebuild;

/// Refuses keys made outside `main`, because the number of the step is folded in there.
///
/// # Errors
/// `P51`.
pub(super) fn check_keys(module: &Module, main: FuncId) -> Result<(), OpError> {
    let begins = |n: &Node| matches!(n.op, Op::Random(Random::Key { .. }));
    let others = module.functions.iter().filter(|&(id, _)| id != main);
    match others.map(|(_, f)| f).find(|f| f.nodes.iter().any(begins)) {
        None => Ok(()),
        Some(function) => Err(OpError::new(
            "P51",
            format!(
                "`@{}` makes a `key`; in a program to differentiate only `@main` may make keys",
                function.name
            ),
        )),
    }
}

/// Whether a program has dropout.
pub(super) fn drops(module: &Module) -> bool {
    let mut nodes = module.functions.values().flat_map(|function| &function.nodes);
    nodes.any(|node| match &node.op {
        Op::Random(Random::Dropout { .. }) => true,
        Op::Attention(attention) => attention.dropout.is_some(),
        _ => false,
    })
}

/// The same program without dropout. Keys stay, but no mask is drawn from them.
///
/// # Errors
/// None on a program that verifies.
pub(super) fn without(module: &Module) -> Result<Module, Diagnostics> {
    rebuild(module, |b, function, node, operands| match &node.op {
        Op::Random(Random::Dropout { .. }) => Ok(Some(vec![operands[0]])),
        // The mask is unused from here on; its key takes its place.
        Op::Random(Random::DropoutMask { .. }) if only_drops(function, node.result()) => {
            Ok(Some(vec![operands[0]]))
        }
        Op::Attention(attention) if attention.dropout.is_some() => {
            let key = attention.key_operand(operands.len());
            let attention = Attention { dropout: None, ..attention.clone() };
            let operands = operands.iter().enumerate().filter(|&(i, _)| Some(i) != key);
            let operands: Vec<ValueId> = operands.map(|(_, &v)| v).collect();
            Ok(Some(b.node(Op::Attention(attention), &operands, &[])?.to_vec()))
        }
        _ => Ok(None),
    })
}

/// Whether `dropout` operations are the only users of a mask.
fn only_drops(function: &Function, mask: ValueId) -> bool {
    let drops = |n: &Node| matches!(n.op, Op::Random(Random::Dropout { .. }));
    let mut readers = function.nodes.iter().filter(|n| n.operands.contains(&mask));
    readers.all(drops) && function.outputs.iter().all(|o| o.value != mask)
}
