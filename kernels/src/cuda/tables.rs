//! Lists of numbers that kernels read: uploaded when they are first asked for, once for each content.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::arguments::Address;
use super::device::Device;
use super::error::CudaError;

/// Lists on a device, given back when dropped.
pub(super) struct Tables<'d> {
    device: &'d dyn Device,
    known: RefCell<BTreeMap<Vec<u64>, Address>>,
}

impl<'d> Tables<'d> {
    pub(super) fn new(device: &'d dyn Device) -> Self {
        Self { device, known: RefCell::default() }
    }

    /// Where the device has these reals.
    pub(super) fn reals(&self, numbers: &[f64]) -> Result<Address, CudaError> {
        self.words(numbers.iter().map(|x| x.to_bits()).collect())
    }

    /// Where the device has these integers.
    pub(super) fn integers(&self, numbers: &[i64]) -> Result<Address, CudaError> {
        self.words(numbers.iter().map(|x| x.cast_unsigned()).collect())
    }

    fn words(&self, words: Vec<u64>) -> Result<Address, CudaError> {
        if let Some(&known) = self.known.borrow().get(&words) {
            return Ok(known);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let at = self.device.allocate(bytes.len() as u64)?;
        self.known.borrow_mut().insert(words, at);
        // SAFETY: the memory was just allocated for as many bytes.
        unsafe { self.device.upload(&bytes, at) }?;
        Ok(at)
    }
}

impl Drop for Tables<'_> {
    fn drop(&mut self) {
        for &at in self.known.borrow().values() {
            // SAFETY: it was allocated here; whoever launches kernels that use it waits for them before.
            unsafe { self.device.release(at) };
        }
    }
}
