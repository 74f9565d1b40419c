//! The name under which a checkpoint has the tensor of a binding.

use ithaca_ir::ops::{Binding, source};

use crate::store::microscaled::blocks_of;
use crate::store::renamed::{Candidate, MODEL_PREFIXES, candidates};
use crate::store::scaled::scales_of;
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
    let mut partly = None;
    for Candidate { name, window } in candidates(&of.stored_name(layer), &MODEL_PREFIXES) {
        if let Some((_, part)) = window {
            if let Some(found) = fused(from, of, name, part, stored) {
                return Ok(Some(found));
            }
            continue;
        }
        let members = source::members(&name, stored.first().copied().unwrap_or(1));
        let is_absent = |member: &&String| from.shape(member).is_none();
        match members.iter().filter(is_absent).count() {
            0 if members.iter().any(|member| from.shape(&scales_of(member)).is_some()) => {
                return Err(StoreError::Scaled { store: from.description(), name });
            }
            _ if from.shape(&blocks_of(&name)).is_some() => {
                return Err(StoreError::Scaled { store: from.description(), name });
            }
            0 => return Ok(Some(Binding { name, stored: stored.to_vec(), ..of.clone() })),
            absent if absent < members.len() => {
                partly = partly.or_else(|| members.iter().find(is_absent).cloned());
            }
            _ => {}
        }
    }
    match partly {
        Some(absent) => Err(from.missing(&absent)),
        None => Ok(None),
    }
}

/// A stack of experts' matrices as a window of the tensor `name` of all experts.
fn fused(
    from: &Checkpoint,
    of: &Binding,
    name: String,
    (part, parts): (u64, u64),
    stored: &[u64],
) -> Option<Binding> {
    let &[experts, rows, columns] = stored else { return None };
    let whole = vec![experts, parts.checked_mul(rows)?, columns];
    let is_plain_stack = of.is_stack() && of.view.is_empty() && of.window.is_empty();
    if !is_plain_stack || from.shape(&name).as_ref() != Some(&whole) {
        return None;
    }
    let (view, window) = match parts {
        1 => (Vec::new(), Vec::new()),
        _ => (vec![experts, parts, rows, columns], vec![0..experts, part..part + 1, 0..rows, 0..columns]),
    };
    Some(Binding { name, stored: whole, view, window, ..of.clone() })
}
