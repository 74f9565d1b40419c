//! Documents show what their commands print: each `text` block after commands is the output of the last of them.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Commands of a document, one below the other, and the block that follows them, as a range of bytes.
struct Shown {
    commands: Vec<String>,
    block: std::ops::Range<usize>,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Commands that start with `ithaca` (or run it by cargo), each with the block that shows its output.
fn shown(document: &str) -> Vec<Shown> {
    let mut shown = Vec::new();
    let mut commands: Vec<String> = Vec::new();
    let mut at = 0;
    let mut lines = document.split_inclusive('\n').peekable();
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
                    shown.push(Shown { commands: std::mem::take(&mut commands), block: start..at });
                    at += line.len();
                    break;
                }
                at += line.len();
            }
        } else if !line.trim().is_empty() {
            commands.clear();
        }
    }
    shown
}

/// The text with measured errors (`1.669e-5`) masked: their digits depend on the processor's vector instructions.
pub(crate) fn masked(text: &str) -> String {
    let mask = |word: &str| {
        if word.trim().contains("e-") && word.trim().parse::<f64>().is_ok() {
            "#".to_owned()
        } else {
            word.to_owned()
        }
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

/// Compares, or writes with `ITHACA_BLESS`, the outputs that a document shows, at least so many.
#[cfg(unix)]
fn check(path: &str, least: usize) {
    let path = root().join(path);
    let document = std::fs::read_to_string(&path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for name in ["examples", "tests"] {
        std::os::unix::fs::symlink(root().join(name), folder.path().join(name)).unwrap();
    }
    let shown = shown(&document);
    assert!(shown.len() >= least, "{} shows the output of {} commands", path.display(), shown.len());
    let is_blessing = std::env::var_os("ITHACA_BLESS").is_some();
    let (mut blessed, mut end) = (String::new(), 0);
    for Shown { commands, block } in shown {
        let found = commands.iter().fold(String::new(), |_, command| output(command, folder.path()));
        let expected = &document[block.clone()];
        if !is_blessing {
            let (found, expected) = (masked(&found), masked(expected));
            assert_eq!(found, expected, "{commands:?}; run once with ITHACA_BLESS=1 and review the diff");
        }
        blessed.extend([&document[end..block.start], &found]);
        end = block.end;
    }
    blessed += &document[end..];
    if is_blessing && blessed != document {
        std::fs::write(path, blessed).unwrap();
    }
}

#[cfg(unix)]
#[test]
fn commands_print_what_the_readme_shows() {
    check("README.md", 4);
}

#[cfg(unix)]
#[test]
fn commands_print_what_the_book_shows() {
    // The default tier runs the first two pages.
    let pages = [
        ("tour.md", 3),
        ("ci.md", 3),
        ("guide/size-an-inference-cluster.md", 6),
        ("guide/from-a-plan-to-your-framework.md", 6),
        ("cookbook/train-70b.md", 2),
        ("cookbook/long-context.md", 5),
        ("cookbook/experts.md", 4),
        ("cookbook/own-cluster.md", 3),
    ];
    let is_whole = crate::tier::is_full() || std::env::var_os("ITHACA_BLESS").is_some();
    for (page, least) in pages.into_iter().take(if is_whole { pages.len() } else { 2 }) {
        check(&format!("docs/book/src/{page}"), least);
    }
}

/// `.ci/python.sh` runs README's lines of Python; here they show the plan of the lines before.
#[test]
fn python_shows_the_plan_of_the_commands() {
    let document = std::fs::read_to_string(root().join("README.md")).unwrap();
    let (commands, python) = document.split_once("## From Python").unwrap();
    let row = python.lines().find(|line| line.starts_with("megatron-cp-allgather ")).unwrap();
    let (_, reason) = row.split_once(' ').unwrap();
    assert!(commands.contains(reason), "{row}");
    let plan = python.lines().find(|line| line.starts_with("<ithaca.Plan ")).unwrap();
    let (_, seconds) = plan.trim_end_matches('>').rsplit_once(", ").unwrap();
    assert!(commands.contains(seconds), "{plan}");
}
