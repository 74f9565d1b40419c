//! The environment and the outcome of a command.

use ithaca_passes::registry::Registry;

/// The environment of a command.
pub struct Session<'a> {
    /// The known strategies and movements.
    pub registry: &'a Registry,
    /// Called with the current activity, for a person who waits.
    pub progress: &'a mut dyn FnMut(&str),
    /// The arguments of the process, the name of the program first; repairs repeat them.
    pub arguments: Vec<String>,
    /// Columns of the output.
    pub width: usize,
    /// Reads environment variables; a launcher sets the rank of this process there.
    pub environment: &'a dyn Fn(&str) -> Option<String>,
}

/// The outcome of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// For standard output.
    pub text: String,
    /// The exit code: 0, or 1 for a difference.
    pub code: u8,
}

impl CommandOutput {
    /// Success, with this output.
    pub fn success(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 0 }
    }
}
