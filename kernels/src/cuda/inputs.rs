//! Uploads weights and inputs to the devices of ranks.

use ithaca_ir::DType;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::schedule::integers::{self, Integers, Meaning};

use super::rank::LocalRank;
use super::storage;
use crate::cpu::memory::{SourcePlan, SourceTensor};
use crate::error::RunError;
use crate::source;
use crate::store::TensorSource;
use crate::tensor::index;

/// Uploads the shards of every rank.
///
/// # Errors
/// The sources'; a token or label that is out of range.
pub(super) fn load(
    schedule: &Schedule,
    plan: &SourcePlan<'_>,
    locals: &[LocalRank<'_>],
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
) -> Result<(), RunError> {
    let space = &schedule.space;
    let allowed = integers::of_inputs(schedule);
    for (number, tensor) in plan.tensors().iter().enumerate() {
        let parts = || locals.iter().filter_map(|local| tensor.part_of[index(local.rank.0)]);
        if parts().next().is_none() {
            continue;
        }
        let stored = tensor.load(space, weights, inputs)?;
        for (part, region) in
            tensor.regions.iter().enumerate().filter(|(part, _)| parts().any(|p| p == *part))
        {
            let cut = source::cut(space, &tensor.ty, region, (tensor.binding, &stored), |x| x);
            if let Some(&integers) = allowed.get(&tensor.binding.name) {
                check(schedule, tensor, integers, &cut.data)?;
            }
            let bytes = storage::write(tensor.ty.dtype, &cut.data);
            for local in locals.iter().filter(|local| tensor.part_of[index(local.rank.0)] == Some(part)) {
                let Some(at) = local.sources[number] else { continue };
                // SAFETY: the rank allocated memory for this part, and no work runs yet.
                unsafe { local.device.upload(&bytes, at) }?;
            }
        }
    }
    Ok(())
}

/// Checks that the stored `data` of an input is in the range of `integers`.
fn check(
    schedule: &Schedule,
    tensor: &SourceTensor<'_>,
    integers: Integers,
    data: &[f64],
) -> Result<(), RunError> {
    if tensor.ty.dtype != DType::I32 {
        return Ok(());
    }
    let ignored = integers.ignored().map(|ignored| ignored as f64);
    let inside = |x: f64| {
        (x >= 0.0 && x < integers.below as f64) || ignored == Some(x) || x == tensor.binding.fill as f64
    };
    let Some(&value) = data.iter().find(|&&x| !inside(x)) else { return Ok(()) };
    let (value, dim) = (value as i32, schedule.space.dims[integers.dim].name.clone());
    Err(match integers.meaning {
        Meaning::Rows => RunError::TokenOutOfRange { value, rows: integers.below, dim },
        Meaning::Labels(_) => {
            RunError::LabelOutOfRange { value, labels: integers.below, dim, at: Vec::new() }
        }
    })
}
