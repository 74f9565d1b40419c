//! The communication of weights and gradients: that of values which follow from weights and states alone, and of values
//! from which only weights and states follow. Kernels that compute activations wait for no such gradient, and for a weight
//! known in advance, so these collectives have a stream of their own.
//!
//! A weight gathered for another layer, and a gradient that another layer reduces, pass between functions. So both
//! properties are found for the whole program: every value has them until a source or a use contradicts.

use ithaca_ir::Op;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Module, Node, ValueId};

/// For each value of a function.
#[derive(Clone, Debug)]
pub(super) struct Traffic {
    /// It follows from weights and states alone.
    from_weights: Vec<bool>,
    /// Only weights and states follow from it.
    to_weights: Vec<bool>,
    /// The same of each result of the function, wherever it is called.
    returned: Vec<bool>,
}

impl Traffic {
    /// The traffic of each function of a module.
    pub(super) fn of(module: &Module) -> Vec<Self> {
        let all = |function: &Function| Self {
            from_weights: vec![true; function.values.len()],
            to_weights: vec![true; function.values.len()],
            returned: vec![true; function.outputs.len()],
        };
        let mut found = Found { module, all: module.functions.values().map(all).collect(), changed: true };
        if let Some(main) = module.main() {
            found.all[main.index()].returned.fill(false);
        }
        while std::mem::take(&mut found.changed) {
            module.functions.ids().for_each(|id| found.sources(id));
            module.functions.ids().rev().for_each(|id| found.uses(id));
        }
        found.all
    }

    /// Whether a collective is one of weights or gradients.
    pub(super) fn has(&self, node: &Node) -> bool {
        let all = |values: &[ValueId], are: &[bool]| values.iter().all(|v| are[v.index()]);
        all(&node.operands, &self.from_weights) || all(&node.results, &self.to_weights)
    }
}

struct Found<'m> {
    module: &'m Module,
    all: Vec<Traffic>,
    changed: bool,
}

impl Found<'_> {
    /// Looks for sources of values that are no weights.
    fn sources(&mut self, id: FuncId) {
        let function = &self.module.functions[id];
        for node in &function.nodes {
            let own = &self.all[id.index()].from_weights;
            let is_weight = node.operands.iter().all(|v| own[v.index()]) && !node.operands.is_empty();
            match &node.op {
                Op::Param(_) | Op::State(_) => {}
                Op::Call { callee, .. } => {
                    let called = &self.module.functions[*callee];
                    let passed: Vec<bool> = node.operands.iter().map(|v| own[v.index()]).collect();
                    for (&param, is_weight) in called.params.iter().zip(passed) {
                        self.refute(*callee, param, is_weight, Self::from_weights);
                    }
                    for (i, (&result, output)) in node.results.iter().zip(&called.outputs).enumerate() {
                        let is_weight = self.all[callee.index()].from_weights[output.value.index()];
                        self.refute(id, result, is_weight, Self::from_weights);
                        if i < carried(&node.op) {
                            self.refute(*callee, called.params[i], is_weight, Self::from_weights);
                        }
                    }
                }
                _ => node.results.iter().for_each(|&v| self.refute(id, v, is_weight, Self::from_weights)),
            }
        }
    }

    /// Looks for uses that compute anything but weights and states.
    fn uses(&mut self, id: FuncId) {
        let function = &self.module.functions[id];
        for (output, is_late) in function.outputs.iter().zip(self.all[id.index()].returned.clone()) {
            self.refute(id, output.value, is_late, Self::to_weights);
        }
        for node in function.nodes.iter().rev() {
            let own = &self.all[id.index()].to_weights;
            match &node.op {
                Op::Assign { .. } => {}
                Op::Call { callee, .. } => {
                    let called = &self.module.functions[*callee];
                    let late: Vec<bool> = node.results.iter().map(|v| own[v.index()]).collect();
                    for (i, is_late) in late.into_iter().enumerate() {
                        let is_carried = i < carried(&node.op);
                        let again = |of: &Traffic| of.to_weights[called.params[i].index()];
                        let is_late = is_late && (!is_carried || again(&self.all[callee.index()]));
                        let returned = &mut self.all[callee.index()].returned[i];
                        self.changed |= *returned && !is_late;
                        *returned &= is_late;
                    }
                    for (&operand, &param) in node.operands.iter().zip(&called.params) {
                        let is_late = self.all[callee.index()].to_weights[param.index()];
                        self.refute(id, operand, is_late, Self::to_weights);
                    }
                }
                op => {
                    let is_late = (op.is_communication() || is_light(op))
                        && node.results.iter().all(|v| own[v.index()]);
                    node.operands.iter().for_each(|&v| self.refute(id, v, is_late, Self::to_weights));
                }
            }
        }
    }

    fn from_weights(of: &mut Traffic) -> &mut [bool] {
        &mut of.from_weights
    }

    fn to_weights(of: &mut Traffic) -> &mut [bool] {
        &mut of.to_weights
    }

    /// A value loses a property that does not hold.
    fn refute(&mut self, id: FuncId, value: ValueId, holds: bool, of: fn(&mut Traffic) -> &mut [bool]) {
        let known = &mut of(&mut self.all[id.index()])[value.index()];
        self.changed |= *known && !holds;
        *known &= holds;
    }
}

/// The results that a layer hands to the next.
fn carried(op: &Op) -> usize {
    match op {
        Op::Call { layers, scan, .. } if layers.end - layers.start > 1 => {
            scan.map_or(usize::MAX, |scan| scan.carried)
        }
        _ => 0,
    }
}

/// Element-by-element operations on a gradient.
pub(crate) fn is_light(op: &Op) -> bool {
    matches!(op, Op::Cast { .. } | Op::Scale { .. } | Op::Accumulate | Op::Binary(_) | Op::Slice { .. })
}
