//! Tensor types: element type, named dimensions, layout.

use smallvec::SmallVec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::layout::{At, AxisList, Layout};
use crate::mesh::AxisId;

/// The type of a value. On the program level the layout is whole.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first; no name occurs twice.
    pub dims: SmallVec<[DimId; 4]>,
    /// The placement on the mesh.
    pub layout: Layout,
}

/// As the clone of [`Layout`].
impl Clone for TensorType {
    fn clone(&self) -> Self {
        let Self { dtype, dims, layout } = self;
        Self { dtype: *dtype, dims: SmallVec::from_slice(dims), layout: layout.clone() }
    }
}

impl TensorType {
    /// A whole tensor.
    pub fn new(dtype: DType, dims: impl IntoIterator<Item = DimId>) -> Self {
        let dims: SmallVec<[DimId; 4]> = dims.into_iter().collect();
        let layout = Layout::whole(dims.len());
        Self { dtype, dims, layout }
    }

    /// The same tensor in another layout.
    pub fn with_layout(&self, layout: Layout) -> Self {
        assert_eq!(layout.split.len(), self.dims.len(), "a layout has an entry for each dimension");
        Self { dtype: self.dtype, dims: SmallVec::from_slice(&self.dims), layout }
    }

    /// The same tensor on these ranks.
    pub fn located(&self, at: Option<At>) -> Self {
        let mut ty = self.clone();
        ty.layout.at = at;
        ty
    }

    /// Whether this is `whole`, a tensor of all ranks, on whatever ranks it is.
    pub fn is_anywhere(&self, whole: &Self) -> bool {
        let (mine, other) = (&self.layout, &whole.layout);
        (self.dtype, &self.dims, &mine.split, &mine.partial, &mine.moved, None)
            == (whole.dtype, &whole.dims, &other.split, &other.partial, &other.moved, other.at)
    }

    /// The position of `dim`.
    pub fn position(&self, dim: DimId) -> Option<usize> {
        self.dims.iter().position(|&d| d == dim)
    }

    /// Whether the tensor has the dimension.
    pub fn has(&self, dim: DimId) -> bool {
        self.dims.contains(&dim)
    }

    /// The axes that split `dim`, major to minor; empty when the tensor lacks it.
    pub fn axes_of(&self, dim: DimId) -> &[AxisId] {
        self.position(dim).map_or(&[], |i| self.layout.split[i].as_slice())
    }

    /// The same tensor with `dim` split by `axes`; `dim` must be one of its dimensions.
    pub fn split(mut self, dim: DimId, axes: impl IntoIterator<Item = AxisId>) -> Self {
        let i = self.position(dim).expect("split names a dimension of the tensor");
        self.layout.split[i] = axes.into_iter().collect::<AxisList>();
        self
    }
}
