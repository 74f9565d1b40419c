//! The choice of fusion passes in a plan.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;

use ithaca_ir::Diagnostic;
use ithaca_pass::Pass;

use super::caches::FuseCaches;
use super::levels::{Choose, TwoLevel};
use super::overlap::{MAX_CHUNKS, Overlap};
use super::pack::Pack;
use super::prefetch::{MAX_LAYERS, Prefetch};
use super::saturate::Saturate;
use crate::lower::Packing;

/// The fusion passes of a program, before and after `lower-reshards`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fusion {
    /// Whether axes that span nodes become two axes before collectives are chosen.
    pub levels: Option<Choose>,
    /// How collectives are coalesced and chunked, and whether operations become fused kernels.
    pub messages: Messages,
    /// Whether, and how many layers ahead, weights are gathered before use and gradients reduced later.
    pub prefetch: Option<Prefetch>,
    /// Which kernels pack and unpack; an option of lowering, not a pass.
    pub packing: Packing,
    /// The most MiB of a message of coalesced gathers or reductions, where it is not that of `pack`.
    pub bucket: Option<u64>,
}

/// The largest bucket, in MiB.
pub const MAX_BUCKET: u64 = 1 << 20;

/// The treatment of collectives after they are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Messages {
    /// Every tensor is a message, and every operation a kernel.
    #[default]
    Alone,
    /// Independent collectives are coalesced into one message, and operations become fused kernels.
    Packed,
    /// Collectives and adjacent kernels are cut into up to this many chunks, and collectives outside the chunks are
    /// coalesced, and operations become fused kernels.
    Chunked(u64),
}

impl Fusion {
    /// No fusion.
    pub const NONE: Fusion = Fusion {
        levels: None,
        messages: Messages::Alone,
        prefetch: None,
        packing: Packing::Apart,
        bucket: None,
    };

    /// Independent collectives are coalesced into one message.
    pub const PACK: Fusion = Fusion { messages: Messages::Packed, ..Fusion::NONE };

    /// Up to this many chunks; collectives outside the chunks are coalesced.
    pub const fn overlap(chunks: u64) -> Fusion {
        Fusion { messages: Messages::Chunked(chunks), ..Fusion::NONE }
    }

    /// The same, with kernels that write and read wire buffers if they can.
    pub const fn folded(self) -> Fusion {
        Fusion { packing: Packing::Folded, ..self }
    }

    /// The same, with two-level collectives.
    pub const fn in_levels(self, choose: Choose) -> Fusion {
        Fusion { levels: Some(choose), ..self }
    }

    /// The same, with prefetched weights.
    pub const fn ahead(self, prefetch: Prefetch) -> Fusion {
        Fusion { prefetch: Some(prefetch), ..self }
    }

