//! Random weights and inputs for a program, the same on every machine for a seed and a name.
//!
//! Weights are spread so that deep networks stay finite: matrices by one over the root of their larger side, weights
//! of norms near one, vectors small. Integers that look up a table stay below its rows. Elements are sums of uniform
//! numbers, rounded to `f32`, so that no mathematical library and no precision of the reader has a say in them.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Module, ValueId};
use ithaca_ir::ops::cache::CACHE;
use ithaca_ir::ops::random::mix;
use ithaca_ir::ops::{Appended, Cache, Fused};
use ithaca_ir::{DType, Op};

use super::error::StoreError;
use super::source::TensorSource;
use crate::digest::fnv1a;
use crate::tensor::{Tensor, index};

/// The bound of integers that look up no table.
const DEFAULT_BOUND: u64 = 2;

/// Random tensors under the names that a module reads.
#[derive(Clone, Debug)]
pub struct RandomTensors {
    seed: u64,
    tensors: BTreeMap<String, Recipe>,
}

/// How a tensor is made.
#[derive(Clone, Debug)]
struct Recipe {
    shape: Vec<u64>,
    spread: Spread,
}

/// How elements are distributed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spread {
    /// About normal.
    Normal { mean: f64, deviation: f64 },
    /// Whole numbers from zero, below the bound.
    Below(u64),
    /// A table of so many pages, and of so many in host memory: each row has equally many in a row, those in host memory first, then
    /// −1.
    Pages([u64; 2]),
}

/// The use of a value that determines its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Use {
    /// The weight of a norm.
    Norm,
    /// Indices into a table of so many rows.
    Index(u64),
    /// The pages of the parts of sequences, of so many, and of so many in host memory.
    Pages([u64; 2]),
}

impl RandomTensors {
    /// Every weight and input that `module` reads, of every layer it runs; and caches that are partly filled.
    pub fn of_module(module: &Module, seed: u64) -> Self {
        let mut tensors = BTreeMap::new();
        let layers = module.layers_of_functions();
        let mut uses_of_params: Vec<Vec<Option<Use>>> = Vec::new();
        for (id, function) in module.functions.iter() {
            let uses = uses(module, function, &uses_of_params);
            for node in &function.nodes {
                let binding = match &node.op {
                    Op::Param(binding) | Op::Input(binding) => binding,
                    Op::State(binding) if binding.name.starts_with(CACHE) => binding,
                    _ => continue,
                };
                let Some(&result) = node.results.first() else { continue };
                let ty = function.ty(result);
                let mut shape = binding.stored_shape(&module.space, ty);
                let members = shape.first().copied().unwrap_or(1);
                if binding.is_stack() {
                    shape.remove(0);
                }
                let spread = spread(ty.dtype, &shape, uses[result.index()]);
                for layer in layers[id.index()].iter().cloned().flatten() {
                    for name in binding.stored_names(layer, members) {
                        let recipe = Recipe { shape: shape.clone(), spread };
                        tensors
                            .entry(name)
                            .and_modify(|known: &mut Recipe| known.spread = narrower(known.spread, spread))
                            .or_insert(recipe);
                    }
                    if !binding.is_per_layer() {
                        break;
                    }
                }
            }
            uses_of_params.push(function.params.iter().map(|p| uses[p.index()]).collect());
        }
        Self { seed, tensors }
    }
}

impl RandomTensors {
    /// Those of another module as well.
    #[must_use]
    pub fn and_of(mut self, module: &Module) -> Self {
        for (name, recipe) in Self::of_module(module, self.seed).tensors {
            self.tensors
                .entry(name)
                .and_modify(|known| known.spread = narrower(known.spread, recipe.spread))
                .or_insert(recipe);
        }
        self
    }

    /// The same without caches: sequences have no tokens yet.
    #[must_use]
    pub fn without_caches(mut self) -> Self {
        self.tensors.retain(|name, _| !name.starts_with(CACHE));
        self
    }
}

impl TensorSource for RandomTensors {
    fn description(&self) -> String {
        format!("random tensors of seed {}", self.seed)
    }

    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.tensors.get(name).map(|r| r.shape.clone())
    }

    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
        let recipe = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        let shape: Vec<usize> = recipe.shape.iter().map(|&n| index(n)).collect();
        let n: usize = shape.iter().product();
        let key = mix(self.seed, fnv1a(name.bytes()));
        let element = |i: u64| match (recipe.spread, recipe.shape.as_slice()) {
            (Spread::Pages(pages), &[rows, entries]) => entry(pages, [rows, entries], i),
            (spread, _) => element(spread, mix(key.wrapping_add(i), 0)),
        };
        let data = (0..n as u64).map(element).collect();
        Ok(Tensor::new(shape, data))
    }
}

