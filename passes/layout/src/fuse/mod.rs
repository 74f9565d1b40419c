//! Fusion and overlap: cheaper forms of a program, fewer and larger collectives, and collectives that overlap with
//! kernels.
//!
//! These passes work on sharded or per-rank programs and keep the parameters and results of functions. `RULES.md`
//! states their rules.

mod accumulate;
mod appends;
mod caches;
mod choice;
mod graph;
pub mod levels;
pub mod overlap;
mod pack;
mod pages;
pub mod prefetch;
mod replace;
pub mod saturate;

#[cfg(test)]
mod tests;

pub use accumulate::Accumulate;
pub use caches::FuseCaches;
pub use choice::{Fusion, MAX_BUCKET, Messages};
pub use pack::{Kind, OPTIONS, Pack};
