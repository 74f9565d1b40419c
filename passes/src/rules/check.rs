//! Whether a rule is sound: it is tried on random programs, in exact types and layouts and in double precision.

use std::collections::BTreeMap;
use std::fmt::Write;

use ithaca_ir::{Diagnostic, Diagnostics, Module, text, verify};

use super::draw::LAYOUT_OPS;
use super::instance::{Miss, instance};
use super::rewrite::{Allow, Budget, World, rewrite};
use super::syntax::Rule;
use super::{Evaluate, Evaluated};

/// Programs on which a rule must agree.
pub const PROGRAMS: usize = 48;

/// Random draws after which a rule is given up.
pub const DRAWS: u64 = 20_000;

/// Counterexamples of which the smallest is shown.
const COUNTEREXAMPLES: usize = 8;

/// The largest difference that is taken for rounding, relative to the largest element.
const RELATIVE: f64 = 1e-9;

/// The largest difference that is taken for rounding where everything cancels.
const ABSOLUTE: f64 = 1e-13;

/// Rules that were tried and never gave another result.
#[derive(Clone, Debug)]
pub struct CheckedRules {
    pub(super) rules: Vec<Rule>,
}

impl CheckedRules {
    /// The rules, in order of the file.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }
}

/// Tries every rule.
///
/// # Errors
/// `P66` for a rule of which too few programs could be made, with what was missing; `P67` for one that computes
/// something else, with a counterexample.
pub fn check(rules: Vec<Rule>, evaluator: &dyn Evaluate) -> Result<CheckedRules, Diagnostics> {
    let refused: Diagnostics = rules.iter().filter_map(|rule| refusal(rule, evaluator)).collect();
    if refused.is_empty() { Ok(CheckedRules { rules }) } else { Err(refused) }
}

struct Always;

impl Allow for Always {
    fn allow(&mut self) -> bool {
        true
    }
}

/// What one draw showed.
enum Trial {
    /// Both programs gave the same, on so many ranks.
    Agreed(u64),
    Differed {
        difference: String,
        before: Box<Module>,
        after: Option<Box<Module>>,
    },
    Missed(Reason, String),
}

/// Why a draw showed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    Types,
    Conditions,
    Replacement,
    Run,
}

impl Reason {
    fn text(self) -> &'static str {
        match self {
            Reason::Types => "no operands were found for the left side",
            Reason::Conditions => "the conditions did not hold",
            Reason::Replacement => "the replacement was not legal there",
            Reason::Run => "the program could not be run",
        }
    }
}

fn refusal(rule: &Rule, evaluator: &dyn Evaluate) -> Option<Diagnostic> {
    let about_layouts = rule.mentions(LAYOUT_OPS);
    let mut agreed = 0;
    let mut differed: Vec<(u64, String, Box<Module>, Option<Box<Module>>)> = Vec::new();
    let mut missed: BTreeMap<Reason, (u64, String)> = BTreeMap::new();
    for seed in 0..DRAWS {
        match trial(rule, seed, evaluator) {
            // On one rank every layout is the same, so it shows nothing of a rule about layouts.
            Trial::Agreed(ranks) if ranks > 1 || !about_layouts => agreed += 1,
            Trial::Agreed(_) => {}
            Trial::Differed { difference, before, after } => {
                differed.push((seed, difference, before, after));
            }
            Trial::Missed(reason, example) => {
                let entry = missed.entry(reason).or_insert((0, example));
                entry.0 += 1;
            }
        }
        if differed.len() >= COUNTEREXAMPLES || agreed + differed.len() >= PROGRAMS {
            break;
        }
    }
    let smallest = differed.into_iter().min_by_key(|(seed, _, before, _)| {
        let ranks = before.space.mesh.ranks();
        (about_layouts && ranks == 1, ranks, elements(before), *seed)
    });
    if let Some((seed, difference, before, after)) = smallest {
        return Some(unsound(rule, seed, &difference, &before, after.as_deref()));
    }
    if agreed >= PROGRAMS {
        return None;
    }
    let message = format!(
        "rule `{}` could not be tried: {agreed} of {DRAWS} random programs came to a comparison, and {PROGRAMS} are needed",
        rule.name
    );
    let reasons: Vec<String> = missed
        .iter()
        .map(|(reason, (n, example))| {
            let example = if example.is_empty() { String::new() } else { format!(" ({example})") };
            format!("{n} times {}{example}", reason.text())
        })
        .collect();
    let diagnostic = Diagnostic::new("P66", message).at(rule.span).label("this rule is not used");
    Some(diagnostic.help(format!("what was missing: {}", reasons.join("; "))))
}

fn elements(module: &Module) -> u64 {
    let values = module.functions.values().flat_map(|f| f.values.values());
    values.map(|v| module.space.shape(&v.ty).iter().product::<u64>()).sum()
}

