//! `saturate`: the local algebra of communication, by equality saturation.
//!
//! One function at a time becomes an e-graph (Willsey et al., egg, POPL 2021), rules add what is equal to what is there,
//! and the form that is cheapest on the cluster at hand is taken out, shared values paid once.
//!
//! ```text
//! %1 = reshard %q : f32[b s@u h d]                      // from f32[b s h@u d]
//! %2 = cast %1 {to=bf16} : bf16[b s@u h d]
//! ```
//! becomes
//! ```text
//! %1 = cast %q {to=bf16} : bf16[b s h@u d]
//! %2 = reshard %1 : bf16[b s@u h d]
//! ```
//!
//! Rules are those of [`RULE_FILES`], in the language of [`crate::rules`]; each was tried on random programs, by a test.
//! Rules of one's own are tried when they are read. Operations with effects stay in their order. A function is left as it
//! is where nothing cheaper was found, where it does not communicate, and where what is cheaper would hold more than
//! an eighth more at once. The e-graph is bounded by its terms and by rounds, never by time, so a plan is the same
//! everywhere.

mod block;
mod extract;
mod grow;
mod language;
mod matching;
mod peak;
mod price;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::ops::{self, OpError};
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, Function, Level, Module, Op, units};
use ithaca_pass::{Context, Pass, options};
use serde::{Deserialize, Serialize};

use crate::rules::{self, CheckedRules, Rule};
use block::Block;
use extract::extract;
use grow::{Limits, grow};
use language::Term;
use peak::peak_bytes;
pub(in crate::fuse) use price::PriceList;

/// The rules that come with Ithaca: names of files, and what stands in them.
pub const RULE_FILES: &[(&str, &str)] = &[
    ("reshards.rules", include_str!("reshards.rules")),
    ("collectives.rules", include_str!("collectives.rules")),
    ("algebra.rules", include_str!("algebra.rules")),
];

/// What options the pass has, for a list.
pub const OPTIONS: &str =
    "nodes=N (4000), iterations=N (8), rules=builtin|added (those of `--rules` as well)";

/// The most terms of an e-graph, and the most rounds.
const MOST: u64 = 1_000_000;

/// The part of what a function holds at once by which it may grow.
const MEMORY: u64 = 8;

/// The rules of [`RULE_FILES`].
pub fn builtin() -> Vec<Rule> {
    let parsed = RULE_FILES.iter().flat_map(|(_, text)| rules::parse(text).expect("a test reads every file"));
    parsed.collect()
}

/// `passes` with the pass before and behind `lower-reshards`: first layouts are exchanged, then collectives.
pub fn with_saturation(passes: Vec<Box<dyn Pass>>) -> Vec<Box<dyn Pass>> {
    let mut all: Vec<Box<dyn Pass>> = Vec::with_capacity(passes.len() + 2);
    for pass in passes {
        let lowers = pass.name() == "lower-reshards";
        if lowers {
            all.push(Box::new(Saturate::default()));
        }
        all.push(pass);
        if lowers {
            all.push(Box::new(Saturate::default()));
        }
    }
    all
}

/// Which rules are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Source {
    /// The built-in rules.
    #[default]
    Builtin,
    /// The rules of a file as well.
    Added,
}

/// Options in a pipeline.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    #[serde(deserialize_with = "options::whole::<_, 1, MOST>")]
    nodes: u64,
    #[serde(deserialize_with = "options::whole::<_, 1, MOST>")]
    iterations: u64,
    rules: Source,
}

impl Default for Options {
    fn default() -> Self {
        Self { nodes: 4000, iterations: 8, rules: Source::Builtin }
    }
}

/// The pass.
#[derive(Clone, Debug, Default)]
pub struct Saturate {
    options: Options,
    /// The rules of the file, once they are given.
    added: Option<CheckedRules>,
}

impl Saturate {
    /// The pass with the options of a pipeline.
    ///
    /// # Errors
    /// `P02` for an option that there is not, or a value that it cannot have.
    pub fn from_pipeline(options: &[(String, String)]) -> Result<Self, Diagnostic> {
        Ok(Self { options: options::read("saturate", OPTIONS, options)?, added: None })
    }

    /// Whether a file of rules was asked for and is yet to be given.
    pub fn awaits_rules(&self) -> bool {
        self.options.rules == Source::Added && self.added.is_none()
    }

    /// With these rules beside those that come with Ithaca.
    pub fn with_rules(mut self, rules: CheckedRules) -> Self {
        self.options.rules = Source::Added;
        self.added = Some(rules);
        self
    }

    fn limits(&self) -> Limits {
        let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Limits { nodes: size(self.options.nodes), iterations: size(self.options.iterations) }
    }

