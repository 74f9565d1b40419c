//! The syntax tree of rule files: rules, patterns, terms, conditions. Each prints as it parses.

use std::fmt;

use ithaca_ir::ops::{Attr, Class, OpInfo, TABLE};
use ithaca_ir::{Diagnostic, Span};

/// A rewrite rule: if `left` matches and `conditions` hold, `right` has equal results.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The name, unique in its file.
    pub name: String,
    /// The span of the name.
    pub(super) span: Span,
    pub(crate) left: App,
    /// The replacement: an operation or a value, or one for each result of `left`.
    pub(super) right: Vec<Pattern>,
    /// All must hold.
    pub(super) conditions: Vec<Condition>,
}

/// A value or the result of an operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Pattern {
    /// `%x`: any value, the same at every occurrence.
    Value(Name),
    App(App),
}

/// A name in the rule, without its sigil.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Name {
    pub(crate) text: String,
    pub(super) span: Span,
}

/// An operation applied to patterns.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct App {
    /// The operation's name in the text form.
    pub(crate) op: String,
    /// The span of the operation's name.
    pub(super) span: Span,
    pub(crate) operands: Vec<Pattern>,
    pub(super) attrs: Vec<(Name, Term)>,
    pub(super) rest: Rest,
    /// In a replacement, the value that gives the target layout of a `reshard` or `permute`; in a pattern, the name of the
    /// operand.
    pub(super) like: Option<Name>,
    /// The index of the requested result, if it is an operand.
    pub(crate) result: usize,
}

/// The attributes that a pattern does not name.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Rest {
    /// No others.
    Absent,
    /// `..`: any.
    Ignored,
    /// `..?r`: any, bound to `?r`.
    Bound(Name),
}

/// A term: the value of an attribute, or a computation.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Term {
    /// `?a`.
    Variable(Name),
    /// A value as the text form spells it.
    Literal(Attr),
    /// `[a, b]`.
    List(Vec<Term>),
    /// `name(key=a, …)`.
    Call(String, Vec<(String, Term)>),
    /// `a & b`.
    All(Vec<Term>),
    /// `a | b`.
    Any(Vec<Term>),
    /// Arithmetic; on the right side and in conditions only.
    Arithmetic(Sign, Box<Term>, Box<Term>),
}

/// An arithmetic operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    Plus,
    Minus,
    Times,
    Over,
}

/// A comparison; `<` and `<=` are of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    Unequal,
    Less,
    AtMost,
}

/// A test of a value and a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DimTest {
    /// The value has the dimension.
    Has,
    /// The value does not have the dimension.
    Lacks,
    /// The value has the dimension, and no axis splits it.
    Whole,
}

/// A condition of a rule.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Condition {
    /// Two terms compared.
    Compare(Term, Comparison, Term),
    /// `float(?t)`: an element type of real numbers.
    Float(Term),
    /// `divides(?a, ?d)`: the number, or the number of ranks along the axis, divides the dimension or number.
    Divides(Term, Term),
    /// `has(%x, ?d)`, `lacks(%x, ?d)` or `whole(%x, ?d)`.
    Dimension(DimTest, Name, Term),
    /// `alike(%x, %y)`: both have the same dimensions, element type and layout.
    Alike(Name, Name),
}

impl From<(&str, Span)> for Name {
    fn from((text, span): (&str, Span)) -> Self {
        Self { text: text.to_owned(), span }
    }
}

impl Sign {
    pub(super) fn spelling(self) -> char {
        match self {
            Sign::Plus => '+',
            Sign::Minus => '-',
            Sign::Times => '*',
            Sign::Over => '/',
        }
    }
}

impl Comparison {
    /// Every comparison with its spelling.
    pub(super) const ALL: [(Self, &str); 4] = [
        (Comparison::Equal, "="),
        (Comparison::Unequal, "!="),
        (Comparison::AtMost, "<="),
        (Comparison::Less, "<"),
    ];
}

impl DimTest {
    /// Every test with its spelling.
    pub(super) const ALL: [(Self, &str); 3] =
        [(DimTest::Has, "has"), (DimTest::Lacks, "lacks"), (DimTest::Whole, "whole")];
}

