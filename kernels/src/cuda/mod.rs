//! The runtime on CUDA devices.
//!
//! - [`ithaca_device`]: the kernels, and the device program of a schedule, which the runtime executes.
//! - [`compile`]: NVRTC. [`device`]: the interface of a device; [`gpu`] and [`host`] are devices.
//! - [`Machine`]: executes a schedule on GPUs, [`execute_on`] on any device; [`collectives`] are in process or NCCL's.
//! - [`available`]: detects the CUDA libraries. Without them every entry point returns a typed [`Unavailable`].

pub mod arguments;

pub mod available;

mod cache;

pub mod collectives;

pub mod compile;

pub mod device;

pub mod error;

pub mod execute;

pub mod gpu;

pub mod host;

mod inputs;

mod timestamps;

mod options;

mod deadline;

mod rank;

mod steps;

mod storage;

mod watch;

pub use arguments::Address;
pub use device::Device;
pub use error::{CudaError, Part, Unavailable};
pub use execute::{Machine, execute_on, kernels_of};
pub use host::{Host, HostKernels};
pub use ithaca_device::{SOURCES, catalogue};
pub use options::{Backend, Clock, Issue, Options};
