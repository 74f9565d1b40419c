//! What users see: diagnostics for a terminal and as JSON.

use ithaca_ir::{Source, diagnostic};

use crate::filetests::{diagnose, files};

#[test]
fn diagnostics_for_a_terminal() {
    let mut out = String::new();
    for folder in ["parse", "verify", "schedule"] {
        for (path, source) in files(folder) {
            let name = format!("{folder}/{}", path.file_name().unwrap().to_string_lossy());
            out += &diagnostic::render(&diagnose(&source), Some(Source { name: &name, text: &source }));
            out += "\n";
        }
    }
    insta::assert_snapshot!(out);
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
