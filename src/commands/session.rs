//! What a command is given, and what it gives.

use ithaca_passes::registry::Registry;

/// What a command may use of the outside.
pub struct Session<'a> {
    /// The strategies and movements that there are.
    pub registry: &'a Registry,
    /// Called with what is being done, for a person who waits.
    pub progress: &'a mut dyn FnMut(&str),
    /// Variables of the environment, by which a launcher says which process this is.
    pub environment: &'a dyn Fn(&str) -> Option<String>,
}

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// For standard output.
    pub text: String,
    /// The exit code: 0, or 1 when something differs.
    pub code: u8,
}

impl Done {
    /// Success, with this to say.
    pub fn success(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 0 }
    }
}
