//! Orders the slots of layers so that few edges cross.

use std::collections::BTreeMap;

use super::layers::{Layers, Slot};

/// The number of sweeps over the layers, alternately down and up.
const SWEEPS: usize = 12;

/// Orders the slots of each layer by the mean position of their neighbours, and keeps the order with the fewest
/// crossings.
pub(super) fn untangle(layers: &mut Layers) {
    let mut best = (crossings(layers), layers.slots.clone());
    for sweep in 0..SWEEPS {
        let n = layers.slots.len();
        match sweep % 2 {
            0 => (1..n).for_each(|at| sort(layers, at, Side::Above)),
            _ => (0..n.saturating_sub(1)).rev().for_each(|at| sort(layers, at, Side::Below)),
        }
        let now = crossings(layers);
        if now < best.0 {
            best = (now, layers.slots.clone());
        }
    }
    layers.slots = best.1;
}

/// The neighbours that a layer is ordered by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Above,
    Below,
}

fn sort(layers: &mut Layers, at: usize, side: Side) {
    let (other, edges) = match side {
        Side::Above => (at - 1, &layers.edges[at - 1]),
        Side::Below => (at + 1, &layers.edges[at]),
    };
    let places = places(&layers.slots[other]);
    let mut sums: BTreeMap<Slot, (usize, usize)> = BTreeMap::new();
    for &(from, to) in edges {
        let (mine, theirs) = match side {
            Side::Above => (to, from),
            Side::Below => (from, to),
        };
        let sum = sums.entry(mine).or_default();
        *sum = (sum.0 + places[&theirs], sum.1 + 1);
    }
    // A slot without neighbours on this side stays where it is.
    let n = places.len().max(1) as f64;
    let width = layers.slots[at].len().max(1) as f64;
    let keyed = layers.slots[at].iter().enumerate().map(|(i, slot)| {
        let mean = sums.get(slot).map(|&(sum, count)| sum as f64 / count as f64);
        (mean.unwrap_or(i as f64 * n / width), *slot)
    });
    let mut keyed: Vec<(f64, Slot)> = keyed.collect();
    keyed.sort_by(|a, b| a.0.total_cmp(&b.0));
    layers.slots[at] = keyed.into_iter().map(|(_, slot)| slot).collect();
}

fn places(slots: &[Slot]) -> BTreeMap<Slot, usize> {
    slots.iter().enumerate().map(|(i, &slot)| (slot, i)).collect()
}

/// Pairs of edges that cross, over all layers.
pub(super) fn crossings(layers: &Layers) -> usize {
    let mut total = 0;
    for (at, edges) in layers.edges.iter().enumerate() {
        let Some(below) = layers.slots.get(at + 1) else { continue };
        let (from, to) = (places(&layers.slots[at]), places(below));
        let mut ends: Vec<(usize, usize)> = edges.iter().map(|(a, b)| (from[a], to[b])).collect();
        ends.sort_unstable();
        for (i, &(a, b)) in ends.iter().enumerate() {
            total += ends[i + 1..].iter().filter(|&&(c, d)| a < c && d < b).count();
        }
    }
    total
}
