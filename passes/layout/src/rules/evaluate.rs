//! The interface to the execution of programs, for the check of rules.

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

/// Runs programs for the check of rules; this crate does not execute programs.
pub trait Evaluate {
    /// The outputs of `module`, verified at any level, in order. `seed` and the sources of `sources` determine its
    /// random inputs, so two programs with the same sources receive the same inputs.
    ///
    /// # Errors
    /// Why the module cannot be run.
    fn outputs(&self, module: &Module, sources: &Module, seed: u64) -> Result<Vec<Evaluated>, String>;
}
