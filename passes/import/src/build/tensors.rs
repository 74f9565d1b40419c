//! Weights as the library stores them: heads and head width form one stored dimension.

use std::ops::Range;

use ithaca_ir::ops::{Binding, OpError};
use ithaca_ir::{DType, DimId, FunctionBuilder, Space, TensorType, ValueId};

/// What building a part of a program gives.
pub(super) type Built<T> = Result<T, OpError>;

/// The types and bindings of a model's tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensors {
    /// The element type of weights and activations.
    pub(super) dtype: DType,
    /// Dimensions of query heads and key/value heads.
    pub(super) heads: [DimId; 2],
    /// The dimension of a head's width.
    pub(super) width: DimId,
}

impl Tensors {
    /// The type with these dimensions.
    pub(super) fn ty(&self, dims: &[DimId]) -> TensorType {
        TensorType::new(self.dtype, dims.iter().copied())
    }

    /// A weight whose stored shape follows from its dimensions; heads and head width are one stored dimension.
    pub(super) fn weight(&self, f: &mut FunctionBuilder<'_>, name: &str, dims: &[DimId]) -> Built<ValueId> {
        let stored = self.stored(f.space(), dims);
        self.window(f, name, stored, Vec::new(), dims)
    }

    /// A weight that is a window of a stored tensor.
    pub(super) fn window(
        &self,
        f: &mut FunctionBuilder<'_>,
        name: &str,
        stored: Vec<u64>,
        window: Vec<Range<u64>>,
        dims: &[DimId],
    ) -> Built<ValueId> {
        self.view(f, name, stored, Vec::new(), window, dims)
    }

    /// A weight that is a window of a stored tensor seen in another shape.
    pub(super) fn view(
        &self,
        f: &mut FunctionBuilder<'_>,
        name: &str,
        stored: Vec<u64>,
        view: Vec<u64>,
        window: Vec<Range<u64>>,
        dims: &[DimId],
    ) -> Built<ValueId> {
        let ty = self.ty(dims);
        // An empty shape means the shape of the type.
        let stored = if stored == f.space().shape(&ty) { Vec::new() } else { stored };
        f.weight(Binding { stored, view, window, ..Binding::named(name) }, ty)
    }

    /// `x` plus the bias of `name`.
    pub(super) fn biased(
        &self,
        f: &mut FunctionBuilder<'_>,
        x: ValueId,
        name: &str,
        dims: &[DimId],
    ) -> Built<ValueId> {
        let bias = self.weight(f, &format!("{name}.bias"), dims)?;
        f.add(x, bias)
    }

    /// The shape in which the library stores a tensor of these dimensions.
    fn stored(&self, space: &Space, dims: &[DimId]) -> Vec<u64> {
        let mut shape: Vec<u64> = Vec::new();
        let mut heads = None;
        for &dim in dims {
            let size = space.size(dim);
            match heads.take() {
                Some(n) if dim == self.width => {
                    shape.pop();
                    shape.push(n * size);
                }
                _ => shape.push(size),
            }
            if self.heads.contains(&dim) {
                heads = Some(size);
            }
        }
        shape
    }
}
