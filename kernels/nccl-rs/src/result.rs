//! Status codes as errors.

use std::ffi::c_int;
use std::time::Duration;

/// A status other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// A CUDA call failed.
    UnhandledCudaError,
    /// A system call failed.
    SystemError,
    /// An internal check failed.
    InternalError,
    /// An argument has an invalid value.
    InvalidArgument,
    /// The calls are in the wrong order, or ranks disagree.
    InvalidUsage,
    /// A remote rank failed, or the network did.
    RemoteError,
    /// The operation is still in progress in the background.
    InProgress,
    /// It took longer than the library allows.
    Timeout,
    /// A code that this crate does not know.
    Unknown(c_int),
}

impl Status {
    /// The error of a status code; `None` for success.
    pub fn of(code: c_int) -> Option<Status> {
        Some(match code {
            0 => return None,
            1 => Status::UnhandledCudaError,
            2 => Status::SystemError,
            3 => Status::InternalError,
            4 => Status::InvalidArgument,
            5 => Status::InvalidUsage,
            6 => Status::RemoteError,
            7 => Status::InProgress,
            8 => Status::Timeout,
            other => Status::Unknown(other),
        })
    }

    /// The name in NCCL's header.
    pub fn name(self) -> &'static str {
        match self {
            Status::UnhandledCudaError => "ncclUnhandledCudaError",
            Status::SystemError => "ncclSystemError",
            Status::InternalError => "ncclInternalError",
            Status::InvalidArgument => "ncclInvalidArgument",
            Status::InvalidUsage => "ncclInvalidUsage",
            Status::RemoteError => "ncclRemoteError",
            Status::InProgress => "ncclInProgress",
            Status::Timeout => "ncclTimeout",
            Status::Unknown(_) => "unknown status",
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
    /// A communicator did not become ready in time.
    #[error("{call} is not ready after {} ms", waited.as_millis())]
    NotReady {
        /// The object that was waited for.
        call: &'static str,
        /// How long.
        waited: Duration,
    },
}
