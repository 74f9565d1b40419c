//! Fusion and overlap: fewer, larger collectives, and collectives that travel while kernels compute.
//!
//! These passes work on per-rank programs. They change no number and no layout of what functions take and return.

pub mod overlap;
