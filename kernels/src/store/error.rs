//! Why a tensor could not be read or written.

use std::io;
use std::path::{Path, PathBuf};

/// Why a tensor could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The action: `open`, `read`, `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// The file does not have the format of its name.
    #[error("{} is not a valid {format} file: {reason}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The format it should have.
        format: &'static str,
        /// The defect.
        reason: String,
    },
    /// No tensor of that name.
    #[error("{store} has no tensor `{name}`{}", nearest.as_ref().map(|n| format!("; it has `{n}`")).unwrap_or_default())]
    Missing {
        /// The source.
        store: String,
        /// The name.
        name: String,
        /// The most similar name.
        nearest: Option<String>,
    },
    /// An element type that is not read.
    #[error(
        "tensor `{name}` of {store} has element type {dtype}, which is not supported; supported are F64, F32, F16, BF16, F8_E4M3, I64 and I32"
    )]
    UnsupportedType {
        /// Where it is.
        store: String,
        /// The name.
        name: String,
        /// The type, as the file spells it.
        dtype: String,
    },
    /// A weight of few bits with scales, where a part of it is needed as it is stored.
    #[error("tensor `{name}` of {store} has scales for blocks of it, and is not cut as it is stored")]
    Scaled {
        /// Where it is.
        store: String,
        /// The name.
        name: String,
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
    /// The error of an action (`open`, `read`, `write`) on a file.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> StoreError {
        move |source| StoreError::Io { action, path: path.to_owned(), source }
    }
}
