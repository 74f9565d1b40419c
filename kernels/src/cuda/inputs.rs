//! Weights and inputs, as ranks hold them on their devices.

use std::collections::BTreeMap;

use ithaca_ir::ops::{Gradient, Loss};
use ithaca_ir::schedule::{Place, Schedule, Work};
use ithaca_ir::{DType, DimId, Op};

use super::rank::Seat;
use super::storage;
use crate::cpu::memory::{Planned, SourcePlan};
use crate::error::RunError;
use crate::source;
use crate::store::TensorSource;
use crate::tensor::index;

/// What integers of an input may be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// Rows of a table.
    Rows(DimId),
    /// Labels, or this number.
    Labels(DimId, i64),
}

/// Uploads every rank's parts.
///
/// # Errors
/// What the sources refuse; an input that is looked up or is a label, and lies outside.
pub(super) fn load(
    schedule: &Schedule,
    plan: &SourcePlan<'_>,
    seats: &[Seat<'_>],
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
) -> Result<(), RunError> {
    let space = &schedule.space;
    let meanings = meanings(schedule);
    for (number, tensor) in plan.tensors().iter().enumerate() {
        let stored = tensor.load(space, weights, inputs)?;
        for (part, region) in tensor.regions.iter().enumerate() {
            let cut = source::cut(space, &tensor.ty, region, (tensor.binding, &stored), |x| x);
            if let Some(&meaning) = meanings.get(&tensor.binding.name) {
                check(schedule, tensor, meaning, &cut.data)?;
            }
            let bytes = storage::write(tensor.ty.dtype, cut.data.into_iter());
            for seat in seats.iter().filter(|seat| tensor.part_of[index(seat.rank.0)] == Some(part)) {
                let Some(at) = seat.sources[number] else { continue };
                // SAFETY: the seat has room for the part there, and nothing runs yet.
                unsafe { seat.device.upload(&bytes, at) }?;
            }
        }
    }
    Ok(())
}

/// The inputs whose integers mean something to a task that reads them.
fn meanings(schedule: &Schedule) -> BTreeMap<String, Meaning> {
    let mut meanings = BTreeMap::new();
    for frame in schedule.frames.values() {
        for task in &frame.tasks {
            let Work::Compute(op) = &task.work else { continue };
            let (operand, meaning) = match op {
                Op::Embed { over, .. } => (1, Meaning::Rows(*over)),
                Op::Loss(Loss::CrossEntropy { over, ignore } | Loss::Pick { over, ignore })
                | Op::Gradient(Gradient::CrossEntropy { over, ignore }) => {
                    (1, Meaning::Labels(*over, *ignore))
                }
                _ => continue,
            };
            let buffer = task.reads.get(operand).and_then(|&b| frame.buffers.get(b));
            if let Some(Place::Input(binding)) = buffer.map(|b| &b.place) {
                meanings.insert(binding.name.clone(), meaning);
            }
        }
    }
    meanings
}

fn check(schedule: &Schedule, tensor: &Planned<'_>, meaning: Meaning, data: &[f64]) -> Result<(), RunError> {
    if tensor.ty.dtype != DType::I32 {
        return Ok(());
    }
    let space = &schedule.space;
    let (dim, ignored) = match meaning {
        Meaning::Rows(dim) => (dim, None),
        Meaning::Labels(dim, ignored) => (dim, Some(ignored as f64)),
    };
    // A vocabulary that is a part of another counts by that one's.
    let valid = space.dims[dim].valid;
    let inside =
        |x: f64| (x >= 0.0 && x < valid as f64) || ignored == Some(x) || x == tensor.binding.fill as f64;
    let Some(&value) = data.iter().find(|&&x| !inside(x)) else { return Ok(()) };
    let (value, dim) = (value as i32, space.dims[dim].name.clone());
    Err(match meaning {
        Meaning::Rows(_) => RunError::TokenOutOfRange { value, rows: valid, dim },
        Meaning::Labels(..) => RunError::LabelOutOfRange { value, labels: valid, dim, at: Vec::new() },
    })
}
