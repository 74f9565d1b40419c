//! Rebuilds modules node by node; unchanged nodes are copied.

use std::ops::Index;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Node, Output, ValueId};
use ithaca_ir::ops::OpError;
use ithaca_ir::{Arena, Diagnostics, FuncId, FunctionBuilder, Module, Op, Space, TensorType};

/// `module` with every node that `rewrite` replaces replaced; the level stays.
///
/// `rewrite` gets the function under construction, the old function, one of its nodes and that node's operands in the
/// new function. It returns the new values of the node's results, which it may have added to the builder, or `None` to
/// keep the node.
///
/// # Errors
/// The invariant that a node breaks: one that `rewrite` added, or a later one that does not fit it.
pub fn rebuild(
    module: &Module,
    mut rewrite: impl FnMut(
        &mut FunctionBuilder<'_>,
        &Function,
        &Node,
        &[ValueId],
    ) -> Result<Option<Vec<ValueId>>, OpError>,
) -> Result<Module, Diagnostics> {
    let mut rebuilt = module.emptied(module.level);
    for function in module.functions.values() {
        let mut b = FunctionBuilder::like(function, &rebuilt.space, &rebuilt.functions);
        let mut map = ValueMap::with_params(&mut b, function);
        for node in &function.nodes {
            match rewrite(&mut b, function, node, &map.operands(node))? {
                None => map.copy(&mut b, node)?,
                Some(values) => {
                    assert_eq!(values.len(), node.results.len(), "each result has one new value");
                    map.replace(&mut b, &node.results, &values);
                }
            }
        }
        let function = b.finish(map.outputs());
        rebuilt.functions.push(function);
    }
    Ok(rebuilt)
}

/// A copy of a function under construction: its builder, with the new values.
pub struct Copy<'a> {
    /// The copy.
    pub b: FunctionBuilder<'a>,
    /// The new value of each old value.
    pub values: ValueMap<'a>,
}

impl<'a> Copy<'a> {
    /// A copy that has the parameters of `source`.
    pub fn of(source: &'a Function, space: &'a Space, functions: &'a Arena<FuncId, Function>) -> Self {
        let mut b = FunctionBuilder::like(source, space, functions);
        let values = ValueMap::with_params(&mut b, source);
        Self { b, values }
    }

    /// A copy in a function of its own, without parameters.
    pub fn into(source: &'a Function, b: FunctionBuilder<'a>) -> Self {
        Self { b, values: ValueMap::new(source) }
    }

    /// Adds a parameter for `old`.
    pub fn param(&mut self, old: ValueId) {
        self.values.param(&mut self.b, old);
    }

    /// Makes each of `new` the value of one of `old`, with its name.
    pub fn set_all(&mut self, old: &[ValueId], new: &[ValueId]) {
        self.values.replace(&mut self.b, old, new);
    }

    /// Adds a node unchanged.
    ///
    /// # Errors
    /// The invariant that the node breaks with its new operands.
    pub fn node(&mut self, node: &Node) -> Result<(), OpError> {
        self.values.copy(&mut self.b, node)
    }

    /// Adds an operation that defines `results`, with their types.
    ///
    /// # Errors
    /// The invariant that the operation breaks.
    pub fn node_as(&mut self, op: Op, operands: &[ValueId], results: &[ValueId]) -> Result<(), OpError> {
        let new = self.b.node(op, operands, &self.values.declared(results))?;
        self.set_all(results, &new);
        Ok(())
    }

    /// Ends the copy with the outputs of the source.
    pub fn finish(self) -> Function {
        self.b.finish(self.values.outputs())
    }
}

/// For each value of a function that is rebuilt the new value, once there is one.
///
/// Indexing panics for a value without a new one: operands must be mapped before their uses.
#[derive(Clone, Debug)]
pub struct ValueMap<'a> {
    /// The function that is rebuilt.
    pub source: &'a Function,
    new: Vec<Option<ValueId>>,
}

impl<'a> ValueMap<'a> {
    /// The empty map of `source`.
    pub fn new(source: &'a Function) -> Self {
        Self { source, new: vec![None; source.values.len()] }
    }

    /// The map of `source` after its parameters were added to `b`.
    pub fn with_params(b: &mut FunctionBuilder<'_>, source: &'a Function) -> Self {
        let mut map = Self::new(source);
        for &param in &source.params {
            map.param(b, param);
        }
        map
    }

    /// The new value of `old`, if there is one.
    pub fn get(&self, old: ValueId) -> Option<ValueId> {
        self.new[old.index()]
    }

    /// Maps `old` to `new`.
    pub fn insert(&mut self, old: ValueId, new: ValueId) {
        self.new[old.index()] = Some(new);
    }

    /// Adds a parameter with the type and the name of `old`, and maps `old` to it.
    pub fn param(&mut self, b: &mut FunctionBuilder<'_>, old: ValueId) -> ValueId {
        let value = &self.source.values[old];
        let new = b.param(value.ty.clone(), value.name.as_deref());
        self.insert(old, new);
        new
    }

    /// The operands of `node` in the new function.
    pub fn operands(&self, node: &Node) -> Vec<ValueId> {
        node.operands.iter().map(|&v| self[v]).collect()
    }

    /// The types of old values.
    pub fn declared(&self, old: &[ValueId]) -> Vec<TensorType> {
        old.iter().map(|&v| self.source.ty(v).clone()).collect()
    }

    /// Maps each of `old` to the first of `new`, which take their names.
    pub fn replace(&mut self, b: &mut FunctionBuilder<'_>, old: &[ValueId], new: &[ValueId]) {
        for (&old, &new) in old.iter().zip(new) {
            b.name(new, self.source.values[old].name.as_deref());
            self.insert(old, new);
        }
    }

    /// Adds `node` unchanged, with its operands in the new function.
    ///
    /// # Errors
    /// The invariant that the node breaks with its new operands.
    pub fn copy(&mut self, b: &mut FunctionBuilder<'_>, node: &Node) -> Result<(), OpError> {
        let results = b.copied(self.source, node, &self.operands(node))?;
        self.replace(b, &node.results, &results);
        Ok(())
    }

    /// As [`copy`](Self::copy), with another operation and other result types.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn copy_as(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        node: &Node,
        op: Op,
        declared: &[TensorType],
    ) -> Result<(), OpError> {
        let results = b.node(op, &self.operands(node), declared)?;
        self.replace(b, &node.results, &results);
        Ok(())
    }

    /// The outputs of the function, in the new function.
    pub fn outputs(&self) -> Vec<Output> {
        let outputs = self.source.outputs.iter();
        outputs.map(|o| Output { name: o.name.clone(), value: self[o.value] }).collect()
    }
}

impl Index<ValueId> for ValueMap<'_> {
    type Output = ValueId;

    fn index(&self, old: ValueId) -> &ValueId {
        self.new[old.index()].as_ref().expect("values are rebuilt before their uses")
    }
}
