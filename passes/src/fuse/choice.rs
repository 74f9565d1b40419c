//! What is fused when a plan is made.

use std::fmt;

use ithaca_ir::Diagnostic;

use super::levels::{Choose, TwoLevel};
use super::overlap::{MAX_CHUNKS, Overlap};
use super::pack::Pack;
use super::prefetch::{MAX_LAYERS, Prefetch};
use crate::pass::Pass;
use crate::shard::Zero;

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
    /// Messages, of which those of weights travel before they are needed.
    Prefetch {
        /// How far ahead.
        prefetch: Prefetch,
        /// Whether axes that span nodes become two before.
        levels: Option<Choose>,
        /// What the messages are.
        messages: Messages,
    },
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
    /// What is done unless asked otherwise: messages, and weights that ZeRO splits ahead of their use.
    pub fn usual(zero: Zero) -> Self {
        match zero {
            Zero::Off | Zero::Optimizer | Zero::Gradients => Fusion::Pack,
            Zero::Parameters => {
                Fusion::Prefetch { prefetch: Prefetch::default(), levels: None, messages: Messages::Packed }
            }
        }
    }

    /// The choice spelled `text`: `none`, `pack`, `overlap` or `overlap(chunks=N)`, alone or behind `prefetch+` or
    /// `prefetch(layers=N)+`, and these behind `two-level+` or `two-level(choose=cheaper)+`.
    ///
    /// # Errors
    /// `P02` for another word, a number of chunks that is none from 2 to [`MAX_CHUNKS`], or of layers above
    /// [`MAX_LAYERS`].
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        let found = LEVELS.iter().find_map(|&(known, choose)| Some((choose, behind(text, known)?)));
        let (levels, rest) = found.map_or((None, Some(text)), |(choose, rest)| (Some(choose), rest));
        let (prefetch, rest) = match rest.map(|rest| (rest, Self::parse_prefetch(rest))) {
            Some((_, Some((prefetch, rest)))) => (Some(prefetch), rest),
            Some((rest, None)) => (None, Some(rest)),
            None => (None, None),
        };
        // Nothing behind a `two-level` or `prefetch` means what is done unless asked otherwise.
        let messages = rest.map_or(Ok(Messages::Packed), Messages::parse)?;
        Ok(match (prefetch, levels) {
            (Some(prefetch), levels) => Fusion::Prefetch { prefetch, levels, messages },
            (None, Some(choose)) => Fusion::TwoLevel(choose, messages),
            (None, None) => match messages {
                Messages::Alone => Fusion::None,
                Messages::Packed => Fusion::Pack,
                Messages::Chunked(chunks) => Fusion::Overlap(chunks),
            },
        })
    }

    /// A `prefetch` in front of `text`, and what stands behind its `+`.
    fn parse_prefetch(text: &str) -> Option<(Prefetch, Option<&str>)> {
        let each = (0..=MAX_LAYERS).map(|layers| (Prefetch { layers }, format!("prefetch(layers={layers})")));
        let mut spelled = each.chain([(Prefetch::default(), "prefetch".to_owned())]);
        spelled.find_map(|(prefetch, known)| Some((prefetch, behind(text, &known)?)))
    }

    fn messages(self) -> Messages {
        match self {
            Fusion::None => Messages::Alone,
            Fusion::Pack => Messages::Packed,
            Fusion::Overlap(chunks) => Messages::Chunked(chunks),
            Fusion::TwoLevel(_, messages) | Fusion::Prefetch { messages, .. } => messages,
        }
    }

    fn levels(self) -> Option<Choose> {
        match self {
            Fusion::None | Fusion::Pack | Fusion::Overlap(_) => None,
            Fusion::TwoLevel(choose, _) => Some(choose),
            Fusion::Prefetch { levels, .. } => levels,
        }
    }

    fn prefetch(self) -> Option<Prefetch> {
        match self {
            Fusion::None | Fusion::Pack | Fusion::Overlap(_) | Fusion::TwoLevel(..) => None,
            Fusion::Prefetch { prefetch, .. } => Some(prefetch),
        }
    }

    /// Its passes before collectives are chosen.
    pub fn before(self) -> Vec<Box<dyn Pass>> {
        self.levels()
            .map(|choose| Box::new(TwoLevel { choose, ..TwoLevel::default() }) as _)
            .into_iter()
            .collect()
    }

    /// Its passes behind the choice of collectives.
    pub fn passes(self) -> Vec<Box<dyn Pass>> {
        let mut passes: Vec<Box<dyn Pass>> = match self.messages() {
            Messages::Alone => Vec::new(),
            Messages::Packed => vec![Box::new(Pack::default())],
            Messages::Chunked(chunks) => vec![Box::new(Overlap { chunks }), Box::new(Pack::default())],
        };
        // Whole messages travel ahead.
        passes.extend(self.prefetch().map(|prefetch| Box::new(prefetch) as _));
        passes
    }
}

/// What stands behind `known` and a `+` in `text`, or nothing where nothing does; none where `text` begins otherwise.
fn behind<'a>(text: &'a str, known: &str) -> Option<Option<&'a str>> {
    let rest = text.strip_prefix(known)?;
    match rest {
        "" => Some(None),
        _ => rest.strip_prefix('+').map(Some),
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
                "choices: none, pack, overlap, overlap(chunks=N) with N from 2 to {MAX_CHUNKS}; `prefetch+` before them \
                 gathers weights ahead, `two-level+` before all puts axes that span nodes in two levels"
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
        match self.prefetch() {
            Some(prefetch) if prefetch == Prefetch::default() => f.write_str("prefetch+")?,
            Some(prefetch) => write!(f, "prefetch(layers={})+", prefetch.layers)?,
            None => {}
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
        let ahead =
            |layers, levels, messages| Fusion::Prefetch { prefetch: Prefetch { layers }, levels, messages };
        let plain = ahead(1, None, Messages::Packed);
        let within = ahead(0, None, Messages::Chunked(4));
        let both = ahead(1, Some(Choose::Cheaper), Messages::Alone);
        let known = [Fusion::None, Fusion::Pack, Fusion::Overlap(2), Fusion::Overlap(64), forced, priced];
        for choice in known.into_iter().chain([plain, within, both]) {
            assert_eq!(Fusion::parse(&choice.to_string()).unwrap(), choice);
        }
        assert_eq!(Fusion::parse("overlap").unwrap(), Fusion::Overlap(4));
        assert_eq!(Fusion::parse("two-level").unwrap(), forced);
        assert_eq!(Fusion::parse("prefetch").unwrap(), plain);
        assert_eq!(plain.to_string(), "prefetch+pack");
        assert_eq!(Fusion::parse("prefetch(layers=1)").unwrap(), plain);
        for wrong in [
            "prefetch+",
            "prefetch(layers=2)",
            "prefetch+two-level",
            "prefetch+prefetch",
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
