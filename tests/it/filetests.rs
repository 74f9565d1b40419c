//! Text in, diagnostics out: the expected ones stand on the offending line as `//~ error[V07] part of the message`.
//!
//! A diagnostic that has no place in the text is expected on the first line.

use std::path::{Path, PathBuf};

use ithaca_ir::{Diagnostic, Diagnostics, schedule, text, verify};

/// The `.ith` files of a folder of `tests/files`, in order of names.
pub(crate) fn files(folder: &str) -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(folder);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&root).unwrap().map(|e| e.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "ith"));
    paths.sort();
    assert!(!paths.is_empty(), "{} holds no tests", root.display());
    paths.into_iter().map(|p| (p.clone(), std::fs::read_to_string(p).unwrap())).collect()
}

/// What the language has to say about a text, module or schedule.
pub(crate) fn diagnose(source: &str) -> Diagnostics {
    if source.lines().next().is_some_and(|line| line.contains(" schedule")) {
        return schedule::parse(source)
            .and_then(|s| schedule::verify(&s).map(drop))
            .err()
            .unwrap_or_default();
    }
    match text::parse(source) {
        Ok(module) => verify::verify(&module).err().unwrap_or_default(),
        Err(diagnostics) => diagnostics,
    }
}

fn line_of(source: &str, diagnostic: &Diagnostic) -> usize {
    let start = diagnostic.span.map_or(0, |s| s.start as usize);
    source[..start].matches('\n').count() + 1
}

/// Expected diagnostics: line, code (`error` alone leaves it open), part of the message.
fn expected(source: &str) -> Vec<(usize, String, String)> {
    let lines = source.lines().enumerate();
    lines
        .flat_map(|(i, line)| line.split("//~ error").skip(1).map(move |rest| (i + 1, rest)))
        .map(|(line, rest)| match rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
            Some((code, message)) => (line, code.to_owned(), message.trim().to_owned()),
            None => (line, String::new(), rest.trim().to_owned()),
        })
        .collect()
}

fn check(path: &Path, source: &str) {
    let mut found: Vec<Diagnostic> = diagnose(source);
    let wanted = expected(source);
    assert!(!wanted.is_empty(), "{} expects nothing", path.display());
    for (line, code, message) in &wanted {
        let i = found.iter().position(|d| {
            line_of(source, d) == *line && d.code.starts_with(code.as_str()) && d.message.contains(message)
        });
        match i {
            Some(i) => drop(found.remove(i)),
            None => {
                panic!("{}:{line}: no error[{code}] with `{message}`; left are {found:#?}", path.display())
            }
        }
    }
    assert!(found.is_empty(), "{}: not expected: {found:#?}", path.display());
}

#[test]
fn texts_that_cannot_be_read() {
    files("parse").iter().for_each(|(path, source)| check(path, source));
}

#[test]
fn modules_that_break_an_invariant() {
    files("verify").iter().for_each(|(path, source)| check(path, source));
}

#[test]
fn schedules_that_break_an_invariant() {
    files("schedule").iter().for_each(|(path, source)| check(path, source));
}

#[test]
fn every_invariant_has_a_file_that_breaks_it() {
    let codes = |folder: &str| -> Vec<String> {
        files(folder).iter().flat_map(|(_, source)| expected(source)).map(|(_, code, _)| code).collect()
    };
    let tested = [codes("parse"), codes("verify"), codes("schedule")].concat();
    // A text of 4 GiB is no file for a repository, and gradients flow in a pass only. What a collective brings is broken by
    // geometry, not by a text; one text is one order, and has no program beside it.
    let elsewhere = |code: &str| matches!(code, "E10" | "V32" | "S15" | "S16" | "S18");
    for (_, table) in ithaca_ir::codes::SECTIONS {
        for entry in table.iter().filter(|c| !elsewhere(c.code)) {
            assert!(tested.iter().any(|c| c == entry.code), "no file breaks {}: {}", entry.code, entry.rule);
        }
    }
    for code in &tested {
        assert!(ithaca_ir::codes::rule(code).is_some(), "{code} is in no table of codes");
    }
}

#[test]
fn sound_files_verify_and_print_as_they_parse() {
    for (path, source) in files("roundtrip") {
        let name = path.display();
        assert!(diagnose(&source).is_empty(), "{name}: {:#?}", diagnose(&source));
        if source.starts_with("ithaca 1 schedule") {
            let schedule = schedule::parse(&source).unwrap();
            let printed = schedule::print(&schedule);
            assert_eq!(schedule::parse(&printed).unwrap(), schedule, "{name}");
            assert_eq!(schedule::print(&schedule::parse(&printed).unwrap()), printed, "{name}");
        } else {
            let module = text::parse(&source).unwrap();
            let printed = text::print(&module);
            assert_eq!(text::parse(&printed).unwrap(), module, "{name}");
            assert_eq!(text::print(&text::parse(&printed).unwrap()), printed, "{name}");
        }
    }
}

#[test]
fn a_printed_file_reads_as_it_was_written() {
    let source = files("roundtrip").into_iter().find(|(p, _)| p.ends_with("llama_ulysses.ith")).unwrap().1;
    assert_eq!(text::print(&text::parse(&source).unwrap()), source);
}

#[test]
fn files_cut_anywhere_are_refused_or_read_but_never_panic() {
    for (path, source) in files("roundtrip") {
        for cut in (0..source.len()).filter(|&i| source.is_char_boundary(i)) {
            let part = &source[..cut];
            let diagnostics = diagnose(part);
            let whole = part.trim_end() == source.trim_end();
            assert!(whole || !diagnostics.is_empty(), "{}: cut at {cut} is accepted", path.display());
            for diagnostic in &diagnostics {
                let source = ithaca_ir::Source { name: "cut", text: part };
                assert!(diagnostic.render(Some(source)).contains(diagnostic.code));
            }
        }
    }
}

#[test]
fn bytes_changed_anywhere_never_panic() {
    for (_, source) in files("roundtrip") {
        for (i, byte) in
            [b'0', b'}', b'%', b'"', b'(', b'@', b'9', b'\n', b'x'].into_iter().cycle().enumerate()
        {
            let at = i * 7;
            if at >= source.len() {
                break;
            }
            let mut bytes = source.clone().into_bytes();
            bytes[at] = byte;
            let Ok(changed) = String::from_utf8(bytes) else { continue };
            for diagnostic in diagnose(&changed) {
                diagnostic.render(Some(ithaca_ir::Source { name: "changed", text: &changed }));
            }
        }
    }
}
