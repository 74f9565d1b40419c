//! How communicators are made.

use std::ffi::c_int;

use crate::result::Error;
use crate::sys::RawConfig;

use super::int;

/// Whether calls return before they are done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waiting {
    /// They return when they are done.
    #[default]
    Blocking,
    /// They return at once; [`state`](super::Communicator::state) says how they stand.
    NonBlocking,
}

/// What a communicator is made with; what is not given is the library's own choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Whether calls return before they are done.
    pub waiting: Waiting,
    /// The fewest thread blocks of a kernel, and the most.
    pub blocks: Option<(usize, usize)>,
}

impl Config {
    /// As the library reads it.
    ///
    /// # Errors
    /// [`Error::Range`] for numbers beyond its integers, and where the fewest are more than the most.
    pub(super) fn raw(&self) -> Result<RawConfig, Error> {
        let blocking = match self.waiting {
            Waiting::Blocking => 1,
            Waiting::NonBlocking => 0,
        };
        let mut raw = RawConfig { blocking, ..RawConfig::default() };
        if let Some((fewest, most)) = self.blocks {
            if fewest > most {
                return Err(Error::Range { what: "fewest blocks", value: fewest, bound: most + 1 });
            }
            let blocks: [c_int; 2] = [int("blocks", fewest)?, int("blocks", most)?];
            [raw.min_ctas, raw.max_ctas] = blocks;
        }
        Ok(raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_given_is_undefined() {
        let raw = Config::default().raw().unwrap();
        assert_eq!((raw.blocking, raw.min_ctas, raw.size), (1, c_int::MIN, 48));
        let config = Config { waiting: Waiting::NonBlocking, blocks: Some((2, 8)) };
        let raw = config.raw().unwrap();
        assert_eq!((raw.blocking, raw.min_ctas, raw.max_ctas), (0, 2, 8));
        assert!(Config { blocks: Some((9, 8)), ..config }.raw().is_err());
    }
}
