//! `saturate`: local algebraic rewrites of communication, by equality saturation.
//!
//! Each function becomes an e-graph (Willsey et al., egg, POPL 2021), rules add equal forms, and the cheapest form on
//! the cluster is extracted; a shared value costs once.
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
//! The rules are those of [`COMMUNICATION`] or [`KERNELS`], in the language of [`crate::rules`]; a test checks each on
//! random programs. Rules about kernels make several operations one, in every plan (`saturate{rules=kernels}`).
//! User rules are checked when they are read. Operations with effects keep their order. A function stays unchanged if
//! no cheaper form was found, if it does not communicate and the rules are about communication, or if the cheaper form would hold over an eighth more memory
//! at its peak. The e-graph is limited by terms and rounds, never by time, so plans are reproducible.

mod block;
mod extract;
mod grow;
mod language;
mod pairs;
mod peak;
mod price;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use egg::Id;
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::{self, OpError};
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, Function, Level, Module, Op, units};
use ithaca_pass::choices::{self, Choice, Topic, impossible};
use ithaca_pass::{Context, Pass, options};
use serde::{Deserialize, Serialize};

use crate::lower::Packing;
use crate::rules::{self, CheckedRules, Rule};
use block::Block;
use extract::{extract, recorded, written};
use grow::{Additions, grow};
use language::{Graph, Term};
use pairs::{Pair, pairs};
use peak::peak_bytes;
pub(in crate::fuse) use price::PriceList;

/// A file of rules: its name and contents.
pub type RuleFile = (&'static str, &'static str);

/// The rules about communication.
pub const COMMUNICATION: &[RuleFile] = &[
    ("reshards.rules", include_str!("reshards.rules")),
    ("collectives.rules", include_str!("collectives.rules")),
    ("algebra.rules", include_str!("algebra.rules")),
];

/// The rules that make several operations one kernel.
pub const KERNELS: &[RuleFile] = &[("kernels.rules", include_str!("kernels.rules"))];

/// The options of the pass, for the list of passes.
pub const OPTIONS: &str = "nodes=N (4000), iterations=N (8), rules=builtin|added|kernels (about communication; those of \
                           `--rules` as well; fused kernels), packing=apart|folded";

/// The most terms of an e-graph, and the most rounds.
const MOST: u64 = 1_000_000;

/// A cheaper form may hold `1 / MEMORY` more memory at its peak.
const MEMORY: u64 = 8;

/// The rules of [`COMMUNICATION`].
static ABOUT_COMMUNICATION: LazyLock<Vec<Rule>> = LazyLock::new(|| parsed(COMMUNICATION));

/// The rules of [`KERNELS`].
static ABOUT_KERNELS: LazyLock<Vec<Rule>> = LazyLock::new(|| parsed(KERNELS));

fn parsed(files: &[RuleFile]) -> Vec<Rule> {
    files.iter().flat_map(|(_, text)| rules::parse(text).expect("a test reads every file")).collect()
}

/// `passes` with this pass before and after `lower-reshards`: it first rewrites reshards, then collectives.
pub fn with_saturation(passes: Vec<Box<dyn Pass>>) -> Vec<Box<dyn Pass>> {
    let with_rewrites = |pass: Box<dyn Pass>| {
        let lowers = pass.name() == "lower-reshards";
        let rewrites = || lowers.then(|| Box::new(Saturate::default()) as Box<dyn Pass>);
        [rewrites(), Some(pass), rewrites()]
    };
    passes.into_iter().flat_map(with_rewrites).flatten().collect()
}

/// The source of rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Source {
    /// The built-in rules about communication.
    #[default]
    Builtin,
    /// The rules of a file as well.
    Added,
    /// The built-in rules about kernels.
    Kernels,
}

/// The pass.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Saturate {
    /// The maximum number of terms of an e-graph.
    #[serde(deserialize_with = "options::whole::<_, 1, MOST>")]
    nodes: u64,
    /// The maximum number of rounds over all rules and classes.
    #[serde(deserialize_with = "options::whole::<_, 1, MOST>")]
    iterations: u64,
    rules: Source,
    /// Which kernels pack: where products write wire buffers, a pair of products costs a kernel that packs.
    packing: Packing,
    /// The rules of the file, once they are given.
    #[serde(skip)]
    added: Option<CheckedRules>,
}

