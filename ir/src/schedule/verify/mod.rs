//! Verifies schedules.
use super::Schedule;
use crate::diagnostic::Diagnostics;
/// Checks a schedule.
///
/// # Errors
/// `S` diagnostics.
pub fn verify(_schedule: &Schedule) -> Result<(), Diagnostics> {
    Ok(())
}
