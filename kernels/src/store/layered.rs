//! A source over another: the updates of a step over the files that the first step read.

use super::error::StoreError;
use super::source::TensorSource;
use crate::tensor::Tensor;

/// Two sources; a name that both have is the upper one's.
pub struct Layered<'a> {
    upper: &'a dyn TensorSource,
    lower: &'a dyn TensorSource,
}

impl<'a> Layered<'a> {
    /// `upper` over `lower`.
    pub fn new(upper: &'a dyn TensorSource, lower: &'a dyn TensorSource) -> Self {
        Self { upper, lower }
    }

    fn holder(&self, name: &str) -> &'a dyn TensorSource {
        match self.upper.shape(name) {
            Some(_) => self.upper,
            None => self.lower,
        }
    }
}

impl TensorSource for Layered<'_> {
    fn description(&self) -> String {
        if self.upper.names().is_empty() {
            return self.lower.description();
        }
        format!("{} over {}", self.upper.description(), self.lower.description())
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.upper.names();
        names.extend(self.lower.names());
        names.sort();
        names.dedup();
        names
    }

    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.holder(name).shape(name)
    }

    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
        match self.shape(name) {
            Some(_) => self.holder(name).read(name),
            None => Err(self.missing(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Tensors;

    #[test]
    fn the_upper_source_wins_and_the_lower_one_has_the_rest() {
        let tensor = |x: f64| Tensor::new(vec![1], vec![x]);
        let upper: Tensors = [("w", tensor(1.0))].into_iter().collect();
        let lower: Tensors = [("w", tensor(2.0)), ("x", tensor(3.0))].into_iter().collect();
        let source = Layered::new(&upper, &lower);
        assert_eq!(source.read("w").unwrap().data, [1.0]);
        assert_eq!(source.read("x").unwrap().data, [3.0]);
        assert_eq!(source.names(), ["w", "x"]);
        assert!(source.read("y").is_err() && source.shape("y").is_none());
    }
}
