//! Converts a function to an e-graph and back.
//!
//! Operations with effects keep their order: sources, reads and writes of states, calls, operations without used
//! results, and attention that draws random numbers. Their results are leaves, their operands roots.

use std::collections::{BTreeMap, BTreeSet};

use egg::Id;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::Node;
use ithaca_ir::ops::attr::Names;
use ithaca_ir::ops::{Binding, Class, Context, OpError, Target};
use ithaca_ir::{Function, FunctionBuilder, Op, Output, TensorType, ValueId};
use smallvec::SmallVec;

use super::language::{Graph, Symbol, Symbols, Term, add, rebuild};
use crate::rules::used;

/// The e-graph of a function.
pub(super) struct Block<'f> {
    pub(super) function: &'f Function,
    pub(super) graph: Graph,
    /// The class of each value.
    pub(super) classes: Vec<Id>,
    /// For each node, whether rules may replace it.
    free: Vec<bool>,
}

/// Whether an operation may be moved, merged with equal ones and replaced.
fn is_pure(op: &Op) -> bool {
    match op {
        // Collectives that were coalesced into one message stay one.
        Op::Coalesced(_) => false,
        Op::Attention(a) | Op::AttentionBackward(a) => a.dropout.is_none(),
        Op::Scores { attention, .. } | Op::Weigh { attention, .. } => attention.dropout.is_none(),
        op => op.class() != Class::Effect,
    }
}

impl<'f> Block<'f> {
    /// The e-graph of the operations of `function` that satisfy `may_change`; equal ones are merged.
    pub(super) fn of(function: &'f Function, names: Names<'_>, may_change: impl Fn(&Op) -> bool) -> Self {
        let used = used(function);
        let mut graph = Graph::new(Symbols::default());
        let mut classes: Vec<Id> = Vec::with_capacity(function.values.len());
        let leaf = |graph: &mut Graph, v: ValueId| {
            let symbol = graph.analysis.leaf(function.ty(v).clone());
            graph.add(Term { symbol, operands: SmallVec::new() })
        };
        for &param in &function.params {
            let class = leaf(&mut graph, param);
            classes.push(class);
        }
        let mut free = Vec::with_capacity(function.nodes.len());
        for node in &function.nodes {
            let is_free =
                may_change(&node.op) && is_pure(&node.op) && node.results.iter().any(|v| used[v.index()]);
            free.push(is_free);
            if is_free {
                let types: Vec<TensorType> = node.results.iter().map(|&v| function.ty(v).clone()).collect();
                let operands: Vec<Id> = node.operands.iter().map(|v| classes[v.index()]).collect();
                classes.extend(add(&mut graph, names, &node.op, &types, &operands));
            } else {
                classes.extend(node.results.iter().map(|&v| leaf(&mut graph, v)));
            }
        }
        rebuild(&mut graph);
        Self { function, graph, classes, free }
    }

    /// For each class of the original function, its first term.
    pub(super) fn originals(&self) -> BTreeMap<Id, Term> {
        let mut originals = BTreeMap::new();
        for n in 0..self.function.nodes.len() {
            if let Some((class, term)) = self.term(n) {
                originals.entry(class).or_insert(term);
            }
        }
        originals
    }

    /// The current class and term of a replaceable node; `None` for others, and for a reshard that changes nothing.
    fn term(&self, n: usize) -> Option<(Id, Term)> {
        let node = &self.function.nodes[n];
        if !self.free[n] {
            return None;
        }
        let types: Vec<TensorType> = node.results.iter().map(|&v| self.function.ty(v).clone()).collect();
        let symbol = self.graph.analysis.find(&node.op, &types)?;
        let operands = node.operands.iter().map(|v| self.graph.find(self.classes[v.index()])).collect();
        let term = Term { symbol, operands };
        self.graph.lookup(term.clone()).map(|class| (self.graph.find(class), term))
    }

    /// The classes to compute: operands of fixed nodes, and outputs.
    pub(super) fn roots(&self) -> Vec<Id> {
        let nodes = self.function.nodes.iter().zip(&self.free);
        let operands = nodes.filter(|(_, free)| !**free).flat_map(|(node, _)| node.operands.iter().copied());
        let values = operands.chain(self.function.outputs.iter().map(|o| o.value));
        let mut roots: Vec<Id> = values.map(|v| self.graph.find(self.classes[v.index()])).collect();
        roots.sort_unstable();
        roots.dedup();
        roots
    }

