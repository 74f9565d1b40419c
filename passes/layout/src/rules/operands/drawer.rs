//! An application for which operands are drawn: its attributes, and the types made of others.

use std::collections::BTreeMap;

use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::Attr;
use ithaca_ir::{DType, DimId, TensorType};

use crate::rules::draw::Draw;
use crate::rules::syntax::App;

/// Attributes fixed by literals or bound variables.
pub(crate) type Fixed = BTreeMap<String, Attr>;

/// Attributes by name.
pub(super) type Attributes = Vec<(String, Attr)>;

pub(super) struct Drawer<'a> {
    pub(super) draw: &'a mut Draw,
    pub(super) app: &'a App,
    pub(super) fixed: &'a Fixed,
    pub(super) may_add: bool,
    pub(super) attrs: Attributes,
}

impl Drawer<'_> {
    /// Whether the pattern or the bound attributes have this one.
    pub(super) fn names(&self, key: &str) -> bool {
        self.fixed.contains_key(key) || self.app.attrs.iter().any(|(name, _)| name.text == key)
    }

    /// Whether to include an optional attribute.
    pub(super) fn wants(&mut self, key: &str) -> bool {
        self.names(key) || (self.may_add && self.draw.rng.once_in(3))
    }

    /// The dimension from which the operation derives `dim`.
    pub(super) fn base(&self, dim: DimId) -> Option<DimId> {
        let dim = &self.draw.space.dims[dim];
        match self.app.op.as_str() {
            "repeat" | "sum_copies" => dim.copies,
            "take" | "join" => dim.part.map(|part| part.of),
            _ => dim.fetched.as_ref().map(|fetched| fetched.of),
        }
    }

    /// The dimensions that the operation derives from `base`.
    pub(super) fn derived(&self, base: DimId) -> Vec<DimId> {
        self.draw.space.dims.ids().filter(|&dim| self.base(dim) == Some(base)).collect()
    }

    /// Sets an attribute: the fixed value, or else the drawn one.
    pub(super) fn attr(&mut self, key: &str, drawn: Attr) {
        let attr = self.fixed.get(key).cloned().unwrap_or(drawn);
        self.attrs.push((key.to_owned(), attr));
    }

    pub(super) fn number(&mut self, key: &str, from: &[f64]) {
        let x = self.draw.rng.one_of(from).unwrap_or(1.0);
        self.attr(key, Attr::Float(x));
    }

    pub(super) fn dim(&mut self, key: &str, dim: DimId) {
        self.attrs.push((key.to_owned(), word(&self.draw.space.dims[dim].name)));
    }

    /// The fixed dimension, if there is one.
    pub(super) fn fixed_dim(&self, key: &str) -> Option<DimId> {
        self.fixed.get(key).and_then(|attr| self.named(attr))
    }

    /// The dimension that an attribute names.
    pub(super) fn named(&self, attr: &Attr) -> Option<DimId> {
        match attr {
            Attr::Word(word) => self.draw.space.dim(word),
            _ => None,
        }
    }

    /// One of `candidates`, or the fixed one if it is among them.
    pub(super) fn one_dim(&mut self, key: &str, candidates: &[DimId]) -> Option<DimId> {
        let dim = if self.fixed.contains_key(key) {
            self.fixed_dim(key).filter(|d| candidates.contains(d))?
        } else {
            self.draw.rng.one_of(candidates)?
        };
        self.dim(key, dim);
        Some(dim)
    }

    /// A dimension declared by the operation, new unless it is fixed.
    pub(super) fn own_dim(&mut self, key: &str, sizes: &[u64]) -> Option<DimId> {
        let dim =
            if self.fixed.contains_key(key) { self.fixed_dim(key)? } else { self.draw.sized_dim(sizes) };
        self.dim(key, dim);
        Some(dim)
    }

    pub(super) fn one_axis(&mut self, candidates: &[AxisId]) -> Option<AxisId> {
        let axis = match self.fixed.get("axis") {
            Some(Attr::Word(word)) => self.draw.space.mesh.axis(word).filter(|a| candidates.contains(a))?,
            Some(_) => return None,
            None => self.draw.rng.one_of(candidates)?,
        };
        self.attrs.push(("axis".to_owned(), word(&self.draw.space.mesh.axes[axis].name)));
        Some(axis)
    }
}

pub(super) fn word(name: &str) -> Attr {
    Attr::Word(name.to_owned())
}

pub(super) fn call<const N: usize>(name: &str, args: [(&str, Attr); N]) -> Attr {
    Attr::Call(name.to_owned(), args.map(|(key, attr)| (key.to_owned(), attr)).to_vec())
}

pub(super) fn whole_dims(ty: &TensorType) -> Vec<DimId> {
    ty.dims.iter().copied().filter(|&d| ty.axes_of(d).is_empty()).collect()
}

/// A tensor with some dimensions of `ty`, in its layout.
pub(super) fn laid_out_as(ty: &TensorType, dtype: DType, dims: Vec<DimId>) -> TensorType {
    from_parts(dtype, dims.into_iter().map(|d| (d, ty.axes_of(d).into())).collect())
}

/// A tensor with all dimensions of `ty` but the last, in its layout.
pub(super) fn without_last(ty: &TensorType, dtype: DType) -> TensorType {
    laid_out_as(ty, dtype, ty.dims[..ty.dims.len() - 1].to_vec())
}

pub(super) fn from_parts(dtype: DType, parts: Vec<(DimId, AxisList)>) -> TensorType {
    let mut ty = TensorType::new(dtype, parts.iter().map(|(d, _)| *d));
    for (split, (_, axes)) in ty.layout.split.iter_mut().zip(parts) {
        *split = axes;
    }
    ty
}

/// The type with `dim`, unsplit, as its last dimension.
pub(super) fn with_last(ty: &TensorType, dim: DimId) -> TensorType {
    with_dim(ty, ty.dims.len(), dim)
}

/// The type with `dim`, unsplit, at a position.
pub(super) fn with_dim(ty: &TensorType, at: usize, dim: DimId) -> TensorType {
    let mut ty = ty.clone();
    ty.dims.insert(at, dim);
    ty.layout.split.insert(at, AxisList::new());
    ty
}

/// The type with dimension `to` in place of `from`, split in the same way.
pub(super) fn renamed(ty: &TensorType, from: DimId, to: DimId) -> Option<TensorType> {
    let i = ty.position(from)?;
    let mut ty = ty.clone();
    ty.dims[i] = to;
    Some(ty)
}
