//! The name under which a checkpoint has the tensor of a binding.

use ithaca_ir::ops::{Binding, source};

use crate::store::experts::{FusedForm, alias};
use crate::store::renamed::{MODEL_PREFIXES, variants};
use crate::store::{Checkpoint, StoreError, TensorSource};

/// The binding `of` for a layer, of stored shape `stored`, as this checkpoint has it: under its own name, without or with
/// the prefix of a model with a head, under Mixtral's other name, or in a tensor of all experts.
///
/// # Errors
/// [`StoreError::Missing`] when some members of a stack are there and others are not. `None` when all are missing.
pub(super) fn resolve(
    from: &Checkpoint,
    of: &Binding,
    layer: u64,
    stored: &[u64],
) -> Result<Option<Binding>, StoreError> {
    let name = of.stored_name(layer);
    let mut partly = None;
    for name in
        variants(&name, &MODEL_PREFIXES).flat_map(|v| [alias(&v), Some(v)].into_iter().rev().flatten())
    {
        let members = source::members(&name, stored.first().copied().unwrap_or(1));
        let absent = members.iter().filter(|m| from.shape(m).is_none()).count();
        if absent == 0 {
            return Ok(Some(Binding { name, stored: stored.to_vec(), ..of.clone() }));
        }
        if absent < members.len() {
            partly = partly.or_else(|| members.into_iter().find(|m| from.shape(m).is_none()));
        }
        if let Some(found) = fused(from, of, &name, stored) {
            return Ok(Some(found));
        }
    }
    match partly {
        Some(absent) => Err(from.missing(&absent)),
        None => Ok(None),
    }
}

/// A stack of experts' matrices as a window of one tensor.
fn fused(from: &Checkpoint, of: &Binding, name: &str, stored: &[u64]) -> Option<Binding> {
    let form = FusedForm::of(name).filter(|_| of.is_stack() && of.view.is_empty() && of.window.is_empty())?;
    let &[experts, rows, columns] = stored else { return None };
    let (part, parts) = form.part;
    let whole = vec![experts, parts.checked_mul(rows)?, columns];
    let name = form.names.into_iter().find(|name| from.shape(name).as_ref() == Some(&whole))?;
    let (view, window) = match parts {
        1 => (Vec::new(), Vec::new()),
        _ => (vec![experts, parts, rows, columns], vec![0..experts, part..part + 1, 0..rows, 0..columns]),
    };
    Some(Binding { name, stored: whole, view, window, ..of.clone() })
}
