//! Parsing rules, and applying them to programs in text form. Soundness is tested in the crate that runs programs.

use super::*;

fn refused(text: &str) -> String {
    let found = parse(text).expect_err(text);
    let source = ithaca_ir::Source { name: "my.rules", text };
    ithaca_ir::diagnostic::render(&found, Some(source))
}

#[test]
fn rules_print_as_they_are_written() {
    for text in [
        "rule a\n  add %x %y => add %y %x\n  where alike(%x, %y)",
        "rule b\n  all_gather (slice %x {axis=?a, dim=?d}) {axis=?a, dim=?d} => %x",
        "rule c\n  merge %a %b (merge %c %d %e %f) (merge %c %d %e %f)#1 => merge %a %b %c %d",
        "rule d\n  attention %q %k %v {scale=?s, mask=(causal & window(left=?w, right=0)), ..?r} => attention %q %k %v {scale=((?s * 2.0) / -4.0), mask=full, ..?r}\n  where ?w < 3, ?s != 0.5, has(%q, s), divides(2, s)",
    ] {
        let rules = parse(text).unwrap_or_else(|d| panic!("{d:#?}"));
        assert_eq!(rules[0].to_string(), text);
        let again = parse(&rules[0].to_string()).unwrap_or_else(|d| panic!("{d:#?}"));
        assert_eq!(again[0].to_string(), text);
    }
}

#[test]
fn malformed_rules_are_refused_at_their_place() {
    let mut all = String::new();
    for text in [
        "",
        "// nothing\n",
        "role a add %x %y => %x",
        "rule a add %x, => %x",
        "rule a add %x %y = %x",
        "rule a %x => %x",
        "rule a add %x %y => %x where",
        "rule a add %x %y => %x where even(%x)",
        "rule a add %x %y => %x where 3",
        "rule a scale %x {factor=} => %x",
        "rule a scale %x {factor=?a, factor=?b} => %x",
        "rule a scale %x {factor=1e999} => %x",
        "rule a scale %x {factor=é} => %x",
        "rule a scale %x {factor=99999999999999999999} => %x",
        "rule a add %x %y => %x\nrule a add %x %y => %y",
        "rule a adt %x %y => %x",
        "rule a add %x => %x",
        "rule a scale %x {faktor=?a} => %x",
        "rule a silu %x {factor=?a} => %x",
        "rule a add %x (param {name=?n}) => %x",
        "rule a call %x {callee=?f, layers=?l} => %x",
        "rule a add %x %y => add %x %z",
        "rule a scale %x {factor=?a} => scale %x {factor=?b}",
        "rule a scale %x {factor=?a} => scale %x {..?r}",
        "rule a add %x %y => %x where has(%z, ?d)",
        "rule a scale %x {factor=?a*2} => %x",
        "rule a rms_norm %x %w {over=?d, ..} => rms_norm %x %w {over=?d, ..}",
        "rule a rms_norm %x %w {over=?r, ..?r} => rms_norm %x %w {over=?r, ..?r}",
    ] {
        all += &format!("{}\n", refused(text));
    }
    let deep = format!("rule a {}silu %x{} => %x", "silu (".repeat(40), ")".repeat(40));
    assert!(refused(&deep).contains("deeper"));
    let deep = format!("rule a scale %x {{factor={}1{}}} => %x", "(".repeat(5000), ")".repeat(5000));
    assert!(refused(&deep).contains("deeper"));
    let long = format!("rule a scale %x {{factor=?a}} => scale %x {{factor=1{}}}", "+1".repeat(100_000));
    assert!(refused(&long).contains("deeper"));
    insta::assert_snapshot!("malformed", all);
}

/// The program after unchecked rules.
fn applied(rules: &str, program: &str) -> (String, Vec<String>) {
    let rules = CheckedRules { rules: parse(rules).unwrap_or_else(|d| panic!("{d:#?}")) };
    let module = ithaca_ir::text::parse(program).unwrap_or_else(|d| panic!("{d:#?}"));
    let pass: Box<dyn Pass> = Box::new(ApplyRules::new(rules));
    let mut cx = Context::new(&ithaca_pass::Volume);
    let after = ithaca_pass::run_passes(module, &[pass], &mut cx, &mut ithaca_pass::Unwatched)
        .unwrap_or_else(|d| panic!("{d:#?}"));
    (ithaca_ir::text::print(&after), cx.notes().to_vec())
}

const PROGRAM: &str = "ithaca 1 program
model \"two blocks\"
dim s = 4
dim m = 6

func @block(%x: f32[s m]) {
  %w = param {name=\"w\"} : f32[m]
  %a = scale %x {factor=2.0} : f32[s m]
  %b = scale %a {factor=0.5} : f32[s m]
  %c = mul %b, %w : f32[s m]
  return %c
}

func @main() {
  %x = input {name=\"x\"} : f32[s m]
  %y = call %x {callee=@block, layers=0..2} : f32[s m]
  %unused = silu %y : f32[s m]
  return y = %y
}
";

#[test]
fn replacements_are_tried_again_and_names_stay() {
    let rules = "
        rule fold scale (scale %x {factor=?a}) {factor=?b} => scale %x {factor=?a*?b}
        rule one scale %x {factor=1} => %x
        rule swap mul (scale %x {factor=?a}) %y => scale (mul %x %y) {factor=?a}";
    insta::assert_snapshot!("applied", applied(rules, PROGRAM).0);
}

#[test]
fn rules_that_feed_themselves_are_stopped() {
    let (text, notes) = applied("rule grow mul %x %w => mul (scale %x {factor=1}) %w", PROGRAM);
    assert!(text.contains("rules{grow=1000}"), "{text}");
    assert_eq!(notes.len(), 1, "{notes:?}");
    let (text, notes) = applied("rule spin scale %x {factor=?a} => scale %x {factor=?a}", PROGRAM);
    assert!(text.contains("rules{spin=1000}"), "{text}");
    assert!(notes[0].contains("1000 applications"), "{notes:?}");
}
