//! Applies rules to a function in one sweep.
//!
//! Operations are copied in order. Before one is added, the rules are tried on it, in the order of the file; where one
//! matches, the operations of its replacement take the place of the one at hand and are tried in their turn. Operands
//! are final when they are looked at, so one sweep leaves no match behind. What only the replaced operations needed is
//! left out at the end.

use ithaca_ir::entity::{Arena, Entity};
use ithaca_ir::module::{FuncId, Node};
use ithaca_ir::ops::{Context, OpError};
use ithaca_ir::{Function, FunctionBuilder, Level, Op, Output, Space, TensorType, ValueId};

use super::matching::Graph;
use super::replace::{Declined, Place, Replacement, Site, replacement};
use super::syntax::Rule;

/// How often each rule was applied, and how often it may be.
pub(super) struct Budget<'a> {
    /// Applications of each rule.
    pub(super) applied: Vec<u64>,
    /// The most applications of one rule.
    pub(super) limit: u64,
    /// Rules that matched when they might be applied no more.
    pub(super) stopped: Vec<bool>,
    /// For each rule, the first replacement that was declined for its types.
    pub(super) other_types: Vec<Option<String>>,
    /// For each rule, why the first replacement that was not legal was not.
    pub(super) illegal: Vec<Option<String>>,
    /// Asked before each application, the limit aside.
    pub(super) allow: &'a mut dyn Allow,
}

/// Whether one more rewrite may be made.
pub(super) trait Allow {
    fn allow(&mut self) -> bool;
}

impl<'a> Budget<'a> {
    pub(super) fn new(n_rules: usize, limit: u64, allow: &'a mut dyn Allow) -> Self {
        Self {
            applied: vec![0; n_rules],
            limit,
            stopped: vec![false; n_rules],
            other_types: vec![None; n_rules],
            illegal: vec![None; n_rules],
            allow,
        }
    }
}

/// Where functions live.
#[derive(Clone, Copy)]
pub(super) struct World<'a> {
    pub(super) space: &'a Space,
    pub(super) functions: &'a Arena<FuncId, Function>,
    pub(super) level: Level,
}

/// The function with rules applied; parameters, outputs and their types are kept.
///
/// # Errors
/// The invariant that an operation breaks: a bug, as replacements are checked before they are made.
pub(super) fn rewrite(
    world: World<'_>,
    function: &Function,
    rules: &[Rule],
    budget: &mut Budget<'_>,
) -> Result<Function, OpError> {
    let before: u64 = budget.applied.iter().sum();
    let sweep = Sweep::new(world, function);
    let (rewritten, kept) = sweep.run(function, rules, budget)?;
    match budget.applied.iter().sum::<u64>() == before {
        true => Ok(function.clone()),
        false => without_unused(world, &rewritten, &kept),
    }
}

/// A value to come.
type Slot = usize;

/// An operation to be tried and added.
struct Task {
    op: Op,
    operands: Vec<Slot>,
    types: Vec<TensorType>,
    results: Vec<Slot>,
    /// Nothing used it before, and it stays.
    stays: bool,
}

struct Sweep<'a> {
    world: World<'a>,
    b: FunctionBuilder<'a>,
    /// The value of each slot, once there is one.
    values: Vec<Option<ValueId>>,
    names: Vec<Option<Box<str>>>,
    defined: Vec<Option<(usize, usize)>>,
    /// Nodes that stay though nothing uses them.
    kept: Vec<usize>,
}

impl<'a> Sweep<'a> {
    fn new(world: World<'a>, function: &Function) -> Self {
        let mut b = FunctionBuilder::like(function, world.space, world.functions);
        // Slots of the old function's values are their numbers.
        let mut values = vec![None; function.values.len()];
        for &param in &function.params {
            let value = &function.values[param];
            values[param.index()] = Some(b.param(value.ty.clone(), value.name.as_deref()));
        }
        let names = function.values.values().map(|v| v.name.clone()).collect();
        Self { world, b, values, names, defined: vec![None; function.params.len()], kept: Vec::new() }
    }

    fn run(
        mut self,
        function: &Function,
        rules: &[Rule],
        budget: &mut Budget<'_>,
    ) -> Result<(Function, Vec<usize>), OpError> {
        let mut used = vec![false; function.values.len()];
        for v in
            function.nodes.iter().flat_map(|n| &n.operands).chain(function.outputs.iter().map(|o| &o.value))
        {
            used[v.index()] = true;
        }
        for node in &function.nodes {
            let mut tasks = vec![task(function, node, &used)];
            while let Some(task) = tasks.pop() {
                let operands: Vec<ValueId> = task.operands.iter().map(|&s| self.value(s)).collect();
                match self.apply(&task, &operands, rules, budget) {
                    Some(replacement) => self.queue(task, replacement, &mut tasks),
                    None => self.add(task, &operands)?,
                }
            }
        }
        let outputs: Vec<Output> = function
            .outputs
            .iter()
            .map(|o| Output { name: o.name.clone(), value: self.value(o.value.index()) })
            .collect();
        Ok((self.b.finish(outputs), self.kept))
    }

