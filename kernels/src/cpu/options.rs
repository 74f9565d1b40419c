//! Options of a run.

use std::time::Duration;

use super::fault::Fault;
use crate::storage::Storage;

/// Limits of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most memory for arenas, weights and inputs of all ranks that run in this process together, bytes.
    pub memory_limit: u64,
    /// How long a rank waits for one message; `None` is without limit; a wait that cannot end is still an error.
    pub timeout: Option<Duration>,
    /// Whether values of narrow types are rounded when they are written.
    pub storage: Storage,
    /// Whether a task that writes NaN is a failure.
    pub look_for_nan: LookForNan,
    /// A fault to inject.
    pub fault: Option<Fault>,
    /// Whether to record the times of tasks.
    pub trace: Trace,
}

/// Whether a run checks for NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LookForNan {
    /// It does not.
    #[default]
    Off,
    /// It checks all writes of tasks; the first task that writes NaN fails. An infinity is valid: the lse of a query that
    /// sees no key is minus infinity.
    Writes,
}

/// Whether a run records the times of its tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trace {
    /// It does not.
    #[default]
    None,
    /// Each run of each task, in [`Execution::spans`](super::execution::Execution::spans).
    Spans,
}

impl Default for Options {
    /// 8 GiB, no timeout, no rounding, no checks, no fault and no trace.
    fn default() -> Self {
        Self {
            memory_limit: 8 << 30,
            timeout: None,
            storage: Storage::Wide,
            look_for_nan: LookForNan::Off,
            fault: None,
            trace: Trace::None,
        }
    }
}
