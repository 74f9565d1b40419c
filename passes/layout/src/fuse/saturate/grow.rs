//! Applies rules until saturation or until the e-graph reaches its limits.
//!
//! The loop equals egg's runner without the time limit, which would make plans depend on the machine. Also, matches of
//! these rules bind attributes, which egg's substitutions cannot hold.

use std::collections::{BTreeMap, BTreeSet};

use egg::Id;
use ithaca_ir::Level;
use ithaca_ir::ops::Context;
use ithaca_ir::ops::attr::Names;

use super::language::{Graph, Symbol, Term, add, applied, as_class, rebuild, results};
use crate::rules::{Place, Replacement, Rule, Site, matches, replacement};

/// The maximum number of matches of one rule in one class.
const MATCHES: usize = 256;

/// The additions of rules, each with the index of its rule, in order.
#[derive(Debug, Default)]
pub(super) struct Additions {
    /// New terms.
    pub(super) terms: Vec<(Term, usize)>,
    /// Classes found equal to an existing value.
    pub(super) found: Vec<(Id, usize)>,
}

impl Additions {
    /// For each new term, as it is in the graph, the first rule that made it.
    pub(super) fn makers(&self, graph: &Graph) -> BTreeMap<Term, usize> {
        let mut makers = BTreeMap::new();
        for (term, rule) in &self.terms {
            let operands = term.operands.iter().map(|&o| graph.find(o)).collect();
            makers.entry(Term { operands, ..term.clone() }).or_insert(*rule);
        }
        makers
    }
}

/// Applies `rules` to `graph`, until it has `max_terms` terms, for at most `max_rounds` rounds over all rules and classes.
pub(super) fn grow(
    graph: &mut Graph,
    cx: Context<'_>,
    level: Level,
    rules: &[Rule],
    max_terms: u64,
    max_rounds: u64,
) -> Additions {
    let is_full = |graph: &Graph| graph.total_size() as u64 >= max_terms;
    let mut additions = Additions::default();
    let mut seen: BTreeSet<(usize, Id, String)> = BTreeSet::new();
    for _ in 0..max_rounds {
        let mut found: Vec<(usize, Id, Replacement)> = Vec::new();
        let index = index(graph);
        let site = Site { cx, level, program: &*graph };
        let may_match = |rule: &Rule| rule.pattern().all(|op| index.contains_key(op));
        for (n, rule) in rules.iter().enumerate().filter(|(_, rule)| may_match(rule)) {
            for &class in index.get(rule.left.op.as_str()).into_iter().flatten() {
                for bindings in matches(&*graph, cx.names(), rule, applied(graph, class).collect(), MATCHES) {
                    if !seen.insert((n, class, format!("{bindings:?}"))) {
                        continue;
                    }
                    // An illegal or ill-typed replacement is skipped, as in `ApplyRules`.
                    if let Ok(replacement) = replacement(rule, &bindings, site, &graph[class].data) {
                        found.push((n, class, replacement));
                    }
                }
            }
        }
        let before = (graph.total_size(), graph.number_of_classes());
        for (rule, class, replacement) in found {
            if is_full(graph) {
                break;
            }
            apply(graph, cx.names(), rule, class, replacement, &mut additions);
        }
        rebuild(graph);
        if is_full(graph) || (graph.total_size(), graph.number_of_classes()) == before {
            break;
        }
    }
    additions
}

/// The classes of a rebuilt e-graph that contain an operation, by its name, ascending.
fn index(graph: &Graph) -> BTreeMap<&'static str, BTreeSet<Id>> {
    let mut index: BTreeMap<&'static str, BTreeSet<Id>> = BTreeMap::new();
    for class in graph.classes() {
        for term in &class.nodes {
            if let Symbol::Apply { op, .. } = graph.analysis.get(term.symbol) {
                index.entry(op.name()).or_default().insert(class.id);
            }
        }
    }
    index
}

/// Adds a replacement and merges its results with those of `class`.
fn apply(
    graph: &mut Graph,
    names: Names<'_>,
    rule: usize,
    class: Id,
    replacement: Replacement,
    additions: &mut Additions,
) {
    let Replacement { nodes, results: places } = replacement;
    let mut classes: Vec<Vec<Id>> = Vec::with_capacity(nodes.len());
    for node in &nodes {
        let operands: Vec<Id> = node.operands.iter().map(|place| place.of(as_class, &classes)).collect();
        let own = add(graph, names, &node.op, &node.types, &operands);
        let symbol = graph.analysis.apply(&node.op, &node.types, names);
        additions.terms.push((Term { symbol, operands: operands.into_iter().collect() }, rule));
        classes.push(own);
    }
    let old = results(graph, class);
    for (place, old) in places.into_iter().zip(old) {
        if matches!(place, Place::Value(_)) {
            additions.found.push((old, rule));
        }
        graph.union(old, place.of(as_class, &classes));
    }
}
