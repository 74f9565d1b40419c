//! Dropout in training, as the library's `model.train()` applies it.
//!
//! `main` makes a key, and every function with dropout takes it as its last argument; a block derives the key of its
//! layer. Each place of dropout in the program has its own seed.

use std::ops::Range;

use ithaca_ir::ops::{Attention, Dropout, Keyed, Random};
use ithaca_ir::{DType, FuncId, Op, TensorType, ValueId};

use super::body::{Body, Built};
use super::drops::Place;

impl Body<'_> {
    /// Makes the initial key, in `main`.
    pub(super) fn make_key(&mut self) -> Built<()> {
        if self.drops.takes_key(Place::Embedding) || self.drops.takes_key(Place::Block) {
            let key = self.push(Op::Random(Random::Key { seed: 0 }), &[])?;
            self.name(key, Some("key"));
            self.key = Some(key);
        }
        Ok(())
    }

    /// Calls a function, which takes the key as its last argument if it has dropout.
    pub(super) fn call_with_key(
        &mut self,
        place: Place,
        callee: FuncId,
        layers: Range<u64>,
        arguments: &[ValueId],
    ) -> Built<ValueId> {
        let key = self.key.filter(|_| self.drops.takes_key(place));
        let arguments: Vec<ValueId> = arguments.iter().copied().chain(key).collect();
        Ok(self.call(callee, layers, &arguments)?[0])
    }

    /// Takes the key as a parameter; call it after declaring the other parameters.
    pub(super) fn take_key(&mut self, place: Place) {
        if self.drops.takes_key(place) {
            self.key = Some(self.param(TensorType::new(DType::I32, []), Some("key")));
        }
    }

    /// Takes the key of a block, and derives it for its layer; call it after declaring the other parameters.
    pub(super) fn take_layer_key(&mut self) -> Built<()> {
        self.take_key(Place::Block);
        if let Some(key) = self.key {
            self.key = Some(self.push(Op::Random(Random::LayerKey), &[key])?);
        }
        Ok(())
    }

    /// `x` after dropout at this place.
    pub(super) fn drop(&mut self, place: Place, x: ValueId) -> Built<ValueId> {
        let rate = self.drops.rate(place);
        let Some(key) = self.key.filter(|_| rate > 0.0) else { return Ok(x) };
        let ty = TensorType { dtype: DType::Bool, ..self.ty(x).clone() };
        let seed = self.drops.next();
        let mask = self.push_as(Op::Random(Random::DropoutMask { rate, seed }), &[key], ty)?;
        self.push(Op::Random(Random::Dropout { rate }), &[x, mask])
    }

    /// The stream `x` plus a branch after its dropout.
    pub(super) fn residual(&mut self, x: ValueId, branch: ValueId, name: &str) -> Built<ValueId> {
        let branch = self.drop(Place::Block, branch)?;
        let y = self.add(x, branch)?;
        self.name(y, Some(name));
        Ok(y)
    }

    /// Attention with dropout of its weights; its results.
    pub(super) fn attend(
        &mut self,
        name: &str,
        mut attention: Attention,
        operands: &[ValueId],
    ) -> Built<Vec<ValueId>> {
        let rate = self.drops.rates.attention;
        let key = self.key.filter(|_| rate > 0.0);
        attention.dropout = key.map(|_| Dropout { rate, seed: self.drops.next(), keyed: Keyed::Position });
        let operands: Vec<ValueId> = operands.iter().copied().chain(key).collect();
        let results = self.node(Op::Attention(attention), &operands, &[])?;
        self.name(results[0], Some(name));
        Ok(results.to_vec())
    }
}
