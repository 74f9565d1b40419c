//! A checkpoint cut for the ranks of a plan, and joined again.
//!
//! A folder has one safetensors file for each rank, with the parts of stored tensors that the rank holds by the plan's
//! layouts, and [`INDEX`], which says what they are parts of. Every file says of itself which plan and rank it is of, and
//! of every tensor which elements of which stored one it has ([`Part`]), so that joining needs neither plan nor model.
//! Elements keep their type and their bits. What the plan takes of no tensor that it takes some of (rows that a window
//! leaves out) lies in [`REST`], so that the whole can be joined all the same.

mod cut;
mod error;
mod join;
mod manifest;
mod part;
mod resolve;

pub use cut::{Cut, cut};
pub use error::ShardError;
pub use join::{Joined, join};
pub use manifest::{INDEX, Identity, REST, rank_file};
pub use part::{Part, Run};
