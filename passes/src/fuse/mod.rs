//! Fusion and overlap: cheaper forms of a program, fewer and larger collectives, and collectives that travel while kernels
//! compute.
//!
//! These passes work on sharded or per-rank programs. What functions take and return stays as it is.

pub mod overlap;
pub mod saturate;