    /// The function that computes each class by its chosen term: original nodes keep their position, or follow the last of
    /// their new operands, and new ones come before their first use. `None` if an effect needs a later value.
    ///
    /// # Errors
    /// The invariant that an operation breaks.
    pub(super) fn rebuilt(
        &self,
        cx: Context<'_>,
        chosen: &BTreeMap<Id, Term>,
    ) -> Result<Option<Function>, OpError> {
        let function = self.function;
        let b = FunctionBuilder::like(function, cx.space, cx.functions);
        let mut writer = Writer { block: self, chosen, b, values: BTreeMap::new(), tuples: BTreeSet::new() };
        for &param in &function.params {
            let value = &function.values[param];
            let new = writer.b.param(value.ty.clone(), value.name.as_deref());
            writer.values.entry(self.class(param)).or_insert(new);
        }
        for (node, &free) in function.nodes.iter().zip(&self.free) {
            if free {
                for &v in &node.results {
                    // If an operand comes later, so does the value: before its first use.
                    writer.value(self.class(v))?;
                }
                continue;
            }
            if let Op::Assign { target, binding } = &node.op
                && !writer.read_before_written(*target, binding)?
            {
                return Ok(None);
            }
            let Some(operands) = writer.values(node.operands.iter().map(|&v| self.class(v)))? else {
                return Ok(None);
            };
            let results = writer.b.copied(function, node, &operands)?;
            for (&old, &new) in node.results.iter().zip(&results) {
                writer.b.name(new, function.values[old].name.as_deref());
                writer.values.entry(self.class(old)).or_insert(new);
            }
        }
        let Some(outputs) = writer.values(function.outputs.iter().map(|o| self.class(o.value)))? else {
            return Ok(None);
        };
        function.values.ids().for_each(|v| writer.name(v));
        let outputs = function.outputs.iter().zip(outputs);
        let outputs = outputs.map(|(o, value)| Output { name: o.name.clone(), value });
        Ok(Some(writer.b.finish(outputs)))
    }

    /// Whether rules may replace a node.
    pub(super) fn is_free(&self, n: usize) -> bool {
        self.free[n]
    }

    /// The class of a value.
    pub(super) fn class(&self, value: ValueId) -> Id {
        self.graph.find(self.classes[value.index()])
    }
}

struct Writer<'a, 'f> {
    block: &'a Block<'f>,
    chosen: &'a BTreeMap<Id, Term>,
    b: FunctionBuilder<'a>,
    /// The value of each class computed so far.
    values: BTreeMap<Id, ValueId>,
    /// The operations with several results added so far.
    tuples: BTreeSet<Id>,
}

impl Writer<'_, '_> {
    /// Adds reads of a weight or state before it is assigned, for later uses of the old value; returns whether all could
    /// be added.
    fn read_before_written(&mut self, target: Target, binding: &Binding) -> Result<bool, OpError> {
        let block = self.block;
        let reads = |node: &&Node| match (&node.op, target) {
            (Op::Param(read), Target::Param) | (Op::State(read), Target::State) => read == binding,
            _ => false,
        };
        let read: Vec<Id> =
            block.function.nodes.iter().filter(reads).map(|n| block.class(n.result())).collect();
        let there: Vec<Id> = read.into_iter().filter(|class| self.values.contains_key(class)).collect();
        for (&class, term) in self.chosen {
            if term.operands.iter().any(|&o| there.contains(&block.graph.find(o))) {
                self.value(class)?;
                if !self.values.contains_key(&class) && !self.tuples.contains(&class) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The values of classes; `None` if one cannot be computed.
    fn values(&mut self, classes: impl Iterator<Item = Id>) -> Result<Option<Vec<ValueId>>, OpError> {
        classes.map(|class| self.value(class).transpose()).collect::<Option<_>>().transpose()
    }

    /// The value of a class, which is added with its operands if it does not exist; `None` if it cannot be computed.
    fn value(&mut self, class: Id) -> Result<Option<ValueId>, OpError> {
        if let (None, Some(term)) = (self.values.get(&class), self.chosen.get(&class)) {
            let graph = &self.block.graph;
            match graph.analysis.get(term.symbol) {
                Symbol::Leaf(..) => {}
                Symbol::Result(_) => self.node(graph.find(term.operands[0]))?,
                Symbol::Apply { .. } => self.node(class)?,
            }
        }
        Ok(self.values.get(&class).copied())
    }

    /// Adds the operation chosen for `class`, if its operands can be computed.
    fn node(&mut self, class: Id) -> Result<(), OpError> {
        let Some(term) = self.chosen.get(&class).filter(|_| !self.tuples.contains(&class)) else {
            return Ok(());
        };
        let graph = &self.block.graph;
        let Symbol::Apply { op, types, .. } = graph.analysis.get(term.symbol) else { return Ok(()) };
        let Some(operands) = self.values(term.operands.iter().map(|&o| graph.find(o)))? else {
            return Ok(());
        };
        let results = self.b.node(op.clone(), &operands, types)?;
        if let [only] = results[..] {
            self.values.insert(class, only);
            return Ok(());
        }
        self.tuples.insert(class);
        for result in graph.classes() {
            for term in result
                .nodes
                .iter()
                .filter(|term| term.operands.first().is_some_and(|&o| graph.find(o) == class))
            {
                if let Symbol::Result(i) = *graph.analysis.get(term.symbol) {
                    self.values.entry(result.id).or_insert(results[i]);
                }
            }
        }
        Ok(())
    }

    /// Gives the new value of `old` its name.
    fn name(&mut self, old: ValueId) {
        if let Some(&new) = self.values.get(&self.block.class(old))
            && self.b.function().values[new].name.is_none()
        {
            self.b.name(new, self.block.function.values[old].name.as_deref());
        }
    }
}
