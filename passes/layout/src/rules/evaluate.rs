//! What runs the programs on which rules are tried.

use ithaca_ir::Module;

/// An output of a program, in double precision.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluated {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its elements, row-major.
    pub elements: Vec<f64>,
}

/// What runs programs, for rules to be tried: this crate computes nothing itself.
pub trait Evaluate {
    /// The outputs of `module`, a verified one of any level, in order. Its inputs are random numbers that `seed` and
    /// the sources of `sources` determine, so that two programs with the same sources get the same inputs.
    ///
    /// # Errors
    /// Why it cannot be run.
    fn outputs(&self, module: &Module, sources: &Module, seed: u64) -> Result<Vec<Evaluated>, String>;
}
