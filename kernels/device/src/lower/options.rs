//! How a schedule is lowered.

/// How a schedule is lowered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether steps have searches for NaN.
    pub checks: Checks,
}

/// Whether steps have searches for NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    /// They have none.
    #[default]
    None,
    /// One for each buffer of real numbers that a step writes.
    OfWrittenBuffers,
}
