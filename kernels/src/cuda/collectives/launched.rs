//! Collectives of one of several processes, which end when another process fails.

use ithaca_ir::Rank;

use super::exchange::{Broken, Collectives, Exchange};
use super::nccl::Nccl;
use crate::cuda::error::CudaError;

/// The collectives of one rank, whose others are in processes of their own.
pub(in crate::cuda) struct Launched<'p, 'd> {
    pub(in crate::cuda) rank: Rank,
    pub(in crate::cuda) nccl: Nccl<'d>,
    /// Whether another process is known to have failed.
    pub(in crate::cuda) has_failed: &'p dyn Fn() -> bool,
}

impl Collectives for Launched<'_, '_> {
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), Broken> {
        // SAFETY: the caller vouches for the memory.
        unsafe { self.nccl.exchange(exchange) }
    }

    fn check(&self) -> Result<(), Broken> {
        if (self.has_failed)() {
            let detail = "another process failed".to_owned();
            return Err(Broken { rank: self.rank, error: CudaError::Failed { call: "launch", detail } });
        }
        self.nccl.check()
    }

    fn abort(&self) {
        self.nccl.abort();
    }
}