impl Default for Saturate {
    fn default() -> Self {
        Self { nodes: 4000, iterations: 8, rules: Source::Builtin, packing: Packing::Apart, added: None }
    }
}

impl Saturate {
    /// Whether the pass expects a file of rules that is not read yet.
    pub fn awaits_rules(&self) -> bool {
        self.rules == Source::Added && self.added.is_none()
    }

    /// Adds these rules to the built-in ones.
    pub fn with_rules(self, rules: CheckedRules) -> Self {
        Self { rules: Source::Added, added: Some(rules), ..self }
    }

    /// The pass that makes several operations one kernel.
    pub fn kernels(packing: Packing) -> Self {
        Self { rules: Source::Kernels, packing, ..Self::default() }
    }

    fn rules(&self) -> Result<Cow<'static, [Rule]>, Diagnostic> {
        if self.awaits_rules() {
            let message = "`saturate{rules=added}` takes its rules from a file";
            return Err(Diagnostic::new("P02", message).help("name the file by `ithaca opt --rules FILE`"));
        }
        Ok(match (self.rules, &self.added) {
            (Source::Kernels, _) => Cow::Borrowed(&ABOUT_KERNELS),
            (Source::Builtin | Source::Added, None) => Cow::Borrowed(&ABOUT_COMMUNICATION),
            (Source::Builtin | Source::Added, Some(added)) => {
                ABOUT_COMMUNICATION.iter().chain(added.rules()).cloned().collect()
            }
        })
    }
}

impl Pass for Saturate {
    fn name(&self) -> &'static str {
        "saturate"
    }

    fn options(&self) -> Vec<(String, String)> {
        options::write(self)
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level == Level::Program {
            let message =
                "`saturate` needs a sharded or per-rank program, but this one is not laid out over a mesh";
            return Err(vec![Diagnostic::new("P03", message).help("run `shard` first")]);
        }
        let rules = self.rules().map_err(|refused| vec![refused])?;
        // Rules about communication also merge equal operations; those about kernels change what they name only.
        let is_about_kernels = self.rules == Source::Kernels;
        let named: Option<BTreeSet<&str>> =
            is_about_kernels.then(|| rules.iter().flat_map(Rule::operations).chain([pairs::NAME]).collect());
        let runs = module.run_counts();
        let mut saturated = module.emptied(module.level);
        let mut prices = match cx.source() {
            choices::Source::Prices(prices) => Some(PriceList::new(&module.space, prices)),
            choices::Source::Record(_) if is_about_kernels => None,
            choices::Source::Record(_) => {
                let message =
                    "`saturate` with rules about communication chooses by prices, and no plan records it";
                return Err(vec![Diagnostic::new("P05", message)]);
            }
        };
        let mut notes = Vec::new();
        for (id, function) in module.functions.iter() {
            let inference = ops::Context { space: &module.space, functions: &saturated.functions };
            let may_match =
                if is_about_kernels { has_parts(function, &rules) } else { communicates(function) };
            let cheaper = if may_match {
                self.cheaper(inference, module.level, function, &rules, named.as_ref(), (&mut prices, cx))?
            } else {
                None
            };
            match cheaper.filter(|_| cx.rewrite()) {
                None => saturated.functions.push(function.clone()),
                Some(cheaper) => {
                    if !is_about_kernels {
                        notes.push(cheaper.note(&rules, runs[id.index()]));
                    }
                    saturated.functions.push(cheaper.function)
                }
            };
        }
        if is_about_kernels {
            notes.extend(fused_note(&saturated));
        }
        notes.into_iter().for_each(|note| cx.note(note));
        Ok(saturated)
    }
}

/// Whether a function has communication.
fn communicates(function: &Function) -> bool {
    function.nodes.iter().any(|node| node.op.is_communication() || node.op == Op::Reshard)
}

/// Whether a function has all operations of the left side of a rule.
fn has_parts(function: &Function, rules: &[Rule]) -> bool {
    let names: BTreeSet<&str> = function.nodes.iter().map(|node| node.op.name()).collect();
    rules.iter().any(|rule| rule.pattern().all(|op| names.contains(op)))
}

