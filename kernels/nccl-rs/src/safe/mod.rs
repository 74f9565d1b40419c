//! The library, unique ids and communicators.
//!
//! Device memory and streams belong to whoever made them, so the collectives, which take both by address, are `unsafe`;
//! everything else is checked here.

mod collectives;
mod communicator;
mod config;
mod library;

pub use communicator::{Communicator, Split, State};
pub use config::{Config, Waiting};
pub use library::{HOME_VARIABLE, LIBRARY_VARIABLE, Library, UniqueId};

use std::ffi::{c_int, c_void};

use crate::result::Error;
use crate::sys::RawStream;

/// An address in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePointer(pub u64);

impl DevicePointer {
    /// The address `bytes` further.
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    fn read(self) -> *const c_void {
        self.write().cast_const()
    }

    fn write(self) -> *mut c_void {
        std::ptr::without_provenance_mut(usize::try_from(self.0).unwrap_or(0))
    }
}

/// A CUDA stream, as its address; zero is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub u64);

impl Stream {
    fn raw(self) -> RawStream {
        std::ptr::without_provenance_mut(usize::try_from(self.0).unwrap_or(0))
    }
}

fn int(what: &'static str, value: usize) -> Result<c_int, Error> {
    let bound = usize::try_from(c_int::MAX).unwrap_or(usize::MAX);
    c_int::try_from(value).map_err(|_| Error::Range { what, value, bound })
}

/// A function that older libraries lack.
fn since<F>(found: Option<F>, call: &'static str, needs: (u32, u32)) -> Result<F, Error> {
    found.ok_or(Error::Missing { call, needs })
}
