//! What turns a model into a schedule: passes over modules, and the lowering to tasks.
//!
//! Architecture invariant: nothing here opens a device, a file or a clock of the user's, and nothing prints.

pub mod compile;
pub mod lower;
pub mod pass;
pub mod pipeline;
pub mod rebuild;
pub mod reshard;
pub mod shard;
