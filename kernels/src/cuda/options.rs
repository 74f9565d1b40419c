//! How a schedule runs on devices.

use std::time::Duration;

use crate::cpu::{Fault, LookForNan};

/// Who does collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// Copies and sums on one GPU that has all ranks.
    #[default]
    InProcess,
    /// NCCL, ranks dealt to the GPUs in turn.
    Nccl,
}

/// How a step's tasks are issued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Issue {
    /// One by one.
    #[default]
    Tasks,
    /// One by one, then once more into a graph, which is run from the same weights and inputs.
    Graph,
}

/// Whether tasks are timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// They are not: nothing waits but where the schedule says so.
    #[default]
    Off,
    /// Each is waited for before the next is issued, so that nothing runs beside it.
    EachTask,
    /// As they run, by events of their streams.
    Streams,
}

/// How a schedule runs on a device.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Whether tasks are timed.
    pub clock: Clock,
    /// Whether a graph is made of the step.
    pub issue: Issue,
    /// How long ranks wait without anything going on, when communicators are made and when a step runs; `None` is for ever.
    pub timeout: Option<Duration>,
    /// What is to go wrong.
    pub fault: Option<Fault>,
    /// Whether a task that writes NaN is a failure; if so, each is waited for. The step of a graph was looked at before.
    pub look_for_nan: LookForNan,
}
