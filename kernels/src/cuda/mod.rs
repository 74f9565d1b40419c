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
pub use ithaca_device::{SOURCES, catalogue};
pub use steps::Clock;
