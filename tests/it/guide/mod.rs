//! The guide: its Rust blocks, one after the other, are the program that the tests here run, and each of its commands
//! prints what it shows. The template is tested too.

use std::path::{Path, PathBuf};

use clap::Parser;
use ithaca::cli::Cli;
use ithaca::commands::{self, Session};

use crate::readme::masked;

#[allow(dead_code, reason = "the program's `main` is not called by its tests")]
mod bidirectional;

#[allow(dead_code, reason = "the program's `main` is not called by its tests")]
#[path = "../../../examples/template.rs"]
mod template;

const GUIDE: &str = "docs/book/src/guide/your-first-sharding-pass.md";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The Rust blocks, one after the other, with a blank line between.
fn program(guide: &str) -> String {
    let blocks = guide.split("```rust\n").skip(1);
    let blocks: Vec<&str> = blocks.map(|rest| rest.split("```").next().unwrap()).collect();
    blocks.join("\n")
}

#[test]
fn the_program_is_the_one_that_the_guide_writes() {
    let guide = std::fs::read_to_string(root().join(GUIDE)).unwrap();
    let path = root().join("tests/it/guide/bidirectional.rs");
    let written = program(&guide);
    if std::env::var_os("ITHACA_BLESS").is_some() {
        std::fs::write(&path, &written).unwrap();
    }
    let tested = std::fs::read_to_string(&path).unwrap();
    assert_eq!(written, tested, "run once with ITHACA_BLESS=1 and review the diff");
}

/// What a command of the guide prints; it writes to `folder`.
fn output(command: &str, folder: &Path) -> String {
    let arguments = command.strip_prefix("cargo run --release --example bidirectional -- ").unwrap();
    let place = |word: &str| match word {
        "plan.json" | "out/" => folder.join(word).display().to_string(),
        _ if word.starts_with("examples/") => root().join(word).display().to_string(),
        // What a shell would leave of it.
        _ => word.trim_matches('"').to_owned(),
    };
    let arguments = arguments.split_whitespace().map(place);
    let cli = Cli::try_parse_from(std::iter::once("ithaca".to_owned()).chain(arguments)).unwrap();
    let registry = bidirectional::registry();
    let mut session = Session {
        registry: &registry,
        progress: &mut |_| {},
        arguments: Vec::new(),
        width: 120,
        environment: &|_| None,
    };
    let done = commands::run(cli, &mut session).unwrap_or_else(|f| panic!("{command}: {}", f.render()));
    assert_eq!(done.code, 0, "{command}: {}", done.text);
    done.text.replace(&format!("{}/", folder.display()), "")
}

#[test]
fn commands_print_what_the_guide_shows() {
    let path = root().join(GUIDE);
    let guide = std::fs::read_to_string(&path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut blessed = String::new();
    let mut lines = guide.split_inclusive('\n').peekable();
    let (mut ran, mut compared) = (0, 0);
    while let Some(line) = lines.next() {
        blessed += line;
        let Some(command) = line.strip_prefix("    cargo run ") else { continue };
        let command = format!("cargo run {}", command.trim_end());
        let found = output(&command, folder.path());
        ran += 1;
        while lines.peek().is_some_and(|line| line.trim().is_empty()) {
            blessed += lines.next().unwrap();
        }
        if lines.peek() != Some(&"```text\n") {
            continue;
        }
        blessed += lines.next().unwrap();
        let shown: String = lines.by_ref().take_while(|line| *line != "```\n").collect();
        if std::env::var_os("ITHACA_BLESS").is_none() {
            let hint = "run once with ITHACA_BLESS=1 and review the diff";
            assert_eq!(masked(&found), masked(&shown), "`{command}`; {hint}");
        }
        compared += 1;
        blessed += &found;
        blessed += "```\n";
    }
    assert!(ran >= 8 && compared >= 4, "{ran} commands ran, {compared} were compared");
    if std::env::var_os("ITHACA_BLESS").is_some() {
        std::fs::write(path, blessed).unwrap();
    }
}
