//! Errors of lowering.

/// The reason why a schedule has no device program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// No kernel computes an operation.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// The schedule is inconsistent, as no verified schedule is.
    #[error("{0}")]
    Invalid(String),
    /// The error of one task.
    #[error("task {task} of `@{frame}`: {cause}")]
    Task {
        /// The name of the frame.
        frame: String,
        /// The number of the task.
        task: usize,
        /// The error.
        cause: Box<LowerError>,
    },
}

impl LowerError {
    pub(crate) fn unsupported<T>(what: impl Into<String>) -> Result<T, Self> {
        Err(LowerError::Unsupported(what.into()))
    }

    pub(crate) fn invalid<T>(what: impl Into<String>) -> Result<T, Self> {
        Err(LowerError::Invalid(what.into()))
    }
}