/// The use of each value of `function`, indexed by value.
fn uses(module: &Module, function: &Function, callees: &[Vec<Option<Use>>]) -> Vec<Option<Use>> {
    let mut uses: Vec<Option<Use>> = vec![None; function.values.len()];
    // Backwards, so that a use is known before the operations that pass the value on.
    for node in function.nodes.iter().rev() {
        let mut note = |value: ValueId, found: Option<Use>| {
            let known = &mut uses[value.index()];
            *known = match (*known, found) {
                (Some(Use::Index(a)), Some(Use::Index(b))) => Some(Use::Index(a.min(b))),
                (known, found) => known.or(found),
            };
        };
        match node.op.appended() {
            // A ring has room for any number of tokens.
            Some(Appended { by: Cache::Append { over, rows, wraps: false }, start }) => {
                let [capacity, new] = [over, rows].map(|dim| module.space.dims[dim].valid);
                note(node.operands[start], Some(Use::Index(capacity.saturating_sub(new) + 1)));
            }
            // Those on the device say how many further ones are in host memory.
            Some(Appended { by: Cache::AppendPages { pages, slots, rows, beyond, after: None }, start }) => {
                let table = node.operands[start + 2];
                let beyond = beyond.map_or(0, |dim| module.space.size(dim));
                let [pages, slots, new] = [pages, slots, rows].map(|dim| module.space.size(dim));
                let shape = module.space.shape(function.ty(table));
                let of_each = |pages: u64| shape.first().map_or(0, |&rows| pages / rows.max(1));
                let each = of_each(pages) + of_each(beyond);
                let capacity = slots * each.min(shape.last().copied().unwrap_or(0));
                note(node.operands[start], Some(Use::Index(capacity.saturating_sub(new) + 1)));
                note(table, Some(Use::Pages([pages, beyond])));
            }
            _ => {}
        }
        match &node.op {
            Op::Embed { over, .. } => {
                note(node.operands[1], Some(Use::Index(module.space.dims[*over].valid)))
            }
            Op::Expand => {
                let found = uses[node.results[0].index()];
                let known = &mut uses[node.operands[0].index()];
                *known = known.or(found);
            }
            Op::Attention(a) if a.starts && !a.wraps => {
                let [keys, new] = [a.keys, a.queries].map(|dim| module.space.dims[dim].valid);
                let start = node.operands[3 + usize::from(a.bias.is_some())];
                note(start, Some(Use::Index(keys.saturating_sub(new) + 1)));
            }
            Op::RmsNorm { .. }
            | Op::LayerNorm { .. }
            | Op::RmsScale { .. }
            | Op::Fused(Fused::AddRmsNorm { .. } | Fused::AddLayerNorm { .. }) => {
                let place = if let Op::RmsNorm { .. } | Op::LayerNorm { .. } = node.op { 1 } else { 2 };
                if let Some(&weight) = node.operands.get(place) {
                    note(weight, Some(Use::Norm));
                }
            }
            Op::Call { callee, .. } => {
                for (&operand, &found) in node.operands.iter().zip(&callees[callee.index()]) {
                    note(operand, found);
                }
            }
            op if op.is_layout_change() => {
                let found = uses[node.results[0].index()];
                if uses[node.operands[0].index()].is_none() {
                    uses[node.operands[0].index()] = found;
                }
            }
            // Other operations compute new values.
            _ => {}
        }
    }
    uses
}

fn spread(dtype: DType, shape: &[u64], found: Option<Use>) -> Spread {
    match (dtype.is_float(), found) {
        (false, Some(Use::Pages(pages))) => Spread::Pages(pages),
        (false, Some(Use::Index(rows))) => Spread::Below(rows.max(1)),
        (false, _) => Spread::Below(DEFAULT_BOUND),
        (true, Some(Use::Norm)) => Spread::Normal { mean: 1.0, deviation: 0.1 },
        (true, _) if shape.len() < 2 => Spread::Normal { mean: 0.0, deviation: 0.1 },
        (true, _) => {
            let side = shape.iter().copied().max().unwrap_or(1).max(4);
            Spread::Normal { mean: 0.0, deviation: 1.0 / (side as f64).sqrt() }
        }
    }
}

fn narrower(a: Spread, b: Spread) -> Spread {
    match (a, b) {
        (Spread::Below(a), Spread::Below(b)) => Spread::Below(a.min(b)),
        (a, _) => a,
    }
}

/// Element `i` of a table of `pages`, of so many rows and entries of each.
fn entry([pages, beyond]: [u64; 2], [rows, entries]: [u64; 2], i: u64) -> f64 {
    let (row, entry) = (i / entries.max(1), i % entries.max(1));
    let [each, of_host] = [pages, beyond].map(|pages| pages / rows.max(1));
    if entry < of_host {
        (pages + row * of_host + entry) as f64
    } else if entry - of_host < each {
        (row * each + entry - of_host) as f64
    } else {
        -1.0
    }
}

/// One element from 64 random bits.
fn element(spread: Spread, bits: u64) -> f64 {
    match spread {
        Spread::Below(bound) | Spread::Pages([bound, _]) => {
            ((u128::from(bits) * u128::from(bound)) >> 64) as f64
        }
        Spread::Normal { mean, deviation } => {
            // Four uniform numbers of 16 bits: their sum has mean 2 and variance 1/3, and no tails.
            let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
            let standard = (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt();
            f64::from((mean + deviation * standard) as f32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_about_normal_and_bounded() {
        let spread = Spread::Normal { mean: 1.0, deviation: 0.5 };
        let n = 20_000u64;
        let xs: Vec<f64> = (0..n).map(|i| element(spread, mix(i, 0))).collect();
        let mean = xs.iter().sum::<f64>() / n as f64;
        let variance = xs.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n as f64;
        assert!((mean - 1.0).abs() < 0.02 && (variance.sqrt() - 0.5).abs() < 0.02, "{mean} {variance}");
        assert!((0..n).all(|i| element(Spread::Below(7), mix(i, 0)) < 7.0));
        assert!((0..n).any(|i| element(Spread::Below(7), mix(i, 0)) == 6.0));
    }

    #[test]
    fn names_and_seeds_decide() {
        let key = |seed, name: &str| mix(seed, fnv1a(name.bytes()));
        assert!(key(1, "a") != key(1, "b") && key(1, "a") != key(2, "a"));
    }
}
