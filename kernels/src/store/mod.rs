//! Where weights and inputs come from: tensors by name.
//!
//! A source answers with `f64` whatever it stores, so that nothing is lost before the reader rounds: every stored
//! element type that is accepted fits exactly, 64-bit integers up to 2^53.

mod checkpoint;
mod experts;
mod file;
mod layered;
mod memory;
mod random;
mod renamed;
mod stored;
mod whole;
mod write;

pub mod shards;
pub mod training;

use std::path::PathBuf;

pub use checkpoint::{Checkpoint, SINGLE, open};
pub use experts::FusedExperts;
pub use file::{Raw, SafeTensorsFile};
pub use layered::Layered;
pub use memory::Tensors;
pub use random::RandomTensors;
pub use renamed::{MODEL_PREFIXES, Renamed};
pub use stored::Stored;
pub use whole::WholeFile;
pub use write::{About, Entry, Writer, check_writable, write, write_about};

use crate::tensor::Tensor;

/// Named tensors that can be read.
pub trait TensorSource: Sync {
    /// What it is, for messages: a path, or a description.
    fn description(&self) -> String;

    /// The names, sorted.
    fn names(&self) -> Vec<String>;

    /// The shape of a tensor; `None` when there is none of that name.
    fn shape(&self, name: &str) -> Option<Vec<u64>>;

    /// A whole tensor.
    ///
    /// # Errors
    /// [`StoreError`]: a name that is not there, a type that cannot be read, a file that does not hold what it says.
    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError>;
}

impl<S: TensorSource + ?Sized> TensorSource for &S {
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

impl<S: TensorSource + ?Sized> TensorSource for Box<S> {
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

/// Why a tensor could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: `open`, `read`, `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Its reason.
        source: std::io::Error,
    },
    /// The file is not what its name says.
    #[error("{} is not a valid {format} file: {reason}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The format it should have.
        format: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// No tensor of that name.
    #[error("{store} has no tensor `{name}`{}", nearest.as_ref().map(|n| format!("; it has `{n}`")).unwrap_or_default())]
    Missing {
        /// What was searched.
        store: String,
        /// The name.
        name: String,
        /// The most similar name.
        nearest: Option<String>,
    },
    /// An element type that is not read.
    #[error(
        "tensor `{name}` of {store} has element type {dtype}, which is not supported; supported are F64, F32, F16, BF16, I64 and I32"
    )]
    UnsupportedType {
        /// Where it is.
        store: String,
        /// The name.
        name: String,
        /// The type, as the file spells it.
        dtype: String,
    },
    /// The tensor has another shape than the program says.
    #[error("tensor `{name}` of {store} has shape {found:?}, but the program needs {expected:?}")]
    Shape {
        /// Where it is.
        store: String,
        /// The name.
        name: String,
        /// The shape in the store.
        found: Vec<u64>,
        /// The shape that the program states.
        expected: Vec<u64>,
    },
    /// A number that the program's type cannot hold.
    #[error("tensor `{name}` of {store} holds {value}, which is not a 32-bit integer")]
    NotAnInteger {
        /// Where it is.
        store: String,
        /// The name.
        name: String,
        /// The number.
        value: f64,
    },
}

impl StoreError {
    /// No tensor `name` in `source`.
    pub fn missing(source: &dyn TensorSource, name: &str) -> Self {
        Self::Missing {
            store: source.description(),
            name: name.to_owned(),
            nearest: nearest(&source.names(), name),
        }
    }
}

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
