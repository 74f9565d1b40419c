//! A learned bias of scores by relative position.

use crate::dim::DimId;

/// A bias `[buckets heads]`, learned for buckets of relative positions (T5: Raffel et al., arXiv 1910.10683, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelativeBias {
    /// The dimension of buckets.
    pub buckets: DimId,
    /// The distance from which on all keys share the last bucket.
    pub max_distance: u64,
    /// Which keys have buckets of their own.
    pub sides: Sides,
}

/// The keys that buckets tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sides {
    /// Keys before and after the query: half of the buckets each.
    Both,
    /// Keys before the query; those after it share the first bucket.
    Before,
}

impl RelativeBias {
    /// The bucket, of `buckets`, of a key `offset` positions after its query.
    ///
    /// Half of a side's buckets are single distances, the others grow as powers, computed in `f32` as the published
    /// models do.
    pub fn bucket(&self, buckets: u64, offset: i64) -> u64 {
        let (first, n, distance) = match self.sides {
            Sides::Both => {
                let n = buckets / 2;
                (if offset > 0 { n } else { 0 }, n, offset.unsigned_abs())
            }
            Sides::Before => (0, buckets, (-offset).max(0).unsigned_abs()),
        };
        let exact = n / 2;
        if distance < exact || n == 0 {
            return first + distance;
        }
        let scaled = (distance as f32 / exact as f32).ln() / (self.max_distance as f32 / exact as f32).ln();
        let more = (scaled * (n - exact) as f32).max(0.0) as u64;
        first + (exact + more).min(n - 1)
    }
}
