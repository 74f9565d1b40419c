//! What a schedule's tasks refer to by number: types, transfers, sources, tables of constants.

use ithaca_ir::layers::union;
use ithaca_ir::layout::At;
use ithaca_ir::message::Parcel;
use ithaca_ir::module::Layers;
use ithaca_ir::ops::{Binding, RelativeBias, Rotary};
use ithaca_ir::{DType, Mask, TensorType};

/// Layers, and the ranks that run them; all of them where there is no place.
pub(super) type Run = (Layers, Option<At>);

/// A weight or input of the program, for all frames that read it.
pub(super) struct Source {
    pub(super) binding: Binding,
    pub(super) ty: usize,
    pub(super) file: SourceFile,
    /// Layers it is loaded for.
    pub(super) layers: Vec<Run>,
    /// Whether some task writes it, so that it is kept from step to step.
    pub(super) is_written: bool,
}

impl Source {
    /// Whether `name` is that of its tensor of some layer.
    pub(super) fn keeps(&self, name: &str) -> bool {
        self.layers
            .iter()
            .flat_map(|(layers, _)| layers.clone())
            .any(|layer| self.binding.stored_name(layer) == name)
    }
}

/// Which file a source is in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SourceFile {
    Weights,
    Inputs,
    /// Among the weights, or zero.
    States,
}

/// Collected while frames are emitted; indices are the numbers in the generated names (`T0`, `X0`, `S0`).
#[derive(Default)]
pub(super) struct Tables {
    pub(super) types: Vec<TensorType>,
    pub(super) transfers: Vec<Parcel>,
    pub(super) sources: Vec<Source>,
    /// Constants that kernels read: frequencies of rotary embeddings, strips of masks, buckets of biases.
    pub(super) constants: Vec<Vec<f64>>,
    /// Dimensions of tensors whose positions kernels ask for: the number of the type, and the dimension's place in it.
    pub(super) sequences: Vec<(usize, usize)>,
}

impl Tables {
    /// The number of a type.
    pub(super) fn ty(&mut self, ty: &TensorType) -> usize {
        intern(&mut self.types, ty)
    }

    /// The number of what a transfer does with one tensor.
    pub(super) fn parcel(&mut self, parcel: &Parcel) -> usize {
        self.ty(&parcel.from);
        self.ty(&parcel.to);
        intern(&mut self.transfers, parcel)
    }

    /// The number of a rotary embedding's frequencies, less than zero where it turns back.
    pub(super) fn frequencies(&mut self, rotary: &Rotary) -> usize {
        let turned = rotary.frequencies().into_iter().map(|f| rotary.turn.sign() * f).collect();
        intern(&mut self.constants, &turned)
    }

    /// The number of the positions of a dimension of a type.
    pub(super) fn sequence(&mut self, ty: &TensorType, place: usize) -> usize {
        let ty = self.ty(ty);
        intern(&mut self.sequences, &(ty, place))
    }

    /// The number of the distances at which the buckets of one side of a bias start, and how many these are.
    pub(super) fn buckets(&mut self, bias: &RelativeBias, buckets: u64) -> (usize, u64) {
        let bounds = bias.starts(buckets);
        let per_side = bounds.len() as u64;
        (intern(&mut self.constants, &bounds), per_side)
    }

    /// The number of the strips of a mask over `n_queries` and `n_keys` positions.
    pub(super) fn mask(&mut self, mask: &Mask, n_queries: u64, n_keys: u64) -> usize {
        intern(&mut self.constants, &mask.table(n_queries, n_keys))
    }

    /// The number of a source that a frame reads in the layers of `runs`.
    ///
    /// Where it is loaded stands with the layers, so that what several places have is one source.
    pub(super) fn source(
        &mut self,
        file: SourceFile,
        binding: &Binding,
        ty: &TensorType,
        runs: &[Run],
    ) -> usize {
        let at = ty.layout.at;
        let ty = self.ty(&ty.located(None));
        let layers_of = |layers: &Layers| if binding.is_per_layer() { layers.clone() } else { 0..1 };
        let layers: Vec<Run> =
            runs.iter().map(|(layers, place)| (layers_of(layers), at.or(*place))).collect();
        let known = self.sources.iter().position(|s| s.file == file && s.ty == ty && s.binding == *binding);
        match known {
            Some(i) => {
                let mut all = std::mem::take(&mut self.sources[i].layers);
                all.extend(layers);
                self.sources[i].layers = by_place(all);
                i
            }
            None => {
                let layers = by_place(layers);
                self.sources.push(Source { binding: binding.clone(), ty, file, layers, is_written: false });
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

/// The same layers on the same ranks, those of a place as ranges that are ascending and do not touch.
fn by_place(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_by_key(|(layers, at)| (*at, layers.start));
    let of_place = |runs: &[Run]| -> Vec<Run> {
        let at = runs[0].1;
        let layers = union(runs.iter().map(|(layers, _)| layers.clone()).collect());
        layers.into_iter().map(|layers| (layers, at)).collect()
    };
    runs.chunk_by(|a, b| a.1 == b.1).flat_map(of_place).collect()
}
