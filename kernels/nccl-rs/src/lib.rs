//! NCCL, opened at run time: one binary serves a laptop without the library and a cluster with it.
//!
//! - [`sys`]: the types and the table of functions that are loaded.
//! - [`result`]: status codes as errors.
//! - [`safe`]: [`Library`], [`UniqueId`], [`Communicator`], [`Collective`]. Without a library, opening returns
//!   [`Unavailable`] with the names that were tried; nothing here panics.
//!
//! Names and types follow the NCCL user guide, "API", and are compared with `nccl.h` by a test. The library opens from
//! NCCL 2.10; later functions are looked up when it is opened, and a call of a missing one is [`Error::Missing`], which
//! names the version that has it. Communicators need 2.14.
//!
//! Communicators do not block. A call that is still in progress has not failed: [`Communicator::state`] returns its
//! state, which the caller polls.

pub mod result;
pub mod safe;
pub mod sys;

pub use result::{Error, Status, Unavailable};
pub use safe::{Collective, Communicator, DevicePointer, Library, Split, State, Stream};
pub use sys::{DataType, UniqueId};
