//! Why a checkpoint could not be cut or joined.

use std::path::PathBuf;

use crate::error::RunError;
use crate::store::error::StoreError;

/// Why a checkpoint could not be cut or joined.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// A tensor or a file could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The schedule contradicts itself.
    #[error(transparent)]
    Schedule(#[from] RunError),
    /// The folder for parts is not empty.
    #[error("{} is there and not an empty folder", .0.display())]
    Occupied(PathBuf),
    /// A file is not one of parts, or contradicts itself or the index; or a checkpoint cannot be cut.
    #[error("{} cannot be used: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The defect.
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
