//! Matches the left side of a rule in an e-graph: enumerates the choices of terms that match.

use std::collections::BTreeMap;

use egg::Id;
use ithaca_ir::Space;

use super::language::{Graph, Symbol, Term, as_value, type_of};
use crate::rules::{App, Bindings, Pattern, Rule, all_hold, bind_attrs};

/// The classes that contain an operation, by its name, ascending.
pub(super) struct Index(BTreeMap<&'static str, Vec<Id>>);

impl Index {
    /// The index of a rebuilt e-graph.
    pub(super) fn of(graph: &Graph) -> Self {
        let mut classes: Vec<Id> = graph.classes().map(|class| class.id).collect();
        classes.sort_unstable();
        let mut index: BTreeMap<&'static str, Vec<Id>> = BTreeMap::new();
        for class in classes {
            for term in &graph[class].nodes {
                if let Symbol::Apply { op, .. } = graph.analysis.get(term.symbol) {
                    let known = index.entry(op.name()).or_default();
                    if known.last() != Some(&class) {
                        known.push(class);
                    }
                }
            }
        }
        Self(index)
    }

    /// The classes that contain an operation of this name.
    pub(super) fn classes(&self, op: &str) -> &[Id] {
        self.0.get(op).map_or(&[], Vec::as_slice)
    }
}

/// The bindings for each match of the rule's left side with `class` that satisfies its conditions; at most `limit`.
pub(super) fn matches(graph: &Graph, space: &Space, rule: &Rule, class: Id, limit: usize) -> Vec<Bindings> {
    let mut found = Vec::new();
    apps(graph, &rule.left, class, &Bindings::default(), limit, &mut found);
    found.retain(|bindings| {
        let ty = |name: &str| bindings.values.get(name).map(|&v| type_of(graph, v));
        all_hold(rule, bindings, space, &ty)
    });
    found
}

/// Extends `bindings` by each match of `app` with a term of `class`.
fn apps(graph: &Graph, app: &App, class: Id, bindings: &Bindings, limit: usize, found: &mut Vec<Bindings>) {
    for term in &graph[class].nodes {
        let Symbol::Apply { op, attrs, .. } = graph.analysis.get(term.symbol) else { continue };
        if app.op != op.name() || app.operands.len() != term.operands.len() {
            continue;
        }
        let mut own = bindings.clone();
        if !bind_attrs(app, attrs, &mut own) {
            continue;
        }
        let mut ways = vec![own];
        for (pattern, &operand) in app.operands.iter().zip(&term.operands) {
            ways = ways.iter().flat_map(|way| operand_ways(graph, pattern, operand, way, limit)).collect();
        }
        found.extend(ways);
        if found.len() >= limit {
            found.truncate(limit);
            return;
        }
    }
}

fn operand_ways(
    graph: &Graph,
    pattern: &Pattern,
    operand: Id,
    way: &Bindings,
    limit: usize,
) -> Vec<Bindings> {
    let mut found = Vec::new();
    match pattern {
        Pattern::Value(name) => {
            let value = as_value(graph.find(operand));
            let mut way = way.clone();
            if *way.values.entry(name.text.clone()).or_insert(value) == value {
                found.push(way);
            }
        }
        Pattern::App(app) => {
            if app.result == 0 {
                apps(graph, app, operand, way, limit, &mut found);
            }
            for Term { symbol, operands } in &graph[operand].nodes {
                if matches!(graph.analysis.get(*symbol), Symbol::Result(i) if *i == app.result) {
                    apps(graph, app, operands[0], way, limit, &mut found);
                }
            }
        }
    }
    found
}
