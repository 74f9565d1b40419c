//! The command line from outside: what it prints, what it writes, and with which code it ends.

mod answers;
mod calibrate;
mod checkpoints;
mod decoding;
mod goldens;
mod ineffective;
mod kinds;
mod malformed;
mod odd_values;
mod pipelines;
mod project;
mod refusals;
mod report;
mod runtime;
mod serving;
mod session;
mod training;
mod two_layouts;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What a run of the program left behind.
#[derive(Debug)]
pub(crate) struct Ran {
    /// The exit code.
    pub(crate) code: i32,
    /// Standard output.
    pub(crate) out: String,
    /// Standard error.
    pub(crate) err: String,
}

/// Runs the program in a folder.
pub(crate) fn ithaca<A: AsRef<OsStr>>(folder: &Path, args: impl IntoIterator<Item = A>) -> Ran {
    let output = Command::new(env!("CARGO_BIN_EXE_ithaca")).args(args).current_dir(folder).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let ran = Ran {
        code: output.status.code().expect("the program ends by itself"),
        out: text(output.stdout),
        err: text(output.stderr),
    };
    assert!(!ran.err.contains("panicked"), "{ran:#?}");
    ran
}

/// Runs a line of arguments that are separated by spaces.
pub(crate) fn line(folder: &Path, line: &str) -> Ran {
    ithaca(folder, line.split_whitespace())
}

/// Runs a line that must succeed, and returns what it printed.
pub(crate) fn said(folder: &Path, args: &str) -> String {
    let ran = line(folder, args);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{args}: {ran:#?}");
    ran.out
}

/// Runs a line that must be refused: code 2, a diagnostic on standard error, nothing on standard output.
pub(crate) fn refused(folder: &Path, args: &str) -> String {
    let before = listing(folder);
    let ran = line(folder, args);
    assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{args}: {ran:#?}");
    assert!(ran.err.contains("error"), "{args}: {ran:#?}");
    assert_eq!(listing(folder), before, "{args} leaves no file behind");
    ran.err
}

/// Every path below a folder, sorted; of the repository, where others write too, none below its folders.
pub(crate) fn listing(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    let is_repository = folder.join("Cargo.lock").exists();
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() && !is_repository {
                open.push(entry.path());
            }
            found.push(entry.path());
        }
    }
    found.sort();
    found
}

/// A path of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A new folder with copies of the examples in it, so that arguments are the same on every machine.
pub(crate) fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["llama-3-8b", "qwen2.5-7b", "gpt2"] {
        let to = folder.path().join("examples").join(name);
        std::fs::create_dir_all(&to).unwrap();
        let config = repository("examples").join(name).join("config.json");
        std::fs::copy(config, to.join("config.json")).unwrap();
    }
    folder
}
