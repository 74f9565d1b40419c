//! The book: generated pages are in step with the code, every page is in the summary, links stay inside.

mod strategies;

use std::path::{Path, PathBuf};

use crate::cli::said;
use strategies::Places;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn pages() -> PathBuf {
    root().join("docs/book/src")
}

fn is_blessing() -> bool {
    std::env::var_os("ITHACA_BLESS").is_some()
}

/// Compares a file of the book with what it is made from; with `ITHACA_BLESS=1` in the environment, writes it.
fn in_step(file: &Path, expected: &str) {
    let path = pages().join(file);
    if is_blessing() {
        std::fs::write(&path, expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let hint = "run the tests once with ITHACA_BLESS=1 and review the diff";
    assert!(found == expected, "{} is stale: {hint}", path.display());
}

#[test]
fn pages_of_strategies_are_in_step() {
    let count = strategies::count();
    let places = Places::of(count);
    let is_whole = count == Places::all();
    let rows = strategies::rows();
    for row in &rows {
        if let Some(picture) = strategies::picture(row) {
            in_step(&Path::new("pictures").join(format!("{}.svg", row.name)), &picture);
        }
        let (start, lines) = strategies::page(row, &places);
        let file = strategies::folder().join(format!("{}.md", row.name));
        if is_whole {
            in_step(&file, &(start + &strategies::wins(row.name, &lines)));
            continue;
        }
        // The default tier compares the first scenarios only.
        let page = std::fs::read_to_string(pages().join(&file)).unwrap();
        assert!(page.starts_with(&start), "{} is stale", file.display());
        for line in lines {
            assert!(page.contains(&line), "{} is stale, it lacks {line}", file.display());
        }
    }
    if is_whole {
        in_step(&strategies::folder().join("README.md"), &strategies::overview(&rows, &places));
    }
}

#[test]
fn the_layer_in_pytorch_is_in_step() {
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json");
    let request = "plan examples/llama-3-8b --gpus 8 --seq 128k --strategy ulysses -o";
    said(root(), &format!("{request} {}", plan.display()));
    let module = said(root(), &format!("emit {} --target torch", plan.display()));
    let (_, rest) = module.split_once("\ndef block(").unwrap();
    let (block, _) = rest.split_once("\n\n\n").unwrap();
    in_step(Path::new("guide/llama-3-8b-ulysses.py"), &format!("def block({block}\n"));
}

#[test]
fn every_page_is_in_the_summary() {
    let summary = std::fs::read_to_string(pages().join("SUMMARY.md")).unwrap();
    for (path, _) in texts() {
        let name = path.strip_prefix(pages()).unwrap().to_string_lossy().replace('\\', "/");
        let is_listed = name == "SUMMARY.md" || summary.contains(&format!("]({name})"));
        assert!(is_listed, "{name} is not in SUMMARY.md");
    }
}

/// Every page, with its text.
fn texts() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut open = vec![pages()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "md") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn links_of_the_book_stay_in_the_book() {
    let root = pages().canonicalize().unwrap();
    for (path, text) in texts() {
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            if link.is_empty() || link.contains("://") {
                continue;
            }
            let target = path.parent().unwrap().join(link).canonicalize();
            let is_inside = target.is_ok_and(|target| target.starts_with(&root));
            assert!(is_inside, "{}: {link} leads nowhere, or out of the book", path.display());
        }
    }
}

#[test]
fn files_that_pages_include_exist_and_the_package_out_of_tree_takes_this_version() {
    for (path, text) in texts() {
        for file in text.split("{{#include ").skip(1).filter_map(|rest| rest.split([':', '}']).next()) {
            assert!(path.parent().unwrap().join(file).is_file(), "{}: no {file}", path.display());
        }
    }
    let page = std::fs::read_to_string(pages().join("cookbook/out-of-tree.md")).unwrap();
    let manifest = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let version = manifest["dependencies"]["ithaca"].as_str().unwrap();
    assert!(env!("CARGO_PKG_VERSION").starts_with(&format!("{version}.")), "{version}");
    let template = std::fs::read_to_string(root().join("examples/template.rs")).unwrap();
    let start = template.lines().nth(5).unwrap();
    assert_eq!(start, "use std::process::ExitCode;", "the included lines begin here");
}
