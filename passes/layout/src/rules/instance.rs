//! Random programs in which the left side of a rule occurs.
//!
//! The result's type is drawn first, then the attributes and operand types of each operation from the result down to
//! the values, which become inputs in the drawn layouts.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::ops::{Attr, Attrs, Binding, Context, OpError};
use ithaca_ir::{
    Arena, DimId, FuncId, Function, FunctionBuilder, Level, Module, Op, Output, TensorType, ValueId,
};

use super::draw::Draw;
use super::matching::{Bindings, all_hold, bind_attrs, same, value};
use super::operands::{Fixed, operands};
use super::replace::{NewNode, Place};
use super::sizes::{Focus, numbers_within, whole_numbers};
use super::syntax::{App, Comparison, Condition, Pattern, Rest, Rule, Term};

/// The maximum number of elements of an input.
const MAX_ELEMENTS: u64 = 2048;

/// Why a draw gave no comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RejectedDraw {
    /// No operands give the drawn types.
    Types,
    /// The conditions do not hold.
    Conditions,
    /// The replacement is not legal in the program.
    Replacement,
    /// The program cannot be run.
    Run,
}

impl RejectedDraw {
    pub(super) fn text(self) -> &'static str {
        match self {
            RejectedDraw::Types => "no operands were found for the left side",
            RejectedDraw::Conditions => "the conditions did not hold",
            RejectedDraw::Replacement => "the replacement was not legal there",
            RejectedDraw::Run => "the program could not be run",
        }
    }
}

/// A program that returns the results of the rule's left side; with `focus`, one that tests a size.
pub(super) fn instance(rule: &Rule, seed: u64, focus: Option<Focus>) -> Result<Module, RejectedDraw> {
    let draw = Draw::new(rule, seed, focus);
    let mut builder = ProgramBuilder {
        rule,
        draw,
        bindings: Bindings::default(),
        leaves: Vec::new(),
        named: Vec::new(),
        nodes: Vec::new(),
        known: BTreeMap::new(),
    };
    builder.settle();
    let want = builder.draw.ty();
    builder.app(&rule.left, &want).ok_or(RejectedDraw::Types)?;
    let known = || builder.leaves.iter().chain(&builder.named);
    let ty = |name: &str| known().find(|(known, _)| known == name).map(|(_, ty)| ty);
    if !all_hold(rule, &builder.bindings, &builder.draw.space, &ty) {
        return Err(RejectedDraw::Conditions);
    }
    let most = MAX_ELEMENTS.max(2 * builder.draw.largest());
    let small = |ty: &TensorType| builder.draw.space.shape(ty).iter().product::<u64>() <= most;
    if !builder.leaves.iter().all(|(_, ty)| small(ty)) {
        return Err(RejectedDraw::Types);
    }
    builder.program().ok_or(RejectedDraw::Types)
}

struct ProgramBuilder<'r> {
    rule: &'r Rule,
    draw: Draw,
    bindings: Bindings,
    /// Values of the pattern by name, in order of their first use.
    leaves: Vec<(String, TensorType)>,
    /// Operands of the pattern that have a name.
    named: Vec<(String, TensorType)>,
    /// The operations of the pattern, operands first; a [`Place::Value`] is an index of `leaves`.
    nodes: Vec<NewNode>,
    /// The index of the operation of each key of a pattern.
    known: BTreeMap<String, usize>,
}

