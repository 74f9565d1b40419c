//! Matches operations against patterns, attributes against terms, and evaluates conditions.
//!
//! A value of a function has one maker, so a rule matches an operation at most once; a class of an e-graph may have
//! several makers.

use std::collections::BTreeMap;

use ithaca_ir::ops::attr::Names;
use ithaca_ir::ops::{Attr, Op};
use ithaca_ir::{DType, Space, TensorType, ValueId};
use smallvec::SmallVec;

use super::syntax::{App, Comparison, Condition, DimTest, Pattern, Rest, Rule, Sign, Term};

/// The values of a rule's variables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bindings {
    pub(crate) values: BTreeMap<String, ValueId>,
    pub(crate) attrs: BTreeMap<String, Attr>,
    pub(crate) rests: BTreeMap<String, Vec<(String, Attr)>>,
}

/// An operation that defines a value.
pub(crate) struct Maker<'a> {
    pub(crate) op: &'a Op,
    /// Its attributes, if they are at hand.
    pub(crate) attrs: Option<&'a [(&'static str, Attr)]>,
    pub(crate) operands: SmallVec<[ValueId; 4]>,
}

/// A program in which patterns match.
pub(crate) trait Program {
    fn type_of(&self, value: ValueId) -> &TensorType;

    /// The operations that define `value` by their result of this index.
    fn makers(&self, value: ValueId, result: usize) -> Vec<Maker<'_>>;
}

/// The bindings for each match of the rule's left side with one of `roots` that satisfies its conditions; at most `limit`.
pub(crate) fn matches(
    program: &dyn Program,
    names: Names<'_>,
    rule: &Rule,
    roots: Vec<Maker<'_>>,
    limit: usize,
) -> Vec<Bindings> {
    let mut found = applications(program, names, &rule.left, roots, &Bindings::default(), limit);
    found.retain(|bindings| {
        let ty = |name: &str| bindings.values.get(name).map(|&v| program.type_of(v));
        all_hold(rule, bindings, names.space, &ty)
    });
    found
}

/// Extends `bindings` by each match of `app` with one of `makers`.
fn applications(
    program: &dyn Program,
    names: Names<'_>,
    app: &App,
    makers: Vec<Maker<'_>>,
    bindings: &Bindings,
    limit: usize,
) -> Vec<Bindings> {
    let mut found = Vec::new();
    for Maker { op, attrs, operands } in makers {
        if app.op != op.name() || app.operands.len() != operands.len() {
            continue;
        }
        let mut own = bindings.clone();
        let is_bound = match attrs {
            Some(attrs) => bind_attrs(app, attrs, &mut own),
            None => bind_attrs(app, &op.attrs(names), &mut own),
        };
        let mut ways = if is_bound { vec![own] } else { Vec::new() };
        for (pattern, &value) in app.operands.iter().zip(&operands) {
            let extended = ways.into_iter().flat_map(|mut way| match pattern {
                Pattern::Value(name) => {
                    let is_same = *way.values.entry(name.text.clone()).or_insert(value) == value;
                    if is_same { vec![way] } else { Vec::new() }
                }
                Pattern::App(app) => {
                    let is_same = app
                        .like
                        .as_ref()
                        .is_none_or(|name| *way.values.entry(name.text.clone()).or_insert(value) == value);
                    let makers = if is_same { program.makers(value, app.result) } else { Vec::new() };
                    applications(program, names, app, makers, &way, limit)
                }
            });
            ways = extended.collect();
        }
        found.extend(ways);
        if found.len() >= limit {
            found.truncate(limit);
            break;
        }
    }
    found
}

