//! The ranks of a mesh that are drawn, and the arrows of collectives between them.

use ithaca_ir::layout::At;
use ithaca_ir::ops::Op;
use ithaca_ir::{AxisId, Mesh, Rank, Space, TensorType, boxes};

/// The most ranks that are drawn.
const MOST_RANKS: u64 = 8;

/// The most arrows of one collective.
const MOST_ARROWS: usize = 4;

/// The ranks that are drawn: along each axis, the first few.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Drawn {
    /// The ranks, in order.
    pub(super) ranks: Vec<Rank>,
    /// Ranks of the whole mesh.
    pub(super) n_ranks: u64,
}

/// The ranks that a note spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ends {
    /// The first.
    pub(super) first: Rank,
    /// The last.
    pub(super) last: Rank,
}

/// One line between two ranks that are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrow {
    /// The first and the last of ranks that all send to each other.
    Among(Rank, Rank),
    /// From one to the other.
    To(Rank, Rank),
}

/// The arrows of a collective.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Arrows {
    /// Those that are drawn.
    pub(super) shown: Vec<Arrow>,
    /// The number of further arrows of the ranks that are drawn.
    pub(super) more: u64,
}

impl Drawn {
    /// All ranks of a small mesh. The longest axes of a large mesh are cut until few enough ranks remain. They are
    /// neighbours, so that their transfers are drawn.
    pub(super) fn of(mesh: &Mesh) -> Self {
        let mut kept: Vec<u64> = mesh.axes.values().map(|axis| axis.size).collect();
        while kept.iter().fold(1, |n: u64, &k| n.saturating_mul(k)) > MOST_RANKS {
            let longest = kept.iter().copied().max().expect("a mesh without axes has one rank");
            // An axis that is longer than all ranks that are drawn is cut to them at once.
            for k in kept.iter_mut().rev().filter(|k| **k == longest).take(1) {
                *k = longest.min(MOST_RANKS + 1) - 1;
            }
        }
        let mut ranks = vec![Rank(0)];
        for ((axis, _), &k) in mesh.axes.iter().zip(&kept) {
            let along = |r: Rank| (0..k).map(move |c| (r, c));
            ranks =
                ranks.into_iter().flat_map(along).map(|(r, c)| mesh.with_coordinate(r, axis, c)).collect();
        }
        Self { ranks, n_ranks: mesh.ranks() }
    }

    /// The drawn ranks at a place, or all of them without a place.
    pub(super) fn only(&self, mesh: &Mesh, at: Option<At>) -> Self {
        let here = |rank: &Rank| at.is_none_or(|at| at.has(mesh, *rank));
        Self { ranks: self.ranks.iter().copied().filter(here).collect(), n_ranks: self.n_ranks }
    }

    /// The first and the last of the drawn ranks; `None` if no rank is drawn.
    pub(super) fn ends(&self) -> Option<Ends> {
        Some(Ends { first: *self.ranks.first()?, last: *self.ranks.last()? })
    }

    /// The drawn ranks by their coordinates along all axes but the last, with these coordinates as `dp=0 tp=1`.
    pub(super) fn groups(&self, mesh: &Mesh) -> Vec<(String, Vec<Rank>)> {
        let axes: Vec<AxisId> = mesh.axes.ids().collect();
        let outer = &axes[..axes.len().saturating_sub(1)];
        let mut groups: Vec<(String, Vec<Rank>)> = Vec::new();
        for &rank in &self.ranks {
            let name = coordinates(mesh, outer, rank);
            match groups.last_mut().filter(|(last, _)| *last == name) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((name, vec![rank])),
            }
        }
        groups
    }

    /// The arrows of the collective `op` from `from` to `to`: between neighbours of a permute, else one for each group
    /// of ranks, over its ranks that are drawn.
    pub(super) fn arrows(&self, space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> Arrows {
        let mut shown = Vec::new();
        let mut total = 0;
        match op {
            Op::Permute => {
                for &rank in &self.ranks {
                    let exchange = boxes::exchange(space, op, from, to, rank);
                    let peers = exchange.group.iter().zip(&exchange.send);
                    for (&peer, _) in peers.filter(|(peer, sent)| **peer != rank && !sent.is_empty()) {
                        total += 1;
                        if self.ranks.contains(&peer) {
                            shown.push(Arrow::To(rank, peer));
                        }
                    }
                }
            }
            _ => {
                let mut seen: Vec<Rank> = Vec::new();
                for &rank in &self.ranks {
                    if seen.contains(&rank) {
                        continue;
                    }
                    let group = boxes::group(space, op, from, to, rank);
                    let drawn: Vec<Rank> = group.into_iter().filter(|r| self.ranks.contains(r)).collect();
                    if let (Some(&first), Some(&last)) = (drawn.first(), drawn.last()) {
                        shown.push(Arrow::Among(first, last));
                        total += 1;
                    }
                    seen.extend(drawn);
                }
            }
        }
        shown.truncate(MOST_ARROWS);
        Arrows { more: total - shown.len() as u64, shown }
    }
}

/// The coordinates of `rank` along `axes`, as `dp=0 tp=1`.
pub(super) fn coordinates(mesh: &Mesh, axes: &[AxisId], rank: Rank) -> String {
    let one = |&axis: &AxisId| format!("{}={}", mesh.axes[axis].name, mesh.coordinate(rank, axis));
    axes.iter().map(one).collect::<Vec<_>>().join(" ")
}
