//! Artifacts from verified schedules and modules: CUDA/NCCL programs, JSON, pictures.
//!
//! Everything here is text made from data: no file is written, no tool is looked for, and the same schedule always
//! gives the same bytes.
//!
//! Architecture invariant: this crate depends on `ir` alone; device code reaches it as text.

pub mod codes;
pub mod cuda;
pub mod dot;
pub mod json;
pub mod mermaid;
pub mod svg;
pub mod trace;
