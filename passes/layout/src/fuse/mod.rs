//! Fusion and overlap: cheaper forms of a program, fewer and larger collectives, and collectives that travel while kernels
//! compute.
//!
//! These passes work on sharded or per-rank programs. What functions take and return stays as it is. Their rules stand in
//! `RULES.md`.

mod choice;
mod graph;
pub mod levels;
pub mod overlap;
mod pack;
pub mod prefetch;
pub mod saturate;

#[cfg(test)]
mod tests;

pub use choice::{Fusion, Messages};
pub use pack::{Kind, OPTIONS, Pack};