impl ProgramBuilder<'_> {
    /// Binds variables that a condition equates with known values.
    fn settle(&mut self) {
        for condition in &self.rule.conditions {
            let Condition::Compare(a, Comparison::Equal, b) = condition else { continue };
            for (variable, term) in [(a, b), (b, a)] {
                if let (Term::Variable(name), Some(known)) = (variable, value(term, &self.bindings)) {
                    self.bindings.attrs.entry(name.text.clone()).or_insert(known);
                }
            }
        }
    }

    /// Binds the numbers in a mask's arguments: small ones, and ones near the rule's constants.
    fn numbers(&mut self, term: &Term) {
        for name in numbers_within(term).unwrap_or_default() {
            if !self.bindings.attrs.contains_key(name) {
                let around = |n: u64| [n.saturating_sub(1), n, n.saturating_add(1)];
                let mut numbers = vec![0, 1, 1, 2, 3];
                numbers.extend(whole_numbers(self.rule).into_iter().flat_map(around));
                let n = self.draw.rng.one_of(&numbers).unwrap_or(1);
                self.bindings.attrs.insert(name.to_owned(), Attr::Int(n));
            }
        }
    }

    /// Draws the operation of a pattern and all below it, and returns the requested result; `None` if the draw failed.
    fn app(&mut self, app: &App, want: &TensorType) -> Option<Place> {
        let key = app.key();
        if let Some(&node) = self.known.get(&key) {
            let fits = self.nodes[node].types.get(app.result) == Some(want);
            return fits.then_some(Place::New(node, app.result));
        }
        let mut fixed = Fixed::new();
        for (key, term) in &app.attrs {
            if key.text == "mask" {
                self.numbers(term);
            }
            if let Some(attr) = value(term, &self.bindings) {
                fixed.insert(key.text.clone(), attr);
            }
        }
        let mut may_add = app.rest != Rest::Absent;
        if let Rest::Bound(name) = &app.rest
            && let Some(bound) = self.bindings.rests.get(&name.text)
        {
            // The operation that bound them fixed the other attributes.
            may_add = false;
            fixed.extend(bound.iter().cloned());
        }
        let (attrs, operands) = operands(&mut self.draw, app, &fixed, may_add, want)?;
        let agrees = attrs.iter().all(|(key, attr)| fixed.get(key).is_none_or(|fixed| same(fixed, attr)));
        if !agrees || operands.len() != app.operands.len() {
            return None;
        }
        let functions = Arena::new();
        let attrs = Attrs::new(app.op.as_str(), attrs);
        let cx = Context { space: &self.draw.space, functions: &functions };
        let op = Op::from_attrs(&app.op, attrs, cx.names())?.ok()?;
        let refs: Vec<&TensorType> = operands.iter().collect();
        let types = op.infer(cx, &refs, std::slice::from_ref(want)).ok()?.into_vec();
        if types.get(app.result) != Some(want) {
            return None;
        }
        let found = op.attrs(cx.names());
        if !bind_attrs(app, &found, &mut self.bindings) {
            return None;
        }
        self.settle();
        let places = app.operands.iter().zip(&operands).map(|(pattern, ty)| match pattern {
            Pattern::App(inner) => {
                self.named.extend(inner.like.as_ref().map(|name| (name.text.clone(), ty.clone())));
                self.app(inner, ty)
            }
            Pattern::Value(name) => {
                let known = self.leaves.iter().position(|(known, _)| *known == name.text);
                let leaf = known.unwrap_or_else(|| {
                    self.leaves.push((name.text.clone(), ty.clone()));
                    self.leaves.len() - 1
                });
                (self.leaves[leaf].1 == *ty).then_some(Place::Value(ValueId::new(leaf)))
            }
        });
        let operands = places.collect::<Option<Vec<Place>>>()?;
        self.known.insert(key, self.nodes.len());
        self.nodes.push(NewNode { op, operands, types });
        Some(Place::New(self.nodes.len() - 1, app.result))
    }

    /// The program that returns the results of the rule's left side.
    fn program(mut self) -> Option<Module> {
        let level = if self.rule.mentions(&["reshard"]) {
            Level::Sharded
        } else if self.draw.space.mesh.axes.is_empty() && !self.rule.changes_layouts() {
            Level::Program
        } else {
            Level::PerRank
        };
        // A pending sum is a product over a split dimension.
        let mut sums = Vec::new();
        for (_, ty) in &self.leaves {
            let axes = &ty.layout.partial;
            let degree = self.draw.space.mesh.degree(axes);
            sums.push((!axes.is_empty()).then(|| self.draw.fresh_dim(&[degree, 2 * degree])));
        }
        let mut functions = Arena::new();
        let main = self.main(&sums, &functions).ok()?;
        functions.push(main);
        let name = format!("rule {}", self.rule.name);
        let module = Module { level, name, pipeline: Vec::new(), space: self.draw.space, functions };
        ithaca_ir::verify::verify(&module).is_ok().then_some(module)
    }

    fn main(&self, sums: &[Option<DimId>], functions: &Arena<FuncId, Function>) -> Result<Function, OpError> {
        let mut b = FunctionBuilder::new("main", &self.draw.space, functions);
        let mut values: Vec<ValueId> = Vec::new();
        for ((name, ty), sum) in self.leaves.iter().zip(sums) {
            let value = match *sum {
                None => b.push_as(Op::Input(Binding::named(name.as_str())), &[], ty.clone())?,
                Some(dim) => summands(&mut b, name, ty, dim)?,
            };
            b.name(value, Some(name));
            values.push(value);
        }
        let mut results: Vec<Vec<ValueId>> = Vec::new();
        for node in &self.nodes {
            let operands: Vec<ValueId> =
                node.operands.iter().map(|place| place.of(|leaf| values[leaf.index()], &results)).collect();
            results.push(b.node(node.op.clone(), &operands, &node.types)?.into_vec());
        }
        let mut outputs = Vec::new();
        for (i, mut value) in results.pop().into_iter().flatten().enumerate() {
            for axis in b.ty(value).layout.partial.clone() {
                value = b.push(Op::AllReduce { axis: axis.into() }, &[value])?;
            }
            outputs.push(Output { name: Some(format!("y{i}")), value });
        }
        Ok(b.finish(outputs))
    }
}

/// A pending sum over the axes of `ty`, as a product over `dim`, with different summands on each rank.
fn summands(
    b: &mut FunctionBuilder<'_>,
    name: &str,
    ty: &TensorType,
    dim: DimId,
) -> Result<ValueId, OpError> {
    let axes = ty.layout.partial.clone();
    let mut terms = ty.clone();
    terms.layout.partial.clear();
    terms.dims.push(dim);
    terms.layout.split.push(axes.clone());
    let weights = TensorType::new(ty.dtype, [dim]).split(dim, axes);
    let terms = b.push_as(Op::Input(Binding::named(format!("{name}.terms"))), &[], terms)?;
    let weights = b.push_as(Op::Input(Binding::named(format!("{name}.weights"))), &[], weights)?;
    b.push_as(Op::Einsum, &[terms, weights], ty.clone())
}
