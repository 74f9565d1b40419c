//! Errors of devices.

use std::time::Duration;

/// The most ranks that an error names.
const MOST_NAMED: usize = 8;

/// A part of CUDA that this machine lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} not available: {}", part.name(), why.join("; "))]
pub struct Unavailable {
    /// The missing part.
    pub part: Part,
    /// The attempts, each with the reason of its failure.
    pub why: Vec<String>,
}

/// The parts of CUDA that the runtime uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The driver: `libcuda`.
    Driver,
    /// A GPU.
    Gpu,
    /// The kernel compiler: `libnvrtc`.
    Nvrtc,
    /// Matrix products: `libcublasLt`.
    CublasLt,
    /// Collectives: `libnccl`.
    Nccl,
}

impl Part {
    /// The part with its verb, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Part::Driver => "the CUDA driver is",
            Part::Gpu => "a GPU is",
            Part::Nvrtc => "NVRTC is",
            Part::CublasLt => "cuBLASLt is",
            Part::Nccl => "NCCL is",
        }
    }

    /// The repair.
    pub fn help(self) -> &'static str {
        match self {
            Part::Driver => "install NVIDIA's driver; its library is libcuda.so.1",
            Part::Gpu => {
                "`nvidia-smi` lists the GPUs that the driver has; CUDA_VISIBLE_DEVICES may hide some"
            }
            Part::Nvrtc | Part::CublasLt => {
                "install the CUDA toolkit 13, or name the directory that has `lib` with CUDA_HOME"
            }
            Part::Nccl => {
                "install NCCL, or name the directory that has `lib` with NCCL_HOME; `--collectives in-process` does \
                 without"
            }
        }
    }
}

/// An error of the CUDA runtime.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A part of CUDA is missing.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// A call failed.
    #[error("{call}: {detail}")]
    Failed {
        /// The function of the library.
        call: &'static str,
        /// The message of the library.
        detail: String,
    },
    /// The kernels do not compile.
    #[error("the kernels do not compile: {log}")]
    Compile {
        /// The log of the compiler.
        log: String,
    },
    /// A kernel was not compiled, or was launched with mismatched arguments.
    #[error("kernel `{kernel}`: {why}")]
    Kernel {
        /// Its name.
        kernel: String,
        /// The reason.
        why: String,
    },
    /// A stream waits for an event that was not recorded.
    #[error("a stream waits for an event that nothing recorded")]
    Unrecorded,
    /// The device does not support an operation.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// Issued work made no progress within the timeout.
    #[error("it has not ended after {:.1} s{}", waited.as_secs_f64(), waiting_ranks(.waiting))]
    Timeout {
        /// The time without progress.
        waited: Duration,
        /// Other ranks that wait at the same task.
        waiting: Vec<u64>,
    },
    /// A rank did not join a communicator.
    #[error("rank {rank} did not join {communicator}: {cause}")]
    NotJoined {
        /// The rank.
        rank: u64,
        /// The communicator, as messages name it.
        communicator: String,
        /// The cause.
        cause: Box<CudaError>,
    },
    /// A schedule has no device program.
    #[error(transparent)]
    Lower(#[from] ithaca_device::LowerError),
    /// NCCL failed.
    #[error(transparent)]
    Nccl(#[from] nccl_rs::Error),
}

fn waiting_ranks(waiting: &[u64]) -> String {
    let named: Vec<String> = waiting.iter().take(MOST_NAMED).map(u64::to_string).collect();
    let more = match waiting.len().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    match named.as_slice() {
        [] => String::new(),
        [one] if more.is_empty() => format!(", with rank {one} waiting"),
        several => format!(", with ranks {}{more} waiting", several.join(", ")),
    }
}

impl From<nccl_rs::Unavailable> for CudaError {
    fn from(missing: nccl_rs::Unavailable) -> Self {
        CudaError::Unavailable(Unavailable { part: Part::Nccl, why: missing.tried })
    }
}
