//! Sources: parameters, inputs, positions.

use std::ops::Range;

use smallvec::smallvec;

use crate::ops::{Op, OpError, Types};
use crate::space::Space;
use crate::types::TensorType;

/// Where a source's elements lie in a file of tensors.
///
/// The stored tensor is seen as `view`, cut to `window` and read in row-major order as the dimensions of the type, at
/// their valid sizes; a dimension that copies another reads that one and repeats. So `q_proj.weight` stored
/// `[4096, 4096]` is bound to `[h d m]`, one third of a fused `c_attn.weight` is a window, and where queries, keys and
/// values alternate head by head, one of them is a window of the view `[h, 3, d, m]`.
///
/// A name with `{expert}` is that of many tensors, one for each index of the first stored dimension; `stored`, `view` and
/// `window` speak of their stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Binding {
    /// The name of the stored tensor; `{layer}` stands for the layer of the call, `{expert}` for the index of an expert.
    pub name: String,
    /// The stored shape; empty when it is that of the type.
    pub stored: Vec<u64>,
    /// The shape as which the stored elements are seen, row-major as they are; empty when it is `stored`.
    pub view: Vec<u64>,
    /// The range of each dimension of the view that is taken; empty when all is.
    pub window: Vec<Range<u64>>,
    /// An index of the last dimension of the type reads what is stored so many places further on, as labels do that are the
    /// tokens themselves.
    pub ahead: u64,
    /// What is read in padding, and beyond the end.
    pub fill: i64,
}

impl Binding {
    /// The binding of a tensor that is stored as its type says.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// The name in the file for a layer.
    pub fn stored_name(&self, layer: u64) -> String {
        self.name.replace(LAYER, &layer.to_string())
    }

    /// Whether each expert has its own tensor: members of a stack along the first dimension.
    pub fn is_stack(&self) -> bool {
        self.name.contains(EXPERT)
    }

    /// The name with every number in it left open, the layer's too: bindings share a stored name only if these are equal.
    pub(crate) fn name_form(&self) -> String {
        let mut form = String::new();
        for c in self.name.replace(LAYER, "0").chars() {
            match c.is_ascii_digit() {
                true if form.ends_with('0') => {}
                true => form.push('0'),
                false => form.push(c),
            }
        }
        form
    }

    /// The names in the file for a layer, of which a stack of `n` has as many.
    pub fn stored_names(&self, layer: u64, n: u64) -> Vec<String> {
        members(&self.stored_name(layer), n)
    }

    /// Whether each layer has its own tensor.
    pub fn is_per_layer(&self) -> bool {
        self.name.contains(LAYER)
    }

    /// The shape that the file must have, for a source of type `ty`.
    pub fn stored_shape(&self, space: &Space, ty: &TensorType) -> Vec<u64> {
        match self.stored.is_empty() {
            true => ty.dims.iter().map(|&d| stored_size(space, d)).collect(),
            false => self.stored.clone(),
        }
    }
}

/// The names of the `n` members of the stack `name`; `name` alone when it is no stack.
pub fn members(name: &str, n: u64) -> Vec<String> {
    match name.contains(EXPERT) {
        true => (0..n).map(|i| name.replace(EXPERT, &i.to_string())).collect(),
        false => vec![name.to_owned()],
    }
}

/// What stands for the layer in a name.
const LAYER: &str = "{layer}";

/// What stands for the index of an expert in a name.
const EXPERT: &str = "{expert}";

/// Elements of a dimension that a file holds: padding and copies are not stored.
pub fn stored_size(space: &Space, dim: crate::DimId) -> u64 {
    match space.dims[dim].copies {
        Some(of) => space.dims[of].valid,
        None => space.dims[dim].valid,
    }
}

pub(super) fn infer(
    op: &Op,
    binding: &Binding,
    space: &Space,
    declared: &[TensorType],
) -> Result<Types, OpError> {
    let ty = only(op.name(), declared)?;
    let Binding { name, stored, view, window, ahead, fill } = binding;
    let has_first = if stored.is_empty() { !ty.dims.is_empty() } else { stored.len() > 1 };
    if binding.is_stack() && !has_first {
        return Err(OpError::new("V17", format!("`{name}` names a stack, which has a first dimension")));
    }
    if name.is_empty() {
        return Err(OpError::new("V17", format!("`{}` has an empty name", op.name())));
    }
    let labels = matches!(op, Op::Input(_)) && ty.dtype == crate::DType::I32 && !ty.dims.is_empty();
    if (*ahead != 0 || *fill != 0) && !labels {
        return Err(OpError::new(
            "V17",
            format!("`{name}`: only integers of an `input` are read ahead or filled up"),
        ));
    }
    let elements = product(stored.iter().copied());
    if !view.is_empty()
        && (stored.is_empty() || elements.is_none() || elements != product(view.iter().copied()))
    {
        return Err(OpError::new("V17", format!("the stored shape {stored:?} cannot be seen as {view:?}")));
    }
    let seen = if view.is_empty() { stored } else { view };
    if !window.is_empty() {
        let fits = window.len() == seen.len()
            && window.iter().zip(seen).all(|(w, &n)| w.start < w.end && w.end <= n);
        if !fits {
            let what = if view.is_empty() { "stored shape" } else { "view" };
            return Err(OpError::new(
                "V17",
                format!("window {window:?} does not lie in the {what} {seen:?}"),
            ));
        }
    }
    if !stored.is_empty() {
        let taken = match window.is_empty() {
            true => elements,
            false => product(window.iter().map(|w| w.end - w.start)),
        };
        let wanted = product(ty.dims.iter().map(|&d| stored_size(space, d)));
        if taken != wanted || taken.is_none() {
            let show = |n: Option<u64>| n.map_or("too many".to_owned(), |n| n.to_string());
            return Err(OpError::new(
                "V17",
                format!("`{name}` has {} stored elements, but its type has {}", show(taken), show(wanted)),
            ));
        }
    }
    Ok(smallvec![ty.clone()])
}

pub(super) fn infer_positions(space: &Space, declared: &[TensorType]) -> Result<Types, OpError> {
    let ty = only("positions", declared)?;
    if ty.dtype != crate::DType::I32 || ty.dims.len() != 1 {
        return Err(OpError::new("V04", "`positions` is an i32 vector over one sequence dimension"));
    }
    if space.size(ty.dims[0]) > 1 << 31 {
        return Err(OpError::new("V04", "`positions` counts at most 2^31 tokens"));
    }
    Ok(smallvec![ty.clone()])
}

pub(super) fn only<'a>(name: &str, declared: &'a [TensorType]) -> Result<&'a TensorType, OpError> {
    match declared {
        [ty] => Ok(ty),
        _ => Err(OpError::new("V03", format!("`{name}` has one result, not {}", declared.len()))),
    }
}

fn product(sizes: impl Iterator<Item = u64>) -> Option<u64> {
    sizes.into_iter().try_fold(1u64, u64::checked_mul)
}
