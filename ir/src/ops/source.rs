//! Sources: parameters, inputs, positions.

use std::borrow::Cow;
use std::ops::Range;

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::ops::check::only;
use crate::ops::context::Types;
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::table::op::Op;
use crate::ops::table::source::{Binding, Target};
use crate::order::Run;
use crate::space::Space;
use crate::types::TensorType;

impl Binding {
    /// The binding of a tensor that is stored as its type says.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// The name in the file for a layer.
    pub fn stored_name(&self, layer: u64) -> String {
        self.name.replace(LAYER, &layer.to_string()).replace(NEXT_LAYER, &(layer + 1).to_string())
    }

    /// The same of the layer after that of the call: it may be read, and the other layer writes it.
    #[must_use]
    pub fn of_next_layer(&self) -> Self {
        Self { name: self.name.replace(LAYER, NEXT_LAYER), ..self.clone() }
    }

    /// Whether it is of the layer after that of the call.
    pub fn is_of_next_layer(&self) -> bool {
        self.name.contains(NEXT_LAYER)
    }

    /// How that layer itself binds it, and by how much its layers are further than those of the call.
    pub fn of_own_layer(&self) -> (Cow<'_, Self>, u64) {
        if !self.is_of_next_layer() {
            return (Cow::Borrowed(self), 0);
        }
        (Cow::Owned(Self { name: self.name.replace(NEXT_LAYER, LAYER), ..self.clone() }), 1)
    }

    /// Whether each expert has its own tensor: members of a stack along the first dimension.
    pub fn is_stack(&self) -> bool {
        self.name.contains(EXPERT)
    }

    /// The name with every number in it left open, the layer's too: bindings share a stored name only if these are equal.
    pub(crate) fn name_form(&self) -> String {
        let mut form = String::new();
        for c in self.name.replace(LAYER, "0").replace(NEXT_LAYER, "0").chars() {
            if !c.is_ascii_digit() {
                form.push(c);
            } else if !form.ends_with('0') {
                form.push('0');
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
        self.name.contains(LAYER) || self.is_of_next_layer()
    }

    /// The shape that the file must have, for a source of type `ty`.
    pub fn stored_shape(&self, space: &Space, ty: &TensorType) -> Vec<u64> {
        if self.stored.is_empty() {
            ty.dims.iter().map(|&d| stored_size(space, d)).collect()
        } else {
            self.stored.clone()
        }
    }
}

/// The names of the `n` members of the stack `name`; `name` alone when it is no stack.
pub fn members(name: &str, n: u64) -> Vec<String> {
    if name.contains(EXPERT) {
        (0..n).map(|i| name.replace(EXPERT, &i.to_string())).collect()
    } else {
        vec![name.to_owned()]
    }
}

/// The placeholder of the layer in a name.
const LAYER: &str = "{layer}";

/// The placeholder of the layer after it.
const NEXT_LAYER: &str = "{layer+1}";

/// The placeholder of an expert's index in a name.
const EXPERT: &str = "{expert}";

/// Elements of a dimension that a file holds: padding and copies are not stored.
pub fn stored_size(space: &Space, dim: DimId) -> u64 {
    match space.dims[dim].copies {
        Some(of) => space.dims[of].valid,
        None => space.dims[dim].valid,
    }
}

/// Where a file has the elements `indices` of a dimension, by their numbers among them: runs in order, without padding.
///
/// A dimension that copies another has the elements of that one.
pub fn stored_runs(space: &Space, dim: DimId, indices: Range<u64>) -> Vec<Run> {
    let (size, start) = (stored_size(space, dim), indices.start);
    let own = &space.dims[dim];
    let runs = match own.copies {
        Some(of) => {
            let times = (own.size / space.size(of).max(1)).max(1);
            let run = |i| Run { index: i, position: space.dims[of].position(i / times), len: 1 };
            indices.map(run).collect()
        }
        None => own.order.runs(own.size, indices),
    };
    let stored = |run: Run| Run {
        index: run.index - start,
        len: run.len.min(size.saturating_sub(run.position)),
        ..run
    };
    runs.into_iter().map(stored).filter(|run| run.len > 0).collect()
}

pub(super) fn infer(
    op: &Op,
    binding: &Binding,
    space: &Space,
    declared: &[TensorType],
) -> Result<Types, OpError> {
    let ty = only(op.name(), declared)?;
    let Binding { name, stored, view, window, ahead, fill, host } = binding;
    let has_first = if stored.is_empty() { !ty.dims.is_empty() } else { stored.len() > 1 };
    ensure!(!binding.is_stack() || has_first, "V17", "`{name}` names a stack, which has a first dimension");
    ensure!(!name.is_empty(), "V17", "`{}` has an empty name", op.name());
    let labels = matches!(op, Op::Input(_)) && ty.dtype == DType::I32 && !ty.dims.is_empty();
    if (*ahead != 0 || *fill != 0) && !labels {
        bail!("V17", "`{name}`: only integers of an `input` are read ahead or filled up");
    }
    let is_state = matches!(op, Op::State(_) | Op::Assign { target: Target::State, .. });
    ensure!(!host || is_state, "V17", "`{name}`: only states are in host memory");
    let elements = product(stored.iter().copied());
    if !view.is_empty()
        && (stored.is_empty() || elements.is_none() || elements != product(view.iter().copied()))
    {
        bail!("V17", "the stored shape {stored:?} cannot be seen as {view:?}");
    }
    let seen = if view.is_empty() { stored } else { view };
    if !window.is_empty() {
        let fits = window.len() == seen.len()
            && window.iter().zip(seen).all(|(w, &n)| w.start < w.end && w.end <= n);
        if !fits {
            let shape = if view.is_empty() { "stored shape" } else { "view" };
            bail!("V17", "window {window:?} does not lie in the {shape} {seen:?}");
        }
    }
    if !stored.is_empty() {
        let taken =
            if window.is_empty() { elements } else { product(window.iter().map(|w| w.end - w.start)) };
        let wanted = product(ty.dims.iter().map(|&d| stored_size(space, d)));
        if taken != wanted || taken.is_none() {
            let show = |n: Option<u64>| n.map_or("too many".to_owned(), |n| n.to_string());
            bail!("V17", "`{name}` has {} stored elements, but its type has {}", show(taken), show(wanted));
        }
    }
    Ok(smallvec![ty.clone()])
}

pub(super) fn infer_positions(
    padding: i64,
    space: &Space,
    declared: &[TensorType],
) -> Result<Types, OpError> {
    let ty = only("positions", declared)?;
    if ty.dtype != DType::I32 || ty.dims.len() != 1 {
        bail!("V04", "`positions` is an i32 vector over one sequence dimension");
    }
    ensure!(
        i32::try_from(padding).is_ok(),
        "V04",
        "padding of `positions` is numbered in i32, not {padding}"
    );
    ensure!(space.size(ty.dims[0]) <= 1 << 31, "V04", "`positions` counts at most 2^31 tokens");
    Ok(smallvec![ty.clone()])
}

fn product(sizes: impl Iterator<Item = u64>) -> Option<u64> {
    sizes.into_iter().try_fold(1u64, u64::checked_mul)
}
