//! A checkpoint cut for the ranks of a plan, and joined again.
//!
//! A folder has one safetensors file for each rank, with the parts of stored tensors that the rank holds by the plan's
//! layouts, and [`INDEX`], which says what they are parts of. Every file says of itself which plan and rank it is of, and
//! of every tensor which elements of which stored one it has ([`Part`]), so that joining needs neither plan nor model.
//! Elements keep their type and their bits. What the plan takes of no tensor that it takes some of (rows that a window
//! leaves out) lies in [`REST`], so that the whole can be joined all the same.

mod cut;
mod join;
mod manifest;
mod part;
mod resolve;

use std::path::PathBuf;

pub use cut::{Cut, cut};
pub use join::{Joined, join};
pub use manifest::{INDEX, Identity, REST, rank_file};
pub use part::{Part, Run};

use super::StoreError;
use crate::error::RunError;

/// Why a checkpoint could not be cut or joined.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// A tensor or a file could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The schedule contradicts itself.
    #[error(transparent)]
    Schedule(#[from] RunError),
    /// The folder for parts has something in it.
    #[error("{} is there and not an empty folder", .0.display())]
    Occupied(PathBuf),
    /// A file is not one of parts, or contradicts itself or the index; or a checkpoint cannot be cut.
    #[error("{} cannot be used: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A file of another plan than the index.
    #[error("{} belongs to the plan {found}, but the index to {expected}", path.display())]
    OtherPlan {
        /// The file.
        path: PathBuf,
        /// Its plan's digest.
        found: String,
        /// The index's.
        expected: String,
    },
    /// Two parts have different bits for one element.
    #[error("{} has other bits at {at:?} of `{name}` than a part before it", path.display())]
    Conflict {
        /// The later file.
        path: PathBuf,
        /// The stored tensor.
        name: String,
        /// The element.
        at: Vec<u64>,
    },
    /// Elements that no part has.
    #[error("no part has {missing} of the {elements} elements of `{name}`, the first at {at:?}")]
    Missing {
        /// The stored tensor.
        name: String,
        /// How many.
        missing: u64,
        /// Of how many.
        elements: u64,
        /// The first.
        at: Vec<u64>,
    },
}

/// The position of the `i`-th element of a tensor, row-major.
fn unravel(shape: &[u64], mut i: u64) -> Vec<u64> {
    let mut at: Vec<u64> = shape
        .iter()
        .rev()
        .map(|&n| {
            let here = i % n.max(1);
            i /= n.max(1);
            here
        })
        .collect();
    at.reverse();
    at
}
