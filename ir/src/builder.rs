//! Builds functions node by node, inferring types as it goes.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use smallvec::SmallVec;

use crate::diagnostic::Span;
use crate::dim::DimId;
use crate::dtype::DType;
use crate::entity::Arena;
use crate::handles::{FuncId, Layers, ValueId};
use crate::identifier::is_identifier;
use crate::module::{Function, Node, Output, Value};
use crate::ops::context::Context;
use crate::ops::error::OpError;
use crate::ops::structure::has_signature;
use crate::ops::table::elementwise::Binary;
use crate::ops::table::op::Op;
use crate::ops::table::source::Binding;
use crate::ops::table::structure::Scan;
use crate::phase::Phase;
use crate::space::Space;
use crate::types::TensorType;

/// A function under construction.
///
/// Every `push` runs inference, so the function satisfies the invariants of single operations.
pub struct FunctionBuilder<'a> {
    space: &'a Space,
    functions: &'a Arena<FuncId, Function>,
    function: Function,
    names: BTreeSet<Box<str>>,
    /// The types of its values, which share them.
    types: HashSet<Arc<TensorType>>,
}

impl<'a> FunctionBuilder<'a> {
    /// Starts a function that lives in `space` and may call `functions`.
    pub fn new(name: impl Into<String>, space: &'a Space, functions: &'a Arena<FuncId, Function>) -> Self {
        Self {
            space,
            functions,
            function: Function::new(name),
            names: BTreeSet::new(),
            types: HashSet::new(),
        }
    }

    /// Starts a function with the name, the phase and the origin of `source`.
    pub fn like(source: &Function, space: &'a Space, functions: &'a Arena<FuncId, Function>) -> Self {
        let mut b = Self::part_of(source.name.as_str(), source, space, functions);
        b.function.origin.clone_from(&source.origin);
        // Rewrites add a few.
        b.reserve(source.values.len() + source.values.len() / 4, source.nodes.len() + source.nodes.len() / 4);
        b
    }

    /// Room for so many values and nodes more.
    pub fn reserve(&mut self, n_values: usize, n_nodes: usize) {
        self.function.values.reserve(n_values);
        self.function.nodes.reserve_exact(n_nodes);
    }

    /// Starts a function that is made from `source` and runs in its phase.
    pub fn part_of(
        name: impl Into<String>,
        source: &Function,
        space: &'a Space,
        functions: &'a Arena<FuncId, Function>,
    ) -> Self {
        Self::new(name, space, functions).made_from(source.model_name()).in_phase(source.phase)
    }

    /// The same, made from a function of the model.
    pub fn made_from(mut self, origin: impl Into<String>) -> Self {
        self.function.origin = Some(origin.into());
        self
    }

    /// The same, in another phase.
    pub fn in_phase(mut self, phase: Phase) -> Self {
        self.function.phase = phase;
        self
    }

    /// The function so far.
    pub fn function(&self) -> &Function {
        &self.function
    }

