//! How much an attention computes: pairs and FLOPs, on the busiest rank.

use crate::dim::DimId;
use crate::mask::Positions;
use crate::mesh::{AxisId, Rank};
use crate::ops::table::attention::Attention;
use crate::space::Space;
use crate::types::TensorType;

impl Attention {
    /// Pairs of a query and a key that `rank` computes for one head, holding `q` and `k`.
    pub fn pairs(&self, space: &Space, q: &TensorType, k: &TensorType, rank: Rank) -> u128 {
        let held = |ty: &TensorType, dim: DimId| {
            let i = ty.position(dim)?;
            Some(Positions::of(space, dim, space.local_range(ty, i, rank)))
        };
        let (Some(queries), Some(keys)) = (held(q, self.queries), held(k, self.keys)) else { return 0 };
        self.pairs_of(space, &queries, &keys)
    }

    /// Pairs of queries and keys at these positions; queries after a cache are counted where it is full with them.
    pub fn pairs_of(&self, space: &Space, queries: &Positions, keys: &Positions) -> u128 {
        if !self.starts {
            return self.mask.pairs_between(queries, keys);
        }
        let [n_queries, n_keys] = [self.queries, self.keys].map(|d| space.dims[space.sequence(d)].valid);
        self.mask.pairs_between(&queries.behind(n_keys.saturating_sub(n_queries)), keys)
    }

    /// Whether a query at one of these positions may see a key at one of those.
    pub fn may_see(&self, queries: &Positions, keys: &Positions) -> bool {
        self.starts || self.mask.pairs_between(queries, keys) > 0
    }

    /// FLOPs on the busiest rank: two for each kept pair, head and element of width, for scores and for values.
    pub fn flops(&self, space: &Space, operands: &[&TensorType]) -> u128 {
        self.flops_of(self.busiest_pairs(space, operands[0], operands[1]), space, operands)
    }

    /// FLOPs of the forward pass for this many pairs of each head.
    pub fn flops_of(&self, pairs: u128, space: &Space, operands: &[&TensorType]) -> u128 {
        let others = self.rows_per_query(space, operands[0]);
        let value_width = u128::from(space.size(self.value_width(operands[2])));
        2 * pairs * others * (u128::from(space.size(self.width)) + value_width)
    }

    /// FLOPs of the backward pass on the busiest rank: scores once more, and the gradients of weights, values, queries
    /// and keys, so five products where the forward pass has two.
    pub fn flops_backward(&self, space: &Space, operands: &[&TensorType]) -> u128 {
        self.flops_backward_of(self.busiest_pairs(space, operands[0], operands[1]), space, operands)
    }

    /// FLOPs of the backward pass for this many pairs of each head.
    pub fn flops_backward_of(&self, pairs: u128, space: &Space, operands: &[&TensorType]) -> u128 {
        let others = self.rows_per_query(space, operands[0]);
        let value_width = u128::from(space.size(self.value_width(operands[2])));
        2 * pairs * others * (3 * u128::from(space.size(self.width)) + 2 * value_width)
    }

    fn rows_per_query(&self, space: &Space, q: &TensorType) -> u128 {
        let rows = q.dims.iter().filter(|&&d| d != self.queries && d != self.width);
        rows.map(|&d| u128::from(space.max_extent(d, q.axes_of(d)))).product()
    }

    /// The most pairs that a rank has; ranks that differ in no axis of either sequence are alike.
    pub fn busiest_pairs(&self, space: &Space, q: &TensorType, k: &TensorType) -> u128 {
        let mut axes: Vec<AxisId> = Vec::new();
        for &a in q.axes_of(self.queries).iter().chain(k.axes_of(self.keys)) {
            if !axes.contains(&a) {
                axes.push(a);
            }
        }
        // Beyond this many ranks a sample represents all; the first and the last are the extremes of every order.
        const SAMPLE: usize = 64;
        let ranks = space.mesh.group_along(Rank(0), &axes);
        let step = ranks.len().div_ceil(SAMPLE).max(1);
        let last = ranks.last().copied();
        let sampled = ranks.into_iter().step_by(step).chain(last);
        sampled.map(|r| self.pairs(space, q, k, r)).max().unwrap_or(0)
    }
}
