//! The program `ithaca`: the command line with the strategies and movements that come with it.

use std::process::ExitCode;

use ithaca::passes::registry::Registry;

fn main() -> ExitCode {
    ithaca::shell::main(&Registry::default())
}
