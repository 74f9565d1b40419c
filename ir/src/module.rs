//! Modules, functions, values and nodes: the program's own store.
//!
//! A function is straight-line: nodes in order, each defining new values. Values are numbered in order of definition
//! (parameters first), so a rewrite builds a new function instead of patching an old one, and handles always print
//! as the text spells them. A model is `main`, which calls a function per kind of block over a range of layers.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::diagnostic::Span;
use crate::entity::Arena;
use crate::ops::attr::FunctionNames;
use crate::ops::table::op::Op;
use crate::phase::Phase;
use crate::space::Space;
use crate::types::TensorType;

pub use crate::handles::{FuncId, Layers, ValueId};

/// How far a module has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Whole tensors, no mesh.
    Program,
    /// Every value has a layout; a `reshard` is inserted where two layouts do not match.
    Sharded,
    /// The program of one rank: every communication is a collective.
    PerRank,
}

crate::spellings! {
    Level {
        Program = "program",
        Sharded = "sharded",
        PerRank = "per_rank",
    }
}

/// A program: functions over one space.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// How far the module has come.
    pub level: Level,
    /// The model's name.
    pub name: String,
    /// The passes that made this module, in text form, in order.
    pub pipeline: Vec<String>,
    /// Named dimensions and the mesh.
    pub space: Space,
    /// Functions; a callee comes before its callers.
    pub functions: Arena<FuncId, Function>,
}

impl Module {
    /// The function that nobody calls and that has the model's inputs and outputs: `main`, the last one.
    pub fn main(&self) -> Option<FuncId> {
        self.functions.iter().next_back().filter(|(_, f)| f.name == "main").map(|(id, _)| id)
    }

    /// The function called `name`.
    pub fn function(&self, name: &str) -> Option<FuncId> {
        self.functions.called(name)
    }

    /// The module without functions, for a pass to fill: name, pipeline and space are kept.
    pub fn emptied(&self, level: Level) -> Module {
        Module {
            level,
            name: self.name.clone(),
            pipeline: self.pipeline.clone(),
            space: self.space.clone(),
            functions: Arena::new(),
        }
    }
}

/// A function: parameters, nodes in order, outputs.
#[derive(Clone, Debug, Default)]
pub struct Function {
    /// The name, without its `@`.
    pub name: String,
    /// When in a step it runs.
    pub phase: Phase,
    /// The function of the model from which a pass made this one; absent for functions of the model itself.
    pub origin: Option<String>,
    /// Parameters; the first values of the arena.
    pub params: Vec<ValueId>,
    /// All values, in order of definition.
    pub values: Arena<ValueId, Value>,
    /// The nodes, in order of execution.
    pub nodes: Vec<Node>,
    /// The values that the function returns.
    pub outputs: Vec<Output>,
    /// Where the text form has the function's name.
    pub span: Span,
}

impl Function {
    /// A function with no parameters and no nodes.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// The name of the function of the model that this one is, or was made from.
    pub fn model_name(&self) -> &str {
        self.origin.as_deref().unwrap_or(&self.name)
    }

    /// The type of a value.
    pub fn ty(&self, value: ValueId) -> &TensorType {
        &self.values[value].ty
    }

    /// Changes the type of every value; a type that values share is changed once.
    pub fn retype(&mut self, mut change: impl FnMut(&mut TensorType)) {
        let mut changed: HashMap<Arc<TensorType>, Arc<TensorType>> = HashMap::new();
        for value in self.values.values_mut() {
            let new = changed.entry(Arc::clone(&value.ty)).or_insert_with_key(|old| {
                let mut new = TensorType::clone(old);
                change(&mut new);
                Arc::new(new)
            });
            value.ty = Arc::clone(new);
        }
    }

    /// The types of a node's operands.
    pub fn operand_types(&self, node: &Node) -> SmallVec<[&TensorType; 4]> {
        node.operands.iter().map(|&v| self.ty(v)).collect()
    }

    /// The types of a node's results.
    pub fn result_types(&self, node: &Node) -> SmallVec<[&TensorType; 2]> {
        node.results.iter().map(|&v| self.ty(v)).collect()
    }
}

/// Spans do not take part in equality: a function equals its reparsed text.
impl PartialEq for Function {
    fn eq(&self, other: &Self) -> bool {
        let Self { name, phase, origin, params, values, nodes, outputs, span: _ } = self;
        *name == other.name
            && *phase == other.phase
            && *origin == other.origin
            && *params == other.params
            && *values == other.values
            && *nodes == other.nodes
            && *outputs == other.outputs
    }
}

/// A value: defined once, by a parameter or a node.
#[derive(Clone, Debug)]
pub struct Value {
    /// Its type; of long functions many values share one.
    pub ty: Arc<TensorType>,
    /// Its name without the `%`, if it has one; otherwise it prints as its number.
    pub name: Option<Box<str>>,
    /// Where the text form defines it.
    pub span: Span,
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.ty == other.ty && self.name == other.name
    }
}

/// An operation applied to values.
#[derive(Clone, Debug)]
pub struct Node {
    /// The operation and its attributes.
    pub op: Op,
    /// Operands, defined earlier in the same function.
    pub operands: SmallVec<[ValueId; 4]>,
    /// Results, defined here.
    pub results: SmallVec<[ValueId; 1]>,
    /// Where the text form has the operation's name.
    pub span: Span,
}

impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        self.op == other.op && self.operands == other.operands && self.results == other.results
    }
}

impl Node {
    /// The only result of an operation that has one.
    pub fn result(&self) -> ValueId {
        self.results[0]
    }
}

/// A value that a function returns; in `main` it has the name that files know it by (`logits`).
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// The name, in `main`.
    pub name: Option<String>,
    /// The value.
    pub value: ValueId,
}

/// Callees by name, for attributes.
impl FunctionNames for Arena<FuncId, Function> {
    fn name_of(&self, function: FuncId) -> Option<&str> {
        self.get(function).map(|f| f.name.as_str())
    }

    fn called(&self, name: &str) -> Option<FuncId> {
        self.iter().find(|(_, f)| f.name == name).map(|(id, _)| id)
    }
}
