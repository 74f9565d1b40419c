//! Collectives between the ranks of a run: the transfers of a device program, and who does them.
//!
//! One thread issues the tasks of all its ranks, task by task, so that a collective is asked for once, for all ranks that
//! take part: [`InProcess`] copies and sums on one device, [`Nccl`] has a communicator for each rank.

mod exchange;
mod in_process;
mod launched;
mod nccl;

pub use exchange::{Block, Broken, Collective, Collectives, End, Even, Exchange};
pub use in_process::InProcess;
pub(super) use launched::Launched;
pub use nccl::Nccl;
pub use nccl_rs::Library;
