//! Checks that rules are sound: runs each on random programs, with exact comparison of types and layouts and in double
//! precision.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use ithaca_ir::ops::Attr;
use ithaca_ir::ops::attr::Names;
use ithaca_ir::{Diagnostic, Diagnostics, DimId, Module, text, verify};

use super::evaluate::{Evaluate, Evaluated};
use super::instance::{RejectedDraw, instance};
use super::rewrite::{Budget, rewrite};
use super::sizes::{SCORED, Sizes, sizes};
use super::syntax::Rule;

/// The number of programs on which a rule must agree.
const PROGRAMS: usize = 48;

/// The maximum number of random draws per rule.
const DRAWS: u64 = 20_000;

/// The number of programs for each size from a rule's constants, and the maximum number of draws for each.
const SIZED: (usize, u64) = (3, 1500);

/// The maximum number of elements, including scores, that a program for a given size computes over all ranks.
const WORK: u64 = 5_000_000;

/// The number of counterexamples to collect; the smallest is shown.
const COUNTEREXAMPLES: usize = 8;

/// The rounding tolerance, relative to the largest element.
const RELATIVE: f64 = 1e-9;

/// The absolute rounding tolerance, for results near zero.
const ABSOLUTE: f64 = 1e-13;

/// Rules that passed the check.
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

/// Checks every rule.
///
/// # Errors
/// `P66` for a rule with too few programs, and why they could not be made; `P67` for an unsound rule, with a
/// counterexample.
pub fn check(rules: Vec<Rule>, evaluator: &dyn Evaluate) -> Result<CheckedRules, Diagnostics> {
    let refused: Diagnostics = rules.iter().filter_map(|rule| refusal(rule, evaluator)).collect();
    if refused.is_empty() { Ok(CheckedRules { rules }) } else { Err(refused) }
}

/// A program on which a rule changes the results.
struct Counterexample {
    seed: u64,
    difference: String,
    before: Module,
    /// The program after the rule, if it could be built.
    after: Option<Module>,
}

/// The outcome of one draw.
enum Trial {
    /// Both programs agreed, on this number of ranks.
    Agreed(u64),
    Differed(Box<Counterexample>),
    Rejected(RejectedDraw, String),
}

/// The check of one rule.
struct Check<'a> {
    rule: &'a Rule,
    evaluator: &'a dyn Evaluate,
    about_layouts: bool,
    agreed: usize,
    differed: Vec<Counterexample>,
    /// For each reason, the number of draws without a comparison, and the first message.
    rejected: BTreeMap<RejectedDraw, (u64, String)>,
}

fn refusal(rule: &Rule, evaluator: &dyn Evaluate) -> Option<Diagnostic> {
    let about_layouts = rule.changes_layouts();
    let mut check =
        Check { rule, evaluator, about_layouts, agreed: 0, differed: Vec::new(), rejected: BTreeMap::new() };
    for seed in 0..DRAWS {
        if check.differed.len() >= COUNTEREXAMPLES || check.agreed + check.differed.len() >= PROGRAMS {
            break;
        }
        check.count(seed, instance(rule, seed, None));
    }
    if let Some(found) = check.unsound() {
        return Some(found);
    }
    let sizes = match sizes(rule) {
        Ok(sizes) => sizes,
        Err(refused) => return Some(refused),
    };
    let reached = check.around(&sizes);
    check.unsound().or_else(|| check.untried(&sizes, reached))
}