    fn rules(&self) -> Result<Vec<Rule>, Diagnostic> {
        let mut all = builtin();
        match (self.options.rules, &self.added) {
            (Source::Builtin, _) => {}
            (Source::Added, None) => {
                let message = "`saturate{rules=added}` takes its rules from a file";
                return Err(
                    Diagnostic::new("P02", message).help("name the file by `ithaca opt --rules FILE`")
                );
            }
            (Source::Added, Some(added)) => all.extend(added.rules().iter().cloned()),
        }
        Ok(all)
    }
}

impl Pass for Saturate {
    fn name(&self) -> &'static str {
        "saturate"
    }

    fn options(&self) -> Vec<(String, String)> {
        options::write(&self.options)
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level == Level::Program {
            let message = "`saturate` needs a sharded program, and this one is not laid out over a mesh";
            return Err(vec![Diagnostic::new("P03", message).help("run `shard` first")]);
        }
        let rules = self.rules().map_err(|refused| vec![refused])?;
        let runs = module.run_counts();
        let mut saturated = module.emptied(module.level);
        let mut prices = PriceList::new(&module.space, cx.prices);
        let mut notes = Vec::new();
        for (id, function) in module.functions.iter() {
            let inference = ops::Context { space: &module.space, functions: &saturated.functions };
            let cheaper = match communicates(function) {
                true => self
                    .cheaper(inference, module.level, function, &rules, &mut prices)
                    .map_err(|error| vec![Diagnostic::new(error.code, error.message)])?,
                false => None,
            };
            match cheaper.filter(|_| cx.rewrite()) {
                None => saturated.functions.push(function.clone()),
                Some(cheaper) => {
                    notes.push(cheaper.note(&rules, runs[id.index()]));
                    saturated.functions.push(cheaper.function)
                }
            };
        }
        notes.into_iter().for_each(|note| cx.note(note));
        Ok(saturated)
    }
}

/// Whether a function has something for rules of communication to do.
fn communicates(function: &Function) -> bool {
    function.nodes.iter().any(|node| node.op.is_communication() || node.op == Op::Reshard)
}

/// A function that costs less.
struct Cheaper {
    function: Function,
    /// Seconds before and after, of one run.
    seconds: (f64, f64),
    /// The rules that made what is in it.
    rules: BTreeSet<usize>,
}

impl Cheaper {
    fn note(&self, rules: &[Rule], runs: u64) -> String {
        let by: Vec<&str> = self.rules.iter().map(|&n| rules[n].name.as_str()).collect();
        let by = if by.is_empty() { "equal operations made once".to_owned() } else { by.join(", ") };
        let saved = runs as f64 * (self.seconds.0 - self.seconds.1);
        format!(
            "saturate: `@{}` takes {} less of {} in {runs} runs, nothing overlapped, by {by}",
            self.function.name,
            units::seconds(saved),
            units::seconds(runs as f64 * self.seconds.0),
        )
    }
}

impl Saturate {
    /// The function in its cheapest form, where that is cheaper.
    ///
    /// # Errors
    /// The invariant that an operation breaks: a bug, as replacements are checked before they are made.
    fn cheaper(
        &self,
        cx: ops::Context<'_>,
        level: Level,
        function: &Function,
        rules: &[Rule],
        prices: &mut PriceList<'_>,
    ) -> Result<Option<Cheaper>, OpError> {
        let before = prices.of_function(function);
        let mut block = Block::of(function, cx.names());
        let made = grow(&mut block.graph, cx, level, rules, self.limits());
        let original = block.originals();
        let chosen = extract(&block.graph, prices, &block.roots(), &original);
        let Some(rewritten) = block.rebuilt(cx, &chosen)? else { return Ok(None) };
        let after = prices.of_function(&rewritten);
        let held = |function: &Function| peak_bytes(cx.space, function);
        let allowed = held(function).saturating_add(held(function) / MEMORY);
        if after >= before * (1.0 - 1e-9) || held(&rewritten) > allowed {
            return Ok(None);
        }
        let canonical = |term: &Term| Term {
            operands: term.operands.iter().map(|&o| block.graph.find(o)).collect(),
            ..term.clone()
        };
        let mut makers: BTreeMap<Term, usize> = BTreeMap::new();
        for (term, rule) in &made.terms {
            makers.entry(canonical(term)).or_insert(*rule);
        }
        let new = chosen.values().filter(|term| !original.values().any(|known| known == *term));
        let mut rules: BTreeSet<usize> = new.filter_map(|term| makers.get(term).copied()).collect();
        let left_out = |class: egg::Id| {
            original.get(&class).is_some_and(|term| !chosen.values().any(|known| known == term))
        };
        let found = made.found.iter().filter(|(class, _)| left_out(block.graph.find(*class)));
        rules.extend(found.map(|(_, rule)| *rule));
        Ok(Some(Cheaper { function: rewritten, seconds: (before, after), rules }))
    }
}
