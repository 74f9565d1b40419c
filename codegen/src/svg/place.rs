//! The positions of slots, in pixels.

use std::collections::BTreeMap;

use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;

use super::layers::{Layers, Slot};
use crate::dot::Vertex;

/// Width of a letter, pixels.
pub(super) const LETTER: f64 = 7.3;
/// Height of a line, pixels.
pub(super) const LINE: f64 = 16.0;
/// Pixels between boxes side by side.
const GAP: f64 = 18.0;
/// Pixels between layers.
const LAYER_GAP: f64 = 30.0;
/// Pixels around the text of a box.
const PADDING: f64 = 8.0;

/// The number of sweeps that move slots towards their neighbours.
const SWEEPS: usize = 24;

/// The weight of a passing value relative to a box: long edges are straight.
const STRAIGHT: f64 = 16.0;

/// The positions in a graph.
#[derive(Clone, Debug, PartialEq, Default)]
pub(super) struct Placed {
    /// The middle of each slot, by layer.
    pub(super) x: Vec<BTreeMap<Slot, f64>>,
    /// The top and the height of each layer.
    pub(super) y: Vec<(f64, f64)>,
    /// Size of the picture.
    pub(super) size: (f64, f64),
}

/// The text of a vertex: its label, and the types of its results.
pub(super) fn lines(graph: &DiGraph<Vertex, String>, v: NodeIndex) -> (Vec<&str>, Vec<&str>) {
    let mut types: Vec<&str> = Vec::new();
    let mut edges: Vec<_> = graph.edges_directed(v, Direction::Outgoing).collect();
    edges.sort_unstable_by_key(EdgeRef::id);
    for edge in edges {
        if !types.contains(&edge.weight().as_str()) {
            types.push(edge.weight());
        }
    }
    (graph[v].label.lines().collect(), types)
}

/// Width and height of the box of a vertex.
pub(super) fn size(graph: &DiGraph<Vertex, String>, v: NodeIndex) -> (f64, f64) {
    let (label, types) = lines(graph, v);
    let letters = label.iter().chain(&types).map(|line| line.chars().count()).max().unwrap_or(0);
    let n_lines = label.len() + types.len();
    (letters as f64 * LETTER + 2.0 * PADDING, n_lines as f64 * LINE + PADDING)
}

/// Places slots as near to their neighbours as their order allows.
pub(super) fn place(graph: &DiGraph<Vertex, String>, layers: &Layers) -> Placed {
    let width = |slot: &Slot| match *slot {
        Slot::Vertex(v) => size(graph, v).0,
        Slot::Passing(_) => 0.0,
    };
    let mut x: Vec<BTreeMap<Slot, f64>> = Vec::new();
    for slots in &layers.slots {
        let wanted: Vec<(f64, f64)> = slots.iter().map(|_| (0.0, 1.0)).collect();
        x.push(apart(slots, &wanted, width));
    }
    for sweep in 0..SWEEPS {
        let n = layers.slots.len();
        let order: Vec<usize> = if sweep % 2 == 0 { (0..n).collect() } else { (0..n).rev().collect() };
        for at in order {
            let wanted: Vec<(f64, f64)> =
                layers.slots[at].iter().map(|slot| wanted(layers, &x, at, *slot)).collect();
            x[at] = apart(&layers.slots[at], &wanted, width);
        }
    }
    let mut left = f64::MAX;
    let mut right = f64::MIN;
    for (slot, middle) in x.iter().flatten() {
        left = left.min(middle - width(slot) / 2.0);
        right = right.max(middle + width(slot) / 2.0);
    }
    x.iter_mut().flat_map(|layer| layer.values_mut()).for_each(|middle| *middle -= left);
    let mut y = Vec::new();
    let mut top = 0.0;
    for slots in &layers.slots {
        let height = slots.iter().map(|slot| match *slot {
            Slot::Vertex(v) => size(graph, v).1,
            Slot::Passing(_) => 0.0,
        });
        let height = height.fold(0.0, f64::max);
        y.push((top, height));
        top += height + LAYER_GAP;
    }
    let size = if x.is_empty() { (0.0, 0.0) } else { (right - left, top - LAYER_GAP) };
    Placed { x, y, size }
}

/// The mean of a slot's neighbours above and below, with its weight.
fn wanted(layers: &Layers, x: &[BTreeMap<Slot, f64>], at: usize, slot: Slot) -> (f64, f64) {
    let above = at.checked_sub(1).map(|up| {
        let edges = layers.edges[up].iter().filter(move |(_, to)| *to == slot);
        edges.map(move |(from, to)| (up, *from, *to))
    });
    let below =
        layers.edges[at].iter().filter(|(from, _)| *from == slot).map(|(from, to)| (at + 1, *to, *from));
    let (mut sum, mut total) = (0.0, 0.0);
    for (layer, other, mine) in above.into_iter().flatten().chain(below) {
        let straight = matches!((other, mine), (Slot::Passing(_), Slot::Passing(_)));
        let weight = if straight { STRAIGHT } else { 1.0 };
        sum += weight * x[layer][&other];
        total += weight;
    }
    if total > 0.0 {
        (sum / total, if matches!(slot, Slot::Passing(_)) { STRAIGHT } else { 1.0 })
    } else {
        (x[at][&slot], 1.0)
    }
}

/// The positions nearest to `wanted` by weighted squares, in this order and without overlap. Slots that would overlap
/// are pooled and move as one (the pool-adjacent-violators method of isotonic regression).
fn apart(slots: &[Slot], wanted: &[(f64, f64)], width: impl Fn(&Slot) -> f64) -> BTreeMap<Slot, f64> {
    // For each pool the mean position that its members want for its first slot, their weight, and their number.
    let mut pools: Vec<(f64, f64, usize)> = Vec::new();
    let mut offsets: Vec<f64> = Vec::new();
    let mut offset = 0.0;
    for (i, slot) in slots.iter().enumerate() {
        if i > 0 {
            offset += width(&slots[i - 1]) / 2.0 + GAP + width(slot) / 2.0;
        }
        offsets.push(offset);
        let (at, weight) = wanted[i];
        pools.push((at - offset, weight, 1));
        while let [.., (a, n, count), (b, m, more)] = *pools.as_slice()
            && a > b
        {
            pools.truncate(pools.len() - 2);
            pools.push(((a * n + b * m) / (n + m), n + m, count + more));
        }
    }
    let shifts = pools.iter().flat_map(|&(shift, _, count)| std::iter::repeat_n(shift, count));
    slots.iter().zip(offsets).zip(shifts).map(|((slot, offset), shift)| (*slot, offset + shift)).collect()
}
