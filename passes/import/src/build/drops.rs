//! Dropout in training, as the library's `model.train()` applies it.
//!
//! `main` makes a key, and every function with dropout takes it as its last argument; a block derives the key of its
//! layer. Each place of dropout in the program has its own seed.

use std::cell::Cell;

use ithaca_ir::ops::{Attention, Dropout, Keyed, Random};
use ithaca_ir::{DType, FunctionBuilder, Op, TensorType, ValueId};

use super::tensors::Built;
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
    rates: Dropouts,
    places: Cell<u64>,
}

/// The key of a function, if it has dropout.
pub(super) type Key = Option<ValueId>;

impl Drops {
    /// The dropout of a mode: none except in training.
    pub(super) fn of(dropouts: &Dropouts, mode: Mode) -> Self {
        let rates = match mode {
            Mode::Train => dropouts.clone(),
            Mode::Prefill | Mode::Decode => Dropouts::default(),
        };
        Self { rates, places: Cell::new(0) }
    }

    fn rate(&self, place: Place) -> f64 {
        match place {
            Place::Embedding => self.rates.embedding,
            Place::Block => self.rates.residual,
        }
    }

    /// Whether a function has dropout.
    fn takes_key(&self, place: Place) -> bool {
        match place {
            Place::Embedding => self.rates.embedding > 0.0,
            Place::Block => self.rates.residual > 0.0 || self.rates.attention > 0.0,
        }
    }

    /// The initial key, in `main`.
    pub(super) fn first_key(&self, f: &mut FunctionBuilder<'_>) -> Built<Key> {
        if !self.takes_key(Place::Embedding) && !self.takes_key(Place::Block) {
            return Ok(None);
        }
        let key = f.push(Op::Random(Random::Key { seed: 0 }), &[])?;
        f.name(key, Some("key"));
        Ok(Some(key))
    }

    /// The arguments of a function; the key, if it takes one, comes last.
    pub(super) fn with_key(&self, arguments: &[ValueId], key: Key, place: Place) -> Vec<ValueId> {
        arguments.iter().copied().chain(key.filter(|_| self.takes_key(place))).collect()
    }

    /// The key that a function takes; call it after declaring the other parameters.
    pub(super) fn key(&self, f: &mut FunctionBuilder<'_>, place: Place) -> Key {
        self.takes_key(place).then(|| f.param(TensorType::new(DType::I32, []), Some("key")))
    }

    /// The key that a block takes, derived for its layer; call it after declaring the other parameters.
    pub(super) fn layer_key(&self, f: &mut FunctionBuilder<'_>) -> Built<Key> {
        match self.key(f, Place::Block) {
            None => Ok(None),
            Some(key) => f.push(Op::Random(Random::LayerKey), &[key]).map(Some),
        }
    }

    /// `x` after dropout at this place.
    pub(super) fn drop(
        &self,
        f: &mut FunctionBuilder<'_>,
        key: Key,
        place: Place,
        x: ValueId,
    ) -> Built<ValueId> {
        let rate = self.rate(place);
        let Some(key) = key.filter(|_| rate > 0.0) else { return Ok(x) };
        let ty = TensorType { dtype: DType::Bool, ..f.ty(x).clone() };
        let mask = f.push_as(Op::Random(Random::DropoutMask { rate, seed: self.next() }), &[key], ty)?;
        f.push(Op::Random(Random::Dropout { rate }), &[x, mask])
    }

    /// Attention with dropout of its weights.
    pub(super) fn attend(
        &self,
        f: &mut FunctionBuilder<'_>,
        key: Key,
        mut attention: Attention,
        operands: &[ValueId],
    ) -> Built<ValueId> {
        let rate = self.rates.attention;
        let key = key.filter(|_| rate > 0.0);
        attention.dropout = key.map(|_| Dropout { rate, seed: self.next(), keyed: Keyed::Position });
        let operands: Vec<ValueId> = operands.iter().copied().chain(key).collect();
        f.push(Op::Attention(attention), &operands)
    }

    /// The seed of another place.
    fn next(&self) -> u64 {
        self.places.replace(self.places.get() + 1)
    }
}
