//! What is fused when a plan is made.

use std::fmt;

use ithaca_ir::Diagnostic;

use super::levels::{Choose, TwoLevel};
use super::overlap::{MAX_CHUNKS, Overlap};
use super::pack::Pack;
use crate::pass::Pass;

/// The passes of fusion that a program goes through, around the choice of collectives.
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
    /// Axes that span nodes become two before collectives are chosen; then messages as they say.
    TwoLevel(Choose, Messages),
}

/// What is done with collectives once they are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Messages {
    /// As [`Fusion::None`].
    Alone,
    /// As [`Fusion::Pack`].
    Packed,
    /// As [`Fusion::Overlap`].
    Chunked(u64),
}

/// In front of what else is fused, the choice of levels.
const LEVELS: [(&str, Choose); 2] =
    [("two-level", Choose::Always), ("two-level(choose=cheaper)", Choose::Cheaper)];

impl Fusion {
    /// The choice spelled `text`: `none`, `pack`, `overlap` or `overlap(chunks=N)`, alone or behind `two-level+` or
    /// `two-level(choose=cheaper)+`.
    ///
    /// # Errors
    /// `P02` for another word, or a number of chunks that is none from 2 to [`MAX_CHUNKS`].
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        for (levels, choose) in LEVELS {
            if text == levels {
                return Ok(Fusion::TwoLevel(choose, Messages::Packed));
            }
            if let Some(rest) = text.strip_prefix(levels).and_then(|rest| rest.strip_prefix('+')) {
                return Messages::parse(rest).map(|messages| Fusion::TwoLevel(choose, messages));
            }
        }
        Messages::parse(text).map(|messages| match messages {
            Messages::Alone => Fusion::None,
            Messages::Packed => Fusion::Pack,
            Messages::Chunked(chunks) => Fusion::Overlap(chunks),
        })
    }

    fn messages(self) -> Messages {
        match self {
            Fusion::None => Messages::Alone,
            Fusion::Pack => Messages::Packed,
            Fusion::Overlap(chunks) => Messages::Chunked(chunks),
            Fusion::TwoLevel(_, messages) => messages,
        }
    }

    /// Its passes before collectives are chosen.
    pub fn before(self) -> Vec<Box<dyn Pass>> {
        match self {
            Fusion::None | Fusion::Pack | Fusion::Overlap(_) => Vec::new(),
            Fusion::TwoLevel(choose, _) => vec![Box::new(TwoLevel { choose, ..TwoLevel::default() })],
        }
    }

    /// Its passes behind the choice of collectives.
    pub fn passes(self) -> Vec<Box<dyn Pass>> {
        match self.messages() {
            Messages::Alone => Vec::new(),
            Messages::Packed => vec![Box::new(Pack::default())],
            Messages::Chunked(chunks) => vec![Box::new(Overlap { chunks }), Box::new(Pack::default())],
        }
    }
}

impl Messages {
    fn parse(text: &str) -> Result<Self, Diagnostic> {
        let chunks = |n: &str| n.parse().ok().filter(|n| (2..=MAX_CHUNKS).contains(n));
        let given = text.strip_prefix("overlap(chunks=").and_then(|rest| rest.strip_suffix(')'));
        match (text, given.and_then(chunks)) {
            ("none", _) => Ok(Messages::Alone),
            ("pack", _) => Ok(Messages::Packed),
            ("overlap", _) => Ok(Messages::Chunked(Overlap::default().chunks)),
            (_, Some(chunks)) => Ok(Messages::Chunked(chunks)),
            _ => Err(Diagnostic::new("P02", format!("`{text}` is no choice of fusion")).help(format!(
                "choices: none, pack, overlap, overlap(chunks=N) with N from 2 to {MAX_CHUNKS}; `two-level+` before \
                 them puts axes that span nodes in two levels"
            ))),
        }
    }
}

impl fmt::Display for Fusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Fusion::TwoLevel(choose, _) = self {
            let found = LEVELS.iter().find(|(_, known)| known == choose);
            write!(f, "{}+", found.map_or("", |(text, _)| text))?;
        }
        match self.messages() {
            Messages::Alone => f.write_str("none"),
            Messages::Packed => f.write_str("pack"),
            Messages::Chunked(chunks) => write!(f, "overlap(chunks={chunks})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_read_as_they_print() {
        let forced = Fusion::TwoLevel(Choose::Always, Messages::Packed);
        let priced = Fusion::TwoLevel(Choose::Cheaper, Messages::Chunked(2));
        for choice in [Fusion::None, Fusion::Pack, Fusion::Overlap(2), Fusion::Overlap(64), forced, priced] {
            assert_eq!(Fusion::parse(&choice.to_string()).unwrap(), choice);
        }
        assert_eq!(Fusion::parse("overlap").unwrap(), Fusion::Overlap(4));
        assert_eq!(Fusion::parse("two-level").unwrap(), forced);
        for wrong in [
            "",
            "packed",
            "two-level+",
            "two-level+two-level",
            "overlap(chunks=1)",
            "overlap(chunks=65)",
            "overlap(4)",
        ] {
            assert_eq!(Fusion::parse(wrong).unwrap_err().code, "P02", "{wrong}");
        }
    }
}
