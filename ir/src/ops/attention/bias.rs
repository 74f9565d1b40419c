//! A learned bias of scores by relative position.

use crate::dim::Dim;
use crate::ops::table::attention::{RelativeBias, Sides};

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

    /// The distances at which the buckets of one side start, of `buckets` in all, as kernels take them.
    ///
    /// A bucket that no distance reaches starts behind all positions.
    pub fn starts(&self, buckets: u64) -> Vec<f64> {
        let per_side = match self.sides {
            Sides::Both => buckets / 2,
            Sides::Before => buckets,
        };
        let bucket = |distance: i64| self.bucket(buckets, -distance);
        let end = i64::try_from(Dim::MAX_SIZE).expect("positions are below 2^41");
        let start = |i: u64| {
            // Buckets do not descend with the distance.
            let (mut low, mut high) = (0, end);
            while low < high {
                let middle = (low + high) / 2;
                if bucket(middle) >= i { high = middle } else { low = middle + 1 }
            }
            low as f64
        };
        (0..per_side).map(start).collect()
    }
}
