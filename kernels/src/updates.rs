//! The weights and states that a run assigned, in their stored form.
//!
//! An update is written by one binding, of one layer. The updates of a stored tensor (windows of a fused one, say) are
//! assembled from the parts of ranks; padding is cut and copies of one element are compared. Elements without an update
//! have their value from before the run.

use std::borrow::Cow;
use std::collections::BTreeMap;

use ithaca_ir::ops::state::gradient_of_sum;
use ithaca_ir::ops::{Binding, source};
use ithaca_ir::{Rank, Space, TensorType};

use crate::assemble::put_together;
use crate::error::RunError;
use crate::positions;
use crate::real::Real;
use crate::store::TensorSource;
use crate::tensor::{Outputs, Tensor, extents, index, read_part, whole, write_part};

/// The values that one binding wrote.
pub(crate) struct Update<'a, T: Clone> {
    pub(crate) binding: &'a Binding,
    pub(crate) ty: &'a TensorType,
    /// The part of each rank, in order of ranks.
    pub(crate) held: Vec<Cow<'a, [T]>>,
}

/// The stored tensors with these updates, by name; `before` has their earlier values. Sums of gradients are not stored:
/// each rank may have its own part of one.
///
/// # Errors
/// [`RunError::ReplicasDiffer`] when two elements that are stored as one differ; [`RunError::Store`].
pub(crate) fn kept<T: Real>(
    space: &Space,
    updates: &BTreeMap<impl AsRef<str> + Ord, Vec<Update<'_, T>>>,
    before: &dyn TensorSource,
) -> Result<Outputs<T>, RunError> {
    let mut kept = Outputs::new();
    for (name, parts) in updates.iter().filter(|(name, _)| gradient_of_sum(name.as_ref()).is_none()) {
        kept.extend(unstack(name.as_ref(), merge(space, name.as_ref(), parts, before)?));
    }
    Ok(kept)
}

/// A stored tensor under its name, the members of a stack under theirs.
fn unstack<T: Copy>(name: &str, tensor: Tensor<T>) -> Vec<(String, Tensor<T>)> {
    let n = tensor.shape.first().copied().unwrap_or(1);
    let names = source::members(name, n as u64);
    if names == [name] {
        return vec![(name.to_owned(), tensor)];
    }
    let shape = tensor.shape[1..].to_vec();
    let size = shape.iter().product::<usize>().max(1);
    let parts = tensor.data.chunks(size).map(|part| Tensor::new(shape.clone(), part.to_vec()));
    names.into_iter().zip(parts).collect()
}

/// The stored tensor `name`, with its `parts`; `before` has its earlier value.
fn merge<T: Real>(
    space: &Space,
    name: &str,
    parts: &[Update<'_, T>],
    before: &dyn TensorSource,
) -> Result<Tensor<T>, RunError> {
    let Some(first) = parts.first() else {
        return Err(RunError::invalid(format!("`{name}` has no updates")));
    };
    let shape = first.binding.stored_shape(space, first.ty);
    let mut stored: Vec<Option<T>> = vec![None; shape.iter().map(|&n| index(n)).product()];
    for Update { binding, ty, held } in parts {
        if binding.stored_shape(space, ty) != shape {
            return Err(RunError::invalid(format!("`{name}` is stored in two shapes")));
        }
        let sizes: Vec<usize> = ty.dims.iter().map(|&d| index(source::stored_size(space, d))).collect();
        let local = |rank: Rank| Ok(Cow::Borrowed(held[index(rank.0)].as_ref()));
        let part = put_together(space, name, ty, &sizes, positions::loaded_from, local)?;
        let seen = if binding.view.is_empty() { &shape } else { &binding.view };
        let window = if binding.window.is_empty() { whole(seen) } else { binding.window.clone() };
        if extents(&window).iter().product::<usize>() != part.len() {
            return Err(RunError::invalid(format!("`{name}` is bound to a type of another size")));
        }
        // Several stages of a pipeline may write the same elements.
        let before = read_part(&whole(seen), &stored, &window);
        let differs = |x: &Option<T>, y: &Option<T>| match (x, y) {
            (Some(x), Some(y)) => x.to_f64().to_bits() != y.to_f64().to_bits(),
            _ => false,
        };
        if let Some(i) = before.iter().zip(&part).position(|(x, y)| differs(x, y)) {
            let number = |x: Option<T>| x.map_or(f64::NAN, |x| x.to_f64());
            let rank = space.mesh.iter_ranks().find(|&rank| space.holds(ty, rank)).map_or(0, |rank| rank.0);
            return Err(RunError::ReplicasDiffer {
                output: name.to_owned(),
                rank,
                at: vec![i as u64],
                found: number(part[i]),
                expected: number(before[i]),
            });
        }
        let merged: Vec<Option<T>> = before.iter().zip(&part).map(|(x, y)| y.or(*x)).collect();
        write_part(&whole(seen), &mut stored, &window, &merged);
    }
    let shape: Vec<usize> = shape.iter().map(|&n| index(n)).collect();
    if stored.iter().any(Option::is_none) {
        let names = source::members(name, shape.first().map_or(1, |&n| n as u64));
        let rest = if names.iter().any(|n| before.shape(n).is_none()) {
            Tensor::filled(shape.clone(), 0.0)
        } else if first.binding.is_stack() {
            let mut data = Vec::new();
            for name in &names {
                data.extend(before.read(name)?.data);
            }
            // Members of other shapes together have another length, and are refused below.
            let whole = data.len() == shape.iter().product::<usize>();
            Tensor { shape: if whole { shape.clone() } else { vec![data.len()] }, data }
        } else {
            before.read(name)?
        };
        if rest.shape != shape {
            return Err(RunError::invalid(format!("`{name}` has another shape than in the program")));
        }
        for (element, &x) in stored.iter_mut().zip(&rest.data) {
            element.get_or_insert(T::from_f64(x));
        }
    }
    let data: Option<Vec<T>> = stored.into_iter().collect();
    let data = data.ok_or_else(|| RunError::invalid(format!("some elements of `{name}` are unknown")))?;
    Ok(Tensor::new(shape, data))
}
