//! Chooses a term for each class, to minimise the cost of the roots; a shared class costs once.
//!
//! The optimal choice with sharing is NP-hard (Stepp, 2011). The search starts from two selections, the original
//! function and the optimum without sharing, and improves each: it tries another term class by class, and all results of
//! an operation together, and keeps a change if the total cost falls, until none helps. The result never costs more than the original.

use std::collections::{BTreeMap, BTreeSet};

use egg::Id;
use ithaca_ir::TensorType;

use super::language::{Graph, Symbol, Term};
use super::price::PriceList;

/// The relative improvement that counts; a smaller one is rounding.
const BETTER: f64 = 1e-9;

/// The maximum number of rounds over all classes.
const ROUNDS: usize = 16;

/// A term of a class.
struct Choice {
    term: Term,
    seconds: f64,
    operands: Vec<usize>,
}

/// The index of the chosen term for each class.
type Selection = Vec<usize>;

/// Every class with its terms, by position.
struct Choices {
    classes: Vec<Id>,
    terms: Vec<Vec<Choice>>,
    /// For each operation with several results, by position, the classes and the terms of its results.
    results: BTreeMap<usize, Vec<(usize, usize)>>,
    roots: Vec<usize>,
}

/// The chosen terms of the classes that `roots` need. Some terms cost further seconds. `original` has the terms of the original
/// function; others are chosen only
/// where `is_kept`.
pub(super) fn extract(
    graph: &Graph,
    (prices, further): (&mut PriceList<'_>, &BTreeMap<Term, f64>),
    roots: &[Id],
    original: &BTreeMap<Id, Term>,
    is_kept: impl Fn(&Term) -> bool,
) -> BTreeMap<Id, Term> {
    let of_original: BTreeSet<&Term> = original.values().collect();
    let is_kept = |term: &Term| is_kept(term) || of_original.contains(term);
    let price = |term: &Term| seconds(graph, prices, term) + further.get(term).copied().unwrap_or_default();
    let choices = Choices::of(graph, roots, is_kept, price);
    let alone = choices.alone();
    let as_is = choices.with_terms(alone.clone(), original);
    let (as_is, alone) = (choices.improved(as_is), choices.improved(alone));
    let (_, selection) = if alone.0 < as_is.0 * (1.0 - BETTER) { alone } else { as_is };
    choices.chosen(&selection)
}

/// The departures of chosen terms from those of the original function, as text: `gated@5.1` for term 1 of class 5.
pub(super) fn written(
    graph: &Graph,
    roots: &[Id],
    original: &BTreeMap<Id, Term>,
    chosen: &BTreeMap<Id, Term>,
) -> String {
    let choices = Choices::of(graph, roots, |_| true, |_| 0.0);
    let plain = choices.with_terms(vec![0; choices.terms.len()], original);
    let selection = choices.with_terms(plain.clone(), chosen);
    let departs = (0..plain.len()).filter(|&c| selection[c] != plain[c]);
    let word = |c: usize| {
        let term = &choices.terms[c][selection[c]].term;
        format!("{}@{c}.{}", label(graph, term), selection[c])
    };
    departs.map(word).collect::<Vec<_>>().join(" ")
}

/// The chosen terms as [`written`]; `None` for terms that the graph does not have.
pub(super) fn recorded(
    graph: &Graph,
    roots: &[Id],
    original: &BTreeMap<Id, Term>,
    text: &str,
) -> Option<BTreeMap<Id, Term>> {
    let choices = Choices::of(graph, roots, |_| true, |_| 0.0);
    let mut selection = choices.with_terms(vec![0; choices.terms.len()], original);
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let (name, place) = word.split_once('@')?;
        let (class, n) = place.split_once('.')?;
        let (class, n): (usize, usize) = (class.parse().ok()?, n.parse().ok()?);
        let choice = choices.terms.get(class)?.get(n)?;
        selection[class] = (label(graph, &choice.term) == name).then_some(n)?;
    }
    choices.needed(&selection)?;
    Some(choices.chosen(&selection))
}

/// The operation of a term, `result` for one of several results.
fn label(graph: &Graph, term: &Term) -> &'static str {
    match graph.analysis.get(term.symbol) {
        Symbol::Apply { op, .. } => op.name(),
        Symbol::Result(_) => "result",
        Symbol::Leaf(_) => "leaf",
    }
}

impl Choices {
    fn of(
        graph: &Graph,
        roots: &[Id],
        is_kept: impl Fn(&Term) -> bool,
        mut seconds: impl FnMut(&Term) -> f64,
    ) -> Self {
        let mut classes: Vec<Id> = graph.classes().map(|class| class.id).collect();
        classes.sort_unstable();
        let place = |class: Id| classes.binary_search(&graph.find(class)).expect("every class is listed");
        let terms = classes.iter().map(|&class| {
            let nodes = &graph[class].nodes;
            // A leaf is not computed.
            let leaf =
                nodes.iter().filter(|t| matches!(graph.analysis.get(t.symbol), Symbol::Leaf(..))).min();
            let kept = || nodes.iter().filter(|term| is_kept(term)).collect();
            let nodes: Vec<&Term> = leaf.map_or_else(kept, |leaf| vec![leaf]);
            let choice = |term: &Term| Choice {
                seconds: seconds(term),
                operands: term.operands.iter().map(|&o| place(o)).collect(),
                term: term.clone(),
            };
            nodes.into_iter().map(choice).collect()
        });
        let terms: Vec<Vec<Choice>> = terms.collect();
        let mut results: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for (class, choices) in terms.iter().enumerate() {
            for (n, choice) in choices.iter().enumerate() {
                if let Symbol::Result(_) = graph.analysis.get(choice.term.symbol) {
                    results.entry(choice.operands[0]).or_default().push((class, n));
                }
            }
        }
        // Leaves cost nothing, so they are not looked at again for each selection.
        let is_leaf = |class: Id| {
            graph[class].nodes.iter().any(|t| matches!(graph.analysis.get(t.symbol), Symbol::Leaf(..)))
        };
        let roots = roots.iter().filter(|&&root| !is_leaf(root)).map(|&root| place(root)).collect();
        Self { classes, terms, results, roots }
    }

