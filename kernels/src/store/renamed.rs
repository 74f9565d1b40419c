//! A source that names or holds tensors in another way than the program.
//!
//! Checkpoints of one model family are saved from the bare model (`h.0.ln_1.weight`, as the original GPT-2 files are)
//! or from the model with its head (`transformer.h.0.ln_1.weight`).
//!
//! They have a tensor for each matrix of each expert (`mlp.experts.0.gate_proj.weight`, or, of Mixtral,
//! `block_sparse_moe.experts.0.w1.weight`), or, from version 5 of the library, one for all experts, gate and up one after
//! the other: `mlp.experts.gate_up_proj` `[experts, 2 · width, hidden]` and `mlp.experts.down_proj`
//! `[experts, hidden, width]`.
//!
//! The text part of a model of text and images is saved as `language_model.model.layers.0…` or `model.language_model.layers.0…`.
//!
//! A program names tensors one way; this adapter finds them in the other ways too, the exact name always coming first.

use std::collections::BTreeMap;

use super::error::StoreError;
use super::microscaled;
use super::scaled::unscaled;
use super::source::TensorSource;
use crate::tensor::{Tensor, index};

/// The leading parts that bare models of the known families lack.
pub const MODEL_PREFIXES: [&str; 4] = ["transformer.", "model.", "gpt_neox.", "bert."];

/// One way in which a source may have a tensor.
pub(super) struct Candidate {
    /// The stored name.
    pub(super) name: String,
    /// In a tensor of all experts: the expert, as the program's name has it, and which of how many equal parts of the
    /// expert's rows.
    pub(super) window: Option<(String, (u64, u64))>,
}

/// The ways in which a source may have `name`, best first; any of `prefixes` may be absent from its names or extra.
pub(super) fn candidates(name: &str, prefixes: &[&str]) -> impl Iterator<Item = Candidate> {
    let without = prefixes.iter().filter_map(|prefix| name.strip_prefix(prefix).map(str::to_owned));
    let with = prefixes.iter().map(move |prefix| format!("{prefix}{name}"));
    // The text part of a model of text and images, before version 5 of the library and from there on.
    let of_text = [
        Some(format!("language_model.{name}")),
        name.strip_prefix("model.").map(|rest| format!("model.language_model.{rest}")),
    ];
    let of_text = of_text.into_iter().flatten();
    std::iter::once(name.to_owned()).chain(without).chain(with).chain(of_text).flat_map(|name| {
        // Mixtral's module has two names.
        let alias = name.replace(".block_sparse_moe.", ".mlp.");
        let alias = (alias != name).then_some(alias);
        let fused = fused(&name);
        let plain = std::iter::once(name).chain(alias).map(|name| Candidate { name, window: None });
        plain.chain(fused)
    })
}

/// The tensors of all experts that may have the matrix `name`, if it is one of an expert.
fn fused(name: &str) -> Vec<Candidate> {
    let split = name.split_once(".experts.").and_then(|(module, rest)| Some((module, rest.split_once('.')?)));
    let Some((module, (expert, matrix))) = split else { return Vec::new() };
    let (fused, part) = match matrix {
        "gate_proj.weight" | "w1.weight" => ("gate_up_proj", (0, 2)),
        "up_proj.weight" | "w3.weight" => ("gate_up_proj", (1, 2)),
        "down_proj.weight" | "w2.weight" => ("down_proj", (0, 1)),
        _ => return Vec::new(),
    };
    let other = module.strip_suffix(".block_sparse_moe").map(|layer| format!("{layer}.mlp"));
    let candidate = |module: String| Candidate {
        name: format!("{module}.experts.{fused}"),
        window: Some((expert.to_owned(), part)),
    };
    std::iter::once(module.to_owned()).chain(other).map(candidate).collect()
}

/// A source that is read by the names of a program.
pub struct Renamed<'p, S> {
    source: S,
    prefixes: &'p [&'p str],
    /// Names that are listed in place of the tensors that have them.
    asked: Vec<String>,
}

/// A tensor that a source has under some name.
struct Stored {
    name: String,
    /// The shape of the part that is read.
    shape: Vec<u64>,
    /// The number of that part; `None` for the whole tensor.
    part: Option<u64>,
}

impl<'p, S: TensorSource> Renamed<'p, S> {
    /// `source`, in which any of `prefixes` (for example [`MODEL_PREFIXES`]) may be absent or extra, and experts fused.
    pub fn new(source: S, prefixes: &'p [&'p str]) -> Self {
        Self { source, prefixes, asked: Vec::new() }
    }

    /// The same source, which lists those of `names` that it finds under another name in place of that name; a fused tensor
    /// is listed too unless `names` cover all of it.
    pub fn asked(self, names: impl IntoIterator<Item = String>) -> Self {
        Self { asked: names.into_iter().collect(), ..self }
    }

    fn find(&self, name: &str) -> Option<Stored> {
        candidates(name, self.prefixes).find_map(|Candidate { name, window }| {
            let shape = self.source.shape(&name).or_else(|| microscaled::shape(&self.source, &name))?;
            let Some((expert, (part, parts))) = window else {
                return Some(Stored { name, shape, part: None });
            };
            let expert: u64 = expert.parse().ok()?;
            match *shape {
                [experts, rows, columns] if expert < experts && rows.is_multiple_of(parts) => {
                    let shape = vec![rows / parts, columns];
                    Some(Stored { name, shape, part: Some(expert * parts + part) })
                }
                _ => None,
            }
        })
    }
}

