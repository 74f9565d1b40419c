//! Training steps: gradients and optimizer against the library's, whole and distributed.

mod accounting;
mod activations;
mod bubbles;
mod dropout;
mod memory_formulas;
mod pipeline;
pub(crate) mod sharded;
mod steps;
