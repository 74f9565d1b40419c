//! Dropout of attention weights.

use crate::ops::random;

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
    /// The same dropout, drawn from a [key](crate::ops::random): another key drops other weights.
    pub fn with_key(self, key: i32) -> Self {
        Self { seed: random::start(key, self.seed), ..self }
    }

    /// Whether the weight of this sequence, head, query and key is dropped, by a generator that is keyed by position.
    pub fn drops(&self, sequence: u64, head: u64, query: u64, key: u64) -> bool {
        random::is_below([sequence, head, query, key].into_iter().fold(self.seed, random::mix), self.rate)
    }
}
