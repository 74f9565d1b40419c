//! What is fused when a plan is made.

use std::fmt;

use ithaca_ir::Diagnostic;
use ithaca_pass::Pass;

use super::levels::{Choose, TwoLevel};
use super::overlap::{MAX_CHUNKS, Overlap};
use super::pack::Pack;
use super::prefetch::{MAX_LAYERS, Prefetch};
use crate::lower::Packing;

/// The passes of fusion that a program goes through, around the choice of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fusion {
    /// Whether axes that span nodes become two before collectives are chosen.
    pub levels: Option<Choose>,
    /// What travels together.
    pub messages: Messages,
    /// Whether weights travel before they are needed and gradients after they are there, and how far.
    pub prefetch: Option<Prefetch>,
    /// Which kernels pack and unpack; an option of lowering, not a pass.
    pub packing: Packing,
}

/// What is done with collectives once they are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Messages {
    /// Every tensor travels by itself, whole.
    #[default]
    Alone,
    /// Independent collectives become one message.
    Packed,
    /// Collectives and the kernels beside them are cut into at most so many chunks, and what is independent of a chunk
    /// becomes one message.
    Chunked(u64),
}

/// How a word of `--fuse` says in which cases axes become two.
const LEVELS: [(&str, Choose); 2] =
    [("two-level", Choose::Always), ("two-level(choose=cheaper)", Choose::Cheaper)];

impl Fusion {
    /// Nothing.
    pub const NONE: Fusion =
        Fusion { levels: None, messages: Messages::Alone, prefetch: None, packing: Packing::Apart };

    /// Independent collectives become one message.
    pub const PACK: Fusion = Fusion { messages: Messages::Packed, ..Fusion::NONE };

    /// Chunks, at most so many, and one message for what is independent of a chunk.
    pub const fn overlap(chunks: u64) -> Fusion {
        Fusion { messages: Messages::Chunked(chunks), ..Fusion::NONE }
    }

    /// The same, and kernels write and read what is on the wire where they can.
    pub const fn folded(self) -> Fusion {
        Fusion { packing: Packing::Folded, ..self }
    }

    /// The same, in two levels.
    pub const fn in_levels(self, choose: Choose) -> Fusion {
        Fusion { levels: Some(choose), ..self }
    }

    /// The same, with weights ahead of their use.
    pub const fn ahead(self, prefetch: Prefetch) -> Fusion {
        Fusion { prefetch: Some(prefetch), ..self }
    }

    /// The choice spelled `text`, words joined by `+`: one of `none`, `pack`, `overlap` and `overlap(chunks=N)`, which is
    /// `pack` where there is none; and `two-level` or `two-level(choose=cheaper)`, `prefetch` or `prefetch(layers=N)`, `fold`.
    ///
    /// # Errors
    /// `P02` for another word or one that is there twice, a number of chunks that is none from 2 to [`MAX_CHUNKS`], or of
    /// layers above [`MAX_LAYERS`].
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        let mut fusion = Fusion::PACK;
        let mut seen = [false; 4];
        for word in text.split('+') {
            let place = if let Some(&(_, choose)) = LEVELS.iter().find(|(known, _)| *known == word) {
                fusion.levels = Some(choose);
                0
            } else if let Some(prefetch) = prefetch_of(word) {
                fusion.prefetch = Some(prefetch);
                1
            } else if word == "fold" {
                fusion.packing = Packing::Folded;
                2
            } else if let Some(messages) = Messages::of(word) {
                fusion.messages = messages;
                3
            } else {
                return Err(unknown(&format!("`{word}` is no choice of fusion")));
            };
            if std::mem::replace(&mut seen[place], true) {
                return Err(unknown(&format!("`{text}` says twice what is done")));
            }
        }
        Ok(fusion)
    }

    /// Its passes before collectives are chosen.
    pub fn before(self) -> Vec<Box<dyn Pass>> {
        let levels = self.levels.map(|choose| Box::new(TwoLevel { choose, ..TwoLevel::default() }) as _);
        levels.into_iter().collect()
    }

    /// Its passes behind the choice of collectives.
    pub fn passes(self) -> Vec<Box<dyn Pass>> {
        let mut passes: Vec<Box<dyn Pass>> = match self.messages {
            Messages::Alone => Vec::new(),
            Messages::Packed => vec![Box::new(Pack::default())],
            Messages::Chunked(chunks) => vec![Box::new(Overlap { chunks }), Box::new(Pack::default())],
        };
        // Whole messages travel ahead.
        passes.extend(self.prefetch.map(|prefetch| Box::new(prefetch) as _));
        passes
    }
}

