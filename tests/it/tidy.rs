//! What holds of the repository as a whole: module documentation, lengths, dependencies between packages, words, links,
//! tables of codes, snapshots.

mod modules;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ithaca_ir::Diagnostic;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file of the repository below a folder, without what is built or belongs to version control.
fn files(folder: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root().join(folder)];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if !path.is_dir() {
                found.push(path);
            } else if !["target", ".git", "node_modules"].contains(&name.as_str()) {
                open.push(path);
            }
        }
    }
    found.sort();
    found
}

fn with_extension(folder: &str, extension: &str) -> Vec<(String, String)> {
    let all = files(folder).into_iter().filter(|p| p.extension().is_some_and(|e| e == extension));
    all.map(|path| {
        let name = path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
        (name, std::fs::read_to_string(&path).unwrap())
    })
    .collect()
}

fn sources() -> Vec<(String, String)> {
    let sources = with_extension("", "rs");
    assert!(sources.len() > 100, "the sources are found");
    sources
}

/// Whether a file holds tests only.
fn is_test(path: &str) -> bool {
    path.starts_with("tests/")
        || path.starts_with("benches/")
        || path.ends_with("tests.rs")
        || path.contains("/tests/")
}

/// The part of a source before its tests.
fn product(source: &str) -> &str {
    source.split("#[cfg(test)]\nmod tests {").next().unwrap_or(source)
}

#[test]
fn every_module_says_what_it_is() {
    for (path, source) in sources() {
        assert!(source.starts_with("//! "), "{path} opens with what it is");
    }
}

/// The most lines of a source file.
const MOST_LINES: usize = 500;

#[test]
fn no_source_file_is_too_long() {
    let extensions = ["rs", "py", "js", "h", "hpp", "cuh", "cu"];
    let own = extensions.into_iter().flat_map(|extension| with_extension("", extension));
    let own = own.filter(|(path, _)| !path.contains("/vendor/"));
    let lengths = own.map(|(path, source)| (source.lines().count(), path));
    let mut long: Vec<_> = lengths.filter(|(lines, _)| *lines > MOST_LINES).collect();
    long.sort_by(|a, b| b.cmp(a));
    let long: Vec<String> = long.into_iter().map(|(lines, path)| format!("{path} has {lines}")).collect();
    assert!(long.is_empty(), "files of more than {MOST_LINES} lines; split them:\n{}", long.join("\n"));
}

/// Packages of the workspace that the manifest of one names, in any section.
fn named_packages(manifest: &str) -> BTreeSet<String> {
    let manifest: toml::Table = manifest.parse().unwrap();
    let mut named = BTreeSet::new();
    let dependencies = |table: &toml::Table| -> Vec<String> {
        ["dependencies", "dev-dependencies", "build-dependencies"]
            .iter()
            .filter_map(|section| table.get(*section)?.as_table())
            .flat_map(|t| t.keys().cloned())
            .collect()
    };
    named.extend(dependencies(&manifest));
    for target in manifest.get("target").and_then(|t| t.as_table()).into_iter().flat_map(|t| t.values()) {
        named.extend(target.as_table().map(dependencies).unwrap_or_default());
    }
    named.retain(|name| name.starts_with("ithaca") || name == "nccl-rs");
    named
}

#[test]
fn packages_depend_on_each_other_in_one_direction() {
    for (package, allowed) in [
        ("ir", &[][..]),
        ("passes/pass", &["ithaca-ir"]),
        ("passes/differentiate", &["ithaca-ir", "ithaca-pass"]),
        ("passes/import", &["ithaca-differentiate", "ithaca-ir", "ithaca-pass"]),
        ("passes/layout", &["ithaca-ir", "ithaca-pass"]),
        ("passes/frameworks", &["ithaca-differentiate", "ithaca-import", "ithaca-ir", "ithaca-layout"]),
        (
            "passes/plan",
            &[
                "ithaca-differentiate",
                "ithaca-frameworks",
                "ithaca-import",
                "ithaca-ir",
                "ithaca-layout",
                "ithaca-pass",
            ],
        ),
        (
            "passes",
            &[
                "ithaca-differentiate",
                "ithaca-frameworks",
                "ithaca-import",
                "ithaca-ir",
                "ithaca-layout",
                "ithaca-pass",
                "ithaca-plan",
            ],
        ),
        ("codegen", &["ithaca-device", "ithaca-ir"]),
        ("kernels", &["ithaca-device", "ithaca-ir", "nccl-rs"]),
        ("kernels/device", &["ithaca-ir"]),
        ("kernels/nccl-rs", &[]),
        ("python", &["ithaca"]),
    ] {
        let manifest = std::fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap();
        for named in named_packages(&manifest) {
            assert!(allowed.contains(&named.as_str()), "{package} depends on {named}");
        }
        assert!(!root().join(package).join("build.rs").exists(), "{package} has a build script");
    }
}

