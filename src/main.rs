//! The program `ithaca`: the command line with the built-in strategies and movements.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

use std::process::ExitCode;

use ithaca::passes::registry::Registry;

fn main() -> ExitCode {
    ithaca::shell::main(&Registry::default())
}
