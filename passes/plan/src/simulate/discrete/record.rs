//! The records of a simulation.

/// Whether the runs of tasks are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Times only.
    Times,
    /// Every run of every task on the first rank of each class; of more than 64 classes, on some of them.
    Spans,
}
