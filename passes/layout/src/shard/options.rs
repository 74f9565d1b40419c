//! Options of the `shard` pass, and their spelling in pipelines.

use ithaca_ir::{Diagnostic, Mesh};

use super::choice::AttentionChoice;
use super::strategy;
use super::zero::Zero;
use crate::fuse::Fusion;

/// How heads are dealt to ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadSplit {
    /// Every rank has as many.
    #[default]
    Even,
    /// Where the count does not divide, the first ranks have one key/value group more.
    Uneven,
    /// Where the count does not divide, key/value heads and their query heads are padded until it does.
    Pad,
}

/// What is done with a sequence that does not divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SequenceFit {
    /// It is refused.
    #[default]
    Exact,
    /// It is padded at the end with tokens that no other token sees and no output has.
    Pad,
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
        let block = text.strip_prefix("striped:").map(str::parse::<u64>);
        match (text, block) {
            ("contiguous", _) => Ok(Self::Contiguous),
            ("zigzag", _) => Ok(Self::Zigzag),
            ("striped", _) => Ok(Self::Striped(1)),
            ("balanced", _) => Ok(Self::Balanced),
            (_, Some(Ok(block))) if block > 0 => Ok(Self::Striped(block)),
            _ => Err(Diagnostic::new("P02", format!("there is no token order `{text}`"))
                .help("orders: contiguous, zigzag, striped, striped:BLOCK, balanced")),
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

/// Whether blocks that the mask leaves empty may travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prune {
    /// They may.
    #[default]
    Allowed,
    /// A movement that cannot leave them out is refused.
    Required,
}

/// Options of `shard`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardOptions {
    /// A strategy, or a product of strategies.
    pub strategy: String,
    /// The mesh, major to minor.
    pub mesh: Mesh,
    /// How heads are dealt.
    pub heads: HeadSplit,
    /// What is done with a sequence that does not divide.
    pub sequence: SequenceFit,
    /// The token order; the best-balanced legal one when absent.
    pub order: Option<OrderChoice>,
    /// Whether the movement must leave out what the mask leaves empty.
    pub prune: Prune,
    /// What is split over ranks that hold the same weights.
    pub zero: Zero,
    /// For functions by name, another strategy inside attention than [`strategy`](Self::strategy).
    pub layers: Vec<(String, String)>,
    /// Another movement than the strategy's, and sequences with axes of their own.
    pub attention: AttentionChoice,
    /// What is fused once collectives are chosen; `shard` itself has nothing to do with it.
    pub fusion: Fusion,
}

impl ShardOptions {
    /// The options of a strategy on a mesh, everything else at its default.
    pub fn new(strategy: impl Into<String>, mesh: Mesh) -> Self {
        Self { strategy: strategy.into(), mesh, ..Self::default() }
    }

    /// The strategy as the command line takes it, with those of layers and what departs from it.
    pub fn strategy_text(&self) -> String {
        let layers = self.layers.iter().map(|(layer, name)| format!(" --layer-strategy {layer}={name}"));
        std::iter::once(self.strategy.clone()).chain(layers).chain([self.attention.flags()]).collect()
    }

    /// Reads the options as a pipeline writes them: any key that is no other option is a mesh axis.
    ///
    /// # Errors
    /// `P02` for a wrong value, `P12` for a malformed axis.
    pub fn from_pipeline(options: &[(String, String)]) -> Result<Self, Diagnostic> {
        let mut read = Self::default();
        let mut axes = Vec::new();
        for (key, value) in options {
            if read.attention.read(key, value)? {
                continue;
            }
            let wrong = || Diagnostic::new("P02", format!("`shard` does not know {key}={value}"));
            match (key.as_str(), value.as_str()) {
                ("strategy", name) => name.clone_into(&mut read.strategy),
                ("heads", "even") => read.heads = HeadSplit::Even,
                ("heads", "uneven") => read.heads = HeadSplit::Uneven,
                ("heads", "pad") => read.heads = HeadSplit::Pad,
                ("sequence", "exact") => read.sequence = SequenceFit::Exact,
                ("sequence", "pad") => read.sequence = SequenceFit::Pad,
                ("order", "auto") => read.order = None,
                ("order", text) => read.order = Some(OrderChoice::parse(text)?),
                ("prune", "allowed") => read.prune = Prune::Allowed,
                ("prune", "required") => read.prune = Prune::Required,
                ("zero", stage) => {
                    read.zero = Zero::of_stage(stage.parse().map_err(|_| wrong())?)?;
                }
                ("heads" | "sequence" | "prune", _) => return Err(wrong()),
                (layer, name) if layer.starts_with("strategy.") => {
                    read.layers.push((layer["strategy.".len()..].to_owned(), name.to_owned()));
                }
                (axis, size) => strategy::add_axis(&mut axes, axis, size)?,
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
        let mut options = vec![("strategy".to_owned(), self.strategy.clone())];
        options.extend(self.mesh.axes.values().map(|a| (a.name.clone(), a.size.to_string())));
        match self.heads {
            HeadSplit::Even => {}
            HeadSplit::Uneven => options.push(("heads".to_owned(), "uneven".to_owned())),
            HeadSplit::Pad => options.push(("heads".to_owned(), "pad".to_owned())),
        }
        if self.sequence == SequenceFit::Pad {
            options.push(("sequence".to_owned(), "pad".to_owned()));
        }
        options.extend(self.order.map(|order| ("order".to_owned(), order.to_string())));
        if self.prune == Prune::Required {
            options.push(("prune".to_owned(), "required".to_owned()));
        }
        if self.zero != Zero::Off {
            options.push(("zero".to_owned(), self.zero.stage().to_string()));
        }
        self.attention.write(&mut options);
        options.extend(self.layers.iter().map(|(layer, name)| (format!("strategy.{layer}"), name.clone())));
        options
    }
}