/// Whether attributes match the pattern; binds its variables.
pub(super) fn bind_attrs(app: &App, attrs: &[(&'static str, Attr)], bindings: &mut Bindings) -> bool {
    let mut left: Vec<&(&'static str, Attr)> = attrs.iter().collect();
    for (key, term) in &app.attrs {
        let Some(i) = left.iter().position(|(known, _)| *known == key.text) else { return false };
        if !bind_term(term, &left.remove(i).1, bindings) {
            return false;
        }
    }
    match &app.rest {
        Rest::Absent => left.is_empty(),
        Rest::Ignored => true,
        Rest::Bound(name) => {
            let rest: Vec<(String, Attr)> =
                left.into_iter().map(|(key, attr)| ((*key).to_owned(), attr.clone())).collect();
            *bindings.rests.entry(name.text.clone()).or_insert_with(|| rest.clone()) == rest
        }
    }
}

fn bind_term(term: &Term, attr: &Attr, bindings: &mut Bindings) -> bool {
    let parts: Vec<&Attr> = match (term, attr) {
        (Term::Variable(name), _) => {
            return same(bindings.attrs.entry(name.text.clone()).or_insert_with(|| attr.clone()), attr);
        }
        (Term::Literal(literal), _) => return same(literal, attr),
        (Term::List(_), Attr::List(items))
        | (Term::All(_), Attr::All(items))
        | (Term::Any(_), Attr::Any(items)) => items.iter().collect(),
        (Term::Call(name, terms), Attr::Call(found, args))
            if name == found && terms.iter().map(|(key, _)| key).eq(args.iter().map(|(key, _)| key)) =>
        {
            args.iter().map(|(_, attr)| attr).collect()
        }
        // The parser refuses arithmetic on the left side.
        (Term::List(_) | Term::All(_) | Term::Any(_) | Term::Call(..) | Term::Arithmetic(..), _) => {
            return false;
        }
    };
    let terms = term.parts();
    terms.len() == parts.len() && terms.into_iter().zip(parts).all(|(t, a)| bind_term(t, a, bindings))
}

/// Whether two attributes have equal values: `2` equals `2.0`.
pub(super) fn same(a: &Attr, b: &Attr) -> bool {
    match (number(a), number(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

fn number(attr: &Attr) -> Option<f64> {
    match attr {
        Attr::Int(n) => Some(*n as f64),
        Attr::Float(x) => Some(*x),
        _ => None,
    }
}

/// The value of a term; `None` for arithmetic on non-numbers or a result that is not finite.
pub(super) fn value(term: &Term, bindings: &Bindings) -> Option<Attr> {
    let mut parts =
        term.parts().into_iter().map(|part| value(part, bindings)).collect::<Option<Vec<Attr>>>()?;
    Some(match term {
        Term::Variable(name) => bindings.attrs.get(&name.text)?.clone(),
        Term::Literal(attr) => attr.clone(),
        Term::List(_) => Attr::List(parts),
        Term::All(_) => Attr::All(parts),
        Term::Any(_) => Attr::Any(parts),
        Term::Call(name, args) => {
            Attr::Call(name.clone(), args.iter().map(|(key, _)| key.clone()).zip(parts).collect())
        }
        Term::Arithmetic(sign, ..) => {
            let b = parts.pop()?;
            compute(*sign, &parts.pop()?, &b)?
        }
    })
}

/// Integers stay integers if the result is one.
fn compute(sign: Sign, a: &Attr, b: &Attr) -> Option<Attr> {
    if let (Attr::Int(a), Attr::Int(b)) = (a, b) {
        let whole = match sign {
            Sign::Plus => a.checked_add(*b),
            Sign::Minus => a.checked_sub(*b),
            Sign::Times => a.checked_mul(*b),
            Sign::Over => a.checked_div(*b).filter(|q| q * b == *a),
        };
        if let Some(n) = whole {
            return Some(Attr::Int(n));
        }
    }
    let (a, b) = (number(a)?, number(b)?);
    let x = match sign {
        Sign::Plus => a + b,
        Sign::Minus => a - b,
        Sign::Times => a * b,
        Sign::Over => a / b,
    };
    x.is_finite().then_some(Attr::Float(x))
}

/// Whether all conditions of a rule hold; one that does not apply to the bound values does not hold.
pub(super) fn all_hold<'t>(
    rule: &Rule,
    bindings: &Bindings,
    space: &Space,
    ty: &dyn Fn(&str) -> Option<&'t TensorType>,
) -> bool {
    let word = |term: &Term| match value(term, bindings) {
        Some(Attr::Word(word)) => Some(word),
        _ => None,
    };
    let dim = |term: &Term| word(term).and_then(|w| space.dim(&w));
    rule.conditions.iter().all(|condition| match condition {
        Condition::Compare(a, comparison, b) => {
            let (Some(a), Some(b)) = (value(a, bindings), value(b, bindings)) else { return false };
            let numbers = || Some((number(&a)?, number(&b)?));
            match comparison {
                Comparison::Equal => same(&a, &b),
                Comparison::Unequal => !same(&a, &b),
                Comparison::Less => numbers().is_some_and(|(a, b)| a < b),
                Comparison::AtMost => numbers().is_some_and(|(a, b)| a <= b),
            }
        }
        Condition::Float(t) => word(t).and_then(|w| DType::parse(&w)).is_some_and(DType::is_float),
        Condition::Divides(a, b) => {
            let size = |axis: &Attr| match axis {
                Attr::Word(name) => space.mesh.axis(name).map(|axis| space.mesh.size(axis)),
                _ => None,
            };
            let degree = match value(a, bindings) {
                Some(Attr::Int(n)) => Some(n),
                Some(axis @ Attr::Word(_)) => size(&axis),
                Some(Attr::List(axes)) => axes.iter().map(size).product(),
                _ => None,
            };
            match (degree, value(b, bindings)) {
                (Some(degree), Some(Attr::Int(n))) => degree != 0 && n.is_multiple_of(degree),
                (Some(degree), Some(Attr::Word(w))) => {
                    space.dim(&w).is_some_and(|d| space.dims[d].divides_evenly(degree))
                }
                _ => false,
            }
        }
        Condition::Dimension(test, x, d) => {
            let (Some(ty), Some(d)) = (ty(&x.text), dim(d)) else { return false };
            match test {
                DimTest::Has => ty.has(d),
                DimTest::Lacks => !ty.has(d),
                DimTest::Whole => ty.has(d) && ty.axes_of(d).is_empty(),
            }
        }
        Condition::Alike(x, y) => matches!((ty(&x.text), ty(&y.text)), (Some(a), Some(b)) if a == b),
    })
}
