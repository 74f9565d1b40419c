//! Device programs: the launches, matrix products, copies and transfers that a schedule becomes on GPUs.
//!
//! A schedule says which operation runs on which buffers. A [`DeviceProgram`] says which kernel is launched with which
//! arguments, for all ranks at once: addresses are symbolic ([`Address`]), and a number that differs from rank to rank is a
//! function of the rank's mesh coordinates ([`Int`]). The runtime executes a device program, and `emit` prints it.
//!
//! - [`SOURCES`]: the kernels, plain CUDA C++, which a host compiler compiles as well.
//! - [`catalogue`]: their names. [`flash`]: the attention kernels on tensor cores. [`argument`]: the arguments' layouts.
//! - [`program`], [`record`], [`value`]: the device program.

pub mod address;
pub mod argument;
pub mod catalogue;
pub mod error;
mod few_slots;
pub mod flash;
pub mod lower;
mod merge;
mod ops;
pub mod program;
pub mod record;
mod sources;
mod split;
pub mod structs;
mod threads;
pub mod value;

pub use address::{Address, Region};
pub use argument::{Arg, ArgType, Scalar, Word};
pub use error::LowerError;
pub use lower::{Checks, Options, lower};
pub use program::{
    Call, Check, DeviceProgram, Frame, Operand, Output, ResidentDim, ResidentTensor, Source, SourceFile,
    Step, Table, Wait, Work,
};
pub use record::{
    Activation, Block, Collective, Communicator, Even, Form, Grid, Launch, Matrix, Members, Product, Record,
    Transfer,
};
pub use sources::SOURCES;
pub use value::{Choice, Coordinates, Int, Varying};
