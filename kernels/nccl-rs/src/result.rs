//! Status codes as errors.

use std::ffi::c_int;

/// A status code other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(c_int);

impl Status {
    /// A remote rank failed, or the network did.
    pub const REMOTE_ERROR: Self = Self(6);
    /// The operation is still in progress in the background.
    pub const IN_PROGRESS: Self = Self(7);

    /// The error of a status code; `None` for success.
    pub fn of(code: c_int) -> Option<Status> {
        (code != 0).then_some(Self(code))
    }

    /// The name in NCCL's header.
    pub fn name(self) -> &'static str {
        match self.0 {
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            8 => "ncclTimeout",
            _ => "unknown status",
        }
    }
}

/// No NCCL on this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NCCL is not available: {}", tried.join("; "))]
pub struct Unavailable {
    /// The names that were tried, each with the reason of its failure.
    pub tried: Vec<String>,
}

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// NCCL refused or failed.
    #[error("{call}: {} ({detail})", status.name())]
    Failed {
        /// The function.
        call: &'static str,
        /// Why.
        status: Status,
        /// NCCL's own words.
        detail: String,
    },
    /// An argument that NCCL's types cannot hold, or a rank that does not exist.
    #[error("{what} {value} is out of range: it must be below {bound}")]
    Range {
        /// The argument.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The exclusive upper bound.
        bound: usize,
    },
    /// A function that the library is too old to have.
    #[error("{call} needs NCCL {}.{} or newer", needs.0, needs.1)]
    Missing {
        /// The function.
        call: &'static str,
        /// Major and minor of the first version that has it.
        needs: (u32, u32),
    },
    /// A communicator that is still in progress.
    #[error("{call} is not ready")]
    NotReady {
        /// The object.
        call: &'static str,
    },
}

impl Error {
    /// The error of a call that failed in the background.
    pub fn background(status: Status) -> Self {
        let detail = "found in the background".to_owned();
        Error::Failed { call: "ncclCommGetAsyncError", status, detail }
    }
}
