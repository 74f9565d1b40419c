//! Addresses of device memory and of streams.

use std::ffi::c_void;

use crate::sys::RawStream;

/// An address in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePointer(pub u64);

impl DevicePointer {
    /// The address `bytes` further.
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    pub(super) fn read(self) -> *const c_void {
        self.write().cast_const()
    }

    pub(super) fn write(self) -> *mut c_void {
        std::ptr::without_provenance_mut(usize::try_from(self.0).unwrap_or(0))
    }
}

/// A CUDA stream, as its address; zero is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub u64);

impl Stream {
    pub(super) fn raw(self) -> RawStream {
        std::ptr::without_provenance_mut(usize::try_from(self.0).unwrap_or(0))
    }
}
