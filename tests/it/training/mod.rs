//! Training steps: gradients and optimizer against the library's, whole and distributed.

mod accounting;
mod goldens;
mod pipeline;
pub(crate) mod sharded;
mod steps;
