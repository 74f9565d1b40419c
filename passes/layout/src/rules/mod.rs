//! Rewrite rules written by users: read from a file, checked before use, applied and counted.
//!
//! ```text
//! // The factor of an operand is a factor of the product.
//! rule scale-out-of-product
//!   mul (scale %x {factor=?a}) %y => scale (mul %x %y) {factor=?a}
//! ```
//!
//! [`parse`] reads rules, [`check`] runs each on random programs and returns [`CheckedRules`], the only input of
//! [`ApplyRules`]: an unchecked rule is never applied. Rules apply within one function; they neither make sources nor
//! call functions. `docs/book/src/rules.md` describes the language.
//!
//! Rules are directed and apply in the order of the file, so they are matched on the function itself (`rewrite`). An
//! e-graph would keep every form and leave the choice to a cost, but `=>` states the choice; moreover types, layouts
//! and the legality of operations differ between equal values.

mod check;
mod draw;
mod evaluate;
mod instance;
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
use ithaca_ir::{Diagnostics, Module};
use ithaca_pass::{Context, Pass};

pub(crate) use matching::{Maker, Program, matches};
pub(crate) use replace::{Place, Replacement, Site, replacement};
pub(crate) use rewrite::used;

pub use check::{CheckedRules, check};
pub use evaluate::{Evaluate, Evaluated};
pub use parse::parse;
pub use syntax::Rule;

use rewrite::{Budget, rewrite};

/// The maximum number of applications of one rule in one run of the pass.
const MAX_APPLICATIONS: u64 = 1000;

/// A program in which the left side of a rule occurs, or `None` if the draw failed.
#[cfg(test)]
pub(crate) fn drawn(rule: &Rule, seed: u64) -> Option<Module> {
    instance::instance(rule, seed, None).ok()
}

/// The pass that applies rules, in the order of the file, operands first, each at most 1000 times.
#[derive(Debug)]
pub struct ApplyRules {
    rules: CheckedRules,
    /// The applications of each rule in the last run, for the pipeline's text.
    applied: RefCell<Vec<u64>>,
}

impl ApplyRules {
    /// The pass for these rules.
    pub fn new(rules: CheckedRules) -> Self {
        Self { rules, applied: RefCell::default() }
    }
}

impl Pass for ApplyRules {
    fn name(&self) -> &'static str {
        "rules"
    }

    /// The number of applications of each rule in the last run.
    fn options(&self) -> Vec<(String, String)> {
        let applied = self.applied.borrow();
        let rules = self.rules.rules.iter().zip(applied.iter());
        rules.map(|(rule, n)| (rule.name.clone(), n.to_string())).collect()
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        let rules = &self.rules.rules;
        let mut allow = || cx.rewrite();
        let mut budget = Budget::new(rules.len(), MAX_APPLICATIONS, &mut allow);
        let rewritten = rewrite(module, rules, &mut budget)?;
        let Budget { applied, stopped, .. } = budget;
        for (rule, _) in rules.iter().zip(&stopped).filter(|(_, stopped)| **stopped) {
            cx.note(format!(
                "rule `{}` was stopped after {MAX_APPLICATIONS} applications and would apply again; it may match its own result, or another rule may undo it",
                rule.name
            ));
        }
        *self.applied.borrow_mut() = applied;
        Ok(rewritten)
    }
}
