//! Options of lowering.

/// Options of lowering.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether steps have searches for NaN.
    pub checks: Checks,
}

/// Whether steps have searches for NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    /// No searches.
    #[default]
    None,
    /// A search in each buffer of real numbers that a step writes.
    OfWrittenBuffers,
}
