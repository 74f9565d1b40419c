//! How close a distributed program comes to the whole one: on virtual ranks in double precision, and as a schedule.

use ithaca_ir::{Diagnostics, Module, schedule, text, traffic, verify};
use ithaca_kernels::store::TensorSource;
use ithaca_kernels::{Outputs, Real, cpu, oracle};
use ithaca_passes::lower::lower;

/// What double precision leaves of the order of summation, relative to the largest element.
const EXACT: f64 = 1e-9;

/// What single precision leaves of scores of some size, relative to the largest element.
const SINGLE: f64 = 2e-3;

/// Whether `found` is what was expected up to double precision; infinities must stand where they are expected.
///
/// # Errors
/// The first element that is not, in words.
pub(super) fn exact<A: Real, B: Real>(found: &Outputs<A>, expected: &Outputs<B>) -> Result<(), String> {
    within(found, expected, EXACT)
}

fn within<A: Real, B: Real>(found: &Outputs<A>, expected: &Outputs<B>, tolerance: f64) -> Result<(), String> {
    for (name, expected) in expected {
        let Some(found) = found.get(name) else { return Err(format!("output `{name}` is missing")) };
        if found.shape != expected.shape {
            return Err(format!("`{name}` has shape {:?}, not {:?}", found.shape, expected.shape));
        }
        let finite = expected.data.iter().map(|x| x.to_f64().abs()).filter(|x| x.is_finite());
        let size = finite.fold(1e-2, f64::max);
        for (i, (a, b)) in found.data.iter().zip(&expected.data).enumerate() {
            let (a, b) = (a.to_f64(), b.to_f64());
            let near = if b.is_finite() { (a - b).abs() <= tolerance * size } else { a == b };
            if !near {
                return Err(format!("`{name}` has {a} at {i} of {:?}, not {b}", found.shape));
            }
        }
    }
    Ok(())
}

/// Whether the per-rank program computes what was expected on virtual ranks.
///
/// # Errors
/// What fails, or differs, in words.
pub(super) fn on_ranks(
    per_rank: &Module,
    tensors: &dyn TensorSource,
    expected: &Outputs<f64>,
) -> Result<(), String> {
    on_these(per_rank, tensors, tensors, expected)
}

/// As [`on_ranks`], with weights and inputs from different places.
///
/// # Errors
/// As [`on_ranks`].
pub(super) fn on_these(
    per_rank: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    expected: &Outputs<f64>,
) -> Result<(), String> {
    let found = oracle::run_ranks::<f64>(per_rank, weights, inputs).map_err(|e| e.to_string())?;
    exact(&found, expected)
}

/// Whether its schedule passes the checks, reads as it prints, computes the same on the runtime, and sends what the
/// program says.
///
/// # Errors
/// What fails, or differs, in words.
pub(super) fn as_schedule(
    per_rank: &Module,
    tensors: &dyn TensorSource,
    expected: &Outputs<f64>,
) -> Result<(), String> {
    let said = |d: Diagnostics| format!("{}: {}", d[0].code, d[0].message);
    let printed = text::print(per_rank);
    if text::parse(&printed).map_err(said)? != *per_rank {
        return Err(format!("reads otherwise than it was printed:\n{printed}"));
    }
    let lowered = lower(verify::verify(per_rank).map_err(said)?).map_err(said)?;
    schedule::verify(&lowered).map_err(said)?;
    let printed = schedule::print(&lowered);
    match schedule::parse(&printed) {
        Ok(parsed) if parsed == lowered => {}
        Ok(_) => return Err("reads otherwise than it was printed".to_owned()),
        Err(d) => return Err(said(d)),
    }
    let run =
        cpu::execute(&lowered, tensors, tensors, &cpu::Options::default()).map_err(|e| e.to_string())?;
    within(&run.outputs, expected, SINGLE)?;
    let promised = traffic::of_module(per_rank);
    if run.traffic == promised {
        Ok(())
    } else {
        Err(format!("sent {:?}, promised {promised:?}", run.traffic))
    }
}