impl<S: TensorSource> TensorSource for Renamed<'_, S> {
    fn description(&self) -> String {
        self.source.description()
    }

    fn names(&self) -> Vec<String> {
        let elements = |shape: Vec<u64>| shape.iter().product::<u64>();
        let mut names = self.source.names();
        // The number of elements of each stored tensor that other names need.
        let mut met: BTreeMap<String, u64> = BTreeMap::new();
        for asked in self.asked.iter().filter(|name| self.source.shape(name).is_none()) {
            if let Some(Stored { name, shape, .. }) = self.find(asked) {
                *met.entry(name).or_default() += elements(shape);
                names.push(asked.clone());
            }
        }
        names.retain(|name| met.get(name).is_none_or(|&n| self.source.shape(name).map(elements) != Some(n)));
        names.sort();
        names
    }

    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.find(name).map(|stored| stored.shape)
    }

    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
        let Some(Stored { name, shape, part }) = self.find(name) else {
            return Err(self.source.missing(name));
        };
        if self.source.shape(&name).is_none() {
            return microscaled::read(&self.source, &name, &shape);
        }
        let stored = self.source.read(&name)?;
        let Some(part) = part else { return unscaled(&self.source, &name, stored) };
        let shape: Vec<usize> = shape.into_iter().map(index).collect();
        let n: usize = shape.iter().product();
        Ok(Tensor::new(shape, stored.data[index(part) * n..][..n].to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Tensors;

    #[test]
    fn experts_are_found_in_fused_tensors_and_exact_names_win() {
        let count = |shape: &[usize]| {
            let n = shape.iter().product::<usize>();
            Tensor::new(shape.to_vec(), (0..n).map(|i| i as f64).collect())
        };
        let source: Tensors = [
            ("l.mlp.experts.gate_up_proj", count(&[2, 4, 1])),
            ("l.mlp.experts.down_proj", count(&[2, 1, 2])),
            ("l.mlp.experts.1.down_proj.weight", Tensor::new(vec![1, 1], vec![9.0])),
            ("l.mlp.gate.weight", count(&[2, 1])),
        ]
        .into_iter()
        .collect();
        let fused = Renamed::new(&source, &[]);
        let read = |name: &str| fused.read(name).unwrap().data;
        assert_eq!(read("l.mlp.experts.1.gate_proj.weight"), [4.0, 5.0]);
        assert_eq!(read("l.block_sparse_moe.experts.1.w3.weight"), [6.0, 7.0]);
        assert_eq!(read("l.mlp.experts.1.down_proj.weight"), [9.0]);
        assert_eq!(read("l.mlp.experts.0.down_proj.weight"), [0.0, 1.0]);
        assert_eq!(read("l.block_sparse_moe.gate.weight"), [0.0, 1.0]);
        assert_eq!(fused.shape("l.mlp.experts.2.up_proj.weight"), None);
        assert!(fused.read("l.mlp.experts.2.up_proj.weight").is_err());

        let all = (0..2).flat_map(|i| ["gate", "up"].map(|p| format!("l.mlp.experts.{i}.{p}_proj.weight")));
        let some = ["l.mlp.experts.0.down_proj.weight".to_owned()];
        let names = fused.asked(all.chain(some)).names();
        assert!(!names.contains(&"l.mlp.experts.gate_up_proj".to_owned()), "all of it has other names");
        assert!(names.contains(&"l.mlp.experts.down_proj".to_owned()), "an expert of it has none");
        assert!(names.contains(&"l.mlp.experts.1.up_proj.weight".to_owned()));
    }

    #[test]
    fn a_prefix_may_be_absent_or_extra_and_the_exact_name_wins() {
        let tensor = |x: f64| Tensor::new(vec![1], vec![x]);
        let source: Tensors =
            [("h.w", tensor(1.0)), ("transformer.e", tensor(2.0)), ("e", tensor(3.0))].into_iter().collect();
        let renamed = Renamed::new(&source, &["transformer."]);
        assert_eq!(renamed.read("transformer.h.w").unwrap().data, [1.0]);
        assert_eq!(renamed.read("e").unwrap().data, [3.0]);
        assert_eq!(renamed.read("transformer.e").unwrap().data, [2.0]);
        assert!(renamed.read("other").is_err());
    }
}
