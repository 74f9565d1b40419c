//! What a simulation writes down.

/// Whether what ran when is written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Times only.
    Times,
    /// Every run of every task on the first rank of each class; of more than 64 classes, on some of them.
    Spans,
}
