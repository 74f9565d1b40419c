//! Dropout of attention weights.

use crate::ops::random;
use crate::ops::table::attention::Dropout;

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