    fn value(&self, slot: Slot) -> ValueId {
        self.values[slot].expect("operations are added after those that they need")
    }

    /// What takes the task's place by the first rule that may be applied to it.
    fn apply(
        &self,
        task: &Task,
        operands: &[ValueId],
        rules: &[Rule],
        budget: &mut Budget<'_>,
    ) -> Option<Replacement> {
        let cx = Context { space: self.world.space, functions: self.world.functions };
        let function = self.b.function();
        let graph = Graph { names: cx.names(), function, defined: &self.defined };
        for (i, rule) in rules.iter().enumerate() {
            let Some(bindings) = graph.find(rule, &task.op, operands) else { continue };
            let site = Site { cx, level: self.world.level, values: function };
            match replacement(rule, &bindings, site, &task.types) {
                Err(Declined::Illegal(message)) => {
                    budget.illegal[i].get_or_insert(message);
                }
                Err(Declined::OtherTypes(message)) => {
                    budget.other_types[i].get_or_insert(message);
                }
                Ok(_) if budget.applied[i] >= budget.limit => budget.stopped[i] = true,
                Ok(replacement) => {
                    if budget.allow.allow() {
                        budget.applied[i] += 1;
                        return Some(replacement);
                    }
                }
            }
        }
        None
    }

    /// Puts the new operations where the task was: the first of them is tried first.
    fn queue(&mut self, task: Task, replacement: Replacement, tasks: &mut Vec<Task>) {
        let Replacement { nodes, results } = replacement;
        let mut slots: Vec<Vec<Slot>> = Vec::new();
        for (n, node) in nodes.iter().enumerate() {
            let mut own = Vec::new();
            for i in 0..node.types.len() {
                // A result that takes the place of an old one takes its slot, and with it its name.
                let taken = results.iter().position(|&place| place == Place::New(n, i));
                own.push(match taken {
                    Some(old) => task.results[old],
                    None => self.slot(),
                });
            }
            slots.push(own);
        }
        for (&place, &old) in results.iter().zip(&task.results) {
            if let Place::Value(v) = place {
                self.values[old] = Some(v);
            }
        }
        let mut new: Vec<Task> = Vec::new();
        for (n, node) in nodes.into_iter().enumerate() {
            let mut operands = Vec::new();
            for place in node.operands {
                operands.push(match place {
                    Place::New(node, i) => slots[node][i],
                    Place::Value(v) => {
                        let slot = self.slot();
                        self.values[slot] = Some(v);
                        slot
                    }
                });
            }
            let results = slots[n].clone();
            new.push(Task { op: node.op, operands, types: node.types, results, stays: false });
        }
        if let Some(last) = new.last_mut() {
            last.stays = task.stays;
        }
        tasks.extend(new.into_iter().rev());
    }

    fn slot(&mut self) -> Slot {
        self.values.push(None);
        self.names.push(None);
        self.values.len() - 1
    }

    fn add(&mut self, task: Task, operands: &[ValueId]) -> Result<(), OpError> {
        let n = self.b.function().nodes.len();
        let results = self.b.node(task.op, operands, &task.types)?;
        for (i, (&slot, &value)) in task.results.iter().zip(&results).enumerate() {
            self.values[slot] = Some(value);
            self.defined.push(Some((n, i)));
            self.b.name(value, self.names[slot].as_deref());
        }
        if task.stays {
            self.kept.push(n);
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

/// The function without operations whose results nothing needs, `kept` ones excepted.
fn without_unused(world: World<'_>, function: &Function, kept: &[usize]) -> Result<Function, OpError> {
    let mut needed = vec![false; function.values.len()];
    for output in &function.outputs {
        needed[output.value.index()] = true;
    }
    let mut stays = vec![false; function.nodes.len()];
    for (n, node) in function.nodes.iter().enumerate().rev() {
        stays[n] = kept.contains(&n) || node.results.iter().any(|v| needed[v.index()]);
        if stays[n] {
            node.operands.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    let mut b = FunctionBuilder::like(function, world.space, world.functions);
    let mut map: Vec<Option<ValueId>> = vec![None; function.values.len()];
    let here = |map: &[Option<ValueId>], v: ValueId| map[v.index()].expect("what is needed stays");
    for &param in &function.params {
        let value = &function.values[param];
        map[param.index()] = Some(b.param(value.ty.clone(), value.name.as_deref()));
    }
    for (node, _) in function.nodes.iter().zip(&stays).filter(|(_, stays)| **stays) {
        let operands: Vec<ValueId> = node.operands.iter().map(|&v| here(&map, v)).collect();
        let declared: Vec<TensorType> = node.results.iter().map(|&v| function.ty(v).clone()).collect();
        let results = b.node(node.op.clone(), &operands, &declared)?;
        for (&old, &new) in node.results.iter().zip(&results) {
            b.name(new, function.values[old].name.as_deref());
            map[old.index()] = Some(new);
        }
    }
    let outputs = function.outputs.iter();
    let outputs = outputs.map(|o| Output { name: o.name.clone(), value: here(&map, o.value) });
    let outputs: Vec<Output> = outputs.collect();
    Ok(b.finish(outputs))
}
