//! The sizes to test for the constants of a rule: a rule about 100 tokens needs longer sequences.
//!
//! Integers of a rule, including those in masks and conditions, count as numbers of tokens, heads or elements, except
//! in real attributes ([`REAL`]). For each, programs have dimensions below, equal to and above it.

use std::collections::BTreeSet;

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::Attr;

use super::matching::{Bindings, value};
use super::syntax::{Rule, Term};

/// The largest constant that can be tested; scores of twice as many tokens are still fast to compute.
const MAX_CONSTANT: u64 = 1024;

/// Real attributes, and the range of magnitudes, except zero, whose effect on numbers near 1 exceeds the tolerance of
/// the comparison in double precision.
const REAL: &[(&str, f64, f64)] = &[
    ("factor", 1e-6, 1e6),
    ("scale", 1e-6, 1e6),
    ("offset", 1e-6, 1e6),
    ("eps", 1e-7, 1e3),
    ("softcap", 1e-3, 1e3),
    ("theta", 0.0, f64::MAX),
    ("rate", 0.0, f64::MAX),
    ("seed", 0.0, f64::MAX),
];

/// The sizes that the constants of a rule require.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    /// The constants, ascending.
    pub(super) constants: Vec<u64>,
    /// The sizes to try, ascending.
    pub(super) targets: Vec<u64>,
}

/// A size to draw a program for.
#[derive(Clone, Debug)]
pub(super) struct Focus {
    /// The size of at least one dimension.
    pub(super) size: u64,
    /// Further sizes that other dimensions may have.
    pub(super) others: Vec<u64>,
}

impl Sizes {
    /// The focus on `size`.
    pub(super) fn focus(&self, size: u64) -> Focus {
        Focus { size, others: self.constants.iter().copied().filter(|&n| n > 0).collect() }
    }
}

/// The sizes for a rule.
///
/// # Errors
/// `P66` for a constant that is too large, or whose effect is below the tolerance.
pub(super) fn sizes(rule: &Rule) -> Result<Sizes, Diagnostic> {
    let found = constants(rule);
    let name = &rule.name;
    if let Some((key, x, least, most)) = found.negligible {
        let message = format!(
            "rule `{name}` could not be tried: its constant {key}={x:?} is outside {least:?} to {most:?}, where its effect can be told from rounding"
        );
        return Err(rule.unused("P66", message));
    }
    if let Some(&n) = found.whole.iter().find(|&&n| n > MAX_CONSTANT) {
        let message = format!(
            "rule `{name}` could not be tried: its constant {n} is more than {MAX_CONSTANT}, and programs are drawn with twice as many elements along a dimension at most"
        );
        let help = format!("bind it by a variable, or state the rule with a number up to {MAX_CONSTANT}");
        return Err(rule.unused("P66", message).help(help));
    }
    let around = |&n: &u64| [n / 2, n.saturating_sub(1), n, n + 1, 2 * n, n + 8];
    let targets: BTreeSet<u64> = found.whole.iter().flat_map(around).collect();
    let targets = targets.into_iter().filter(|&n| (1..=2 * MAX_CONSTANT).contains(&n)).collect();
    Ok(Sizes { constants: found.whole.into_iter().collect(), targets })
}

/// The integers in a rule, ascending.
pub(super) fn whole_numbers(rule: &Rule) -> Vec<u64> {
    constants(rule).whole.into_iter().collect()
}

