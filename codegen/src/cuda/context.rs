//! The state that frames share while they are printed.

use ithaca_device::{Communicator, DeviceProgram};
use ithaca_ir::schedule::Schedule;

/// A schedule, its device program, and the names of functions.
pub(super) struct Context<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) program: &'a DeviceProgram,
    /// For each frame the name of its function.
    pub(super) functions: Vec<String>,
    /// The communicators of streams other than the communication stream.
    pub(super) communicators: &'a [Communicator],
}
