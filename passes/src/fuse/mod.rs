//! Fusion: passes over per-rank programs that change how collectives travel and when, never what they compute.
//!
//! The rules of each pass stand in `RULES.md`.

mod graph;
mod pack;

#[cfg(test)]
mod tests;

pub use pack::{Kind, OPTIONS, Pack};
