//! The runtime on CUDA devices, and the device code in CUDA C++ that it shares with emitted programs.
//!
//! - [`SOURCES`]: the kernels, plain C++ over grid-stride loops, so that a host compiler runs the very same source.
//! - [`catalogue`]: their names; [`compile`]: NVRTC; [`arguments`]: what they take.
//! - [`device`]: what is asked of a device; [`gpu`], [`host`] and [`recorder`] are devices.
//! - [`Machine`]: executes a schedule on GPUs, [`execute_on`] on any device; [`collectives`] are in process or NCCL's.
//! - [`available`]: what of CUDA this machine has. Without it every entry is a typed [`Unavailable`].
//!
//! A kernel knows local extents and strides only; who computes those is the host side: that of an emitted program, or
//! what is here.

pub mod arguments;

pub mod available;

mod blocks;

pub mod catalogue;

pub mod collectives;

pub mod compile;

pub mod device;

pub mod error;

pub mod execute;

mod flash;

pub mod gpu;

pub mod host;

mod inputs;

mod ops;

mod moments;

mod patience;

mod rank;

pub mod recorder;

mod steps;

mod storage;

mod tables;

mod watch;

pub use arguments::Address;
pub use device::Device;
pub use error::{CudaError, Part, Unavailable};
pub use execute::{By, Issue, Machine, Options, execute_on, kernels_of};
pub use host::{Host, HostKernels};
pub use steps::Clock;

/// The device code, by file name; each includes `numeric.cuh`, and none needs more than the CUDA runtime's headers.
pub const SOURCES: &[(&str, &str)] = &[
    ("numeric.cuh", include_str!("../../cuda/numeric.cuh")),
    ("elementwise.cuh", include_str!("../../cuda/elementwise.cuh")),
    ("copy.cuh", include_str!("../../cuda/copy.cuh")),
    ("norm.cuh", include_str!("../../cuda/norm.cuh")),
    ("rotary.cuh", include_str!("../../cuda/rotary.cuh")),
    ("sequence.cuh", include_str!("../../cuda/sequence.cuh")),
    ("random.cuh", include_str!("../../cuda/random.cuh")),
    ("score.cuh", include_str!("../../cuda/score.cuh")),
    ("attention.cuh", include_str!("../../cuda/attention.cuh")),
    ("attention_backward.cuh", include_str!("../../cuda/attention_backward.cuh")),
    ("tensor_core.cuh", include_str!("../../cuda/tensor_core.cuh")),
    ("tile.cuh", include_str!("../../cuda/tile.cuh")),
    ("mask_tile.cuh", include_str!("../../cuda/mask_tile.cuh")),
    ("flash.cuh", include_str!("../../cuda/flash.cuh")),
    ("flash_backward.cuh", include_str!("../../cuda/flash_backward.cuh")),
    ("partial.cuh", include_str!("../../cuda/partial.cuh")),
    ("experts.cuh", include_str!("../../cuda/experts.cuh")),
    ("einsum.cuh", include_str!("../../cuda/einsum.cuh")),
    ("sum.cuh", include_str!("../../cuda/sum.cuh")),
    ("gradient.cuh", include_str!("../../cuda/gradient.cuh")),
    ("norm_backward.cuh", include_str!("../../cuda/norm_backward.cuh")),
    ("loss.cuh", include_str!("../../cuda/loss.cuh")),
    ("optimizer.cuh", include_str!("../../cuda/optimizer.cuh")),
];
