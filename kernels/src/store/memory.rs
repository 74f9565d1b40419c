//! Tensors held in memory.

use std::collections::BTreeMap;

use super::error::StoreError;
use super::source::TensorSource;
use crate::real::Real;
use crate::tensor::{Outputs, Tensor};

/// Tensors by name.
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    tensors: BTreeMap<String, Tensor<f64>>,
}

impl Tensors {
    /// No tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor, in place of one of the same name.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor<f64>) {
        self.tensors.insert(name.into(), tensor);
    }
}

impl<T: Real> From<&Outputs<T>> for Tensors {
    /// Outputs or updates of a run, for another run to read.
    fn from(outputs: &Outputs<T>) -> Self {
        outputs.iter().map(|(name, tensor)| (name.clone(), tensor.map(T::to_f64))).collect()
    }
}

impl<S: Into<String>> FromIterator<(S, Tensor<f64>)> for Tensors {
    fn from_iter<I: IntoIterator<Item = (S, Tensor<f64>)>>(iter: I) -> Self {
        Self { tensors: iter.into_iter().map(|(name, t)| (name.into(), t)).collect() }
    }
}

impl TensorSource for Tensors {
    fn description(&self) -> String {
        "memory".to_owned()
    }

    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.tensors.get(name).map(|t| t.shape.iter().map(|&n| n as u64).collect())
    }

    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
        self.tensors.get(name).cloned().ok_or_else(|| self.missing(name))
    }
}
