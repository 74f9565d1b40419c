//! The syntax tree of rule files: rules, patterns, terms, conditions. Each prints as it parses.

use std::fmt;

use ithaca_ir::Span;
use ithaca_ir::ops::Attr;

/// A rewrite rule: if `left` matches and `conditions` hold, `right` is an equal value.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The name, unique in its file.
    pub name: String,
    /// The span of the name.
    pub span: Span,
    /// The pattern to replace.
    pub left: App,
    /// The replacement.
    pub right: Pattern,
    /// The conditions; all must hold.
    pub conditions: Vec<Condition>,
}

/// A value or the result of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Pattern {
    /// `%x`: any value, the same at every occurrence.
    Value(Name),
    /// An operation.
    App(App),
}

/// A name in the rule, without its sigil.
#[derive(Clone, Debug, PartialEq)]
pub struct Name {
    /// The name.
    pub text: String,
    /// Its span.
    pub span: Span,
}

/// An operation applied to patterns.
#[derive(Clone, Debug, PartialEq)]
pub struct App {
    /// The operation's name in the text form.
    pub op: String,
    /// The span of the operation's name.
    pub span: Span,
    /// The operands.
    pub operands: Vec<Pattern>,
    /// Attributes by name.
    pub attrs: Vec<(Name, Term)>,
    /// The attributes that are not named.
    pub rest: Rest,
    /// The value that gives the target layout, for a `reshard` or `permute` of a replacement.
    pub like: Option<Name>,
    /// The index of the requested result, if it is an operand.
    pub result: usize,
}

/// The attributes that a pattern does not name.
#[derive(Clone, Debug, PartialEq)]
pub enum Rest {
    /// No others.
    Absent,
    /// `..`: any.
    Ignored,
    /// `..?r`: any, bound to `?r`.
    Bound(Name),
}

/// A term: the value of an attribute, or a computation.
#[derive(Clone, Debug, PartialEq)]
pub enum Term {
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
pub enum Sign {
    /// `+`
    Plus,
    /// `-`
    Minus,
    /// `*`
    Times,
    /// `/`
    Over,
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// `=`
    Equal,
    /// `!=`
    Unequal,
    /// `<`, of numbers
    Less,
    /// `<=`, of numbers
    AtMost,
}

/// A condition of a rule.
#[derive(Clone, Debug, PartialEq)]
pub enum Condition {
    /// Two terms compared.
    Compare(Term, Comparison, Term),
    /// `float(?t)`: an element type of real numbers.
    Float(Term),
    /// `divides(?a, ?d)`: the number, or the number of ranks along the axis, divides the dimension or number.
    Divides(Term, Term),
    /// `has(%x, ?d)`: the value has the dimension.
    Has(Name, Term),
    /// `lacks(%x, ?d)`: the value does not have the dimension.
    Lacks(Name, Term),
    /// `whole(%x, ?d)`: it has the dimension, and no axis splits it.
    Whole(Name, Term),
    /// `alike(%x, %y)`: both have the same dimensions, element type and layout.
    Alike(Name, Name),
}

impl Sign {
    /// Every operator with its character.
    pub(super) const ALL: [(Sign, char); 4] =
        [(Sign::Plus, '+'), (Sign::Minus, '-'), (Sign::Times, '*'), (Sign::Over, '/')];

    fn char(self) -> char {
        Self::ALL.into_iter().find(|(s, _)| *s == self).expect("every sign is in the list").1
    }
}

impl Comparison {
    fn text(self) -> &'static str {
        match self {
            Comparison::Equal => "=",
            Comparison::Unequal => "!=",
            Comparison::Less => "<",
            Comparison::AtMost => "<=",
        }
    }
}

impl Rule {
    /// Calls `see` with every operation of the rule, callers first, the left side before the right.
    pub(super) fn each_app<'r>(&'r self, see: &mut dyn FnMut(&'r App, Side)) {
        self.left.each(&mut |app| see(app, Side::Left));
        if let Pattern::App(app) = &self.right {
            app.each(&mut |app| see(app, Side::Right));
        }
    }

