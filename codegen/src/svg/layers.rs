//! Assigns vertices to layers.

use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;

use crate::dot::Vertex;

/// An element of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Slot {
    /// A vertex.
    Vertex(NodeIndex),
    /// The results of a vertex on their way to lower layers. All edges of the vertex share it.
    Passing(NodeIndex),
}

/// The layers of a graph: their slots from left to right, and the edges between them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Layers {
    /// The slots of each layer.
    pub(super) slots: Vec<Vec<Slot>>,
    /// For each layer, the edges from its slots to those of the next, without duplicates.
    pub(super) edges: Vec<Vec<(Slot, Slot)>>,
}

/// Layers such that every edge goes down.
pub(super) fn of_graph(graph: &DiGraph<Vertex, String>) -> Layers {
    let layer = depths(graph);
    let n_layers = layer.iter().max().map_or(0, |&last| last + 1);
    let mut layers = Layers { slots: vec![Vec::new(); n_layers], edges: vec![Vec::new(); n_layers] };
    for v in graph.node_indices() {
        let own = layer[v.index()];
        layers.slots[own].push(Slot::Vertex(v));
        let users = graph.edges_directed(v, Direction::Outgoing).map(|e| e.target());
        let mut users: Vec<(usize, NodeIndex)> = users.map(|u| (layer[u.index()], u)).collect();
        users.sort_unstable();
        users.dedup();
        let Some(&(last, _)) = users.last() else { continue };
        for at in own + 1..last {
            layers.slots[at].push(Slot::Passing(v));
        }
        let from = |at: usize| if at == own { Slot::Vertex(v) } else { Slot::Passing(v) };
        for at in own..last {
            let ends = users.iter().filter(|(below, _)| *below == at + 1);
            let passing = (at + 1 < last).then_some(Slot::Passing(v));
            let to = ends.map(|&(_, user)| Slot::Vertex(user)).chain(passing);
            layers.edges[at].extend(to.map(|to| (from(at), to)));
        }
    }
    layers
}

/// The layer of each vertex: below its operands. A vertex without operands is right above its first user.
fn depths(graph: &DiGraph<Vertex, String>) -> Vec<usize> {
    let mut layer: Vec<usize> = vec![0; graph.node_count()];
    // Vertices are in order of definition, so operands come first.
    for v in graph.node_indices() {
        let used = graph.neighbors_directed(v, Direction::Incoming).map(|u| layer[u.index()] + 1);
        layer[v.index()] = used.max().unwrap_or(0);
    }
    for v in graph.node_indices() {
        if graph.neighbors_directed(v, Direction::Incoming).next().is_none() {
            let users = graph.neighbors_directed(v, Direction::Outgoing).map(|u| layer[u.index()]);
            layer[v.index()] = users.min().map_or(0, |first| first.saturating_sub(1));
        }
    }
    layer
}
