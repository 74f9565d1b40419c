//! Options of the `shard` pass, and their spelling in pipelines.

use ithaca_ir::{Diagnostic, Mesh};

use super::strategy;

/// How heads are dealt to ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadSplit {
    /// Every rank has as many.
    #[default]
    Even,
    /// Where the count does not divide, the first ranks have one key/value group more.
    Uneven,
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
}

impl ShardOptions {
    /// The options of a strategy on a mesh, everything else at its default.
    pub fn new(strategy: impl Into<String>, mesh: Mesh) -> Self {
        Self { strategy: strategy.into(), mesh, ..Self::default() }
    }

    /// Reads the options as a pipeline writes them: any key that is no other option is a mesh axis.
    ///
    /// # Errors
    /// `P02` for a wrong value, `P12` for a malformed axis.
    pub fn from_pipeline(options: &[(String, String)]) -> Result<Self, Diagnostic> {
        let mut read = Self::default();
        let mut axes = Vec::new();
        for (key, value) in options {
            let wrong = || Diagnostic::new("P02", format!("`shard` does not know {key}={value}"));
            match (key.as_str(), value.as_str()) {
                ("strategy", name) => name.clone_into(&mut read.strategy),
                ("heads", "even") => read.heads = HeadSplit::Even,
                ("heads", "uneven") => read.heads = HeadSplit::Uneven,
                ("sequence", "exact") => read.sequence = SequenceFit::Exact,
                ("sequence", "pad") => read.sequence = SequenceFit::Pad,
                ("heads" | "sequence", _) => return Err(wrong()),
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
        if self.heads == HeadSplit::Uneven {
            options.push(("heads".to_owned(), "uneven".to_owned()));
        }
        if self.sequence == SequenceFit::Pad {
            options.push(("sequence".to_owned(), "pad".to_owned()));
        }
        options
    }
}
