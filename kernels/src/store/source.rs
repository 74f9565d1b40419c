//! The trait of everything that tensors are read from.

use super::error::StoreError;
use crate::tensor::Tensor;

/// Named tensors that can be read.
pub trait TensorSource: Sync {
    /// A path or description, for messages.
    fn description(&self) -> String;

    /// The names, sorted.
    fn names(&self) -> Vec<String>;

    /// The shape of a tensor; `None` when it has no tensor of that name.
    fn shape(&self, name: &str) -> Option<Vec<u64>>;

    /// A whole tensor.
    ///
    /// # Errors
    /// [`StoreError`]: an unknown name, an unsupported type, a corrupt file.
    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError>;

    /// The error of a missing tensor `name`.
    fn missing(&self, name: &str) -> StoreError {
        StoreError::Missing {
            store: self.description(),
            name: name.to_owned(),
            nearest: nearest(&self.names(), name),
        }
    }
}

/// A pointer to a source is a source.
macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<S: TensorSource + ?Sized> TensorSource for $pointer {
            fn description(&self) -> String {
                (**self).description()
            }

            fn names(&self) -> Vec<String> {
                (**self).names()
            }

            fn shape(&self, name: &str) -> Option<Vec<u64>> {
                (**self).shape(name)
            }

            fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
                (**self).read(name)
            }
        }
    )*};
}

forward!(&S, Box<S>);

/// The name that shares the longest beginning or end with `name`, if it is much alike.
fn nearest(names: &[String], name: &str) -> Option<String> {
    let alike = |other: &str| {
        let front = other.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        let back = other.bytes().rev().zip(name.bytes().rev()).take_while(|(a, b)| a == b).count();
        (front + back).min(other.len())
    };
    let best = names.iter().max_by_key(|n| (alike(n), std::cmp::Reverse(n.len())))?;
    (2 * alike(best) >= name.len()).then(|| best.clone())
}
