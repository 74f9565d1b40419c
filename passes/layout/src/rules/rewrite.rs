//! Applies rules to each function of a module in one sweep.
//!
//! Operations are copied in order. The rules are tried on each operation in the order of the file; if one matches, the
//! operations of its replacement take the place of the operation and the rules are tried on them too. Operands are
//! final when an operation is visited, so one sweep leaves no match. Unused operations are removed at the end.

use std::collections::BTreeSet;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::Node;
use ithaca_ir::ops::{Context, OpError};
use ithaca_ir::{Function, FunctionBuilder, Level, Module, Op, Output, TensorType, ValueId};
use ithaca_pass::rebuild::Copy;

use super::matching::{Maker, Program, matches};
use super::replace::{Place, Replacement, RewriteFailure, Site, replacement};
use super::syntax::Rule;

/// The applications of each rule, and their limit.
pub(super) struct Budget<'a> {
    /// Applications of each rule.
    pub(super) applied: Vec<u64>,
    /// The maximum number of applications of one rule.
    limit: u64,
    /// Rules that matched after they had reached the limit.
    pub(super) stopped: Vec<bool>,
    /// The first replacement declined because of its types.
    pub(super) type_mismatch: Option<String>,
    /// Why the first illegal replacement is illegal.
    pub(super) illegal: Option<String>,
    /// Asked before each application, in addition to the limit.
    allow: &'a mut dyn FnMut() -> bool,
}

impl<'a> Budget<'a> {
    pub(super) fn new(n_rules: usize, limit: u64, allow: &'a mut dyn FnMut() -> bool) -> Self {
        let (applied, stopped) = (vec![0; n_rules], vec![false; n_rules]);
        Self { applied, limit, stopped, type_mismatch: None, illegal: None, allow }
    }
}

/// The module with the rules applied.
///
/// # Errors
/// A broken invariant: a bug, because replacements are checked first.
pub(super) fn rewrite(module: &Module, rules: &[Rule], budget: &mut Budget<'_>) -> Result<Module, OpError> {
    let mut rewritten = module.emptied(module.level);
    for function in module.functions.values() {
        let cx = Context { space: &rewritten.space, functions: &rewritten.functions };
        let function = rewrite_function(cx, module.level, function, rules, budget)?;
        rewritten.functions.push(function);
    }
    Ok(rewritten)
}

/// The function with the rules applied; parameters, outputs and their types stay.
fn rewrite_function(
    cx: Context<'_>,
    level: Level,
    function: &Function,
    rules: &[Rule],
    budget: &mut Budget<'_>,
) -> Result<Function, OpError> {
    let before: u64 = budget.applied.iter().sum();
    let mut b = FunctionBuilder::like(function, cx.space, cx.functions);
    // The first slots are the old function's values.
    let mut values = vec![None; function.values.len()];
    for &param in &function.params {
        let value = &function.values[param];
        values[param.index()] = Some(b.param(value.ty.clone(), value.name.as_deref()));
    }
    let defined = vec![None; function.params.len()];
    let mut sweep = Sweep { cx, level, function, b, values, defined, kept: BTreeSet::new() };
    let used = used(function);
    for node in &function.nodes {
        let mut tasks = vec![task(function, node, &used)];
        while let Some(task) = tasks.pop() {
            let operands: Vec<ValueId> = task.operands.iter().map(|&s| sweep.value(s)).collect();
            match sweep.apply(&task, &operands, rules, budget) {
                Some(replacement) => sweep.queue(task, replacement, &mut tasks),
                None => sweep.add(task, &operands)?,
            }
        }
    }
    if budget.applied.iter().sum::<u64>() == before {
        return Ok(function.clone());
    }
    let outputs = function.outputs.iter();
    let outputs: Vec<Output> =
        outputs.map(|o| Output { name: o.name.clone(), value: sweep.value(o.value.index()) }).collect();
    without_unused(cx, &sweep.b.finish(outputs), &sweep.kept)
}

/// A function under construction.
struct Built<'a> {
    function: &'a Function,
    /// For each value its node and the index of the result; `None` for parameters.
    defined: &'a [Option<(usize, usize)>],
}

impl Program for Built<'_> {
    fn type_of(&self, value: ValueId) -> &TensorType {
        self.function.ty(value)
    }

    fn makers(&self, value: ValueId, result: usize) -> Vec<Maker<'_>> {
        let found = self.defined[value.index()].filter(|(_, i)| *i == result);
        let maker = found.map(|(node, _)| {
            let node = &self.function.nodes[node];
            Maker { op: &node.op, attrs: None, operands: node.operands.clone() }
        });
        maker.into_iter().collect()
    }
}

/// The index of a value that may not exist yet.
type Slot = usize;

/// An operation to visit and add.
struct Task {
    op: Op,
    operands: Vec<Slot>,
    types: Vec<TensorType>,
    results: Vec<Slot>,
    /// It was unused in the original and stays.
    stays: bool,
}

