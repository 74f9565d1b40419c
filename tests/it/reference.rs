//! Pages that are made from tables are in step with them.

use std::path::Path;

use clap::CommandFactory;
use ithaca::cli::Cli;

/// Compares a page of `docs` with what it is made from; with `ITHACA_BLESS=1` in the environment, writes it.
fn in_step(page: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/book/src").join(page);
    if std::env::var_os("ITHACA_BLESS").is_some() {
        std::fs::write(&path, expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "docs/book/src/{page} is stale: run the tests once with ITHACA_BLESS=1 and review the diff"
    );
}

#[test]
fn the_page_of_operations_is_in_step() {
    in_step("operations.md", &ithaca_ir::ops::reference());
}

#[test]
fn the_page_of_diagnostics_is_in_step() {
    in_step("diagnostics.md", &ithaca_ir::codes::reference(&ithaca::codes::sections()));
}

#[test]
fn the_page_of_exit_codes_is_in_step() {
    in_step("exit-codes.md", &ithaca::exit_codes::reference());
    for (command, _) in ithaca::exit_codes::DIFFERENCES {
        assert!(Cli::command().find_subcommand(command).is_some(), "there is no command {command}");
    }
}

#[test]
fn examples_in_the_page_of_the_text_form_are_sound() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/book/src/text.md");
    let page = std::fs::read_to_string(page).unwrap();
    let examples: Vec<&str> = page.split("```\n").skip(1).step_by(2).collect();
    assert_eq!(examples.len(), 2);
    for example in examples {
        let diagnostics = crate::filetests::diagnose(example);
        assert!(diagnostics.is_empty(), "{diagnostics:#?}\n{example}");
    }
}
