//! How the ranks of a group lie in blocks of devices that a level of the topology joins.

use ithaca_ir::{AxisId, Mesh};

/// How many ranks of a group lie in one block of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spread {
    /// In the block that has the fewest, of those that have any.
    pub(super) fewest: u64,
    /// In the block that has the most.
    pub(super) most: u64,
}

impl Spread {
    /// For the groups along `axes`, in blocks of `devices`; bounds where axes with others between them cross blocks unevenly.
    pub(super) fn along(mesh: &Mesh, axes: &[AxisId], devices: u64, all: Option<u64>) -> Spread {
        // Axes side by side number ranks as one axis does: its size and stride.
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for axis in mesh.axes.ids().filter(|axis| axes.contains(axis)) {
            let (p, stride) = (mesh.size(axis), mesh.stride(axis));
            match runs.last_mut().filter(|(_, before)| *before == p * stride) {
                Some((n, before)) => (*n, *before) = (*n * p, stride),
                None => runs.push((p, stride)),
            }
        }
        let ranks = mesh.ranks().max(all.unwrap_or(0));
        let spreads = runs.into_iter().map(|(p, stride)| Spread::of(ranks, p, stride, devices));
        spreads.fold(Spread { fewest: 1, most: 1 }, |all, run| Spread {
            fewest: all.fewest * run.fewest,
            most: all.most * run.most,
        })
    }

    /// For groups of `p` ranks at distance `stride` among `ranks`, in blocks of `devices`.
    fn of(ranks: u64, p: u64, stride: u64, devices: u64) -> Spread {
        let same = |n| Spread { fewest: n, most: n };
        let extent = p * stride;
        if devices.is_multiple_of(extent) || devices >= ranks {
            return same(p);
        }
        if stride.is_multiple_of(devices) {
            return same(1);
        }
        if devices.is_multiple_of(stride) && extent.is_multiple_of(devices) {
            return same(devices / stride);
        }
        let mut all = Spread { fewest: p, most: 1 };
        for first in (0..ranks).filter(|r| (r / stride).is_multiple_of(p)) {
            let mut in_block = 0;
            for i in 0..p {
                let block = |i: u64| (first + i * stride) / devices;
                in_block += 1;
                if i + 1 == p || block(i + 1) != block(i) {
                    all.fewest = all.fewest.min(in_block);
                    all.most = all.most.max(in_block);
                    in_block = 0;
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_of_groups_that_fit_no_node() {
        let spread = |fewest, most| Spread { fewest, most };
        assert_eq!(Spread::of(16, 8, 2, 8), spread(4, 4));
        assert_eq!(Spread::of(64, 8, 8, 8), spread(1, 1));
        assert_eq!(Spread::of(8, 8, 1, 8), spread(8, 8));
        assert_eq!(Spread::of(12, 12, 1, 8), spread(4, 8));
        assert_eq!(Spread::of(12, 3, 4, 8), spread(1, 2));
        assert_eq!(Spread::of(24, 8, 3, 8), spread(2, 3));
    }
}