struct Sweep<'a> {
    cx: Context<'a>,
    level: Level,
    function: &'a Function,
    b: FunctionBuilder<'a>,
    /// The value of each slot, once it exists.
    values: Vec<Option<ValueId>>,
    defined: Vec<Option<(usize, usize)>>,
    /// Unused nodes that stay.
    kept: BTreeSet<usize>,
}

impl Sweep<'_> {
    fn value(&self, slot: Slot) -> ValueId {
        self.values[slot].expect("operations are added after those that they need")
    }

    /// The replacement by the first rule that applies to the task.
    fn apply(
        &self,
        task: &Task,
        operands: &[ValueId],
        rules: &[Rule],
        budget: &mut Budget<'_>,
    ) -> Option<Replacement> {
        let function = self.b.function();
        let program = Built { function, defined: &self.defined };
        for (i, rule) in rules.iter().enumerate().filter(|(_, rule)| rule.left.op == task.op.name()) {
            let root = Maker { op: &task.op, attrs: None, operands: operands.into() };
            let Some(bindings) = matches(&program, self.cx.names(), rule, vec![root], 1).pop() else {
                continue;
            };
            let site = Site { cx: self.cx, level: self.level, program: &program };
            match replacement(rule, &bindings, site, &task.types) {
                Err(RewriteFailure::Illegal(message)) => {
                    budget.illegal.get_or_insert(message);
                }
                Err(RewriteFailure::TypeMismatch(message)) => {
                    budget.type_mismatch.get_or_insert(message);
                }
                Ok(_) if budget.applied[i] >= budget.limit => budget.stopped[i] = true,
                Ok(replacement) => {
                    if (budget.allow)() {
                        budget.applied[i] += 1;
                        return Some(replacement);
                    }
                }
            }
        }
        None
    }

    /// Puts the new operations in the task's place, first one first.
    fn queue(&mut self, task: Task, replacement: Replacement, tasks: &mut Vec<Task>) {
        let Replacement { nodes, results } = replacement;
        for (&place, &old) in results.iter().zip(&task.results) {
            if let Place::Value(v) = place {
                self.values[old] = Some(v);
            }
        }
        let (mut new, mut slots): (Vec<Task>, Vec<Vec<Slot>>) = (Vec::new(), Vec::new());
        for (n, node) in nodes.into_iter().enumerate() {
            let operand = |place: Place| place.of(|v| self.slot(Some(v)), &slots);
            let operands = node.operands.into_iter().map(operand).collect();
            // A result that replaces an old one takes its slot and its name.
            let taken = |i| results.iter().position(|&place| place == Place::New(n, i));
            let slot = |i| taken(i).map_or_else(|| self.slot(None), |old| task.results[old]);
            let results: Vec<Slot> = (0..node.types.len()).map(slot).collect();
            slots.push(results.clone());
            new.push(Task { op: node.op, operands, types: node.types, results, stays: false });
        }
        if let Some(last) = new.last_mut() {
            last.stays = task.stays;
        }
        tasks.extend(new.into_iter().rev());
    }

    fn slot(&mut self, value: Option<ValueId>) -> Slot {
        self.values.push(value);
        self.values.len() - 1
    }

    fn add(&mut self, task: Task, operands: &[ValueId]) -> Result<(), OpError> {
        let n = self.b.function().nodes.len();
        let results = self.b.node(task.op, operands, &task.types)?;
        for (i, (&slot, &value)) in task.results.iter().zip(&results).enumerate() {
            self.values[slot] = Some(value);
            self.defined.push(Some((n, i)));
            let old = self.function.values.get(ValueId::new(slot));
            self.b.name(value, old.and_then(|old| old.name.as_deref()));
        }
        if task.stays {
            self.kept.insert(n);
        }
        Ok(())
    }
}

fn task(function: &Function, node: &Node, used: &[bool]) -> Task {
    Task {
        op: node.op.clone(),
        operands: node.operands.iter().map(|v| v.index()).collect(),
        types: node.results.iter().map(|&v| function.ty(v).clone()).collect(),
        results: node.results.iter().map(|v| v.index()).collect(),
        stays: !node.results.iter().any(|v| used[v.index()]),
    }
}

/// For each value whether an operation or the caller uses it.
pub(crate) fn used(function: &Function) -> Vec<bool> {
    let mut used = vec![false; function.values.len()];
    let operands = function.nodes.iter().flat_map(|n| &n.operands);
    operands.chain(function.outputs.iter().map(|o| &o.value)).for_each(|v| used[v.index()] = true);
    used
}

/// The function without unused operations, except `kept` ones.
fn without_unused(cx: Context<'_>, function: &Function, kept: &BTreeSet<usize>) -> Result<Function, OpError> {
    let mut needed: BTreeSet<ValueId> = function.outputs.iter().map(|o| o.value).collect();
    let mut stays = kept.clone();
    for (n, node) in function.nodes.iter().enumerate().rev() {
        if stays.contains(&n) || node.results.iter().any(|v| needed.contains(v)) {
            stays.insert(n);
            needed.extend(&node.operands);
        }
    }
    let mut copy = Copy::of(function, cx.space, cx.functions);
    for n in stays {
        copy.node(&function.nodes[n])?;
    }
    Ok(copy.finish())
}