    /// The choice spelled `text`, words joined by `+`: one of `none`, `pack`, `overlap` and `overlap(chunks=N)`
    /// (default `pack`), and any of `two-level` or `two-level(choose=cheaper)`, `prefetch` or `prefetch(layers=N)`,
    /// `fold`, `bucket(mib=N)`.
    ///
    /// # Errors
    /// `P02` for an unknown or repeated word, a number of chunks outside 2 to [`MAX_CHUNKS`], a number of layers
    /// above [`MAX_LAYERS`], or a bucket above [`MAX_BUCKET`].
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        let mut fusion = Fusion::PACK;
        let mut seen = BTreeSet::new();
        for word in text.split('+') {
            let refused = || unknown(&format!("`{word}` is not a choice of fusion"));
            let (name, argument) = match word.strip_suffix(')').and_then(|word| word.split_once('(')) {
                Some((name, argument)) => (name, Some(argument)),
                None => (word, None),
            };
            let number = |key, default, legal: RangeInclusive<u64>| match argument {
                None => Ok(default),
                Some(argument) => {
                    let n = argument.strip_prefix(key).and_then(|n| n.parse().ok());
                    n.filter(|n| legal.contains(n)).ok_or_else(refused)
                }
            };
            let mut kind = name;
            match (name, argument) {
                ("two-level", None) => fusion.levels = Some(Choose::Always),
                ("two-level", Some("choose=cheaper")) => fusion.levels = Some(Choose::Cheaper),
                ("prefetch", _) => {
                    let layers = number("layers=", Prefetch::default().layers, 0..=MAX_LAYERS)?;
                    fusion.prefetch = Some(Prefetch { layers });
                }
                ("fold", None) => fusion.packing = Packing::Folded,
                ("bucket", Some(_)) => fusion.bucket = Some(number("mib=", 1, 1..=MAX_BUCKET)?),
                ("none" | "pack", None) | ("overlap", _) => {
                    kind = "messages";
                    fusion.messages = match name {
                        "none" => Messages::Alone,
                        "pack" => Messages::Packed,
                        _ => Messages::Chunked(number("chunks=", Overlap::default().chunks, 2..=MAX_CHUNKS)?),
                    };
                }
                _ => return Err(refused()),
            }
            if !seen.insert(kind) {
                return Err(unknown(&format!("`{text}` states a choice twice")));
            }
        }
        if fusion.bucket.is_some() && fusion.messages == Messages::Alone {
            return Err(unknown("`bucket` is for collectives that are coalesced, and `none` coalesces none"));
        }
        Ok(fusion)
    }

    /// The passes that run before collectives are chosen.
    pub fn before(self) -> Vec<Box<dyn Pass>> {
        let levels = self.levels.map(|choose| Box::new(TwoLevel { choose, ..TwoLevel::default() }) as _);
        levels.into_iter().collect()
    }

    /// The passes that run after collectives are chosen.
    pub fn passes(self) -> Vec<Box<dyn Pass>> {
        let kernels = || Box::new(Saturate::kernels(self.packing));
        let pack = || {
            let usual = Pack::default();
            Box::new(Pack { bytes: self.bucket.map_or(usual.bytes, |mib| mib << 20), ..usual })
        };
        let mut passes: Vec<Box<dyn Pass>> = match self.messages {
            Messages::Alone => Vec::new(),
            Messages::Packed => vec![Box::new(FuseCaches), kernels(), pack()],
            Messages::Chunked(chunks) => {
                vec![Box::new(FuseCaches), kernels(), Box::new(Overlap { chunks }), pack()]
            }
        };
        // `prefetch` works on complete messages.
        passes.extend(self.prefetch.map(|prefetch| Box::new(prefetch) as _));
        passes
    }
}

fn unknown(message: &str) -> Diagnostic {
    Diagnostic::new("P02", message).help(format!(
        "choices: none, pack, overlap, overlap(chunks=N) with N from 2 to {MAX_CHUNKS}; with `fold+` before them kernels \
         write and read wire buffers, with `prefetch+` weights are gathered ahead, with `two-level+` axes that \
         span nodes are in two levels, with `bucket(mib=N)+` gathers and reductions are coalesced up to that size"
    ))
}

impl fmt::Display for Fusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fusion { levels, messages, prefetch, packing, bucket } = *self;
        match levels {
            Some(Choose::Always) => f.write_str("two-level+")?,
            Some(Choose::Cheaper) => f.write_str("two-level(choose=cheaper)+")?,
            None => {}
        }
        match prefetch {
            Some(prefetch) if prefetch == Prefetch::default() => f.write_str("prefetch+")?,
            Some(prefetch) => write!(f, "prefetch(layers={})+", prefetch.layers)?,
            None => {}
        }
        if packing == Packing::Folded {
            f.write_str("fold+")?;
        }
        if let Some(mib) = bucket {
            write!(f, "bucket(mib={mib})+")?;
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
                    for (packing, bucket) in [(Packing::Apart, None), (Packing::Folded, Some(512))] {
                        let bucket = bucket.filter(|_| messages != Messages::Alone);
                        let choice = Fusion { levels, messages, prefetch, packing, bucket };
                        assert_eq!(Fusion::parse(&choice.to_string()).unwrap(), choice);
                    }
                }
            }
        }
    }

    #[test]
    fn a_bucket_is_that_of_the_pass() {
        for (text, bytes) in [("pack", 25 << 20), ("bucket(mib=512)+pack", 512 << 20)] {
            let passes = Fusion::parse(text).unwrap().passes();
            let pack = passes.iter().find(|pass| pass.name() == "pack").unwrap();
            let options = Pack { bytes, ..Pack::default() }.options();
            assert_eq!(pack.options(), options, "{text}");
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
            "bucket",
            "bucket(mib=0)",
            "bucket(mib=512)+none",
            "bucket(512)",
        ] {
            assert_eq!(Fusion::parse(wrong).unwrap_err().code, "P02", "{wrong}");
        }
    }
}
