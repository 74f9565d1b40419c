//! Text form of schedules.

use super::Schedule;
use crate::diagnostic::Diagnostics;

/// The text form.
pub fn print(schedule: &Schedule) -> String {
    format!("{schedule:#?}")
}

/// Reads the text form.
///
/// # Errors
/// `E` diagnostics.
pub fn parse(_text: &str) -> Result<Schedule, Diagnostics> {
    Err(Vec::new())
}
