//! A source whose names lack, or have, a leading part that the program has not.
//!
//! Checkpoints of one model family are saved from the bare model (`h.0.ln_1.weight`, as the original GPT-2 files are)
//! or from the model with its head (`transformer.h.0.ln_1.weight`). A program names tensors one way; this adapter finds
//! them the other way too, the exact name always coming first.

use super::error::StoreError;
use super::source::TensorSource;
use crate::tensor::Tensor;

/// The leading parts that bare models of the families that are known lack.
pub const MODEL_PREFIXES: [&str; 4] = ["transformer.", "model.", "gpt_neox.", "bert."];

/// The names under which a source may have `name`, best first.
pub(super) fn variants<'a, S: AsRef<str>>(
    name: &'a str,
    prefixes: &'a [S],
) -> impl Iterator<Item = String> + 'a {
    let without = prefixes.iter().filter_map(move |p| name.strip_prefix(p.as_ref()).map(str::to_owned));
    let with = prefixes.iter().map(move |p| format!("{}{name}", p.as_ref()));
    std::iter::once(name.to_owned()).chain(without).chain(with)
}

/// A source with prefixes that may be missing from its names, or be there in addition.
pub struct Renamed<'a> {
    source: &'a dyn TensorSource,
    prefixes: Vec<String>,
}

impl<'a> Renamed<'a> {
    /// `source`, in which any of `prefixes` (for example `transformer.` and `model.`) may be absent or extra.
    pub fn new<S: Into<String>>(source: &'a dyn TensorSource, prefixes: impl IntoIterator<Item = S>) -> Self {
        Self { source, prefixes: prefixes.into_iter().map(Into::into).collect() }
    }

    /// The name under which the source has `name`.
    fn find(&self, name: &str) -> Option<String> {
        variants(name, &self.prefixes).find(|n| self.source.shape(n).is_some())
    }
}

impl TensorSource for Renamed<'_> {
    fn description(&self) -> String {
        self.source.description()
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.find(name).and_then(|n| self.source.shape(&n))
    }

    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
        match self.find(name) {
            Some(found) => self.source.read(&found),
            None => Err(self.source.missing(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Tensors;

    #[test]
    fn a_prefix_may_be_absent_or_extra_and_the_exact_name_wins() {
        let tensor = |x: f64| Tensor::new(vec![1], vec![x]);
        let source: Tensors =
            [("h.w", tensor(1.0)), ("transformer.e", tensor(2.0)), ("e", tensor(3.0))].into_iter().collect();
        let renamed = Renamed::new(&source, ["transformer."]);
        assert_eq!(renamed.read("transformer.h.w").unwrap().data, [1.0]);
        assert_eq!(renamed.read("e").unwrap().data, [3.0]);
        assert_eq!(renamed.read("transformer.e").unwrap().data, [2.0]);
        assert!(renamed.read("other").is_err());
    }
}
