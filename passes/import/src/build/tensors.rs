//! Weights as the library stores them: heads and their width are one stored dimension.

use std::ops::Range;

use ithaca_ir::ops::{Binding, OpError};
use ithaca_ir::{DType, DimId, FunctionBuilder, Space, TensorType, ValueId};

/// What building a part of a program gives.
pub(super) type Built<T> = Result<T, OpError>;

/// How a model's tensors are typed and bound.
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

    /// A weight that is stored as its dimensions say, heads and their width being one stored dimension.
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
        // A binding without shape is that of the type.
        let stored = match stored == f.space().shape(&ty) {
            true => Vec::new(),
            false => stored,
        };
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
