//! A source whose experts are stored as one tensor, for a program that names each by itself.
//!
//! Checkpoints have a tensor for each matrix of each expert (`mlp.experts.0.gate_proj.weight`, or, of Mixtral,
//! `block_sparse_moe.experts.0.w1.weight`). Version 5 of the library holds all experts in one, gate and up one after the
//! other: `mlp.experts.gate_up_proj` `[experts, 2 · width, hidden]` and `mlp.experts.down_proj`
//! `[experts, hidden, width]`. A program names tensors the first way; this adapter finds them the second way too, the
//! exact name always coming first.

use std::collections::BTreeMap;

use super::error::StoreError;
use super::source::TensorSource;
use crate::tensor::{Tensor, index};

/// A source whose experts may be fused.
pub struct FusedExperts<S> {
    source: S,
    /// Names that are listed in place of the tensors that have them.
    asked: Vec<String>,
}

/// The place of an expert's matrix in a fused tensor.
struct Window {
    /// The fused tensor.
    name: String,
    /// The expert.
    expert: u64,
    /// Which of how many equal parts of its rows.
    part: (u64, u64),
}

impl Window {
    /// The shape of the matrix, if the fused tensor has it.
    fn shape(&self, fused: &[u64]) -> Option<Vec<u64>> {
        match *fused {
            [experts, rows, columns] if self.expert < experts && rows.is_multiple_of(self.part.1) => {
                Some(vec![rows / self.part.1, columns])
            }
            _ => None,
        }
    }
}

impl<S: TensorSource> FusedExperts<S> {
    /// `source`, in which experts may be fused.
    pub fn new(source: S) -> Self {
        Self { source, asked: Vec::new() }
    }

    /// The same source, which lists those of `names` that it finds under another name in place of that name; a fused tensor
    /// that they are not all of is listed too.
    pub fn asked(self, names: impl IntoIterator<Item = String>) -> Self {
        Self { asked: names.into_iter().collect(), ..self }
    }

    /// Another name of a tensor that is no expert's: Mixtral's module has two.
    fn alias(&self, name: &str) -> Option<String> {
        alias(name).filter(|alias| self.source.shape(alias).is_some())
    }

    /// The window of a fused tensor that is `name`, and its shape.
    fn window(&self, name: &str) -> Option<(Window, Vec<u64>)> {
        let FusedForm { names, expert, part } = FusedForm::of(name)?;
        let expert = expert.parse().ok()?;
        names.into_iter().find_map(|name| {
            let found = self.source.shape(&name)?;
            let window = Window { name, expert, part };
            let shape = window.shape(&found)?;
            Some((window, shape))
        })
    }
}

/// How fused tensors may hold a matrix of an expert.
pub(super) struct FusedForm<'a> {
    /// Names of the tensor, best first.
    pub(super) names: Vec<String>,
    /// The expert, as the matrix's name has it.
    pub(super) expert: &'a str,
    /// Which of how many equal parts of the expert's rows.
    pub(super) part: (u64, u64),
}

impl<'a> FusedForm<'a> {
    /// The form of the matrix `name`, if it is one of an expert.
    pub(super) fn of(name: &'a str) -> Option<Self> {
        let (module, rest) = name.split_once(".experts.")?;
        let (expert, matrix) = rest.split_once('.')?;
        let (fused, part) = match matrix {
            "gate_proj.weight" | "w1.weight" => ("gate_up_proj", (0, 2)),
            "up_proj.weight" | "w3.weight" => ("gate_up_proj", (1, 2)),
            "down_proj.weight" | "w2.weight" => ("down_proj", (0, 1)),
            _ => return None,
        };
        let other = module.strip_suffix(".block_sparse_moe").map(|layer| format!("{layer}.mlp"));
        let modules = [Some(module.to_owned()), other].into_iter().flatten();
        Some(Self { names: modules.map(|m| format!("{m}.experts.{fused}")).collect(), expert, part })
    }
}

/// Another name that Mixtral's module has.
pub(super) fn alias(name: &str) -> Option<String> {
    let alias = name.replace(".block_sparse_moe.", ".mlp.");
    (alias != name).then_some(alias)
}

impl<S: TensorSource> TensorSource for FusedExperts<S> {
    fn description(&self) -> String {
        self.source.description()
    }

    fn names(&self) -> Vec<String> {
        let elements = |shape: Vec<u64>| shape.iter().product::<u64>();
        let mut names = self.source.names();
        // The number of elements of each stored tensor that other names need.
        let mut met: BTreeMap<String, u64> = BTreeMap::new();
        for asked in self.asked.iter().filter(|name| self.source.shape(name).is_none()) {
            let alias = self.alias(asked).and_then(|alias| Some((self.source.shape(&alias)?, alias)));
            let window = || self.window(asked).map(|(window, shape)| (shape, window.name));
            if let Some((shape, stored)) = alias.or_else(window) {
                *met.entry(stored).or_default() += elements(shape);
                names.push(asked.clone());
            }
        }
        names.retain(|name| met.get(name).is_none_or(|&n| self.source.shape(name).map(elements) != Some(n)));
        names.sort();
        names
    }

    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        let exact = self.source.shape(name);
        exact
            .or_else(|| self.alias(name).and_then(|alias| self.source.shape(&alias)))
            .or_else(|| self.window(name).map(|(_, shape)| shape))
    }

    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
        if self.source.shape(name).is_some() {
            return self.source.read(name);
        }
        if let Some(alias) = self.alias(name) {
            return self.source.read(&alias);
        }
        let Some((window, shape)) = self.window(name) else {
            return Err(self.source.missing(name));
        };
        let fused = self.source.read(&window.name)?;
        let shape: Vec<usize> = shape.into_iter().map(index).collect();
        let n: usize = shape.iter().product();
        let start = index(window.expert * window.part.1 + window.part.0) * n;
        Ok(Tensor::new(shape, fused.data[start..start + n].to_vec()))
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
        let fused = FusedExperts::new(&source);
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
}
