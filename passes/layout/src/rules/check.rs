//! Whether a rule is sound: it is tried on random programs, in exact types and layouts and in double precision.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use ithaca_ir::ops::Attr;
use ithaca_ir::ops::attr::Names;
use ithaca_ir::{Diagnostic, Diagnostics, DimId, Module, text, verify};

use super::draw::LAYOUT_OPS;
use super::evaluate::{Evaluate, Evaluated};
use super::instance::{Miss, instance};
use super::rewrite::{Allow, Budget, World, rewrite};
use super::sizes::{SCORED, Sizes, sizes};
use super::syntax::Rule;

/// Programs on which a rule must agree.
pub const PROGRAMS: usize = 48;

/// Random draws after which a rule is given up.
pub const DRAWS: u64 = 20_000;

/// Programs with each size that the constants of a rule ask for, and draws for each size.
const SIZED: (usize, u64) = (3, 1500);

/// The most elements, of scores too, over all ranks, that a program around a size may compute at once.
const WORK: u64 = 5_000_000;

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

/// The seed, what differs, and the program before and after the rule.
type Counterexample = (u64, String, Box<Module>, Option<Box<Module>>);

/// What the draws for a rule showed.
#[derive(Default)]
struct Tally {
    agreed: usize,
    differed: Vec<Counterexample>,
    missed: BTreeMap<Reason, (u64, String)>,
}

impl Tally {
    /// Counts a draw; whether it came to a comparison that counts.
    fn count(&mut self, seed: u64, trial: Trial, about_layouts: bool) -> bool {
        match trial {
            // On one rank every layout is the same, so it shows nothing of a rule about layouts.
            Trial::Agreed(ranks) if ranks > 1 || !about_layouts => self.agreed += 1,
            Trial::Agreed(_) => return false,
            Trial::Differed { difference, before, after } => {
                self.differed.push((seed, difference, before, after));
            }
            Trial::Missed(reason, example) => {
                self.missed.entry(reason).or_insert((0, example)).0 += 1;
                return false;
            }
        }
        true
    }

    fn refusal(&mut self, rule: &Rule, about_layouts: bool) -> Option<Diagnostic> {
        let smallest = std::mem::take(&mut self.differed).into_iter().min_by_key(|(seed, _, before, _)| {
            let ranks = before.space.mesh.ranks();
            (about_layouts && ranks == 1, ranks, elements(before), *seed)
        });
        let (seed, difference, before, after) = smallest?;
        Some(unsound(rule, seed, &difference, &before, after.as_deref()))
    }
}

fn refusal(rule: &Rule, evaluator: &dyn Evaluate) -> Option<Diagnostic> {
    let about_layouts = rule.mentions(LAYOUT_OPS);
    let mut tally = Tally::default();
    for seed in 0..DRAWS {
        if tally.differed.len() >= COUNTEREXAMPLES || tally.agreed + tally.differed.len() >= PROGRAMS {
            break;
        }
        let drawn = instance(rule, seed, None);
        tally.count(seed, trial(rule, seed, drawn, evaluator), about_layouts);
    }
    if let Some(found) = tally.refusal(rule, about_layouts) {
        return Some(found);
    }
    let sizes = match sizes(rule) {
        Ok(sizes) => sizes,
        Err(refused) => return Some(refused),
    };
    let reached = tally.around(rule, &sizes, evaluator);
    if let Some(found) = tally.refusal(rule, about_layouts) {
        return Some(found);
    }
    if tally.agreed >= PROGRAMS {
        let unreached = sizes.constants.iter().find(|&&n| n > reached)?;
        let message = format!(
            "rule `{}` could not be tried: no program with a dimension of {unreached} elements, as its constant {unreached} asks for, or of more came to a comparison",
            rule.name
        );
        return Some(Diagnostic::new("P66", message).at(rule.span).label("this rule is not used"));
    }
    let Tally { agreed, missed, .. } = tally;
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

impl Tally {
    /// Tries a rule on programs around each size that its constants ask for, up to a difference; the largest size that
    /// came to a comparison.
    fn around(&mut self, rule: &Rule, sizes: &Sizes, evaluator: &dyn Evaluate) -> u64 {
        let about_layouts = rule.mentions(LAYOUT_OPS);
        let scored = rule.mentions(SCORED);
        let n_targets = sizes.targets.len().max(1) as u64;
        let draws = SIZED.1.min(2 * DRAWS / n_targets);
        let mut reached = 0;
        for (i, &size) in sizes.targets.iter().enumerate() {
            // A rule that holds for few sizes only gets all of its programs from those.
            let enough = PROGRAMS.saturating_sub(self.agreed).max(SIZED.0);
            let (mut queries, mut keys) = (0, 0);
            for j in 0..draws {
                let seed = DRAWS + i as u64 * SIZED.1 + j;
                let drawn = instance(rule, seed, Some(sizes.focus(size)));
                let Ok(module) = &drawn else { continue };
                let (of_queries, of_keys) = has_size(module, size, scored);
                if work(module) > WORK || !(of_queries && queries < enough || of_keys && keys < enough) {
                    continue;
                }
                if self.count(seed, trial(rule, seed, drawn, evaluator), about_layouts) {
                    queries += usize::from(of_queries);
                    keys += usize::from(of_keys);
                    reached = reached.max(size);
                }
                if !self.differed.is_empty() {
                    return reached;
                }
                if queries >= enough && keys >= enough {
                    break;
                }
            }
        }
        reached
    }
}

/// Whether the queries, and the keys, of some operation have this size; without scores, whether anything has.
fn has_size(module: &Module, size: u64, scored: bool) -> (bool, bool) {
    let functions = module.functions.values();
    let names = Names { space: &module.space, functions: &module.functions };
    if !scored {
        let mut values = functions.flat_map(|f| f.values.values());
        let found = values.any(|v| v.ty.dims.iter().any(|&d| module.space.size(d) == size));
        return (found, found);
    }
    let (mut queries, mut keys) = (false, false);
    for (key, attr) in functions.flat_map(|f| f.nodes.iter()).flat_map(|node| node.op.attrs(names)) {
        if let Attr::Word(word) = &attr
            && module.space.dim(word).is_some_and(|d| module.space.size(d) == size)
        {
            queries |= key == "queries";
            keys |= key == "keys";
        }
    }
    (queries, keys)
}

/// About how many numbers the operations of a program compute, sums and scores one by one, on all ranks.
fn work(module: &Module) -> u64 {
    let mut work = 0u64;
    for function in module.functions.values() {
        for node in &function.nodes {
            let values = node.operands.iter().chain(&node.results);
            let dims: BTreeSet<DimId> = values.flat_map(|&v| function.values[v].ty.dims.clone()).collect();
            let each = dims.into_iter().fold(1u64, |n, d| n.saturating_mul(module.space.size(d)));
            work = work.saturating_add(each);
        }
    }
    work.saturating_mul(module.space.mesh.ranks())
}

fn elements(module: &Module) -> u64 {
    let values = module.functions.values().flat_map(|f| f.values.values());
    values.map(|v| module.space.shape(&v.ty).iter().product::<u64>()).sum()
}

fn trial(rule: &Rule, seed: u64, drawn: Result<Module, Miss>, evaluator: &dyn Evaluate) -> Trial {
    let before = match drawn {
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
