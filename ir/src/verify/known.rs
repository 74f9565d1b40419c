//! The parts of a module that need no check, because a verified module that it was made from has them.
//!
//! Whether an operation is legal depends on the space, on the operation and on the types of its values, except for
//! calls, which depend on their callees. So an operation of the same function, on values of the same types in an equal space, is
//! legal again. Levels, names, the order of values and calls are checked each time.

use crate::module::{Function, Level, Module, Node};
use crate::ops::table::op::Op;

/// As many operations before and after the expected place are compared.
const AROUND: usize = 12;

/// A verified module in the space of the module at hand, if there is one.
#[derive(Default)]
pub(super) struct Known<'a> {
    module: Option<&'a Module>,
}

impl<'a> Known<'a> {
    /// The parts of `module` that `previous` proves.
    pub(super) fn of(previous: &'a Module, module: &Module) -> Self {
        // On the program level types follow other rules.
        let is_alike = (previous.level == Level::Program) == (module.level == Level::Program);
        Self { module: (is_alike && previous.space == module.space).then_some(previous) }
    }

    pub(super) fn has_space(&self) -> bool {
        self.module.is_some()
    }

    pub(super) fn module(&self) -> Option<&'a Module> {
        self.module
    }

    /// For each node of `function`, whether it is known to be legal; empty if none is.
    pub(super) fn nodes(&self, function: &Function) -> Vec<bool> {
        let known =
            self.module.and_then(|module| module.function(&function.name).map(|id| &module.functions[id]));
        let Some(known) = known else { return Vec::new() };
        let mut next = 0;
        let is_known = |node: &Node| {
            if matches!(node.op, Op::Call { .. }) {
                return false;
            }
            let is_same = |i: &usize| is_alike((function, node), (known, &known.nodes[*i]));
            let end = known.nodes.len().min(next + AROUND);
            let found = (next..end)
                .find(is_same)
                .or_else(|| (next.saturating_sub(AROUND)..next.min(end)).find(is_same));
            next = found.map_or(next, |i| i + 1);
            found.is_some()
        };
        function.nodes.iter().map(is_known).collect()
    }
}

/// Whether two nodes are the same operation on values of the same types.
fn is_alike((f, a): (&Function, &Node), (g, b): (&Function, &Node)) -> bool {
    let types_are_equal =
        |a: &[_], b: &[_]| a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| f.ty(a) == g.ty(b));
    a.op == b.op && types_are_equal(&a.results, &b.results) && types_are_equal(&a.operands, &b.operands)
}
