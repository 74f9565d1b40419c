//! The data that all tasks of a run share.

use std::sync::Mutex;
use std::time::Instant;

use ithaca_ir::schedule::{Schedule, Streams};
use ithaca_ir::traffic::Ledger;

use super::communicator::Communicator;
use super::memory::{ArenaShape, Sources};
use super::options::Options;

/// The schedule, its memory and the communicator, for one rank.
#[derive(Clone, Copy)]
pub(super) struct RunContext<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) shape: &'a ArenaShape,
    pub(super) sources: &'a Sources,
    pub(super) communicator: &'a dyn Communicator,
    pub(super) ledger: &'a Mutex<Ledger>,
    pub(super) options: &'a Options,
    /// For each frame the streams that it and its callees use.
    pub(super) used: &'a [Streams],
    /// When the ranks began.
    pub(super) begun: Instant,
}
