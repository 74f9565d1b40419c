//! The library, unique ids and communicators.
//!
//! The collectives take device memory and streams by address. The caller owns both, so the collectives are `unsafe`;
//! everything else is checked here.

mod address;
mod collectives;
mod communicator;
mod library;

pub use address::{DevicePointer, Stream};
pub use collectives::Collective;
pub use communicator::{Communicator, Split, State};
pub use library::{HOME_VARIABLE, LIBRARY_VARIABLE, Library};
