//! What turns a model into a schedule: passes over modules, the lowering to tasks, and the planner that chooses.
//!
//! Architecture invariant: nothing here opens a device, a file or a clock of the user's, and nothing prints.

pub mod cluster;
pub mod codes;
pub mod compile;
pub mod cost;
pub mod differentiate;
pub mod fuse;
pub mod import;
pub mod lower;
pub mod memory;
pub mod movement;
pub mod options;
mod parts;
pub mod pass;
pub mod pipeline;
pub mod plan;
pub mod planner;
pub mod rebuild;
pub mod registry;
pub mod reshard;
pub mod rules;
pub mod shard;
pub mod simulate;