#[derive(Default)]
struct Constants {
    whole: BTreeSet<u64>,
    /// The first real constant whose effect is below the tolerance, with its attribute and the bounds.
    negligible: Option<(&'static str, f64, f64, f64)>,
}

/// The real attribute of this name, and its range.
fn real(key: &str) -> Option<(&'static str, f64, f64)> {
    REAL.iter().copied().find(|(real, ..)| *real == key)
}

fn constants(rule: &Rule) -> Constants {
    let mut found = Constants::default();
    let mut reals: BTreeSet<&str> = BTreeSet::new();
    for (key, term) in rule.apps().into_iter().flat_map(|(app, _)| &app.attrs) {
        if real(&key.text).is_some() {
            reals.extend(term.variables().into_iter().map(|name| name.text.as_str()));
        }
        found.term(&key.text, term);
    }
    for condition in &rule.conditions {
        let (_, terms) = condition.operands();
        let mut variables = terms.iter().flat_map(|term| term.variables());
        if !variables.any(|name| reals.contains(name.text.as_str())) {
            terms.into_iter().for_each(|term| found.term("", term));
        }
    }
    found
}

impl Constants {
    fn term(&mut self, key: &str, term: &Term) {
        match term {
            Term::Literal(attr) => self.attr(key, attr),
            Term::Call(name, args) => {
                args.iter().for_each(|(k, t)| self.term(k, t));
                if name == "blocks" {
                    self.blocks(args);
                }
            }
            term => term.parts().into_iter().for_each(|part| self.term(key, part)),
        }
        if let (Term::Arithmetic(..), None) = (term, real(key)) {
            // Computed terms count too; use small numbers for bound variables.
            let variables = term.variables().into_iter().map(|name| (name.text.clone(), Attr::Int(2)));
            let bindings = Bindings { attrs: variables.collect(), ..Bindings::default() };
            if let Some(attr) = value(term, &bindings) {
                self.attr(key, &attr);
            }
        }
    }

    fn attr(&mut self, key: &str, attr: &Attr) {
        match attr {
            #[expect(clippy::cast_precision_loss, reason = "bounds of reals are no matter of the last bits")]
            Attr::Int(n) => match real(key) {
                Some(real) => self.real(real, *n as f64),
                None => self.whole.extend([*n]),
            },
            Attr::Float(x) => match real(key) {
                Some(real) => self.real(real, *x),
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a magnitude, and one beyond the range is beyond every bound"
                )]
                None => self.whole.extend([x.abs().ceil() as u64]),
            },
            Attr::Range(start, end) => self.whole.extend([*start, *end]),
            Attr::Numbers(_, numbers) => self.whole.extend(numbers),
            // Literals have no parts.
            _ => {}
        }
    }

    fn real(&mut self, (key, least, most): (&'static str, f64, f64), x: f64) {
        if x != 0.0 && !(least..=most).contains(&x.abs()) && self.negligible.is_none() {
            self.negligible = Some((key, x, least, most));
        }
    }

    /// A table of blocks fits sequences with as many blocks as rows.
    fn blocks(&mut self, args: &[(String, Term)]) {
        let arg = |key: &str| args.iter().find(|(k, _)| k == key).map(|(_, term)| term);
        let size = arg("size").and_then(|term| value(term, &Bindings::default()));
        if let (Some(Attr::Int(size)), Some(Term::List(rows))) = (size, arg("rows")) {
            self.whole.insert(size.saturating_mul(rows.len() as u64));
        }
    }
}

/// Variables for numbers within a mask's arguments: `?n` in `window(left=?n, right=0)`.
///
/// `None` when a variable may have another kind of value.
pub(super) fn numbers_within(term: &Term) -> Option<Vec<&str>> {
    match term {
        Term::Variable(_) | Term::Arithmetic(..) => None,
        Term::Call(name, args) => {
            let number = |(_, arg): &(String, Term)| match arg {
                Term::Variable(_) => name == "window",
                arg => matches!(arg, Term::Literal(_)),
            };
            let variables = term.variables().into_iter().map(|name| name.text.as_str());
            args.iter().all(number).then(|| variables.collect())
        }
        term => {
            let parts = term.parts().into_iter().map(numbers_within);
            parts.collect::<Option<Vec<_>>>().map(|parts| parts.concat())
        }
    }
}

/// Operations with queries and keys.
pub(super) const SCORED: &[&str] = &["attention", "attention_backward", "scores", "weigh"];
