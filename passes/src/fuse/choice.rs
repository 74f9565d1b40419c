//! What is fused when a plan is made.

use std::fmt;

use ithaca_ir::Diagnostic;

use super::fold::Fold;
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
    /// As it says, perhaps in two levels, and kernels write and read what is on the wire where they can.
    Fold(Option<Choose>, Messages),
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
    /// The choice spelled `text`: `none`, `pack`, `overlap` or `overlap(chunks=N)`, alone or behind `fold+`, all of it behind
    /// `two-level+` or `two-level(choose=cheaper)+`.
    ///
    /// # Errors
    /// `P02` for another word, or a number of chunks that is none from 2 to [`MAX_CHUNKS`].
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        let folded = |text: &str| {
            let rest = text.strip_prefix("fold")?;
            if rest.is_empty() {
                Some(Ok(Messages::Packed))
            } else {
                rest.strip_prefix('+').map(Messages::parse)
            }
        };
        for (levels, choose) in LEVELS {
            if text == levels {
                return Ok(Fusion::TwoLevel(choose, Messages::Packed));
            }
            if let Some(rest) = text.strip_prefix(levels).and_then(|rest| rest.strip_prefix('+')) {
                return match folded(rest) {
                    Some(messages) => messages.map(|messages| Fusion::Fold(Some(choose), messages)),
                    None => Messages::parse(rest).map(|messages| Fusion::TwoLevel(choose, messages)),
                };
            }
        }
        if let Some(messages) = folded(text) {
            return messages.map(|messages| Fusion::Fold(None, messages));
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
            Fusion::TwoLevel(_, messages) | Fusion::Fold(_, messages) => messages,
        }
    }

    fn levels(self) -> Option<Choose> {
        match self {
            Fusion::None | Fusion::Pack | Fusion::Overlap(_) => None,
            Fusion::TwoLevel(choose, _) => Some(choose),
            Fusion::Fold(levels, _) => levels,
        }
    }

    /// Its passes before collectives are chosen.
    pub fn before(self) -> Vec<Box<dyn Pass>> {
        match self.levels() {
            None => Vec::new(),
            Some(choose) => vec![Box::new(TwoLevel { choose, ..TwoLevel::default() })],
        }
    }

    /// Its passes behind the choice of collectives.
    pub fn passes(self) -> Vec<Box<dyn Pass>> {
        let mut passes: Vec<Box<dyn Pass>> = match self.messages() {
            Messages::Alone => Vec::new(),
            Messages::Packed => vec![Box::new(Pack::default())],
            Messages::Chunked(chunks) => vec![Box::new(Overlap { chunks }), Box::new(Pack::default())],
        };
        if matches!(self, Fusion::Fold(..)) {
            passes.push(Box::new(Fold));
        }
        passes
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
                "choices: none, pack, overlap, overlap(chunks=N) with N from 2 to {MAX_CHUNKS}; `fold+` before them \
                 lets kernels write and read what is on the wire, `two-level+` before all puts axes that span nodes in \
                 two levels"
            ))),
        }
    }
}

impl fmt::Display for Fusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(choose) = self.levels() {
            let found = LEVELS.iter().find(|(_, known)| *known == choose);
            write!(f, "{}+", found.map_or("", |(text, _)| text))?;
        }
        if matches!(self, Fusion::Fold(..)) {
            f.write_str("fold+")?;
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
        let folded = Fusion::Fold(None, Messages::Chunked(2));
        let both = Fusion::Fold(Some(Choose::Always), Messages::Packed);
        for choice in [
            Fusion::None,
            Fusion::Pack,
            Fusion::Overlap(2),
            Fusion::Overlap(64),
            forced,
            priced,
            folded,
            both,
        ] {
            assert_eq!(Fusion::parse(&choice.to_string()).unwrap(), choice);
        }
        assert_eq!(Fusion::parse("fold").unwrap(), Fusion::Fold(None, Messages::Packed));
        assert_eq!(Fusion::parse("overlap").unwrap(), Fusion::Overlap(4));
        assert_eq!(Fusion::parse("two-level").unwrap(), forced);
        for wrong in [
            "",
            "packed",
            "two-level+",
            "two-level+two-level",
            "fold+fold",
            "fold+two-level",
            "overlap(chunks=1)",
            "overlap(chunks=65)",
            "overlap(4)",
        ] {
            assert_eq!(Fusion::parse(wrong).unwrap_err().code, "P02", "{wrong}");
        }
    }
}