/// The fused kernels of a module, by name.
fn fused_note(module: &Module) -> Option<String> {
    let nodes = module.functions.values().flat_map(|function| &function.nodes);
    let fused =
        nodes.filter(|node| matches!(node.op, Op::Fused(_) | Op::RotateAppend(_))).map(|node| node.op.name());
    let names: Vec<&str> = fused.collect::<BTreeSet<_>>().into_iter().collect();
    (!names.is_empty()).then(|| format!("operations are fused to {}", names.join(", ")))
}

/// A cheaper function.
struct Cheaper {
    function: Function,
    /// The terms of its classes.
    chosen: BTreeMap<Id, Term>,
    /// Seconds of one run, before and after.
    seconds: (f64, f64),
    /// The rules that made its terms.
    rules: BTreeSet<usize>,
}

impl Cheaper {
    fn note(&self, rules: &[Rule], runs: u64) -> String {
        let by: Vec<&str> = self.rules.iter().map(|&n| rules[n].name.as_str()).collect();
        let by = if by.is_empty() { "merging equal operations".to_owned() } else { by.join(", ") };
        let saved = runs as f64 * (self.seconds.0 - self.seconds.1);
        format!(
            "saturate: `@{}` takes {} less of {} in {runs} runs, without overlap, by {by}",
            self.function.name,
            units::seconds(saved),
            units::seconds(runs as f64 * self.seconds.0),
        )
    }
}

impl Saturate {
    /// The cheapest form of the function, if it is cheaper, or the recorded form; only operations that are `named` may change.
    ///
    /// # Errors
    /// `P05` for a form that is not recorded, or that the function does not have; a broken invariant: a bug, because
    /// replacements are checked first.
    fn cheaper(
        &self,
        inference: ops::Context<'_>,
        level: Level,
        function: &Function,
        rules: &[Rule],
        named: Option<&BTreeSet<&str>>,
        (prices, cx): (&mut Option<PriceList<'_>>, &mut Context<'_>),
    ) -> Result<Option<Cheaper>, OpError> {
        /// The record of a function that stays as it is.
        const UNCHANGED: &str = "unchanged";
        let may_change = |op: &Op| named.is_none_or(|names| names.contains(op.name()));
        let mut block = Block::of(function, inference.names(), may_change);
        let mut made = grow(&mut block.graph, inference, level, rules, self.nodes, self.iterations);
        let pairs = if named.is_some() {
            pairs(&mut block, inference.names(), &mut made, rules.len())
        } else {
            Vec::new()
        };
        if named.is_some() && made.terms.is_empty() {
            return Ok(None);
        }
        let candidates = Candidates {
            cx: inference,
            original: block.originals(),
            makers: made.makers(&block.graph),
            made: &made,
            block: &block,
            may_change: &may_change,
            pairs: if self.packing == Packing::Folded { pairs } else { Vec::new() },
        };
        match cx.choose(Topic::Kernels, function.name.as_str())? {
            Choice::Recorded(UNCHANGED) => Ok(None),
            Choice::Recorded(text) => candidates.recorded(text).map(Some),
            Choice::ByPrice(_) => {
                let prices = prices.as_mut().expect("choices by prices have prices");
                let cheaper = candidates.cheaper(prices)?;
                cx.record(
                    cheaper.as_ref().map_or_else(|| UNCHANGED.to_owned(), |c| candidates.text(&c.chosen)),
                );
                Ok(cheaper)
            }
        }
    }
}

/// Forms of a function.
struct Candidates<'a, 'f> {
    cx: ops::Context<'a>,
    block: &'a Block<'f>,
    original: BTreeMap<Id, Term>,
    /// The rule that made each new term.
    makers: BTreeMap<Term, usize>,
    made: &'a Additions,
    may_change: &'a dyn Fn(&Op) -> bool,
    /// Pairs of products whose results may be sent: then kernels pack them, and each product would write its wire buffer.
    pairs: Vec<Pair>,
}

/// A form of a function.
struct Candidate {
    function: Function,
    chosen: BTreeMap<Id, Term>,
    seconds: f64,
    peak: u64,
    /// The rules that made its terms.
    rules: BTreeSet<usize>,
}

