//! NCCL, opened at run time: one binary serves a laptop without the library and a cluster with it.
//!
//! - [`sys`]: the types and the table of functions that are loaded.
//! - [`result`]: status codes as errors.
//! - [`safe`]: [`Library`], [`UniqueId`], [`Communicator`]. Where there is no library, opening gives [`Unavailable`],
//!   which says what was tried; nothing here panics.
//!
//! Names and types follow the NCCL user guide, "API"; the functions used are stable since NCCL 2.10.

pub mod result;
pub mod safe;
pub mod sys;

pub use result::{Error, Status, Unavailable};
pub use safe::{Communicator, DevicePointer, Library, Stream, UniqueId};
pub use sys::{DataType, Reduction};