fn trial(rule: &Rule, seed: u64, evaluator: &dyn Evaluate) -> Trial {
    let before = match instance(rule, seed) {
        Ok(module) => Box::new(module),
        Err(Miss::Types) => return Trial::Missed(Reason::Types, String::new()),
        Err(Miss::Conditions) => return Trial::Missed(Reason::Conditions, String::new()),
    };
    let mut always = Always;
    let mut budget = Budget::new(1, 1, &mut always);
    let (after, rewritten) = applied(&before, rule, &mut budget);
    let other_types = budget.other_types.remove(0);
    if budget.applied[0] == 0 {
        return match other_types {
            Some(difference) => Trial::Differed { difference, before, after: None },
            None => Trial::Missed(Reason::Replacement, budget.illegal.remove(0).unwrap_or_default()),
        };
    }
    if let Err(message) = rewritten {
        return Trial::Missed(Reason::Replacement, message);
    }
    let expected = match evaluator.outputs(&before, &before, seed) {
        Ok(outputs) => outputs,
        Err(message) => return Trial::Missed(Reason::Run, message),
    };
    let difference = match evaluator.outputs(&after, &before, seed) {
        Ok(found) => difference(&expected, &found),
        Err(message) => Some(format!("the rewritten program cannot be run: {message}")),
    };
    match difference {
        None => Trial::Agreed(before.space.mesh.ranks()),
        Some(difference) => Trial::Differed { difference, before, after: Some(Box::new(after)) },
    }
}

/// The program with the rule applied once, and whether it verifies.
fn applied(before: &Module, rule: &Rule, budget: &mut Budget<'_>) -> (Module, Result<(), String>) {
    let mut after = before.emptied(before.level);
    for function in before.functions.values() {
        let world = World { space: &before.space, functions: &after.functions, level: before.level };
        match rewrite(world, function, std::slice::from_ref(rule), budget) {
            Ok(function) => {
                after.functions.push(function);
            }
            Err(error) => return (after, Err(error.message)),
        }
    }
    let verdict = verify::verify(&after).map(|_| ()).map_err(|found| found[0].message.clone());
    (after, verdict)
}

/// The first element that differs by more than rounding.
fn difference(expected: &[Evaluated], found: &[Evaluated]) -> Option<String> {
    for (a, b) in expected.iter().zip(found) {
        if a.name != b.name || a.shape != b.shape {
            let message = format!("output `{}` {:?} becomes `{}` {:?}", a.name, a.shape, b.name, b.shape);
            return Some(message);
        }
        let finite = a.elements.iter().chain(&b.elements).filter(|x| x.is_finite());
        let largest = finite.fold(0.0, |m: f64, x| m.max(x.abs()));
        let tolerance = (RELATIVE * largest).max(ABSOLUTE);
        let equal = |x: f64, y: f64| x == y || (x.is_nan() && y.is_nan()) || (x - y).abs() <= tolerance;
        let first = a.elements.iter().zip(&b.elements).position(|(&x, &y)| !equal(x, y));
        if let Some(i) = first {
            let at = unravel(&a.shape, i);
            let (x, y) = (a.elements[i], b.elements[i]);
            return Some(format!("element {at:?} of `{}` is {x:e} before and {y:e} after", a.name));
        }
    }
    None
}

fn unravel(shape: &[u64], i: usize) -> Vec<u64> {
    let mut left = i as u64;
    let mut at: Vec<u64> = Vec::new();
    for &n in shape.iter().rev() {
        at.push(left % n.max(1));
        left /= n.max(1);
    }
    at.reverse();
    at
}

fn unsound(rule: &Rule, seed: u64, difference: &str, before: &Module, after: Option<&Module>) -> Diagnostic {
    let message = format!("rule `{}` is unsound: with inputs of seed {seed}, {difference}", rule.name);
    let mut shown = format!("the program before:\n{}", concise(before));
    if let Some(after) = after {
        let _ = write!(shown, "and after:\n{}", concise(after));
    }
    Diagnostic::new("P67", message)
        .at(rule.span)
        .label("this rule is not used")
        .help(shown.trim_end().to_owned())
        .help("state behind `where` what the rule relies on, or leave it out")
}

/// The text of a module without dimensions that nothing names.
fn concise(module: &Module) -> String {
    let printed = text::print(module);
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let uses = |name: &str| printed.split(|c| !is_part(c)).filter(|word| *word == name).count();
    let kept = |line: &&str| match line.strip_prefix("dim ").and_then(|rest| rest.split(' ').next()) {
        Some(name) => uses(name) > 1,
        None => true,
    };
    let lines: Vec<&str> = printed.lines().filter(kept).collect();
    lines.join("\n") + "\n"
}
