//! Fusion: passes that make a sharded or per-rank program cheaper and compute the same.

pub mod saturate;
