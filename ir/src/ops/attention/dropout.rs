//! Dropout of attention weights.

/// Which weights become zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The share of weights that become zero; the others are divided by one minus it.
    pub rate: f64,
    /// What the generator starts from.
    pub seed: u64,
    /// What decides which weights are dropped.
    pub keyed: Keyed,
}

/// What a generator of random numbers is asked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keyed {
    /// Sequence of the batch, head, position of the query and of the key: every layout drops the same weights.
    Position,
    /// The order in which a device happens to compute: another layout drops other weights.
    Stream,
}

impl Dropout {
    /// Whether the weight of this sequence, head, query and key is dropped, by a generator that is keyed by position.
    pub fn drops(&self, sequence: u64, head: u64, query: u64, key: u64) -> bool {
        let mut x = self.seed;
        for word in [sequence, head, query, key] {
            // The finaliser of splitmix64 over each word in turn.
            x = (x ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^= x >> 31;
        }
        ((x >> 11) as f64) < self.rate * (1u64 << 53) as f64
    }
}
