//! Activity analysis: finds the values that depend on weights; only those have gradients.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, ValueId};
use ithaca_ir::{Module, Op};

/// For each function, the values that depend on weights in at least one call.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    values: Vec<Vec<bool>>,
}

impl Activity {
    /// Analyses every function of `module`.
    pub(super) fn of(module: &Module) -> Self {
        let values = module.functions.values().map(|f| vec![false; f.values.len()]).collect();
        let mut activity = Self { values };
        // Activity propagates through calls and from layer to layer, so iterate to a fixed point.
        while module.functions.iter().fold(false, |more, (id, f)| activity.function(module, id, f) || more) {}
        activity
    }

    /// Whether `value` of `function` depends on weights.
    pub(super) fn is_active(&self, function: FuncId, value: ValueId) -> bool {
        self.values[function.index()][value.index()]
    }

    /// Propagates through one function; returns whether a value became active.
    fn function(&mut self, module: &Module, id: FuncId, function: &Function) -> bool {
        let mut changed = false;
        for node in &function.nodes {
            if let Op::Call { callee, .. } = &node.op {
                let inner = &module.functions[*callee];
                for (i, &operand) in node.operands.iter().enumerate() {
                    let passed = self.is_active(id, operand);
                    // A result is the argument of the next layer.
                    let carried = node.results.get(i).is_some_and(|&r| self.is_active(id, r));
                    let float = inner.ty(inner.params[i]).dtype.is_float();
                    changed |= self.set(*callee, inner.params[i], float && (passed || carried));
                }
                for (&result, output) in node.results.iter().zip(&inner.outputs) {
                    let active = self.is_active(*callee, output.value);
                    changed |= self.set(id, result, active);
                }
                continue;
            }
            let active =
                matches!(node.op, Op::Param(_)) || node.operands.iter().any(|&v| self.is_active(id, v));
            for &result in &node.results {
                changed |= self.set(id, result, active && function.ty(result).dtype.is_float());
            }
        }
        changed
    }

    fn set(&mut self, function: FuncId, value: ValueId, active: bool) -> bool {
        let slot = &mut self.values[function.index()][value.index()];
        let changed = active && !*slot;
        *slot |= active;
        changed
    }
}
