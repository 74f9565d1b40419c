//! The last micro-batch: its backward pass adds the last contribution to sums of gradients, which completes them.
//!
//! ```text
//! %before = state {name=sum.grad.w}
//! %sum    = add %before, %dw
//! assign %sum {target=state, name=sum.grad.w}
//! ```
//! becomes, in a copy of the function,
//! ```text
//! assign %sum {target=state, name=grad.w}
//! ```
//! So a gradient is complete, and may be reduced over ranks, while the backward pass of the layers below runs. In a pipeline only
//! the first stage does so: no other waits for it. The others have time for `.reduce` once they have sent their last gradient.

use std::collections::BTreeMap;

use ithaca_ir::module::{FuncId, Function};
use ithaca_ir::ops::{Binding, Target, state};
use ithaca_ir::{Arena, Op};

use super::tape::{Accumulation, prefixed};
use super::update::OwnedWeights;

/// The name of the function that runs one micro-batch.
pub(super) const MICRO: &str = "micro";

/// The functions of the last micro-batch.
pub(super) struct LastPass<'a> {
    owned: &'a [OwnedWeights],
    main: &'a str,
    copies: BTreeMap<FuncId, FuncId>,
}

impl<'a> LastPass<'a> {
    /// No functions yet, for weights owned by functions of the program with this `main`.
    pub(super) fn new(owned: &'a [OwnedWeights], main: &'a str) -> Self {
        Self { owned, main, copies: BTreeMap::new() }
    }

    /// By function, the function that runs in its place.
    pub(super) fn copies(&self) -> &BTreeMap<FuncId, FuncId> {
        &self.copies
    }

    /// The function that runs in place of `id`: a copy, or the same function if it completes no gradient.
    pub(super) fn function(&mut self, functions: &mut Arena<FuncId, Function>, id: FuncId) -> FuncId {
        if let Some(&known) = self.copies.get(&id) {
            return known;
        }
        let mut copy = functions[id].clone();
        let mut is_changed = self.complete(&mut copy);
        for node in &mut copy.nodes {
            if let Op::Call { callee, .. } = &mut node.op {
                let last = self.function(functions, *callee);
                is_changed |= last != *callee;
                *callee = last;
            }
        }
        let last = if is_changed {
            copy.origin = Some(copy.model_name().to_owned());
            copy.name = format!("{}.complete", copy.name);
            functions.push(copy)
        } else {
            id
        };
        self.copies.insert(id, last);
        last
    }

    /// Stores sums as gradients where the owner of their weights adds to them; returns whether it does.
    pub(super) fn complete(&self, function: &mut Function) -> bool {
        let name = if function.name == MICRO { self.main } else { function.model_name() };
        let is_of = |o: &&OwnedWeights| o.name == name || o.name.strip_suffix(".shared") == Some(name);
        let own = self.owned.iter().filter(is_of).flat_map(|o| &o.weights);
        let own = own.filter(|(_, _, accumulation)| *accumulation == Accumulation::AddByOwner);
        let own: Vec<String> = own.map(|(w, _, _)| prefixed(w, state::GRADIENT).name).collect();
        let mut is_changed = false;
        for node in &mut function.nodes {
            let Op::Assign { target: Target::State, binding } = &mut node.op else { continue };
            let gradient = state::gradient_of_sum(&binding.name);
            if let Some(gradient) = gradient.filter(|g| own.iter().any(|own| own == g)) {
                *binding = Binding { name: gradient.to_owned(), ..binding.clone() };
                is_changed = true;
            }
        }
        is_changed
    }
}