/// The spelling of an item in the list of all.
fn spelling<T: PartialEq>(all: &[(T, &'static str)], item: T) -> &'static str {
    all.iter().find(|(known, _)| *known == item).expect("every item is in the list").1
}

/// The two sides of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

impl Rule {
    /// Every operation of the rule, callers first, the left side before the right.
    pub(super) fn apps(&self) -> Vec<(&App, Side)> {
        let mut apps = Vec::new();
        self.left.collect(Side::Left, &mut apps);
        for pattern in &self.right {
            if let Pattern::App(app) = pattern {
                app.collect(Side::Right, &mut apps);
            }
        }
        apps
    }

    /// The names of the operations of the rule.
    pub(crate) fn operations(&self) -> impl Iterator<Item = &str> {
        self.apps().into_iter().map(|(app, _)| app.op.as_str())
    }

    /// The names of the operations of the left side.
    pub(crate) fn pattern(&self) -> impl Iterator<Item = &str> {
        let left = self.apps().into_iter().filter(|(_, side)| *side == Side::Left);
        left.map(|(app, _)| app.op.as_str())
    }

    /// The diagnostic for a rule that is not used.
    pub(super) fn unused(&self, code: &'static str, message: String) -> Diagnostic {
        Diagnostic::new(code, message).at(self.span).label("this rule is not used")
    }

    /// Whether the rule contains an operation that changes layouts.
    pub(super) fn changes_layouts(&self) -> bool {
        let mut infos = self.apps().into_iter().filter_map(|(app, _)| app.info());
        infos.any(|info| matches!(info.class, Class::Layout | Class::Collective))
    }

    /// Whether the rule contains one of these operations.
    pub(super) fn mentions(&self, ops: &[&str]) -> bool {
        self.apps().iter().any(|(app, _)| ops.contains(&app.op.as_str()))
    }
}

impl App {
    /// The declaration of the operation, if it exists.
    pub(super) fn info(&self) -> Option<&'static OpInfo> {
        TABLE.iter().copied().find(|row| row.name == self.op)
    }

    fn collect<'r>(&'r self, side: Side, apps: &mut Vec<(&'r App, Side)>) {
        apps.push((self, side));
        for operand in &self.operands {
            if let Pattern::App(app) = operand {
                app.collect(side, apps);
            }
        }
    }

    /// The values among the operands.
    pub(super) fn values(&self) -> impl Iterator<Item = &Name> {
        self.operands.iter().filter_map(|operand| match operand {
            Pattern::Value(name) => Some(name),
            Pattern::App(_) => None,
        })
    }

    /// The key of the operation, regardless of the requested result; equal keys are one node.
    pub(super) fn key(&self) -> String {
        App { result: 0, ..self.clone() }.to_string()
    }
}

impl Term {
    /// The terms directly inside.
    pub(super) fn parts(&self) -> Vec<&Term> {
        match self {
            Term::Variable(_) | Term::Literal(_) => Vec::new(),
            Term::List(terms) | Term::All(terms) | Term::Any(terms) => terms.iter().collect(),
            Term::Call(_, args) => args.iter().map(|(_, term)| term).collect(),
            Term::Arithmetic(_, a, b) => vec![a, b],
        }
    }

    /// The variables of the term, in order.
    pub(super) fn variables(&self) -> Vec<&Name> {
        match self {
            Term::Variable(name) => vec![name],
            term => term.parts().into_iter().flat_map(Term::variables).collect(),
        }
    }

    pub(super) fn has_arithmetic(&self) -> bool {
        matches!(self, Term::Arithmetic(..)) || self.parts().into_iter().any(Term::has_arithmetic)
    }
}

impl Condition {
    /// The values and the terms of the condition.
    pub(super) fn operands(&self) -> (Vec<&Name>, Vec<&Term>) {
        match self {
            Condition::Compare(a, _, b) | Condition::Divides(a, b) => (Vec::new(), vec![a, b]),
            Condition::Float(term) => (Vec::new(), vec![term]),
            Condition::Dimension(_, value, dim) => (vec![value], vec![dim]),
            Condition::Alike(x, y) => (vec![x, y], Vec::new()),
        }
    }
}

fn joined<T: fmt::Display>(items: &[T], sign: &str) -> String {
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    items.join(sign)
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {}\n  {} => ", self.name, self.left)?;
        match self.right.as_slice() {
            [Pattern::App(app)] if app.result == 0 => write!(f, "{app}")?,
            patterns => f.write_str(&joined(patterns, ", "))?,
        }
        if !self.conditions.is_empty() {
            write!(f, "\n  where {}", joined(&self.conditions, ", "))?;
        }
        Ok(())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pattern::Value(name) => write!(f, "%{}", name.text),
            Pattern::App(app) if app.result > 0 => write!(f, "({app})#{}", app.result),
            Pattern::App(app) => write!(f, "({app})"),
        }
    }
}

impl fmt::Display for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.op)?;
        for operand in &self.operands {
            write!(f, " {operand}")?;
        }
        if let Some(like) = &self.like {
            write!(f, " as %{}", like.text)?;
        }
        let mut items: Vec<String> =
            self.attrs.iter().map(|(key, term)| format!("{}={term}", key.text)).collect();
        match &self.rest {
            Rest::Absent => {}
            Rest::Ignored => items.push("..".to_owned()),
            Rest::Bound(name) => items.push(format!("..?{}", name.text)),
        }
        if items.is_empty() {
            return Ok(());
        }
        write!(f, " {{{}}}", items.join(", "))
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Term::Variable(name) => write!(f, "?{}", name.text),
            Term::Literal(attr) => write!(f, "{attr}"),
            Term::List(items) => write!(f, "[{}]", joined(items, ", ")),
            Term::Call(name, args) => {
                let args: Vec<String> = args.iter().map(|(key, term)| format!("{key}={term}")).collect();
                write!(f, "{name}({})", joined(&args, ", "))
            }
            Term::All(items) => write!(f, "({})", joined(items, " & ")),
            Term::Any(items) => write!(f, "({})", joined(items, " | ")),
            Term::Arithmetic(sign, a, b) => write!(f, "({a} {} {b})", sign.spelling()),
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Condition::Compare(a, comparison, b) => {
                write!(f, "{a} {} {b}", spelling(&Comparison::ALL, *comparison))
            }
            Condition::Float(t) => write!(f, "float({t})"),
            Condition::Divides(a, b) => write!(f, "divides({a}, {b})"),
            Condition::Dimension(test, x, d) => {
                write!(f, "{}(%{}, {d})", spelling(&DimTest::ALL, *test), x.text)
            }
            Condition::Alike(x, y) => write!(f, "alike(%{}, %{})", x.text, y.text),
        }
    }
}
