//! How a schedule runs on devices.

use std::time::Duration;

use crate::cpu::{Fault, LookForNan};

/// The implementation of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// Copies and sums on one GPU that runs all ranks.
    #[default]
    InProcess,
    /// NCCL; ranks are dealt to the GPUs in turn.
    Nccl,
}

/// How a step's tasks are issued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Issue {
    /// One by one.
    #[default]
    Tasks,
    /// One by one, then again into a graph, which runs from the same weights and inputs.
    Graph,
}

/// Whether tasks are timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// Tasks are not timed and only wait where the schedule does.
    #[default]
    Off,
    /// Each task ends before the next is issued, so that tasks do not overlap.
    EachTask,
    /// Tasks are timed by events of their streams, without extra waits.
    Streams,
}

/// How a schedule runs on a device.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Whether tasks are timed.
    pub clock: Clock,
    /// How tasks are issued.
    pub issue: Issue,
    /// The longest wait without progress while communicators are made and while a step runs; `None` waits for ever.
    pub timeout: Option<Duration>,
    /// A fault to inject.
    pub fault: Option<Fault>,
    /// Whether a task that writes NaN fails; each task then ends before the next is issued. Graphs are not checked: the
    /// same step was checked before.
    pub look_for_nan: LookForNan,
}
