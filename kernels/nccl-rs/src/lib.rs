//! NCCL, opened at run time: one binary serves a laptop without the library and a cluster with it.
//!
//! - [`sys`]: the types and the table of functions that are loaded.
//! - [`result`]: status codes as errors.
//! - [`safe`]: [`Library`], [`UniqueId`], [`Config`], [`Communicator`]. Where there is no library, opening gives
//!   [`Unavailable`], which says what was tried; nothing here panics.
//!
//! Names and types follow the NCCL user guide, "API", and are compared with `nccl.h` by a test. NCCL 2.10 or newer is
//! enough; what came later is looked up when the library is opened, and a call of what it lacks is
//! [`Error::Missing`], which names the version that has it.
//!
//! A call that goes on in the background, as all calls of non-blocking communicators may, has not failed:
//! [`Communicator::state`] says how it stands, and [`Communicator::wait_ready`] waits for its end, at most as long as it
//! is told to.

pub mod result;
pub mod safe;
pub mod sys;

pub use result::{Error, Status, Unavailable};
pub use safe::{Communicator, Config, DevicePointer, Library, Split, State, Stream, UniqueId, Waiting};
pub use sys::{DataType, Reduction};