/// Every crate, by folder.
const CRATES: &[&str] = &[
    "",
    "codegen",
    "ir",
    "kernels",
    "kernels/device",
    "kernels/nccl-rs",
    "passes",
    "passes/differentiate",
    "passes/frameworks",
    "passes/import",
    "passes/layout",
    "passes/pass",
    "passes/plan",
    "python",
];

#[test]
fn modules_form_no_cycle() {
    for package in CRATES {
        let graph = modules::Graph::of(&root().join(package).join("src/lib.rs"));
        let cycles = graph.cycles();
        assert!(cycles.is_empty(), "modules of `{package}` depend on each other:\n{}", cycles.join("\n"));
    }
}

/// Files that may use tables in hash order, and why their order reaches no output.
const HASHED: &[(&str, &str)] = &[
    ("ir/src/builder.rs", "types are looked up, never listed"),
    ("ir/src/module.rs", "types are looked up, never listed"),
    ("ir/src/text/read.rs", "names are looked up, never listed"),
    ("ir/src/schedule/text/read.rs", "names are looked up, never listed"),
    ("ir/src/schedule/verify/meaning/values.rs", "values from outside are looked up, never listed"),
    ("passes/plan/src/memory.rs", "tensors are looked up, and listed in the order of buffers"),
    ("passes/plan/src/simulate/mod.rs", "asks whether a call was seen"),
    ("ir/src/verify/mod.rs", "asks whether a name was seen"),
    ("ir/src/verify/function.rs", "asks whether a name was seen"),
];

#[test]
fn nothing_in_hash_order_reaches_output() {
    let mut used = BTreeSet::new();
    for (path, source) in sources().into_iter().filter(|(path, _)| !is_test(path)) {
        // Written in two parts, so that this file does not contain what it looks for.
        if [concat!("Hash", "Map"), concat!("Hash", "Set")].iter().any(|word| product(&source).contains(word))
        {
            let reason = HASHED.iter().find(|(allowed, _)| *allowed == path);
            assert!(reason.is_some(), "{path} uses a table in hash order; take an ordered one, or say why");
            used.insert(path);
        }
    }
    assert_eq!(used.len(), HASHED.len(), "every exception is used: {used:?}");
}

#[test]
fn nothing_is_left_undone_and_only_the_program_prints() {
    let everywhere = [
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
        concat!("dbg", "!("),
        concat!("#[", "ignore"),
        concat!("#[should", "_panic"),
        concat!("XX", "X"),
        concat!("FIX", "ME"),
        concat!("TO", "DO"),
    ];
    let printing = [concat!("print", "ln!("), concat!("process::", "exit(")];
    for (path, source) in sources() {
        for word in everywhere {
            assert!(!source.contains(word), "{path} has {word}");
        }
        if is_test(&path) || path == "src/shell.rs" {
            continue;
        }
        let product = product(&source);
        // In documentation, a line of an example may print.
        let code = product.lines().filter(|l| !l.trim_start().starts_with("//"));
        for line in code {
            for word in printing {
                assert!(!line.contains(word), "{path} prints or exits: {line}");
            }
        }
    }
}

#[test]
fn every_unwrap_is_in_a_test() {
    for (path, source) in sources().into_iter().filter(|(path, _)| !is_test(path)) {
        let product = source.split("#[cfg(test)]").next().unwrap_or_default();
        for line in product.lines().filter(|l| !l.trim_start().starts_with("//")) {
            assert!(!line.contains(concat!(".unw", "rap()")), "{path}: {line}");
        }
    }
}

/// Words by which a text speaks of how it was made, and not of what it is; each in two parts.
const WORKSHOP: &[(&str, &str)] = &[
    ("/wo", "rk/"),
    ("work", "tree"),
    ("../sha", "red"),
    ("this ses", "sion"),
    ("help", "er A"),
    ("the br", "ief"),
];

#[test]
fn the_repository_speaks_of_itself_alone() {
    let extensions = ["rs", "md", "toml", "json", "sh", "yml", "cuh", "cu", "h", "hpp", "py", "ith", "snap"];
    for path in files("") {
        let is_text = path.extension().is_some_and(|e| extensions.iter().any(|known| e == *known));
        // Descriptions of models are others' words.
        if !is_text || path.ends_with("config.json") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for (a, b) in WORKSHOP {
            let word = format!("{a}{b}");
            assert!(!text.contains(&word), "{} says `{word}`", path.display());
        }
    }
}

