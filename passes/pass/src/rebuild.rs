//! Rebuilds modules node by node: what a pass does not touch is copied.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Node, Output, ValueId};
use ithaca_ir::ops::OpError;
use ithaca_ir::{Arena, Diagnostic, Diagnostics, FuncId, FunctionBuilder, Module, Op, Space, TensorType};

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
        let mut copy = Copy::of(function, &rebuilt.space, &rebuilt.functions);
        for node in &function.nodes {
            let operands = copy.operands(node);
            match rewrite(&mut copy.b, function, node, &operands).map_err(broken)? {
                None => copy.node(node).map_err(broken)?,
                Some(values) => {
                    assert_eq!(values.len(), node.results.len(), "each result has one new value");
                    copy.set_all(&node.results, &values);
                }
            }
        }
        let function = copy.finish();
        rebuilt.functions.push(function);
    }
    Ok(rebuilt)
}

/// The diagnostic for an invariant that a node breaks.
pub fn broken(error: OpError) -> Diagnostics {
    vec![Diagnostic::new(error.code, error.message)]
}

/// A copy of a function under construction.
pub struct Copy<'a> {
    /// The function to copy.
    pub source: &'a Function,
    /// The copy.
    pub b: FunctionBuilder<'a>,
    /// The new value of each old value.
    pub values: Vec<Option<ValueId>>,
}

impl<'a> Copy<'a> {
    /// A copy that has the parameters of `source`.
    pub fn of(source: &'a Function, space: &'a Space, functions: &'a Arena<FuncId, Function>) -> Self {
        let mut copy = Self::into(source, FunctionBuilder::like(source, space, functions));
        source.params.iter().for_each(|&param| copy.param(param));
        copy
    }

    /// A copy in a function of its own, without parameters.
    pub fn into(source: &'a Function, b: FunctionBuilder<'a>) -> Self {
        Self { source, b, values: vec![None; source.values.len()] }
    }

    /// Adds a parameter for `old`.
    pub fn param(&mut self, old: ValueId) {
        let value = &self.source.values[old];
        self.values[old.index()] = Some(self.b.param(value.ty.clone(), value.name.as_deref()));
    }

    /// The new value of `old`, which is defined.
    pub fn get(&self, old: ValueId) -> ValueId {
        self.values[old.index()].expect("operands precede their uses")
    }

    /// Makes `new` the value of `old`.
    pub fn set(&mut self, old: ValueId, new: ValueId) {
        self.values[old.index()] = Some(new);
    }

    /// Makes each of `new` the value of one of `old`, with its name.
    pub fn set_all(&mut self, old: &[ValueId], new: &[ValueId]) {
        for (&old, &new) in old.iter().zip(new) {
            self.b.name(new, self.source.values[old].name.as_deref());
            self.set(old, new);
        }
    }

    /// The new operands of a node.
    pub fn operands(&self, node: &Node) -> Vec<ValueId> {
        node.operands.iter().map(|&v| self.get(v)).collect()
    }

    /// Adds a node unchanged.
    ///
    /// # Errors
    /// The invariant that the node breaks with its new operands.
    pub fn node(&mut self, node: &Node) -> Result<(), OpError> {
        self.node_as(node.op.clone(), &self.operands(node), &node.results)
    }

    /// Adds an operation that defines `results`, with their types.
    ///
    /// # Errors
    /// The invariant that the operation breaks.
    pub fn node_as(&mut self, op: Op, operands: &[ValueId], results: &[ValueId]) -> Result<(), OpError> {
        let declared: Vec<TensorType> = results.iter().map(|&v| self.source.ty(v).clone()).collect();
        let new = self.b.node(op, operands, &declared)?;
        self.set_all(results, &new);
        Ok(())
    }

    /// Ends the copy with the outputs of the source.
    pub fn finish(self) -> Function {
        let output = |o: &Output| Output { name: o.name.clone(), value: self.get(o.value) };
        let outputs: Vec<Output> = self.source.outputs.iter().map(output).collect();
        self.b.finish(outputs)
    }
}

/// Adds `node` of `function` unchanged, its operands renamed by `map`, and appends its results to `map`.
///
/// # Errors
/// The invariant that the node breaks with its new operands.
pub fn copy_node(
    b: &mut FunctionBuilder<'_>,
    function: &Function,
    node: &Node,
    map: &mut Vec<ValueId>,
) -> Result<(), OpError> {
    let operands: Vec<ValueId> = node.operands.iter().map(|v| map[v.index()]).collect();
    let declared: Vec<TensorType> = node.results.iter().map(|&v| function.ty(v).clone()).collect();
    let results = b.node(node.op.clone(), &operands, &declared)?;
    for (&old, &new) in node.results.iter().zip(&results) {
        b.name(new, function.values[old].name.as_deref());
        map.push(new);
    }
    Ok(())
}