impl Candidates<'_, '_> {
    /// The form that a record describes.
    ///
    /// # Errors
    /// `P05` for a form that the function does not have.
    fn recorded(&self, text: &str) -> Result<Cheaper, OpError> {
        let Self { cx, block, original, .. } = self;
        let refused = |why| impossible(Topic::Kernels, &block.function.name, text, why);
        let chosen = recorded(&block.graph, &block.roots(), original, text)
            .ok_or_else(|| refused("the function has other operations"))?;
        let function = block.rebuilt(*cx, &chosen)?.ok_or_else(|| refused("they need later values"))?;
        Ok(Cheaper { function, chosen, seconds: (0.0, 0.0), rules: BTreeSet::new() })
    }

    /// The record of chosen terms.
    fn text(&self, chosen: &BTreeMap<Id, Term>) -> String {
        written(&self.block.graph, &self.block.roots(), &self.original, chosen)
    }

    /// The cheapest form that holds little more memory, if it is cheaper than the original.
    ///
    /// # Errors
    /// The invariant that an operation breaks.
    fn cheaper(&self, prices: &mut PriceList<'_>) -> Result<Option<Cheaper>, OpError> {
        let function = self.block.function;
        let before = prices.of_nodes(function, self.may_change);
        let held = peak_bytes(self.cx.space, function);
        let allowed = held.saturating_add(held / MEMORY);
        // Without the rules that cost too much memory.
        let mut avoided = BTreeSet::new();
        let Some(mut best) = self.best(prices, &avoided)? else { return Ok(None) };
        while best.peak > allowed {
            let mut others = Vec::new();
            for &rule in best.rules.difference(&avoided) {
                let without: BTreeSet<usize> = avoided.iter().copied().chain([rule]).collect();
                others.extend(self.best(prices, &without)?.map(|other| (other, without)));
            }
            let rank = |of: &Candidate| (of.peak.max(allowed), of.seconds);
            let least = others
                .into_iter()
                .min_by(|(a, _), (b, _)| rank(a).partial_cmp(&rank(b)).unwrap_or(Ordering::Equal));
            let Some((other, without)) = least else { return Ok(None) };
            (best, avoided) = (other, without);
        }
        if best.seconds >= before * (1.0 - 1e-9) {
            return Ok(None);
        }
        let Candidate { function, chosen, seconds, rules, peak: _ } = best;
        Ok(Some(Cheaper { function, chosen, seconds: (before, seconds), rules }))
    }

    /// The cheapest form without terms of some rules; `None` if an effect would need a later value.
    ///
    /// # Errors
    /// The invariant that an operation breaks.
    fn best(
        &self,
        prices: &mut PriceList<'_>,
        avoided: &BTreeSet<usize>,
    ) -> Result<Option<Candidate>, OpError> {
        let Self { cx, block, original, makers, made, may_change, pairs } = self;
        let packed: BTreeMap<Term, f64> =
            pairs.iter().map(|pair| (canonical(&block.graph, &pair.term), pair.packing(prices))).collect();
        let is_kept = |term: &Term| makers.get(term).is_none_or(|rule| !avoided.contains(rule));
        let chosen = extract(&block.graph, (prices, &packed), &block.roots(), original, is_kept);
        let Some(function) = block.rebuilt(*cx, &chosen)? else { return Ok(None) };
        let new = chosen.values().filter(|term| !original.values().any(|known| known == *term));
        let mut rules: BTreeSet<usize> = new.filter_map(|term| makers.get(term).copied()).collect();
        let left_out =
            |class: Id| original.get(&class).is_some_and(|term| !chosen.values().any(|known| known == term));
        let found = made.found.iter().filter(|(class, _)| left_out(block.graph.find(*class)));
        rules.extend(found.map(|(_, rule)| *rule));
        let packing: f64 = chosen.values().filter_map(|term| packed.get(term)).sum();
        let seconds = prices.of_nodes(&function, may_change) + packing;
        let peak = peak_bytes(cx.space, &function);
        Ok(Some(Candidate { function, chosen, seconds, peak, rules }))
    }
}

/// A term with the present classes of its operands.
fn canonical(graph: &Graph, term: &Term) -> Term {
    Term { symbol: term.symbol, operands: term.operands.iter().map(|&o| graph.find(o)).collect() }
}