fn prefetch_of(word: &str) -> Option<Prefetch> {
    if word == "prefetch" {
        return Some(Prefetch::default());
    }
    let layers = word.strip_prefix("prefetch(layers=")?.strip_suffix(')')?.parse().ok()?;
    (layers <= MAX_LAYERS).then_some(Prefetch { layers })
}

fn unknown(message: &str) -> Diagnostic {
    Diagnostic::new("P02", message).help(format!(
        "choices: none, pack, overlap, overlap(chunks=N) with N from 2 to {MAX_CHUNKS}; with `fold+` before them kernels \
         write and read what is on the wire, with `prefetch+` weights are gathered ahead, with `two-level+` axes that \
         span nodes are in two levels"
    ))
}

impl Messages {
    fn of(word: &str) -> Option<Self> {
        match word {
            "none" => Some(Messages::Alone),
            "pack" => Some(Messages::Packed),
            "overlap" => Some(Messages::Chunked(Overlap::default().chunks)),
            _ => {
                let chunks = word.strip_prefix("overlap(chunks=")?.strip_suffix(')')?.parse().ok()?;
                (2..=MAX_CHUNKS).contains(&chunks).then_some(Messages::Chunked(chunks))
            }
        }
    }
}

impl fmt::Display for Fusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fusion { levels, messages, prefetch, packing } = *self;
        for (word, choose) in LEVELS {
            if levels == Some(choose) {
                write!(f, "{word}+")?;
            }
        }
        match prefetch {
            Some(prefetch) if prefetch == Prefetch::default() => f.write_str("prefetch+")?,
            Some(prefetch) => write!(f, "prefetch(layers={})+", prefetch.layers)?,
            None => {}
        }
        match packing {
            Packing::Apart => {}
            Packing::Folded => f.write_str("fold+")?,
        }
        match messages {
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
        for messages in [Messages::Alone, Messages::Packed, Messages::Chunked(2), Messages::Chunked(64)] {
            for levels in [None, Some(Choose::Always), Some(Choose::Cheaper)] {
                for prefetch in [None, Some(Prefetch::default()), Some(Prefetch { layers: 0 })] {
                    for packing in [Packing::Apart, Packing::Folded] {
                        let choice = Fusion { levels, messages, prefetch, packing };
                        assert_eq!(Fusion::parse(&choice.to_string()).unwrap(), choice);
                    }
                }
            }
        }
    }

    #[test]
    fn words_stand_in_any_order_and_once() {
        let all = Fusion::overlap(4).folded().ahead(Prefetch::default()).in_levels(Choose::Always);
        assert_eq!(all.to_string(), "two-level+prefetch+fold+overlap(chunks=4)");
        assert_eq!(Fusion::parse("fold+overlap+two-level+prefetch(layers=1)").unwrap(), all);
        assert_eq!(Fusion::parse("two-level").unwrap(), Fusion::PACK.in_levels(Choose::Always));
        assert_eq!(Fusion::parse("fold").unwrap(), Fusion::PACK.folded());
        assert_eq!(Fusion::parse("none").unwrap(), Fusion::NONE);
        for wrong in [
            "",
            "packed",
            "fold+",
            "fold+fold",
            "pack+none",
            "prefetch+",
            "prefetch(layers=2)",
            "prefetch+prefetch(layers=0)",
            "two-level+two-level(choose=cheaper)",
            "overlap(chunks=1)",
            "overlap(chunks=65)",
            "overlap(4)",
        ] {
            assert_eq!(Fusion::parse(wrong).unwrap_err().code, "P02", "{wrong}");
        }
    }
}
