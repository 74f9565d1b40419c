//! Addresses in a device's memory, and the arguments of a launch.

use std::ffi::c_void;

/// An address in a device's memory; zero is the null address.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address(pub(crate) u64);

impl Address {
    /// The null address.
    pub const NONE: Address = Address(0);

    /// The address `bytes` further.
    pub fn offset(self, bytes: u64) -> Self {
        Address(self.0.wrapping_add(bytes))
    }

    /// The number.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// The arguments of a launch, in order of the kernel's parameters.
#[derive(Debug, Default)]
pub struct Arguments {
    values: Vec<(Box<[u64]>, usize)>,
}

impl Arguments {
    /// Adds an argument by its bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_ne_bytes(word)
        };
        self.values.push((bytes.chunks(8).map(word).collect(), bytes.len()));
    }

    /// A pointer to each value, aligned to eight bytes and valid while the arguments live.
    pub fn pointers(&mut self) -> Vec<*mut c_void> {
        self.values.iter_mut().map(|(memory, _)| memory.as_mut_ptr().cast()).collect()
    }

    /// The size of each value in bytes.
    pub fn sizes(&self) -> Vec<usize> {
        self.values.iter().map(|(_, size)| *size).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_lead_to_the_arguments() {
        let mut arguments = Arguments::default();
        arguments.push(&3_i32.to_ne_bytes());
        arguments.push(&7_i64.to_ne_bytes());
        assert_eq!(arguments.sizes(), [4, 8]);
        let pointers = arguments.pointers();
        // SAFETY: the second value is an i64, and the arguments live.
        assert_eq!(unsafe { *pointers[1].cast::<i64>() }, 7);
    }
}
