//! The values of a function by number: equal expressions are one value, however they are made.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::entity::Entity;
use crate::handles::{FuncId, Layers};
use crate::module::{Function, Module};
use crate::ops::table::op::Op;
use crate::ops::table::source::{Binding, Target};
use crate::ops::table::structure::{Scan, Stage};
use crate::schedule::verify::homes::{Home, Homes};
use crate::types::TensorType;

/// A value, by number.
pub(super) type Symbol = usize;

/// The weights and states that a function reads and writes, callees included.
#[derive(Clone, Debug, Default)]
pub(super) struct Effects<'a> {
    pub(super) reads: Homes<'a, ()>,
    pub(super) writes: Homes<'a, ()>,
}

impl<'a> Effects<'a> {
    pub(super) fn add(&mut self, other: &Self) {
        other.reads.iter().for_each(|(home, ())| self.reads.set(home, ()));
        other.writes.iter().for_each(|(home, ())| self.writes.set(home, ()));
    }
}

pub(super) fn effects_of(module: &Module) -> Vec<Effects<'_>> {
    // A call reads what it reads of the next layer as that layer binds it, since calls run for many layers.
    let nodes = || module.functions.values().flat_map(|f| &f.nodes);
    let assigned: Vec<&Binding> = nodes()
        .filter_map(|node| match &node.op {
            Op::Assign { target: Target::State, binding } => Some(binding),
            _ => None,
        })
        .collect();
    let of_layer = |binding| own_layer(&assigned, binding);
    let mut all: Vec<Effects<'_>> = Vec::with_capacity(module.functions.len());
    for function in module.functions.values() {
        let mut effects = Effects::default();
        for node in &function.nodes {
            match &node.op {
                Op::Param(binding) => effects.reads.set((Target::Param, binding), ()),
                Op::State(binding) => effects.reads.set((Target::State, of_layer(binding)), ()),
                Op::Assign { target, binding } => effects.writes.set((*target, binding), ()),
                Op::Call { callee, layers: _, stride: _, scan: _, stage: _ } => {
                    all.get(callee.index()).into_iter().for_each(|called| effects.add(called));
                }
                _ => {}
            }
        }
        all.push(effects);
    }
    all
}

/// A binding of the next layer as one of those that are assigned, if it is one.
fn own_layer<'a>(assigned: &[&'a Binding], binding: &'a Binding) -> &'a Binding {
    if !binding.is_of_next_layer() {
        return binding;
    }
    let own = binding.of_own_layer().0;
    assigned.iter().find(|known| ***known == *own).map_or(binding, |known| known)
}

/// The operation that a call is, on either level.
pub(super) fn call(
    callee: usize,
    layers: &Layers,
    stride: u64,
    scan: Option<Scan>,
    stage: Option<Stage>,
) -> Cow<'static, Op> {
    // Without a mesh a stage is no place.
    let stage = stage.filter(|stage| stage.at().is_some());
    Cow::Owned(Op::Call { callee: FuncId::new(callee), layers: layers.clone(), stride, scan, stage })
}

/// An operation on values, with its results.
struct Expression<'a> {
    op: Cow<'a, Op>,
    /// The types of the results; of a call, those at its caller.
    types: Vec<Arc<TensorType>>,
    results: Vec<Symbol>,
    /// The final values of the weights and states that it writes, in order.
    written: Vec<Symbol>,
}

/// The outputs and the effects of a function.
pub(super) struct Summary<'a> {
    pub(super) outputs: Vec<(Option<&'a str>, Symbol)>,
    /// The final values of weights and states that are written.
    pub(super) lasting: Vec<(Home<'a>, Symbol)>,
}

/// Values from outside, by type.
type Given<'a> = HashMap<(Option<Target>, &'a Binding), Vec<(Arc<TensorType>, Symbol)>>;

/// Values of one function, however they are made.
pub(super) struct Values<'a> {
    pub(super) effects: &'a [Effects<'a>],
    pub(super) n: usize,
    /// Expressions by operation and operands.
    expressions: BTreeMap<(&'static str, Vec<Symbol>), Vec<Expression<'a>>>,
    arguments: BTreeMap<usize, Symbol>,
    /// Inputs, and weights and states before anything is written.
    given: Given<'a>,
}

/// The content of weights and states at some point of a function or of a frame.
pub(super) type Lasting<'a> = Homes<'a, Symbol>;

