//! A checkpoint cut for the ranks of a plan, and joined again.
//!
//! A folder has one safetensors file for each rank, with the parts of stored tensors that the rank holds by the plan's
//! layouts, and [`INDEX`], which lists the stored tensors. The metadata of every file names its plan and rank, and for
//! every tensor the elements of the stored tensor that it has ([`Part`]), so that joining needs neither plan nor model.
//! Elements keep their type and bits. Elements that no rank holds (rows that a window leaves out) are in [`REST`], so that
//! the whole can be joined.

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
