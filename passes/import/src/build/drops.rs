//! The rates of dropout in training, and the seeds of its places.

use std::cell::Cell;

use ithaca_ir::ValueId;

use crate::spec::Dropouts;
use crate::workload::Mode;

/// A place of dropout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The output of the embedding.
    Embedding,
    /// The output of a block's branches, and the weights of its attention.
    Block,
}

/// The rates of dropout, and the number of places so far.
#[derive(Debug)]
pub(super) struct Drops {
    pub(super) rates: Dropouts,
    places: Cell<u64>,
}

/// The key of a function, if it has dropout.
pub(super) type Key = Option<ValueId>;

impl Drops {
    /// The dropout of a mode: only training has any.
    pub(super) fn of(dropouts: &Dropouts, mode: Mode) -> Self {
        let rates = match mode {
            Mode::Train => dropouts.clone(),
            Mode::Prefill | Mode::Decode => Dropouts::default(),
        };
        Self { rates, places: Cell::new(0) }
    }

    pub(super) fn rate(&self, place: Place) -> f64 {
        match place {
            Place::Embedding => self.rates.embedding,
            Place::Block => self.rates.residual,
        }
    }

    /// Whether a function has dropout.
    pub(super) fn takes_key(&self, place: Place) -> bool {
        match place {
            Place::Embedding => self.rates.embedding > 0.0,
            Place::Block => self.rates.residual > 0.0 || self.rates.attention > 0.0,
        }
    }

    /// The seed of another place.
    pub(super) fn next(&self) -> u64 {
        self.places.replace(self.places.get() + 1)
    }
}
