//! Options of the `shard` pass, and their spelling in pipelines.

use std::str::FromStr;

use ithaca_ir::diagnostic::nearest;
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_pass::options;
use serde::{Deserialize, Deserializer, Serialize};

use super::choice::{AttentionChoice, axes_text, parse_axes};
use super::strategy;
use super::zero::Zero;
use crate::fuse::Fusion;
use crate::movement::Partials;

/// The distribution of heads over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeadSplit {
    /// Every rank has the same number.
    #[default]
    Even,
    /// Where the count does not divide, the first ranks have one key/value group more.
    Uneven,
    /// Where the count does not divide, key/value heads and their query heads are padded until it does.
    Pad,
}

/// The treatment of a sequence that does not divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SequenceFit {
    /// Pad it, or where it cannot be padded split it unevenly.
    #[default]
    Auto,
    /// Pad it at the end with tokens that no other token sees and no output has.
    Pad,
    /// The first ranks have one token more.
    Uneven,
}

/// A token order that is asked for; its parts are the ranks that split the sequence inside attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderChoice {
    /// Tokens in a row.
    Contiguous,
    /// Chunks from both ends.
    Zigzag,
    /// Blocks of this many tokens, dealt round.
    Striped(u64),
    /// Chunks dealt by their pairs, the heaviest first, each to the rank that has the least: for masks that no closed
    /// form balances.
    Balanced,
}

impl OrderChoice {
    /// The order spelled `contiguous`, `zigzag`, `striped` or `striped:16`.
    ///
    /// # Errors
    /// `P02` for another spelling.
    pub fn parse(text: &str) -> Result<Self, Diagnostic> {
        text.parse().map_err(|known| {
            Diagnostic::new("P02", format!("there is no token order `{text}`"))
                .help(format!("orders: {known}"))
        })
    }
}

impl FromStr for OrderChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let block = text.strip_prefix("striped:").map(str::parse::<u64>);
        match (text, block) {
            ("contiguous", _) => Ok(Self::Contiguous),
            ("zigzag", _) => Ok(Self::Zigzag),
            ("striped", _) => Ok(Self::Striped(1)),
            ("balanced", _) => Ok(Self::Balanced),
            (_, Some(Ok(block))) if block > 0 => Ok(Self::Striped(block)),
            _ => Err("contiguous, zigzag, striped, striped:BLOCK, balanced"),
        }
    }
}

impl std::fmt::Display for OrderChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Contiguous => f.write_str("contiguous"),
            Self::Zigzag => f.write_str("zigzag"),
            Self::Striped(1) => f.write_str("striped"),
            Self::Striped(block) => write!(f, "striped:{block}"),
            Self::Balanced => f.write_str("balanced"),
        }
    }
}

/// Whether blocks that the mask leaves empty may be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prune {
    /// They may.
    #[default]
    Allowed,
    /// A movement that cannot omit them is refused.
    Required,
}

/// Options of a layout: those of `shard`, and the fusion of collectives.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShardOptions {
    /// A strategy, or a product of strategies.
    pub strategy: String,
    /// The mesh, major to minor.
    #[serde(skip)]
    pub mesh: Mesh,
    /// The distribution of heads.
    pub heads: HeadSplit,
    /// The treatment of a sequence that does not divide.
    pub sequence: SequenceFit,
    /// The token order; the best-balanced legal one when absent.
    #[serde(serialize_with = "options::optional_text", deserialize_with = "order")]
    pub order: Option<OrderChoice>,
    /// Whether the movement must omit blocks that the mask leaves empty.
    pub prune: Prune,
    /// The tensors that are split over ranks with the same weights.
    #[serde(with = "options::text")]
    pub zero: Zero,
    /// For functions by name, another strategy inside attention than [`strategy`](Self::strategy).
    #[serde(skip)]
    pub layers: Vec<(String, String)>,
    /// Another movement than the strategy's, and sequences with axes of their own.
    #[serde(skip)]
    pub attention: AttentionChoice,
    /// The element type in which partial results travel; `shard` itself does not use it.
    #[serde(skip)]
    pub partials: Partials,
    /// The fusion of collectives after they are chosen; `shard` itself does not use it.
    #[serde(skip)]
    pub fusion: Fusion,
}

