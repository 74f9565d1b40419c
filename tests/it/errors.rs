//! What users see: diagnostics for a terminal and as JSON.

use ithaca_ir::{Source, Span, diagnostic};

use crate::filetests::{diagnose, files};

/// Files whose diagnostics show every part of a rendering: helps, several labels, several lines, no place in the text.
const SHOWN: [&str; 10] = [
    "parse/E02_escape.ith",
    "parse/E06_axis.ith",
    "parse/E08_window.ith",
    "verify/V01_operand_count.ith",
    "verify/V03_mismatch.ith",
    "verify/V04_random.ith",
    "verify/V07_conflict.ith",
    "verify/V09_uneven_split.ith",
    "verify/V12_reshard_left.ith",
    "verify/V22_granule.ith",
];

#[test]
fn diagnostics_for_a_terminal() {
    let mut shown = String::new();
    for folder in ["parse", "verify", "schedule"] {
        for (path, source) in files(folder) {
            let name = format!("{folder}/{}", path.file_name().unwrap().to_string_lossy());
            let found = diagnose(&source);
            let text = diagnostic::render(&found, Some(Source { name: &name, text: &source }));
            for diagnostic in &found {
                let head = format!("error[{}]: {}", diagnostic.code, diagnostic.message);
                assert!(text.contains(&head), "{name}: {text}");
                assert!(diagnostic.span.is_none() || text.contains(&name), "{name}: {text}");
            }
            if SHOWN.contains(&name.as_str())
                || (folder == "schedule" && shown.matches("schedule/").count() == 0)
            {
                shown += &text;
                shown += "\n";
            }
        }
    }
    insta::assert_snapshot!(shown);
}

#[test]
fn source_lines_are_cut_to_a_terminal() {
    let text = format!("key = \"{}\" # comment\n", "word ".repeat(40));
    let source = Source { name: "a.toml", text: &text };
    let at = |start, end| diagnostic::Diagnostic::new("E00", "wrong").at(Span::new(start, end)).label("here");
    for span in [(0, 3), (6, 208), (100, 104), (210, 217)] {
        for columns in [60, 80, 200] {
            let shown = at(span.0, span.1).render_within(Some(source), columns);
            assert!(shown.contains("...") && shown.contains("^ here"), "{shown}");
            assert!(shown.lines().all(|line| line.chars().count() <= columns), "{columns}: {shown}");
        }
    }
    let fits = Source { text: &text[..50], ..source };
    assert_eq!(at(2, 49).render_within(Some(fits), 60), at(2, 49).render(Some(fits)));
}

#[test]
fn diagnostics_as_json() {
    let (_, source) = files("verify").into_iter().find(|(p, _)| p.ends_with("V07_conflict.ith")).unwrap();
    let source_text = Source { name: "V07_conflict.ith", text: &source };
    insta::assert_json_snapshot!(diagnostic::json(&diagnose(&source), Some(source_text)));
    let refusal =
        diagnostic::Diagnostic::new("P01", "28 heads on 8 ranks").repairs(["--mesh u=4".to_owned()]);
    insta::assert_json_snapshot!(diagnostic::json(&[refusal], None));
}
