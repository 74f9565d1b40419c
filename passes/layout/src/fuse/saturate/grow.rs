//! Applies rules until nothing is new, or the e-graph is as large as it may become.
//!
//! This is the loop of egg's runner without its clock: the runner also stops after a time, which would make a plan depend
//! on the machine that made it, and matches of our rules bind attributes, for which its substitutions have no place.

use std::collections::BTreeSet;

use egg::Id;
use ithaca_ir::Level;
use ithaca_ir::ops::Context;
use ithaca_ir::ops::attr::Names;

use super::language::{Graph, Term, Types, add, as_class, results};
use super::matching::{Index, matches};
use crate::rules::{Place, Replacement, Rule, Site, replacement};

/// The most ways in which one rule is looked at in one class.
const MATCHES: usize = 256;

/// How far an e-graph may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Terms.
    pub(super) nodes: usize,
    /// Rounds in which every rule is tried everywhere.
    pub(super) iterations: usize,
}

/// What rules did, each with its number, in order.
#[derive(Debug, Default)]
pub(super) struct Made {
    /// Terms that were added.
    pub(super) terms: Vec<(Term, usize)>,
    /// Classes that were found to be a value that is there.
    pub(super) found: Vec<(Id, usize)>,
}

/// Applies `rules` to `graph`.
pub(super) fn grow(graph: &mut Graph, cx: Context<'_>, level: Level, rules: &[Rule], limits: Limits) -> Made {
    let mut made = Made::default();
    let mut seen: BTreeSet<(usize, Id, String)> = BTreeSet::new();
    for _ in 0..limits.iterations {
        let mut found: Vec<(usize, Id, Replacement)> = Vec::new();
        let index = Index::of(graph);
        let types = Types(graph);
        let site = Site { cx, level, values: &types };
        for (n, rule) in rules.iter().enumerate() {
            for &class in index.classes(&rule.left.op) {
                for bindings in matches(graph, cx.space, rule, class, MATCHES) {
                    if !seen.insert((n, class, format!("{bindings:?}"))) {
                        continue;
                    }
                    // What is not legal here, or of another type, is left out, as where rules are applied one by one.
                    if let Ok(replacement) = replacement(rule, &bindings, site, &graph[class].data) {
                        found.push((n, class, replacement));
                    }
                }
            }
        }
        let before = (graph.total_size(), graph.number_of_classes());
        for (rule, class, replacement) in found {
            if graph.total_size() >= limits.nodes {
                break;
            }
            apply(graph, cx.names(), rule, class, replacement, &mut made);
        }
        graph.rebuild();
        if graph.total_size() >= limits.nodes || (graph.total_size(), graph.number_of_classes()) == before {
            break;
        }
    }
    made
}

/// Adds a replacement, and makes its results those of `class`.
fn apply(
    graph: &mut Graph,
    names: Names<'_>,
    rule: usize,
    class: Id,
    replacement: Replacement,
    made: &mut Made,
) {
    let Replacement { nodes, results: places } = replacement;
    let mut classes: Vec<Vec<Id>> = Vec::with_capacity(nodes.len());
    let at = |classes: &[Vec<Id>], place: Place| match place {
        Place::Value(v) => as_class(v),
        Place::New(node, i) => classes[node][i],
    };
    for node in &nodes {
        let operands: Vec<Id> = node.operands.iter().map(|&place| at(&classes, place)).collect();
        let own = add(graph, names, &node.op, &node.types, &operands);
        let symbol = graph.analysis.apply(&node.op, &node.types, names);
        made.terms.push((Term { symbol, operands: operands.into_iter().collect() }, rule));
        classes.push(own);
    }
    let old = results(graph, class);
    for (place, old) in places.into_iter().zip(old) {
        if matches!(place, Place::Value(_)) {
            made.found.push((old, rule));
        }
        graph.union(old, at(&classes, place));
    }
}