impl ShardOptions {
    /// The options of a strategy on a mesh, everything else at its default.
    pub fn new(strategy: impl Into<String>, mesh: Mesh) -> Self {
        Self { strategy: strategy.into(), mesh, ..Self::default() }
    }

    /// The strategy as flags of the command line, with the strategies of layers and the choices of attention.
    pub fn strategy_text(&self) -> String {
        let layers = self.layers.iter().map(|(layer, name)| format!(" --layer-strategy {layer}={name}"));
        std::iter::once(self.strategy.clone()).chain(layers).chain([self.attention.flags()]).collect()
    }

    /// Reads the options as a pipeline writes them: any key that is no other option is a mesh axis.
    ///
    /// # Errors
    /// `P02` for a wrong value, `P12` for a malformed axis.
    pub fn from_pipeline(options: &[(String, String)]) -> Result<Self, Diagnostic> {
        let [own, others] = options::split::<Self>(options);
        let [attention, others] = options::split::<AttentionChoice>(&others);
        let mut read: Self = options::read(PASS, OPTIONS, &own)?;
        read.attention = options::read(PASS, OPTIONS, &attention)?;
        let mut axes = Vec::new();
        for (key, value) in &others {
            match key.split_once('.') {
                Some((LAYER, layer)) => read.layers.push((layer.to_owned(), value.clone())),
                Some((SEQUENCE, dim)) => {
                    read.attention.sequences.push((dim.to_owned(), parse_axes(value)));
                }
                Some(_) | None => strategy::add_axis(&mut axes, key, value).map_err(|refusal| {
                    let names = [options::names::<Self>(), options::names::<AttentionChoice>()].concat();
                    // A number is the size of an axis.
                    let near = nearest(key, names).filter(|_| value.parse::<u64>().is_err());
                    near.iter().fold(refusal, |d, near| d.help(format!("did you mean the option `{near}`?")))
                })?,
            }
        }
        if read.strategy.is_empty() {
            return Err(Diagnostic::new("P02", "`shard` needs an option `strategy`")
                .help("as in `shard{strategy=ulysses,ulysses=4}`"));
        }
        read.mesh = Mesh::new(axes);
        Ok(read)
    }

    /// The options as a pipeline writes them; defaults are left out.
    pub fn to_pipeline(&self) -> Vec<(String, String)> {
        let strategy = ("strategy".to_owned(), self.strategy.clone());
        let axes = self.mesh.axes.values().map(|a| (a.name.clone(), a.size.to_string()));
        std::iter::once(strategy).chain(axes).chain(self.departures()).collect()
    }

    /// The options other than strategy and mesh, as a pipeline writes them; defaults are left out.
    pub fn departures(&self) -> Vec<(String, String)> {
        let mut written = options::write(self);
        written.retain(|(key, _)| key != "strategy");
        written.extend(options::write(&self.attention));
        let sequences = self.attention.sequences.iter();
        written.extend(sequences.map(|(dim, axes)| (format!("{SEQUENCE}.{dim}"), axes_text(axes))));
        written.extend(self.layers.iter().map(|(layer, name)| (format!("{LAYER}.{layer}"), name.clone())));
        written
    }
}

/// The name of the pass.
const PASS: &str = "shard";

/// Options, as `list passes` shows them.
pub const OPTIONS: &str = "strategy=NAME[+NAME], AXIS=SIZE (major to minor), heads=even|uneven|pad, sequence=auto|pad|uneven, \
                           order=contiguous|zigzag|striped[:BLOCK]|balanced, prune=allowed|required, zero=0|1|2|3|3:ELEMENTS|3:none, \
                           movement=NAME[(OPTION=N)], cross-movement=NAME[(OPTION=N)], \
                           sequence.DIM=AXIS[+AXIS]|none, strategy.FUNCTION=NAME";

/// The prefix of the option that gives a function a strategy of its own.
const LAYER: &str = "strategy";

/// The prefix of the option that gives a sequence axes of its own.
const SEQUENCE: &str = "sequence";

/// The token order; `auto` is absent.
fn order<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<OrderChoice>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text == "auto" {
        return Ok(None);
    }
    let expected = |known| serde::de::Error::custom(format!("one of auto, {known}"));
    text.parse().map(Some).map_err(expected)
}
