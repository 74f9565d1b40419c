//! What a schedule's tasks refer to by number: types, transfers, sources, tables of constants.

use std::ops::Range;

use ithaca_ir::ops::{Binding, Rotary};
use ithaca_ir::schedule::Transfer;
use ithaca_ir::{DType, TensorType};

/// A weight or input of the program, for all frames that read it.
pub(super) struct Source {
    pub(super) binding: Binding,
    pub(super) ty: usize,
    pub(super) file: SourceFile,
    /// Layers it is loaded for, ascending, apart from each other.
    pub(super) layers: Vec<Range<u64>>,
}

/// Which file a source is in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SourceFile {
    Weights,
    Inputs,
}

/// Collected while frames are emitted; indices are the numbers in the generated names (`T0`, `X0`, `S0`).
#[derive(Default)]
pub(super) struct Tables {
    pub(super) types: Vec<TensorType>,
    pub(super) transfers: Vec<Transfer>,
    pub(super) sources: Vec<Source>,
    pub(super) frequencies: Vec<Vec<f64>>,
}

impl Tables {
    /// The number of a type.
    pub(super) fn ty(&mut self, ty: &TensorType) -> usize {
        intern(&mut self.types, ty)
    }

    /// The number of a transfer.
    pub(super) fn transfer(&mut self, transfer: &Transfer) -> usize {
        self.ty(&transfer.from);
        self.ty(&transfer.to);
        intern(&mut self.transfers, transfer)
    }

    /// The number of a rotary embedding's frequencies.
    pub(super) fn frequencies(&mut self, rotary: &Rotary) -> usize {
        intern(&mut self.frequencies, &rotary.frequencies())
    }

    /// The number of a source that a frame reads in `layers`.
    pub(super) fn source(
        &mut self,
        file: SourceFile,
        binding: &Binding,
        ty: &TensorType,
        layers: &[Range<u64>],
    ) -> usize {
        let ty = self.ty(ty);
        let layers = if binding.is_per_layer() { layers.to_vec() } else { std::iter::once(0..1).collect() };
        let known = self.sources.iter().position(|s| s.file == file && s.ty == ty && s.binding == *binding);
        match known {
            Some(i) => {
                let mut all = std::mem::take(&mut self.sources[i].layers);
                all.extend(layers);
                self.sources[i].layers = union(all);
                i
            }
            None => {
                let layers = union(layers);
                self.sources.push(Source { binding: binding.clone(), ty, file, layers });
                self.sources.len() - 1
            }
        }
    }

    /// The element types of all tensors.
    pub(super) fn dtypes(&self) -> Vec<DType> {
        DType::ALL.into_iter().filter(|&d| self.types.iter().any(|ty| ty.dtype == d)).collect()
    }
}

fn intern<T: PartialEq + Clone>(items: &mut Vec<T>, item: &T) -> usize {
    match items.iter().position(|known| known == item) {
        Some(i) => i,
        None => {
            items.push(item.clone());
            items.len() - 1
        }
    }
}

/// The same numbers as ranges that are ascending and do not touch.
pub(super) fn union(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|r| r.start);
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}
