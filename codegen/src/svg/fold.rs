//! Folds the graph of a large function: vertices that do alike are drawn once.
//!
//! First those with the same operation on the same operands, as for each weight or each micro-batch. If they are still many, all
//! vertices with the same operation, as the steps of a ring or the stages of a pipeline; an edge that would then go back up is left
//! out.

use std::collections::{BTreeMap, BTreeSet};

use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;

use super::layers;
use crate::dot::Vertex;

/// The most vertices that are drawn one by one.
const MOST: usize = 90;
/// The most vertices side by side.
const WIDEST: usize = 9;
/// The most edges that are labelled with types of one vertex.
const TYPES: usize = 3;

type Graph = DiGraph<Vertex, String>;

/// The graph, folded if it is large, and what is folded as an addition to its title.
pub(super) fn folded(graph: Graph) -> (Graph, String) {
    let n = graph.node_count();
    let widest = layers::of_graph(&graph).slots.iter().map(Vec::len).max().unwrap_or(0);
    if n <= MOST && widest <= WIDEST {
        return (graph, String::new());
    }
    let classes = by_operands(&graph);
    let classes = if count(&classes) <= MOST { classes } else { by_operation(&graph) };
    let small = quotient(&graph, &classes);
    let note = format!(": {n} operations, alike ones drawn once");
    (small, note)
}

fn count(classes: &[usize]) -> usize {
    classes.iter().max().map_or(0, |last| last + 1)
}

/// The operation of a vertex, without names of tensors, numbers of layers and of stages.
fn operation(vertex: &Vertex) -> &str {
    let line = vertex.label.lines().next().unwrap_or_default();
    let words = if line.starts_with("call ") { 2 } else { 1 };
    let ends = line.match_indices(' ').map(|(at, _)| at).chain([line.len()]);
    let is_whole = words == 1 && (line.contains(" over ") || line.starts_with("coalesced"));
    let end = ends.clone().nth(words - 1).filter(|_| !is_whole).unwrap_or(line.len());
    &line[..end]
}

/// Equal numbers for vertices with the same operation on operands of equal numbers, in order of first appearance.
fn by_operands(graph: &Graph) -> Vec<usize> {
    let mut known: BTreeMap<(&str, Vec<usize>), usize> = BTreeMap::new();
    let mut classes: Vec<usize> = Vec::with_capacity(graph.node_count());
    for v in graph.node_indices() {
        let operands = graph.neighbors_directed(v, Direction::Incoming).map(|u| classes[u.index()]);
        let mut operands: Vec<usize> = operands.collect();
        operands.sort_unstable();
        operands.dedup();
        let next = known.len();
        classes.push(*known.entry((operation(&graph[v]), operands)).or_insert(next));
    }
    classes
}

/// Equal numbers for vertices with the same operation.
fn by_operation(graph: &Graph) -> Vec<usize> {
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    let class = |v: NodeIndex| {
        let next = known.len();
        *known.entry(operation(&graph[v])).or_insert(next)
    };
    graph.node_indices().map(class).collect()
}

/// A vertex for each class, with the edges that go forward.
fn quotient(graph: &Graph, classes: &[usize]) -> Graph {
    let mut members: Vec<Vec<NodeIndex>> = vec![Vec::new(); count(classes)];
    for v in graph.node_indices() {
        members[classes[v.index()]].push(v);
    }
    let mut small = Graph::new();
    for of in &members {
        let first = &graph[of[0]];
        let is_same = of.iter().all(|&v| graph[v].label == first.label);
        let label = if is_same { first.label.clone() } else { operation(first).to_owned() };
        let label = if of.len() > 1 { format!("{} × {label}", of.len()) } else { label };
        small.add_node(Vertex { label, style: first.style });
    }
    let mut seen: BTreeSet<(usize, usize)> = BTreeSet::new();
    let mut types: Vec<BTreeSet<&str>> = vec![BTreeSet::new(); members.len()];
    for edge in graph.edge_references() {
        let (from, to) = (classes[edge.source().index()], classes[edge.target().index()]);
        if from >= to || !seen.insert((from, to)) {
            continue;
        }
        let known = &mut types[from];
        let ty = edge.weight().as_str();
        let shown = if known.contains(ty) || known.len() < TYPES { ty } else { "…" };
        known.insert(shown);
        small.add_edge(NodeIndex::new(from), NodeIndex::new(to), shown.to_owned());
    }
    small
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dot::Style;

    /// A ring of so many steps, each of a message and an attention.
    fn ring(steps: usize) -> Graph {
        let mut graph = Graph::new();
        let vertex = |label: &str| Vertex { label: label.to_owned(), style: Style::Local };
        let mut last = graph.add_node(vertex("argument 0"));
        for _ in 0..steps {
            let sent = graph.add_node(vertex("permute over ring"));
            let attention = graph.add_node(vertex("attention\nmask=causal"));
            graph.add_edge(last, sent, "bf16[s]".to_owned());
            graph.add_edge(sent, attention, "bf16[s]".to_owned());
            last = sent;
        }
        graph
    }

    #[test]
    fn a_long_ring_is_a_few_vertices_and_a_short_one_is_left() {
        let (small, note) = folded(ring(4));
        assert_eq!((small.node_count(), note.as_str()), (9, ""));
        let (small, note) = folded(ring(4096));
        let labels: Vec<&str> = small.node_weights().map(|v| v.label.as_str()).collect();
        assert_eq!(labels, ["argument 0", "4096 × permute over ring", "4096 × attention\nmask=causal"]);
        assert_eq!(small.edge_count(), 2);
        assert_eq!(note, ": 8193 operations, alike ones drawn once");
    }
}
