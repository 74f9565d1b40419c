//! The language of the e-graph: operations with attributes and types, applied to classes, and opaque leaves.
//!
//! An operation with one result is in the class of that result. An operation with several results has its own class,
//! with several types, and each result is the class of a projection. All terms of a class have the same type, including
//! the layout, so they are interchangeable.

use std::collections::BTreeMap;

use egg::{Analysis, DidMerge, EGraph, Id, Language};
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::Attr;
use ithaca_ir::ops::attr::Names;
use ithaca_ir::{Op, TensorType, ValueId};
use smallvec::SmallVec;

use crate::rules::{Maker, Program};

/// The e-graph of a function.
pub(super) type Graph = EGraph<Term, Symbols>;

/// A symbol applied to classes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Term {
    /// An index in [`Symbols`].
    pub(super) symbol: usize,
    /// Classes of the operands.
    pub(super) operands: SmallVec<[Id; 4]>,
}

impl Language for Term {
    type Discriminant = usize;

    fn discriminant(&self) -> usize {
        self.symbol
    }

    fn matches(&self, other: &Self) -> bool {
        self.symbol == other.symbol && self.operands.len() == other.operands.len()
    }

    fn children(&self) -> &[Id] {
        &self.operands
    }

    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.operands
    }
}

/// A term without its operands.
#[derive(Clone, Debug)]
pub(super) enum Symbol {
    /// A value that rules keep: a parameter of the function, or a result of an operation with effects.
    Leaf(TensorType),
    /// An operation with its result types, and its attributes as rules see them.
    Apply { op: Op, types: Vec<TensorType>, attrs: Vec<(&'static str, Attr)> },
    /// One of several results.
    Result(usize),
}

/// Every distinct symbol of an e-graph.
#[derive(Clone, Debug, Default)]
pub(super) struct Symbols {
    table: Vec<Symbol>,
    /// The symbols of each operation, by name.
    named: BTreeMap<&'static str, Vec<usize>>,
    results: BTreeMap<usize, usize>,
}

impl Symbols {
    /// The symbol with this number.
    pub(super) fn get(&self, symbol: usize) -> &Symbol {
        &self.table[symbol]
    }

    /// A new symbol for a value that rules keep.
    pub(super) fn leaf(&mut self, ty: TensorType) -> usize {
        self.push(Symbol::Leaf(ty))
    }

    /// The symbol of an operation with these results, if it exists.
    pub(super) fn find(&self, op: &Op, types: &[TensorType]) -> Option<usize> {
        let same = |&s: &usize| match &self.table[s] {
            Symbol::Apply { op: known, types: results, .. } => known == op && results == types,
            Symbol::Leaf(_) | Symbol::Result(_) => false,
        };
        self.named.get(op.name())?.iter().copied().find(same)
    }

    /// The symbol of an operation with these results, added if missing.
    pub(super) fn apply(&mut self, op: &Op, types: &[TensorType], names: Names<'_>) -> usize {
        if let Some(known) = self.find(op, types) {
            return known;
        }
        let attrs = op.attrs(names);
        let symbol = self.push(Symbol::Apply { op: op.clone(), types: types.to_vec(), attrs });
        self.named.entry(op.name()).or_default().push(symbol);
        symbol
    }

    /// The symbol of result `i`.
    pub(super) fn result(&mut self, i: usize) -> usize {
        if let Some(&known) = self.results.get(&i) {
            return known;
        }
        let symbol = self.push(Symbol::Result(i));
        self.results.insert(i, symbol);
        symbol
    }

    fn push(&mut self, symbol: Symbol) -> usize {
        self.table.push(symbol);
        self.table.len() - 1
    }
}

impl Analysis<Term> for Symbols {
    /// The types of the results.
    type Data = Vec<TensorType>;

    fn make(graph: &mut Graph, term: &Term, _id: Id) -> Self::Data {
        match graph.analysis.get(term.symbol) {
            Symbol::Leaf(ty) => vec![ty.clone()],
            Symbol::Apply { types, .. } => types.clone(),
            Symbol::Result(i) => vec![graph[term.operands[0]].data[*i].clone()],
        }
    }

    fn merge(&mut self, a: &mut Self::Data, b: Self::Data) -> DidMerge {
        assert_eq!(*a, b, "all terms of a class have one type");
        DidMerge(false, false)
    }
}

/// Adds an operation and returns the classes of its results. A reshard that changes nothing is its operand.
pub(super) fn add(
    graph: &mut Graph,
    names: Names<'_>,
    op: &Op,
    types: &[TensorType],
    operands: &[Id],
) -> Vec<Id> {
    if matches!(op, Op::Reshard | Op::Permute) && graph[operands[0]].data == types {
        return vec![graph.find(operands[0])];
    }
    let symbol = graph.analysis.apply(op, types, names);
    let class = graph.add(Term { symbol, operands: operands.iter().copied().collect() });
    results(graph, class)
}

/// Restores the invariants of an e-graph. egg times this for its reports; the first look at its clock would calibrate it,
/// longer than a whole plan takes, so it looks at a clock that stands still.
pub(super) fn rebuild(graph: &mut Graph) {
    quanta::with_clock(&quanta::Clock::mock().0, || graph.rebuild());
}

/// The classes of the results of the operation in `class`.
pub(super) fn results(graph: &mut Graph, class: Id) -> Vec<Id> {
    let n = graph[class].data.len();
    if n == 1 {
        return vec![class];
    }
    let mut results = Vec::with_capacity(n);
    for i in 0..n {
        let symbol = graph.analysis.result(i);
        results.push(graph.add(Term { symbol, operands: SmallVec::from_slice(&[class]) }));
    }
    results
}

/// A class as a value; rules refer to values by id.
fn as_value(class: Id) -> ValueId {
    ValueId::new(usize::from(class))
}

/// The class that [`as_value`] was given.
pub(super) fn as_class(value: ValueId) -> Id {
    Id::from(value.index())
}

/// The operations in a class.
pub(super) fn applied(graph: &Graph, class: Id) -> impl Iterator<Item = Maker<'_>> {
    graph[class].nodes.iter().filter_map(|term| match graph.analysis.get(term.symbol) {
        Symbol::Apply { op, attrs, .. } => {
            let operands = term.operands.iter().map(|&operand| as_value(graph.find(operand))).collect();
            Some(Maker { op, attrs: Some(attrs), operands })
        }
        Symbol::Leaf(_) | Symbol::Result(_) => None,
    })
}

/// Values are single-result classes.
impl Program for Graph {
    fn type_of(&self, value: ValueId) -> &TensorType {
        &self[as_class(value)].data[0]
    }

    fn makers(&self, value: ValueId, result: usize) -> Vec<Maker<'_>> {
        let class = as_class(value);
        let own = Some(class).filter(|_| result == 0);
        let is_result =
            |term: &&Term| matches!(self.analysis.get(term.symbol), Symbol::Result(i) if *i == result);
        let tuples = self[class].nodes.iter().filter(is_result).map(|term| term.operands[0]);
        own.into_iter().chain(tuples).flat_map(|class| applied(self, class)).collect()
    }
}