/// Targets of the links of a page, without those into the net or the page itself.
fn links(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for part in page.split("](").skip(1) {
        let target = part.split(')').next().unwrap_or_default();
        let target = target.split('#').next().unwrap_or_default();
        if !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:") {
            found.push(target.to_owned());
        }
    }
    found
}

#[test]
fn links_of_pages_lead_somewhere() {
    for (path, page) in with_extension("", "md") {
        let folder = root().join(&path).parent().unwrap().to_owned();
        for link in links(&page) {
            assert!(folder.join(&link).exists(), "{path}: nothing is at {link}");
        }
    }
}

#[test]
fn commands_of_pages_are_about_files_that_exist() {
    for (path, page) in with_extension("", "md") {
        for line in page.lines().filter(|l| l.contains("ithaca ") || l.contains("cargo ")) {
            for word in line.split(|c: char| c.is_whitespace() || c == '`') {
                if let Some(rest) = word.strip_prefix("examples/").or(word.strip_prefix("tests/goldens/")) {
                    // Placeholders are written in capitals, and patterns with stars and braces.
                    let is_name = !rest.is_empty() && !rest.contains(['*', '{', '<', '…']) && rest != "MODEL";
                    let word = word.trim_end_matches([',', '.', ')', ';', ':']);
                    assert!(!is_name || root().join(word).exists(), "{path}: nothing is at {word}: {line}");
                }
            }
        }
    }
}

/// Codes in quotes, such as `"P20"`.
fn codes(source: &str) -> BTreeSet<String> {
    let quoted = source.split('"').filter(|part| {
        let bytes = part.as_bytes();
        bytes.len() == 3 && b"CEMPSV".contains(&bytes[0]) && bytes[1..].iter().all(u8::is_ascii_digit)
    });
    quoted.map(str::to_owned).collect()
}

#[test]
fn every_code_is_in_one_table_and_every_table_is_used() {
    let mut listed = BTreeSet::new();
    for code in ithaca::codes::sections().iter().flat_map(|(_, codes)| codes.iter()) {
        assert!(listed.insert(code.code.to_owned()), "{} has one meaning", code.code);
    }
    let mut used = BTreeSet::new();
    for (path, source) in sources().into_iter().filter(|(path, _)| !is_test(path)) {
        if path.ends_with("codes.rs") {
            continue;
        }
        for code in codes(product(&source)) {
            assert!(listed.contains(&code), "{path} uses {code}, which is in no table of codes");
            used.insert(code);
        }
    }
    let unused: Vec<&String> = listed.difference(&used).collect();
    assert!(unused.is_empty(), "codes that nothing uses: {unused:?}");
    assert!(listed.contains(Diagnostic::new("P20", "").code));
}

#[test]
fn every_snapshot_belongs_to_a_test() {
    let tests = sources();
    for path in files("") {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(!name.ends_with(".snap.new") && !name.ends_with(".pending-snap"), "{name} waits for review");
        let Some(stem) = name.strip_suffix(".snap") else { continue };
        let snapshot = std::fs::read_to_string(&path).unwrap();
        let source = snapshot.lines().find_map(|l| l.strip_prefix("source: ")).unwrap_or_default();
        let (_, test) =
            tests.iter().find(|(p, _)| p == source).unwrap_or_else(|| panic!("{name}: no {source}"));
        // `it__module__name` or `it__module__name-2`; a name may be put together from a part and a word.
        let own = stem.rsplit("__").next().unwrap();
        let own = own.rsplit_once('-').filter(|(_, n)| n.parse::<u32>().is_ok()).map_or(own, |(own, _)| own);
        // A test of files names each snapshot after its file.
        let stem_of = |path: &PathBuf| path.file_stem().map(|s| s.to_string_lossy().into_owned());
        if files("tests/files").iter().filter_map(stem_of).any(|file| stem.ends_with(&format!("__{file}"))) {
            continue;
        }
        let parts = [Some(own), own.split_once('_').map(|(first, _)| first)];
        let is_named = parts.into_iter().flatten().any(|part| {
            test.contains(&format!("fn {part}()"))
                || test.contains(&format!("\"{part}\""))
                || test.contains(&format!("\"{part}_{{"))
        });
        assert!(is_named, "{name} belongs to no test of {source}");
    }
}