impl Check<'_> {
    /// Counts a draw; returns whether it gave a comparison that counts.
    fn count(&mut self, seed: u64, drawn: Result<Module, RejectedDraw>) -> bool {
        match trial(self.rule, seed, drawn, self.evaluator) {
            // On one rank all layouts are equal, so a rule about layouts is not tested.
            Trial::Agreed(ranks) if ranks > 1 || !self.about_layouts => self.agreed += 1,
            Trial::Agreed(_) => return false,
            Trial::Differed(found) => self.differed.push(*found),
            Trial::Rejected(reason, example) => {
                self.rejected.entry(reason).or_insert((0, example)).0 += 1;
                return false;
            }
        }
        true
    }

    /// Checks the rule on programs for each size from its constants, until a difference is found; returns the largest
    /// size that was compared.
    fn around(&mut self, sizes: &Sizes) -> u64 {
        let scored = self.rule.mentions(SCORED);
        let n_targets = sizes.targets.len().max(1) as u64;
        let draws = SIZED.1.min(2 * DRAWS / n_targets);
        let mut reached = 0;
        for (i, &size) in sizes.targets.iter().enumerate() {
            // A rule that holds for few sizes only takes all its programs from those.
            let enough = PROGRAMS.saturating_sub(self.agreed).max(SIZED.0);
            let (mut queries, mut keys) = (0, 0);
            for j in 0..draws {
                let seed = DRAWS + i as u64 * SIZED.1 + j;
                let drawn = instance(self.rule, seed, Some(sizes.focus(size)));
                let Ok(module) = &drawn else { continue };
                let (of_queries, of_keys) = has_size(module, size, scored);
                if work(module) > WORK || !(of_queries && queries < enough || of_keys && keys < enough) {
                    continue;
                }
                if self.count(seed, drawn) {
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

    /// The refusal with the smallest counterexample, if there is one.
    fn unsound(&self) -> Option<Diagnostic> {
        let Counterexample { seed, difference, before, after } =
            self.differed.iter().min_by_key(|found| {
                let ranks = found.before.space.mesh.ranks();
                (self.about_layouts && ranks == 1, ranks, elements(&found.before), found.seed)
            })?;
        let name = &self.rule.name;
        let message = format!("rule `{name}` is unsound: with inputs of seed {seed}, {difference}");
        let mut shown = format!("the program before:\n{}", concise(before));
        if let Some(after) = after {
            let _ = write!(shown, "and after:\n{}", concise(after));
        }
        let refused = self.rule.unused("P67", message).help(shown.trim_end().to_owned());
        Some(refused.help("state after `where` when the rule holds, or delete the rule"))
    }

    /// The refusal of a rule with too few comparisons, or with none of the size of a constant.
    fn untried(&self, sizes: &Sizes, reached: u64) -> Option<Diagnostic> {
        let (name, agreed) = (&self.rule.name, self.agreed);
        if agreed >= PROGRAMS {
            let n = sizes.constants.iter().find(|&&n| n > reached)?;
            let message = format!(
                "rule `{name}` could not be tried: its constant {n} needs a program with a dimension of {n} elements or more, and none gave a comparison"
            );
            return Some(self.rule.unused("P66", message));
        }
        let message = format!(
            "rule `{name}` could not be tried: {agreed} of {DRAWS} random programs gave a comparison, and {PROGRAMS} are needed"
        );
        let reason = |(reason, (n, example)): (&RejectedDraw, &(u64, String))| {
            let example = if example.is_empty() { String::new() } else { format!(" ({example})") };
            format!("{n} times {}{example}", reason.text())
        };
        let reasons: Vec<String> = self.rejected.iter().map(reason).collect();
        Some(self.rule.unused("P66", message).help(format!("other draws: {}", reasons.join("; "))))
    }
}

/// Whether the queries and the keys of some operation have this size; without scores, whether any dimension has.
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

/// The approximate number of sums and scores that the operations of a program compute, over all ranks.
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

fn trial(rule: &Rule, seed: u64, drawn: Result<Module, RejectedDraw>, evaluator: &dyn Evaluate) -> Trial {
    let before = match drawn {
        Ok(module) => module,
        Err(reason) => return Trial::Rejected(reason, String::new()),
    };
    let mut allow = || true;
    let mut budget = Budget::new(1, 1, &mut allow);
    let rewritten = rewrite(&before, std::slice::from_ref(rule), &mut budget);
    if budget.applied[0] == 0 {
        return match budget.type_mismatch {
            Some(difference) => {
                Trial::Differed(Box::new(Counterexample { seed, difference, before, after: None }))
            }
            None => Trial::Rejected(RejectedDraw::Replacement, budget.illegal.unwrap_or_default()),
        };
    }
    let verdict = rewritten.map_err(|error| error.message).and_then(|after| match verify::verify(&after) {
        Ok(_) => Ok(after),
        Err(found) => Err(found[0].message.clone()),
    });
    let after = match verdict {
        Ok(after) => after,
        Err(message) => return Trial::Rejected(RejectedDraw::Replacement, message),
    };
    let expected = match evaluator.outputs(&before, &before, seed) {
        Ok(outputs) => outputs,
        Err(message) => return Trial::Rejected(RejectedDraw::Run, message),
    };
    let difference = match evaluator.outputs(&after, &before, seed) {
        Ok(found) => difference(&expected, &found),
        Err(message) => Some(format!("the rewritten program cannot be run: {message}")),
    };
    match difference {
        None => Trial::Agreed(before.space.mesh.ranks()),
        Some(difference) => {
            Trial::Differed(Box::new(Counterexample { seed, difference, before, after: Some(after) }))
        }
    }
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
            let stride = |d: usize| a.shape[d + 1..].iter().product::<u64>();
            let at: Vec<u64> = (0..a.shape.len()).map(|d| i as u64 / stride(d) % a.shape[d]).collect();
            let (x, y) = (a.elements[i], b.elements[i]);
            return Some(format!("element {at:?} of `{}` is {x:e} before and {y:e} after", a.name));
        }
    }
    None
}

/// The text of a module without unused dimensions.
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