    /// The selection with these terms where they are known.
    fn with_terms(&self, mut selection: Selection, known: &BTreeMap<Id, Term>) -> Selection {
        for (place, class) in self.classes.iter().enumerate() {
            let at = known
                .get(class)
                .and_then(|term| self.terms[place].iter().position(|choice| choice.term == *term));
            selection[place] = at.unwrap_or(selection[place]);
        }
        selection
    }

    /// The terms of the classes that the roots need.
    fn chosen(&self, selection: &Selection) -> BTreeMap<Id, Term> {
        let needed = self.needed(selection).unwrap_or_default();
        needed.into_iter().map(|c| (self.classes[c], self.terms[c][selection[c]].term.clone())).collect()
    }

    /// For each class the cheapest term including its operands, without sharing.
    fn alone(&self) -> Selection {
        let mut least = vec![f64::INFINITY; self.terms.len()];
        let mut selection = vec![0; self.terms.len()];
        let mut changed = true;
        while changed {
            changed = false;
            for (class, terms) in self.terms.iter().enumerate() {
                for (n, choice) in terms.iter().enumerate() {
                    let operands: f64 = choice.operands.iter().map(|&o| least[o]).sum();
                    let seconds = choice.seconds + operands;
                    if seconds < least[class] * (1.0 - BETTER)
                        || least[class].is_infinite() && seconds.is_finite()
                    {
                        (least[class], selection[class]) = (seconds, n);
                        changed = true;
                    }
                }
            }
        }
        selection
    }

    /// The classes that the roots need, operands first; `None` if a class needs itself or one without terms.
    fn needed(&self, selection: &Selection) -> Option<Vec<usize>> {
        #[derive(Clone, Copy, PartialEq)]
        enum Seen {
            Not,
            Open,
            Done,
        }
        let mut seen = vec![Seen::Not; self.terms.len()];
        let mut order = Vec::new();
        for &root in &self.roots {
            // A class, and the number of its visited operands.
            let mut stack = vec![(root, 0)];
            while let Some((class, n)) = stack.pop() {
                if seen[class] == Seen::Done {
                    continue;
                }
                seen[class] = Seen::Open;
                match self.terms[class].get(selection[class])?.operands.get(n) {
                    None => {
                        seen[class] = Seen::Done;
                        order.push(class);
                    }
                    Some(&operand) => {
                        stack.push((class, n + 1));
                        match seen[operand] {
                            Seen::Open => return None,
                            Seen::Not => stack.push((operand, 0)),
                            Seen::Done => {}
                        }
                    }
                }
            }
        }
        Some(order)
    }

    /// Seconds of all classes that the roots need; infinite if a class needs itself.
    fn seconds(&self, selection: &Selection) -> f64 {
        self.needed(selection).map_or(f64::INFINITY, |needed| {
            needed.into_iter().map(|class| self.terms[class][selection[class]].seconds).sum()
        })
    }

    /// The selection after improvement, class by class, and its cost.
    fn improved(&self, mut selection: Selection) -> (f64, Selection) {
        let mut least = self.seconds(&selection);
        for _ in 0..ROUNDS {
            let mut changed = false;
            let needed = self.needed(&selection).unwrap_or_else(|| (0..self.terms.len()).collect());
            for class in needed.into_iter().rev().filter(|&class| self.terms[class].len() > 1) {
                let before = selection[class];
                let mut best = before;
                for n in (0..self.terms[class].len()).filter(|&n| n != before) {
                    selection[class] = n;
                    let seconds = self.seconds(&selection);
                    if seconds < least * (1.0 - BETTER) {
                        (least, best, changed) = (seconds, n, true);
                    }
                }
                selection[class] = best;
            }
            // An operation with several results may pay off only if all are taken from it.
            for results in self.results.values() {
                let mut all = selection.clone();
                results.iter().for_each(|&(class, n)| all[class] = n);
                let seconds = self.seconds(&all);
                if seconds < least * (1.0 - BETTER) {
                    (least, selection, changed) = (seconds, all, true);
                }
            }
            if !changed {
                break;
            }
        }
        (least, selection)
    }
}

fn seconds(graph: &Graph, prices: &mut PriceList<'_>, term: &Term) -> f64 {
    match graph.analysis.get(term.symbol) {
        Symbol::Leaf(..) | Symbol::Result(_) => 0.0,
        Symbol::Apply { op, types, .. } => {
            let operands: Vec<&TensorType> = term.operands.iter().map(|&o| &graph[o].data[0]).collect();
            prices.seconds(op, &operands, &types.iter().collect::<Vec<_>>())
        }
    }
}
