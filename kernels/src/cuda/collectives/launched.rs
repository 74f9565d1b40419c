//! Collectives of one process of several, which fail when another process fails.

use ithaca_ir::Rank;

use super::exchange::{CollectiveFailure, Collectives, Exchange};
use super::nccl::Nccl;
use crate::cuda::error::CudaError;

/// The collectives of one rank whose peers are other processes.
pub(in crate::cuda) struct Launched<'p, 'd> {
    pub(in crate::cuda) rank: Rank,
    pub(in crate::cuda) nccl: Nccl<'d>,
    /// Whether another process is known to have failed.
    pub(in crate::cuda) has_failed: &'p dyn Fn() -> bool,
}

impl Collectives for Launched<'_, '_> {
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), CollectiveFailure> {
        // SAFETY: the caller guarantees the memory.
        unsafe { self.nccl.exchange(exchange) }
    }

    fn check(&self) -> Result<(), CollectiveFailure> {
        if (self.has_failed)() {
            let detail = "another process failed".to_owned();
            return Err(CollectiveFailure {
                rank: self.rank,
                error: CudaError::Failed { call: "launch", detail },
            });
        }
        self.nccl.check()
    }

    fn abort(&self) {
        self.nccl.abort();
    }
}
