//! The program `ithaca`: the command line with the built-in strategies and movements.

use std::process::ExitCode;

use ithaca::passes::registry::Registry;

fn main() -> ExitCode {
    ithaca::shell::main(&Registry::default())
}
