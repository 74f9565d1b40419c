//! Training steps: gradients and optimizer against the library's, whole and distributed.

mod accounting;
mod dropout;
mod goldens;
mod memory_formulas;
mod pipeline;
mod sharded;
mod steps;
