//! What is fused when a plan is made.

use std::fmt;

use ithaca_ir::Diagnostic;

use super::overlap::{MAX_CHUNKS, Overlap};
use super::pack::Pack;
use crate::pass::Pass;

/// The passes of fusion that a program goes through, behind the choice of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fusion {
    /// None: every tensor travels by itself, whole.
    #[default]
    None,
    /// Independent collectives become one message.
    Pack,
    /// Collectives and the kernels beside them are cut into at most so many chunks, and what is independent of a chunk
    /// becomes one message.
    Overlap(u64),
}

impl Fusion {
    /// The choice spelled `text`: `none`, `pack`, `overlap` or `overlap(chunks=N)`.
    ///
    /// # Errors
    /// `P02` for another word, or a number of chunks that is none from 2 to [`MAX_CHUNKS`].
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        let chunks = |n: &str| n.parse().ok().filter(|n| (2..=MAX_CHUNKS).contains(n));
        let given = text.strip_prefix("overlap(chunks=").and_then(|rest| rest.strip_suffix(')'));
        match (text, given.and_then(chunks)) {
            ("none", _) => Ok(Fusion::None),
            ("pack", _) => Ok(Fusion::Pack),
            ("overlap", _) => Ok(Fusion::Overlap(Overlap::default().chunks)),
            (_, Some(chunks)) => Ok(Fusion::Overlap(chunks)),
            _ => Err(Diagnostic::new("P02", format!("`{text}` is no choice of fusion")).help(format!(
                "choices: none, pack, overlap, overlap(chunks=N) with N from 2 to {MAX_CHUNKS}"
            ))),
        }
    }

    /// Its passes.
    pub fn passes(self) -> Vec<Box<dyn Pass>> {
        match self {
            Fusion::None => Vec::new(),
            Fusion::Pack => vec![Box::new(Pack::default())],
            Fusion::Overlap(chunks) => vec![Box::new(Overlap { chunks }), Box::new(Pack::default())],
        }
    }
}

impl fmt::Display for Fusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fusion::None => f.write_str("none"),
            Fusion::Pack => f.write_str("pack"),
            Fusion::Overlap(chunks) => write!(f, "overlap(chunks={chunks})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_read_as_they_print() {
        for choice in [Fusion::None, Fusion::Pack, Fusion::Overlap(2), Fusion::Overlap(64)] {
            assert_eq!(Fusion::parse(&choice.to_string()).unwrap(), choice);
        }
        assert_eq!(Fusion::parse("overlap").unwrap(), Fusion::Overlap(4));
        for wrong in ["", "packed", "overlap(chunks=1)", "overlap(chunks=65)", "overlap(4)"] {
            assert_eq!(Fusion::parse(wrong).unwrap_err().code, "P02", "{wrong}");
        }
    }
}
