//! Why something on a device did not work.

use std::time::Duration;

/// Ranks that an error names at most.
const MOST_NAMED: usize = 8;

/// A part of CUDA that is not on this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} not available: {}", part.name(), why.join("; "))]
pub struct Unavailable {
    /// Which part.
    pub part: Part,
    /// What was tried, each with the reason why it did not do.
    pub why: Vec<String>,
}

/// The parts of CUDA that the runtime uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The driver: `libcuda`.
    Driver,
    /// A GPU.
    Gpu,
    /// The compiler of kernels: `libnvrtc`.
    Nvrtc,
    /// Matrix products: `libcublasLt`.
    CublasLt,
    /// Collectives: `libnccl`.
    Nccl,
}

impl Part {
    /// As messages call it, with its verb.
    pub fn name(self) -> &'static str {
        match self {
            Part::Driver => "the CUDA driver is",
            Part::Gpu => "a GPU is",
            Part::Nvrtc => "NVRTC is",
            Part::CublasLt => "cuBLASLt is",
            Part::Nccl => "NCCL is",
        }
    }

    /// What to do about it.
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

/// What went wrong on a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// Something is not on this machine.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// A call failed.
    #[error("{call}: {detail}")]
    Failed {
        /// The function.
        call: &'static str,
        /// Its own words.
        detail: String,
    },
    /// The kernels do not compile.
    #[error("the kernels do not compile: {log}")]
    Compile {
        /// What the compiler says.
        log: String,
    },
    /// A kernel that was not compiled, or with other arguments than its own.
    #[error("kernel `{kernel}`: {why}")]
    Kernel {
        /// Its name.
        kernel: String,
        /// What is wrong.
        why: String,
    },
    /// A stream waits for an event that was not recorded.
    #[error("a stream waits for an event that nothing recorded")]
    Unrecorded,
    /// Something that a device does not do.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// What was issued does not end.
    #[error("it has not ended after {:.1} s{}", waited.as_secs_f64(), beside(.waiting))]
    Late {
        /// How long nothing has gone on.
        waited: Duration,
        /// Other ranks that are at the same.
        waiting: Vec<u64>,
    },
    /// A rank did not come into a communicator.
    #[error("rank {rank} does not come into {what}: {cause}")]
    Absent {
        /// The rank.
        rank: u64,
        /// Which communicator.
        what: String,
        /// Why.
        cause: Box<CudaError>,
    },
    /// A schedule has no device program.
    #[error(transparent)]
    Lower(#[from] ithaca_device::LowerError),
    /// NCCL failed.
    #[error(transparent)]
    Nccl(#[from] nccl_rs::Error),
}

fn beside(waiting: &[u64]) -> String {
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