    /// The space the function lives in.
    pub fn space(&self) -> &'a Space {
        self.space
    }

    /// The type of a value built before.
    pub fn ty(&self, value: ValueId) -> &TensorType {
        self.function.ty(value)
    }

    /// Adds a parameter; parameters come before nodes.
    pub fn param(&mut self, ty: impl Into<Arc<TensorType>>, name: Option<&str>) -> ValueId {
        assert!(self.function.nodes.is_empty(), "parameters are numbered before nodes");
        let value = self.shared(ty.into());
        self.function.params.push(value);
        self.name(value, name);
        value
    }

    /// Adds a node; `declared` are the result types where they do not follow from the operands, see [`Op::infer`].
    ///
    /// # Errors
    /// The invariant that the node would break.
    pub fn node(
        &mut self,
        op: Op,
        operands: &[ValueId],
        declared: &[TensorType],
    ) -> Result<SmallVec<[ValueId; 1]>, OpError> {
        let cx = Context { space: self.space, functions: self.functions };
        let inferred = {
            let types: SmallVec<[&TensorType; 4]> = operands.iter().map(|&v| self.function.ty(v)).collect();
            op.infer(cx, &types, declared)?
        };
        let results = inferred.into_iter().map(|ty| self.value(ty)).collect();
        Ok(self.add_node(op, operands, results))
    }

    fn add_node(
        &mut self,
        op: Op,
        operands: &[ValueId],
        results: SmallVec<[ValueId; 1]>,
    ) -> SmallVec<[ValueId; 1]> {
        let node = Node {
            op,
            operands: SmallVec::from_slice(operands),
            results: results.clone(),
            span: Span::default(),
        };
        self.function.nodes.push(node);
        results
    }

    /// Adds `node` of a verified function in the same space, with other operands. Where they have the types of the old ones, so
    /// have the results, which are not inferred again; a call depends on its callee as well.
    ///
    /// # Errors
    /// As [`node`](Self::node).
    pub fn copied(
        &mut self,
        source: &Function,
        node: &Node,
        operands: &[ValueId],
    ) -> Result<SmallVec<[ValueId; 1]>, OpError> {
        let mut pairs = node.operands.iter().zip(operands);
        let fits = || match &node.op {
            Op::Call { callee, scan, .. } => self.functions.get(*callee).is_some_and(|function| {
                let arguments = operands.iter().map(|&v| self.ty(v));
                has_signature(function, scan.as_ref(), arguments, node.results.iter().map(|&v| source.ty(v)))
            }),
            _ => true,
        };
        let is_alike = operands.len() == node.operands.len()
            && pairs.all(|(&old, &new)| source.values[old].ty == self.function.values[new].ty)
            && fits();
        if is_alike {
            let results =
                node.results.iter().map(|&v| self.shared(Arc::clone(&source.values[v].ty))).collect();
            return Ok(self.add_node(node.op.clone(), operands, results));
        }
        let types: SmallVec<[TensorType; 1]> = node.results.iter().map(|&v| source.ty(v).clone()).collect();
        self.node(node.op.clone(), operands, &types)
    }

    /// Adds a node with one result that follows from the operands.
    ///
    /// # Errors
    /// As [`node`](Self::node).
    pub fn push(&mut self, op: Op, operands: &[ValueId]) -> Result<ValueId, OpError> {
        self.node(op, operands, &[]).map(|results| results[0])
    }

    /// Adds a node with one result of the stated type.
    ///
    /// # Errors
    /// As [`node`](Self::node).
    pub fn push_as(&mut self, op: Op, operands: &[ValueId], ty: TensorType) -> Result<ValueId, OpError> {
        self.node(op, operands, &[ty]).map(|results| results[0])
    }

    /// Adds a weight.
    ///
    /// # Errors
    /// `V17` when the binding does not fit the type.
    pub fn weight(&mut self, binding: Binding, ty: TensorType) -> Result<ValueId, OpError> {
        self.push_as(Op::Param(binding), &[], ty)
    }

    /// Adds the sum of products of `x` and `y` over the dimensions that `dims` lacks.
    ///
    /// # Errors
    /// `V04`, `V05`, `V07` when the operands do not fit.
    pub fn einsum(&mut self, x: ValueId, y: ValueId, dims: &[DimId]) -> Result<ValueId, OpError> {
        let dtype: DType = self.ty(x).dtype;
        self.push_as(Op::Einsum, &[x, y], TensorType::new(dtype, dims.iter().copied()))
    }

    /// Adds `x + y`.
    ///
    /// # Errors
    /// `V04`, `V05`, `V07` when the operands do not fit.
    pub fn add(&mut self, x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
        self.push(Op::Binary(Binary::Add), &[x, y])
    }

    /// Adds a call of `callee` for each layer.
    ///
    /// # Errors
    /// `V14`, `V15`, `V18` when the call does not fit the function.
    pub fn call(
        &mut self,
        callee: FuncId,
        layers: Layers,
        operands: &[ValueId],
    ) -> Result<SmallVec<[ValueId; 1]>, OpError> {
        self.node(Op::Call { callee, layers, stride: 0, scan: None, stage: None }, operands, &[])
    }

    /// Adds a call of `callee` for each layer, of which some results are stacked and some arguments taken apart.
    ///
    /// # Errors
    /// `V14`, `V15`, `V18` when the call does not fit the function.
    pub fn scan(
        &mut self,
        callee: FuncId,
        layers: Layers,
        scan: Scan,
        operands: &[ValueId],
    ) -> Result<SmallVec<[ValueId; 1]>, OpError> {
        self.node(Op::Call { callee, layers, stride: 0, scan: Some(scan), stage: None }, operands, &[])
    }

    /// Names a value; a name that is taken, or that the text form could not spell, is left out.
    pub fn name(&mut self, value: ValueId, name: Option<&str>) {
        let Some(name) = name.filter(|n| is_identifier(n)) else { return };
        if self.names.insert(name.into()) {
            self.function.values[value].name = Some(name.into());
        }
    }

    /// Ends the function with these outputs.
    pub fn finish(mut self, outputs: impl IntoIterator<Item = Output>) -> Function {
        self.function.outputs = outputs.into_iter().collect();
        self.function
    }

    fn value(&mut self, ty: TensorType) -> ValueId {
        let ty = match self.types.get(&ty) {
            Some(known) => Arc::clone(known),
            None => {
                let ty = Arc::new(ty);
                self.types.insert(Arc::clone(&ty));
                ty
            }
        };
        self.shared(ty)
    }

    fn shared(&mut self, ty: Arc<TensorType>) -> ValueId {
        self.function.values.push(Value { ty, name: None, span: Span::default() })
    }
}
