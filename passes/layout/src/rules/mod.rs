//! Rewrite rules that a user writes: read from a file, tried before they are used, applied, counted.
//!
//! ```text
//! // The factor of an operand is a factor of the product.
//! rule scale-out-of-product
//!   mul (scale %x {factor=?a}) %y => scale (mul %x %y) {factor=?a}
//! ```
//!
//! [`parse`] reads rules, [`check`] tries each on random programs and hands out [`CheckedRules`], the only thing that
//! [`ApplyRules`] takes: no rule is used that was not tried. Rules see one function at a time; they neither make sources
//! nor call functions. The language is described in `docs/rules.md`.
//!
//! Rules are directed and run in the order in which they are written, so they are matched on the function itself
//! (`rewrite`); an e-graph would keep every form and leave the choice to a cost, which is not what a user who writes
//! `=>` asks for, and types, layouts and with them the legality of an operation differ between values that are equal.

mod check;
mod draw;
mod evaluate;
mod instance;
mod lexer;
mod matching;
mod operands;
mod parse;
mod replace;
mod resolve;
mod rewrite;
mod sizes;
mod syntax;

#[cfg(test)]
mod tests;

use std::cell::RefCell;

use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, Module};
use ithaca_pass::{Context, Pass};

pub(crate) use matching::{Bindings, bind_attrs, holds};
pub(crate) use replace::{Place, Replacement, Site, Values, replacement};

pub use check::{CheckedRules, DRAWS, PROGRAMS, check};
pub use evaluate::{Evaluate, Evaluated};
pub use parse::parse;
pub use sizes::MAX_CONSTANT;
pub use syntax::{App, Comparison, Condition, Name, Pattern, Rest, Rule, Sign, Term};

use rewrite::{Allow, Budget, World};

/// The most applications of one rule in one run of the pass.
pub const MAX_APPLICATIONS: u64 = 1000;

/// A program in which the left side of a rule occurs; none where the draw had no luck.
#[cfg(test)]
pub(crate) fn drawn(rule: &Rule, seed: u64) -> Option<Module> {
    instance::instance(rule, seed, None).ok()
}

/// The pass that applies rules: each at most [`MAX_APPLICATIONS`] times, in the order of the file, operands first.
#[derive(Debug)]
pub struct ApplyRules {
    rules: CheckedRules,
    /// Applications of each rule in the last run, for the pipeline's text.
    applied: RefCell<Vec<u64>>,
}

impl ApplyRules {
    /// The pass for these rules.
    pub fn new(rules: CheckedRules) -> Self {
        Self { rules, applied: RefCell::default() }
    }
}

struct Left<'c, 'p>(&'c mut Context<'p>);

impl Allow for Left<'_, '_> {
    fn allow(&mut self) -> bool {
        self.0.rewrite()
    }
}

impl Pass for ApplyRules {
    fn name(&self) -> &'static str {
        "rules"
    }

    /// How often each rule was applied in the last run.
    fn options(&self) -> Vec<(String, String)> {
        let applied = self.applied.borrow();
        let rules = self.rules.rules.iter().zip(applied.iter());
        rules.map(|(rule, n)| (rule.name.clone(), n.to_string())).collect()
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        let rules = &self.rules.rules;
        let mut allow = Left(cx);
        let mut budget = Budget::new(rules.len(), MAX_APPLICATIONS, &mut allow);
        let mut rewritten = module.emptied(module.level);
        for function in module.functions.values() {
            let world =
                World { space: &rewritten.space, functions: &rewritten.functions, level: module.level };
            let function = rewrite::rewrite(world, function, rules, &mut budget)
                .map_err(|error| vec![Diagnostic::new(error.code, error.message)])?;
            rewritten.functions.push(function);
        }
        let Budget { applied, stopped, .. } = budget;
        for (rule, _) in rules.iter().zip(&stopped).filter(|(_, stopped)| **stopped) {
            cx.note(format!(
                "rule `{}` was stopped after {MAX_APPLICATIONS} applications and would apply again; it may undo itself, or another rule may",
                rule.name
            ));
        }
        *self.applied.borrow_mut() = applied;
        Ok(rewritten)
    }
}