    /// Whether the rule contains one of these operations.
    pub(super) fn mentions(&self, ops: &[&str]) -> bool {
        let mut found = false;
        self.each_app(&mut |app, _| found |= ops.contains(&app.op.as_str()));
        found
    }
}

/// The two sides of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

impl App {
    fn each<'r>(&'r self, see: &mut dyn FnMut(&'r App)) {
        see(self);
        for operand in &self.operands {
            if let Pattern::App(app) = operand {
                app.each(see);
            }
        }
    }

    /// The key of the operation, regardless of the requested result; equal keys are one node.
    pub(super) fn key(&self) -> String {
        App { result: 0, ..self.clone() }.to_string()
    }
}

impl Term {
    /// Calls `see` with every variable of the term.
    pub(super) fn each_variable<'t>(&'t self, see: &mut dyn FnMut(&'t Name)) {
        match self {
            Term::Variable(name) => see(name),
            Term::Literal(_) => {}
            Term::List(terms) | Term::All(terms) | Term::Any(terms) => {
                terms.iter().for_each(|t| t.each_variable(see));
            }
            Term::Call(_, args) => args.iter().for_each(|(_, t)| t.each_variable(see)),
            Term::Arithmetic(_, a, b) => [a, b].into_iter().for_each(|t| t.each_variable(see)),
        }
    }

    /// Whether the term has arithmetic.
    pub(super) fn has_arithmetic(&self) -> bool {
        match self {
            Term::Variable(_) | Term::Literal(_) => false,
            Term::List(terms) | Term::All(terms) | Term::Any(terms) => terms.iter().any(Term::has_arithmetic),
            Term::Call(_, args) => args.iter().any(|(_, t)| t.has_arithmetic()),
            Term::Arithmetic(..) => true,
        }
    }
}

fn joined<T: fmt::Display>(f: &mut fmt::Formatter<'_>, sign: &str, items: &[T]) -> fmt::Result {
    for (i, item) in items.iter().enumerate() {
        write!(f, "{}{item}", if i == 0 { "" } else { sign })?;
    }
    Ok(())
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {}\n  {} => {}", self.name, self.left, Top(&self.right))?;
        for (i, condition) in self.conditions.iter().enumerate() {
            write!(f, "{}{condition}", if i == 0 { "\n  where " } else { ", " })?;
        }
        Ok(())
    }
}

/// A pattern without parentheses.
struct Top<'a>(&'a Pattern);

impl fmt::Display for Top<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Pattern::App(app) if app.result == 0 => write!(f, "{app}"),
            pattern => write!(f, "{pattern}"),
        }
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
            Term::List(items) => {
                f.write_str("[")?;
                joined(f, ", ", items)?;
                f.write_str("]")
            }
            Term::Call(name, args) => {
                let args: Vec<String> = args.iter().map(|(key, term)| format!("{key}={term}")).collect();
                write!(f, "{name}({})", args.join(", "))
            }
            Term::All(items) => {
                f.write_str("(")?;
                joined(f, " & ", items)?;
                f.write_str(")")
            }
            Term::Any(items) => {
                f.write_str("(")?;
                joined(f, " | ", items)?;
                f.write_str(")")
            }
            Term::Arithmetic(sign, a, b) => write!(f, "({a} {} {b})", sign.char()),
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Condition::Compare(a, comparison, b) => write!(f, "{a} {} {b}", comparison.text()),
            Condition::Float(t) => write!(f, "float({t})"),
            Condition::Divides(a, b) => write!(f, "divides({a}, {b})"),
            Condition::Has(x, d) => write!(f, "has(%{}, {d})", x.text),
            Condition::Lacks(x, d) => write!(f, "lacks(%{}, {d})", x.text),
            Condition::Whole(x, d) => write!(f, "whole(%{}, {d})", x.text),
            Condition::Alike(x, y) => write!(f, "alike(%{}, %{})", x.text, y.text),
        }
    }
}
