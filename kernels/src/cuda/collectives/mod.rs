//! Collectives between the ranks of a run, and their implementations.
//!
//! One thread issues the tasks of all its ranks, so a collective is issued once for all ranks that take part. [`InProcess`]
//! copies and sums on one device, [`Nccl`] has a communicator for each rank.

mod exchange;
mod in_process;
mod launched;
mod nccl;

pub use exchange::{Block, Collective, CollectiveFailure, Collectives, End, Even, Exchange};
pub use in_process::InProcess;
pub(super) use launched::Launched;
pub use nccl::Nccl;
pub use nccl_rs::Library;
