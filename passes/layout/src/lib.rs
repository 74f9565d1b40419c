//! Layouts: from a whole program to what one rank runs.
//!
//! Strategies say which mesh axes split which dimensions, `shard` lays a program out by one, movements of attention and
//! reshards become collectives, fusion makes those fewer and cheaper, and lowering turns the per-rank program into a schedule.
//!
//! Architecture invariant: nothing here opens a device, a file or a clock of the user's, and nothing prints.

pub mod compile;
pub mod fuse;
pub mod lower;
pub mod lower_movements;
pub mod movement;
mod parts;
pub mod registry;
pub mod reshard;
pub mod rules;
pub mod shard;
pub mod strategy;
