//! Options of a run.

use std::time::Duration;

use super::fault::Fault;
use crate::storage::Storage;

/// Limits of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most memory for arenas, weights and inputs of all ranks that run in this process together, bytes.
    pub memory_limit: u64,
    /// How long a rank waits for one message; `None` is for ever, which still ends when it waits in vain.
    pub timeout: Option<Duration>,
    /// Whether narrow types round what is written to them.
    pub storage: Storage,
    /// Whether a task that writes NaN is a failure.
    pub look_for_nan: LookForNan,
    /// What is to go wrong.
    pub fault: Option<Fault>,
    /// Whether to write down what ran when.
    pub trace: Trace,
}

/// Where a run looks for what is not a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LookForNan {
    /// Nowhere.
    #[default]
    Nowhere,
    /// In all that tasks write; the first task that writes NaN fails. An infinity is no failure: the lse of a query that
    /// sees no key is minus infinity.
    InWhatIsWritten,
}

/// Whether a run is written down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trace {
    /// It is not.
    #[default]
    None,
    /// Each run of each task, in [`Execution::spans`].
    Spans,
}

impl Default for Options {
    /// 8 GiB, no limit of time, numbers as they were computed; nothing is looked for, goes wrong or is written down.
    fn default() -> Self {
        Self {
            memory_limit: 8 << 30,
            timeout: None,
            storage: Storage::Wide,
            look_for_nan: LookForNan::Nowhere,
            fault: None,
            trace: Trace::None,
        }
    }
}
