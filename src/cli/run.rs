//! Arguments of `run`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::decoding::DecodingArgs;
use super::subject::SubjectArgs;
use super::values::{positive, tolerance};

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The plan or model.
    #[command(flatten)]
    pub subject: SubjectArgs,
    /// Compare with the outputs in this safetensors file [default: those of the whole program].
    #[arg(long, value_name = "FILE", help_heading = "Comparison")]
    pub expect: Option<PathBuf>,
    /// The largest absolute and relative error against `--expect` that passes [default: 1e-4].
    ///
    /// With `--storage typed` the default is 1e-2 for programs in f16 and 5e-2 in bf16, and the error of an element is
    /// relative to the largest element of its tensor.
    #[arg(
        long,
        value_name = "ERROR",
        allow_hyphen_values = true,
        value_parser = tolerance,
        help_heading = "Comparison"
    )]
    pub tolerance: Option<f64>,
    /// Compare with nothing, to time programs that take too long to check.
    #[arg(long, conflicts_with = "expect", help_heading = "Comparison")]
    pub unchecked: bool,
    /// Write the outputs to this safetensors file.
    #[arg(short, long, value_name = "FILE", help_heading = "Comparison")]
    pub output: Option<PathBuf>,
    /// Training steps, each of which continues from the weights and optimizer states of the step before; in decoding, steps
    /// after the prompt, of a token each.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_hyphen_values = true,
        value_parser = positive,
        help_heading = "Checkpoints"
    )]
    pub steps: u64,
    /// What decoding continues.
    #[command(flatten)]
    pub decoding: DecodingArgs,
    /// Write a checkpoint for further training: a file, or a folder for `model.safetensors`.
    #[arg(long, value_name = "PATH", help_heading = "Checkpoints")]
    pub save: Option<PathBuf>,
    /// Continue training from a checkpoint of `--save`, under this plan or any other.
    #[arg(long, value_name = "PATH", help_heading = "Checkpoints")]
    pub resume: Option<PathBuf>,
    /// The device that runs the schedule.
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu, help_heading = "Device")]
    pub device: DeviceArg,
    /// Storage of values of 16-bit types [default: wide; on a GPU always typed].
    #[arg(long, value_enum, help_heading = "Device")]
    pub storage: Option<StorageArg>,
    /// Implementation of collectives, with `--device cuda` [default: in-process].
    #[arg(long, value_enum, help_heading = "Device")]
    pub collectives: Option<CollectivesArg>,
    /// Capture the step as a CUDA graph and launch that, with `--device cuda`.
    #[arg(long, help_heading = "Device")]
    pub graph: bool,
    /// Run one rank in this process, which a launcher (torchrun, mpirun, srun) started beside the other ranks.
    ///
    /// The processes find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    #[arg(long, help_heading = "Device")]
    pub launch: bool,
    /// Stop the run after a rank has waited this long for another, in seconds; on GPUs, after this long without progress.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        allow_hyphen_values = true,
        value_parser = positive,
        help_heading = "Device"
    )]
    pub timeout: u64,
    /// Print the time of tasks by kind; on a GPU each task is waited for, in a second step.
    #[arg(long, help_heading = "Diagnosis")]
    pub timings: bool,
    /// Write a trace of the run for Chrome and Perfetto: a process per rank, a thread per stream.
    #[arg(long, value_name = "FILE", help_heading = "Diagnosis")]
    pub trace: Option<PathBuf>,
    /// Stop at the first task that writes a NaN, and name it; on GPUs each task is waited for.
    #[arg(long, help_heading = "Diagnosis")]
    pub look_for_nan: bool,
    /// Inject a failure into a task of one rank, to see that the other ranks stop.
    ///
    /// The task has the number that errors and traces show, at the given layer or the first. KIND is error (the
    /// default), panic, or hang, which ends by `--timeout`.
    #[arg(
        long,
        value_name = "RANK:FRAME/TASK[:LAYER][=KIND]",
        allow_hyphen_values = true,
        help_heading = "Diagnosis"
    )]
    pub fault: Option<String>,
}

impl RunArgs {
    /// Storage of values of 16-bit types: the one asked for, or the default of the device.
    pub fn storage(&self) -> StorageArg {
        self.storage.unwrap_or(match self.device {
            // What a type of its own does to caches is to be seen.
            DeviceArg::Cpu if self.subject.workload.cache_type.is_some() => StorageArg::Typed,
            DeviceArg::Cpu => StorageArg::Wide,
            DeviceArg::Cuda => StorageArg::Typed,
        })
    }
}

/// Storage of values of 16-bit types while a plan runs on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StorageArg {
    /// In single precision.
    Wide,
    /// Rounded to their type, as on a GPU.
    Typed,
}

/// The device that runs a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// The processor of this machine, a thread per rank.
    Cpu,
    /// CUDA GPUs, all ranks in one process; with `--launch` a GPU and a process for each rank.
    Cuda,
}

/// Implementation of collectives on CUDA GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CollectivesArg {
    /// Copies and sums between ranks that share the first GPU.
    InProcess,
    /// NCCL, ranks dealt to all GPUs; several on one GPU with NCCL 2.30.3 and NCCL_MULTI_RANK_GPU_ENABLE=1.
    Nccl,
}