impl<'a> Values<'a> {
    pub(super) fn new(effects: &'a [Effects<'a>]) -> Self {
        Self {
            effects,
            n: 0,
            expressions: BTreeMap::new(),
            arguments: BTreeMap::new(),
            given: HashMap::new(),
        }
    }

    fn fresh(&mut self) -> Symbol {
        self.n += 1;
        self.n - 1
    }

    pub(super) fn argument(&mut self, i: usize) -> Symbol {
        if let Some(&symbol) = self.arguments.get(&i) {
            return symbol;
        }
        let symbol = self.fresh();
        self.arguments.insert(i, symbol);
        symbol
    }

    /// The value given under a name: an input, or a weight or state before anything is written there.
    pub(super) fn given(
        &mut self,
        target: Option<Target>,
        binding: &'a Binding,
        ty: &Arc<TensorType>,
    ) -> Symbol {
        let symbol = self.n;
        let bound = self.given.entry((target, binding)).or_default();
        // A state that is assigned has one type, and its type is no part of what a call reads.
        if let Some((_, symbol)) = bound.iter().find(|(of, _)| of == ty) {
            return *symbol;
        }
        bound.push((ty.clone(), symbol));
        self.fresh()
    }

    /// Writes a value to a weight or state.
    pub(super) fn assign(&self, lasting: &mut Lasting<'a>, home: Home<'a>, symbol: Symbol) {
        let bound = self.given.get(&(Some(home.0), home.1));
        if bound.is_some_and(|bound| bound.iter().any(|(_, given)| *given == symbol)) {
            lasting.remove(home)
        } else {
            lasting.set(home, symbol)
        }
    }

    /// The results of an expression of these values, and the values it leaves in weights and states.
    pub(super) fn make(
        &mut self,
        op: Cow<'a, Op>,
        operands: Vec<Symbol>,
        types: Vec<Arc<TensorType>>,
        n_written: usize,
    ) -> (Vec<Symbol>, Vec<Symbol>) {
        let first = self.n;
        let alike = self.expressions.entry((op.name(), operands)).or_default();
        if let Some(known) = alike.iter().find(|known| known.op == op && known.types == types) {
            return (known.results.clone(), known.written.clone());
        }
        let results: Vec<Symbol> = (first..first + types.len()).collect();
        let written: Vec<Symbol> = (first + types.len()..first + types.len() + n_written).collect();
        self.n = first + types.len() + n_written;
        alike.push(Expression { op, types, results: results.clone(), written: written.clone() });
        (results, written)
    }

    /// The results of collectives, each of one operand, whether or not they are coalesced.
    pub(super) fn each(
        &mut self,
        collectives: impl Iterator<Item = (&'a Op, Arc<TensorType>)>,
        operands: &[Symbol],
    ) -> Vec<Symbol> {
        let ends = collectives.zip(operands);
        ends.flat_map(|((op, ty), &operand)| self.make(Cow::Borrowed(op), vec![operand], vec![ty], 0).0)
            .collect()
    }

    /// The results of a call; `lasting` is the content of weights and states before it, and afterwards after it.
    pub(super) fn call(
        &mut self,
        op: Cow<'a, Op>,
        callee: usize,
        mut operands: Vec<Symbol>,
        types: Vec<Arc<TensorType>>,
        lasting: &mut Lasting<'a>,
    ) -> Vec<Symbol> {
        let effects = self.effects;
        let Some(called) = effects.get(callee) else { return Vec::new() };
        // A home that this function has not written holds what it held before; it has the number 0.
        let before = |home: Home<'a>| lasting.get(home).map_or(0, |symbol| symbol + 1);
        operands.extend(called.reads.iter().chain(called.writes.iter()).map(|(home, ())| before(home)));
        let (results, written) = self.make(op, operands, types, called.writes.iter().count());
        for ((home, ()), symbol) in called.writes.iter().zip(written) {
            lasting.set(home, symbol);
        }
        results
    }

    pub(super) fn of_function(&mut self, function: &'a Function, id: FuncId) -> Summary<'a> {
        let mut symbols: Vec<Symbol> = vec![0; function.values.len()];
        let mut lasting = Lasting::default();
        for (i, param) in function.params.iter().enumerate() {
            symbols[param.index()] = self.argument(i);
        }
        for node in &function.nodes {
            let operands: Vec<Symbol> = node.operands.iter().map(|v| symbols[v.index()]).collect();
            let types: Vec<Arc<TensorType>> =
                node.results.iter().map(|&v| Arc::clone(&function.values[v].ty)).collect();
            let home = match &node.op {
                Op::Param(binding) => Some((Target::Param, binding)),
                Op::State(binding) => Some((Target::State, binding)),
                _ => None,
            };
            let results = match (&node.op, home) {
                (_, Some(home)) => vec![self.content(&lasting, home, &types[0])],
                (Op::Input(binding), _) => vec![self.given(None, binding, &types[0])],
                (Op::Assign { target, binding }, _) => {
                    self.assign(&mut lasting, (*target, binding), operands[0]);
                    Vec::new()
                }
                (Op::Call { callee, layers, stride, scan, stage }, _) => {
                    let callee = callee.index();
                    let op = call(callee, layers, *stride, *scan, *stage);
                    self.call(op, callee, operands, types, &mut lasting)
                }
                (Op::Coalesced(members), _) => self.each(members.iter().zip(types), &operands),
                (op, _) => self.make(Cow::Borrowed(op), operands, types, 0).0,
            };
            for (value, symbol) in node.results.iter().zip(results) {
                symbols[value.index()] = symbol;
            }
        }
        let outputs =
            function.outputs.iter().map(|o| (o.name.as_deref(), symbols[o.value.index()])).collect();
        let written = self.effects.get(id.index()).into_iter().flat_map(|effects| effects.writes.iter());
        let lasting = written.filter_map(|(home, ())| Some((home, lasting.get(home)?))).collect();
        Summary { outputs, lasting }
    }

    /// The content of a weight or state.
    pub(super) fn content(&mut self, lasting: &Lasting<'a>, home: Home<'a>, ty: &Arc<TensorType>) -> Symbol {
        lasting.get(home).unwrap_or_else(|| self.given(Some(home.0), home.1, ty))
    }
}
