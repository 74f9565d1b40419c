//! The README shows what its commands print: each `text` block after a command is that command's output.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A command of the README and the block that follows it, as a range of bytes.
struct Shown {
    command: String,
    block: std::ops::Range<usize>,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Commands that start with `ithaca` (or run it by cargo), each with the block that shows its output.
fn shown(readme: &str) -> Vec<Shown> {
    let mut shown = Vec::new();
    let mut commands: Vec<String> = Vec::new();
    let mut at = 0;
    let mut lines = readme.split_inclusive('\n').peekable();
    while let Some(line) = lines.next() {
        at += line.len();
        if let Some(command) = line.strip_prefix("    ").map(str::trim_end) {
            let mut command = command.to_owned();
            while let Some(start) = command.strip_suffix('\\') {
                let more = lines.next().unwrap_or_default();
                at += more.len();
                command = format!("{start}{}", more.trim());
            }
            commands.push(command);
        } else if line.trim_end() == "```text" && !commands.is_empty() {
            let start = at;
            for line in lines.by_ref() {
                if line.trim_end() == "```" {
                    let command = commands.pop().expect("there is one");
                    shown.push(Shown { command, block: start..at });
                    at += line.len();
                    break;
                }
                at += line.len();
            }
        }
    }
    shown
}

/// The text with measured errors (`1.669e-5`) masked: their digits depend on the processor's vector instructions.
pub(crate) fn masked(text: &str) -> String {
    let mask = |word: &str| match word.trim().contains("e-") && word.trim().parse::<f64>().is_ok() {
        true => "#".to_owned(),
        false => word.to_owned(),
    };
    text.split(' ')
        .filter(|word| !word.is_empty())
        .map(|w| w.split('\n').map(mask).collect::<Vec<_>>().join("\n"))
        .collect::<Vec<_>>()
        .join(" ")
}

/// What a command prints, both streams, run where the examples and goldens lie and files may be written.
fn output(command: &str, folder: &Path) -> String {
    let command = command.strip_prefix("cargo run --release -- ").or(command.strip_prefix("ithaca "));
    let arguments = command.expect("a command of ours").split_whitespace();
    let output =
        Command::new(env!("CARGO_BIN_EXE_ithaca")).args(arguments).current_dir(folder).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[cfg(unix)]
#[test]
fn commands_print_what_the_readme_shows() {
    let path = root().join("README.md");
    let readme = std::fs::read_to_string(&path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for name in ["examples", "tests"] {
        std::os::unix::fs::symlink(root().join(name), folder.path().join(name)).unwrap();
    }
    let shown = shown(&readme);
    assert!(shown.len() >= 4, "the README shows the output of {} commands", shown.len());
    let mut blessed = readme.clone();
    for Shown { command, block } in shown.iter() {
        let found = output(command, folder.path());
        let expected = &readme[block.clone()];
        if std::env::var_os("ITHACA_BLESS").is_some() {
            blessed =
                blessed.replacen(&format!("```text\n{expected}```"), &format!("```text\n{found}```"), 1);
        } else {
            let (found, expected) = (masked(&found), masked(expected));
            assert_eq!(found, expected, "`{command}`; run once with ITHACA_BLESS=1 and review the diff");
        }
    }
    if blessed != readme && std::env::var_os("ITHACA_BLESS").is_some() {
        std::fs::write(path, blessed).unwrap();
    }
}
