//! What a model drops in training, as the library's `model.train()` does.
//!
//! `main` makes a key, and every function that drops takes it as its last argument; a block makes of it that of its layer.
//! Places of the program are told apart by seeds, one for each.

use std::cell::Cell;

use ithaca_ir::ops::{Attention, Dropout, Keyed, Random};
use ithaca_ir::{DType, FunctionBuilder, Op, TensorType, ValueId};

use super::tensors::Built;
use crate::spec::Dropouts;
use crate::workload::Mode;

/// Where something is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// What the embedding gives.
    Embedding,
    /// What a block adds to the stream, and weights of its attention.
    Block,
}

/// What is dropped, and how many places there were so far.
#[derive(Debug)]
pub(super) struct Drops {
    rates: Dropouts,
    places: Cell<u64>,
}

/// The key of a function, if it drops anything.
pub(super) type Key = Option<ValueId>;

impl Drops {
    /// What a model drops in this mode: nothing but in training.
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

    /// Whether a function drops something.
    fn takes_key(&self, place: Place) -> bool {
        match place {
            Place::Embedding => self.rates.embedding > 0.0,
            Place::Block => self.rates.residual > 0.0 || self.rates.attention > 0.0,
        }
    }

    /// In `main`, where keys begin.
    pub(super) fn first_key(&self, f: &mut FunctionBuilder<'_>) -> Built<Key> {
        if !self.takes_key(Place::Embedding) && !self.takes_key(Place::Block) {
            return Ok(None);
        }
        let key = f.push(Op::Random(Random::Key { seed: 0 }), &[])?;
        f.name(key, Some("key"));
        Ok(Some(key))
    }

    /// The arguments of a function, the key behind the others if it takes one.
    pub(super) fn with_key(&self, arguments: &[ValueId], key: Key, place: Place) -> Vec<ValueId> {
        arguments.iter().copied().chain(key.filter(|_| self.takes_key(place))).collect()
    }

    /// The key that a function takes; to be asked for behind its other parameters.
    pub(super) fn key(&self, f: &mut FunctionBuilder<'_>, place: Place) -> Key {
        self.takes_key(place).then(|| f.param(TensorType::new(DType::I32, []), Some("key")))
    }

    /// The key that a block takes, as that of its layer; to be asked for behind its other parameters.
    pub(super) fn layer_key(&self, f: &mut FunctionBuilder<'_>) -> Built<Key> {
        match self.key(f, Place::Block) {
            None => Ok(None),
            Some(key) => f.push(Op::Random(Random::LayerKey), &[key]).map(Some),
        }
    }

    /// `x` with what is dropped at this place.
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

    /// Attention with what is dropped of its weights.
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
