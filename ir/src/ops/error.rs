//! The error of an operation.

use crate::diagnostic::{Diagnostic, Diagnostics};

/// A broken invariant of one operation, for the verifier to place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpError {
    /// The invariant, `V..`.
    pub code: &'static str,
    /// The violation, with names and numbers.
    pub message: String,
    /// What to do about it, where it is known.
    pub help: Option<String>,
}

impl OpError {
    /// The violation of `code` that `message` describes.
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), help: None }
    }

    /// Says what to do about it.
    #[must_use]
    pub fn help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }
}

impl From<OpError> for Diagnostic {
    fn from(OpError { code, message, help }: OpError) -> Self {
        help.into_iter().fold(Self::new(code, message), Self::help)
    }
}

impl From<OpError> for Box<Diagnostic> {
    fn from(error: OpError) -> Self {
        Box::new(error.into())
    }
}

impl From<OpError> for Diagnostics {
    fn from(error: OpError) -> Self {
        vec![error.into()]
    }
}

/// Returns the violation of an invariant unless the condition holds: `ensure!(condition, code, message, …)`.
macro_rules! ensure {
    ($holds:expr, $code:literal, $($message:tt)+) => {
        if !$holds {
            return Err($crate::ops::error::OpError::new($code, format!($($message)+)).into());
        }
    };
}

/// Returns the violation of an invariant: `bail!(code, message, …)`.
macro_rules! bail {
    ($code:literal, $($message:tt)+) => {
        return Err($crate::ops::error::OpError::new($code, format!($($message)+)).into())
    };
}

pub(crate) use {bail, ensure};
