//! Rewrite rules: sound ones are used, others are refused with what speaks against them.

use std::path::Path;

use ithaca::evaluate::Oracle;
use ithaca_ir::ops::{Family, OpInfo, TABLE, Unary};
use ithaca_ir::{Diagnostics, Module, Source, diagnostic, text};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{compare, oracle};
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::rules::{ApplyRules, CheckedRules, check, parse};

use crate::cli::{ithaca, refused, repository, said};
use crate::tier;

fn read(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap()
}

fn checked(source: &str) -> Result<CheckedRules, Diagnostics> {
    parse(source).and_then(|rules| check(rules, &Oracle))
}

fn refusal(path: &str) -> String {
    let source = read(path);
    let name = Path::new(path).file_name().unwrap().to_str().unwrap();
    let found = checked(&source).expect_err(path);
    diagnostic::render(&found, Some(Source { name, text: &source }))
}

fn apply(module: Module, rules: &CheckedRules) -> Module {
    let pass = Box::new(ApplyRules::new(rules.clone()));
    run_passes(module, &[pass], &mut Context::new(&Volume), &mut Unwatched)
        .unwrap_or_else(|d| panic!("{d:#?}"))
}

#[test]
fn rules_of_the_examples_are_sound() {
    for path in ["examples/rules/algebra.rules", "examples/rules/layouts.rules"] {
        let source = read(path);
        let source = Source { name: path, text: &source };
        if let Err(found) = checked(source.text) {
            panic!("{}", diagnostic::render(&found, Some(source)));
        }
    }
}

/// Operations for which no random operands are drawn; a rule with one is refused, for it cannot be tried.
fn is_untried(row: &OpInfo) -> bool {
    let untried =
        ["sum", "expand", "select", "concat", "cut", "accumulate_product", "product_pair", "coalesced"];
    matches!(row.family, Family::Training | Family::Experts | Family::Random | Family::Cache)
        || untried.contains(&row.name)
}

#[test]
fn rules_that_cannot_be_tried_are_refused() {
    for side in [
        "sum %x",
        "select %x {..?r}",
        "accumulate_product %x %y %z",
        "cross_entropy %x %y {..?r}",
        "dispatch %x %y {..?r}",
    ] {
        let refused = checked(&format!("rule same\n  {side} => {side}\n")).unwrap_err();
        assert_eq!(refused[0].code, "P66", "{side}: {refused:?}");
    }
}

#[test]
fn every_operation_can_be_tried() {
    let mut source = read("tests/files/rules/operations.rules");
    for f in Unary::ALL.map(|f| f.name()) {
        source += &format!("\nrule {f}\n  {f} %a => {f} %a\n");
    }
    let alone = |row: &&OpInfo| matches!(row.family, Family::Source | Family::Structure) || is_untried(row);
    for row in TABLE.iter().filter(|row| !alone(row)) {
        assert!(source.contains(&format!("  {} %a", row.name)), "no rule has `{}`", row.name);
    }
    if let Err(found) = checked(&source) {
        panic!("{}", diagnostic::render(&found, Some(Source { name: "operations.rules", text: &source })));
    }
}

#[test]
fn unsound_rules_are_refused_with_a_counterexample() {
    let text = refusal("tests/files/rules/unsound.rules");
    let rules = parse(&read("tests/files/rules/unsound.rules")).unwrap();
    for rule in &rules {
        assert!(
            text.contains(&format!("error[P67]: rule `{}` is unsound", rule.name)),
            "{}\n{text}",
            rule.name
        );
    }
    let shown = text.match_indices("error[").nth(3).map_or(text.as_str(), |(fourth, _)| &text[..fourth]);
    insta::assert_snapshot!("unsound", shown);
}

#[test]
fn counterexamples_are_programs_that_differ() {
    let source = read("tests/files/rules/unsound.rules");
    for found in checked(&source).unwrap_err() {
        let shown = &found.helps[0];
        let programs: Vec<&str> = shown.split("and after:\n").collect();
        let before = programs[0].strip_prefix("the program before:\n").unwrap();
        let before = text::parse(before).unwrap_or_else(|d| panic!("{d:#?}\n{shown}"));
        ithaca_ir::verify::verify(&before).unwrap_or_else(|d| panic!("{d:#?}\n{shown}"));
        if let [_, after] = programs[..] {
            let after = text::parse(after).unwrap_or_else(|d| panic!("{d:#?}\n{shown}"));
            ithaca_ir::verify::verify(&after).unwrap_or_else(|d| panic!("{d:#?}\n{shown}"));
            assert_ne!(before.functions, after.functions, "{shown}");
        }
    }
}

#[test]
fn rules_that_cannot_be_tried_say_what_was_missing() {
    insta::assert_snapshot!("untried", refusal("tests/files/rules/untried.rules"));
}

fn codes(rule: &str) -> Vec<(&'static str, String)> {
    let found = checked(rule).err().unwrap_or_default();
    found.into_iter().map(|d| (d.code, d.message + "\n" + &d.helps.join("\n"))).collect()
}

/// A rule that gives attention another mask.
fn masks(from: &str, to: &str) -> String {
    format!("rule m attention %q %k %v {{mask={from}, ..?r}} => attention %q %k %v {{mask={to}, ..?r}}")
}

#[test]
fn constants_of_unsound_rules_are_tried_on_longer_sequences() {
    for (from, to, longest) in [
        ("causal", "window(left=100, right=0)", 99..),
        ("window(left=0, right=0)", "causal", 1..),
        ("prefix(50)", "full", 50..),
        ("full", "window(left=300)", 300..),
        ("causal", "causal & (window(left=20, right=0) | sinks(40))", 40..),
        ("window(left=?w, right=0)", "window(left=1, right=0)", 1..),
        ("window(left=?w, right=0)", "window(left=?w+60, right=0)", 1..),
    ] {
        let found = codes(&masks(from, to));
        assert!(matches!(found[..], [("P67", _)]), "{from} => {to}: {found:?}");
        let shown = &found[0].1;
        let program =
            shown.split("the program before:\n").nth(1).unwrap().split("and after:").next().unwrap();
        let program = text::parse(program).unwrap_or_else(|d| panic!("{d:#?}\n{shown}"));
        let n = program.space.dims.values().map(|d| d.size).max().unwrap();
        assert!(longest.contains(&(n - 1)), "{from} => {to}: {shown}");
    }
}

#[test]
fn sound_rules_with_constants_are_accepted() {
    let equal = [
        ("window(left=7, right=0)", "window(left=7, right=0) & causal"),
        ("window(left=0, right=0)", "window(left=0, right=0) & causal"),
        ("window(left=?w, right=0)", "window(left=?w, right=0) & causal"),
        ("prefix(50)", "prefix(50) | prefix(20)"),
        ("documents(0, 7, 16)", "documents(0, 7, 16) | documents(0, 7, 16) & causal"),
        ("causal", "causal & window(left=900, right=0) | causal"),
    ];
    for (from, to) in tier::one_in(2, equal) {
        assert_eq!(codes(&masks(from, to)), [], "{from} => {to}");
    }
}

#[test]
fn constants_that_cannot_be_tried_are_refused() {
    let found = codes(&masks("causal", "window(left=5000, right=0)"));
    assert!(matches!(found[..], [("P66", _)]), "{found:?}");
    assert!(found[0].1.contains("constant 5000 is more than 1024"), "{found:?}");
    let found = codes(
        "rule c attention %q %k %v {mask=causal, scale=?s, heads=?h, kv_heads=?g, queries=?q, keys=?k, width=?d} => attention %q %k %v {mask=causal, scale=?s, heads=?h, kv_heads=?g, queries=?q, keys=?k, width=?d, softcap=1000000.0}",
    );
    assert!(matches!(found[..], [("P66", _)]), "{found:?}");
    assert!(found[0].1.contains("softcap=1000000.0"), "{found:?}");
}

#[test]
fn applied_rules_leave_the_function_that_a_program_computes() {
    let rules = checked(&read("examples/rules/algebra.rules")).unwrap();
    let before = text::parse(&read("tests/files/rules/program.ith")).unwrap();
    let after = apply(before.clone(), &rules);
    let tensors = RandomTensors::of_module(&before, 5);
    let expected = oracle::run::<f64>(&before, &tensors, &tensors).unwrap();
    let found = oracle::run::<f64>(&after, &tensors, &tensors).unwrap();
    for comparison in compare::outputs(&found, &expected) {
        assert!(comparison.verdict.within(1e-12), "{comparison:?}");
    }
    insta::assert_snapshot!("applied", text::print(&after));
}

/// The blocks of a page that start with ```` ```text ````.
fn blocks(page: &str) -> Vec<&str> {
    page.split("```text\n").skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

#[test]
fn the_example_of_the_page_is_what_happens() {
    let page = read("docs/book/src/rules.md");
    let blocks = blocks(&page);
    let programs: Vec<&&str> = blocks.iter().filter(|b| b.starts_with("ithaca 1")).collect();
    let rules = blocks.iter().find(|b| b.contains("rule scale-of-scale")).unwrap();
    let rules = checked(rules).unwrap_or_else(|d| panic!("{d:#?}"));
    let after = apply(text::parse(programs[0]).unwrap(), &rules);
    assert_eq!(text::print(&after), *programs[1]);
    checked(blocks[0]).unwrap_or_else(|d| panic!("{d:#?}"));
}

#[test]
fn the_command_line_applies_rules_where_the_pipeline_says() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let copy = |from: &str, to: &str| {
        std::fs::copy(repository(from), at.join(to)).unwrap();
    };
    copy("tests/files/rules/program.ith", "program.ith");
    copy("tests/files/rules/unsound.rules", "unsound.rules");
    copy("examples/rules/algebra.rules", "algebra.rules");
    let shard = "shard{strategy=ulysses,ulysses=2}";
    let behind = said(at, "opt program.ith --rules algebra.rules");
    assert!(behind.contains("scale-of-scale=1,") && behind.contains("scale-into-attention=1"), "{behind}");
    let before = said(
        at,
        &format!("opt program.ith --rules algebra.rules --pipeline rules,{shard},rules,lower-reshards"),
    );
    let passes: Vec<&str> = before.lines().filter(|l| l.starts_with("pipeline")).collect();
    assert_eq!(passes.len(), 4, "{before}");
    assert!(passes[0].contains("scale-of-scale=1") && passes[2].contains("scale-of-scale=0"), "{before}");
    assert!(before.contains("all_to_all") && !before.contains(" = scale"), "{before}");
    let stopped = said(at, "opt program.ith --rules algebra.rules --stop-after 1");
    assert!(stopped.contains("scale-of-scale=1,") && stopped.contains("scale-into-attention=0"), "{stopped}");

    let unsound = refused(at, "opt program.ith --rules unsound.rules");
    assert!(unsound.contains("error[P67]") && unsound.contains("unsound.rules:1:6"), "{unsound}");
    let json = ithaca(at, "--error-format json opt program.ith --rules unsound.rules".split(' '));
    let first: serde_json::Value = serde_json::from_str(json.err.lines().next().unwrap()).unwrap();
    assert_eq!((json.code, first["code"].as_str(), first["line"].as_u64()), (2, Some("P67"), Some(1)));
    assert!(first["helps"][0].as_str().unwrap().contains("func @main()"), "{first}");
    std::fs::write(at.join("bad.rules"), "rule a\n  adt %x %y => %x\n").unwrap();
    assert!(refused(at, "opt program.ith --rules bad.rules").contains("did you mean `add`?"));
    assert!(refused(at, "opt program.ith --rules none.rules").contains("error[C01]"));
    assert!(refused(at, "opt program.ith --pipeline rules").contains("--rules"));
    assert!(
        refused(at, "opt program.ith --rules algebra.rules --pipeline rules{x=1}").contains("error[P02]")
    );
}

#[test]
fn broken_files_of_rules_are_refused_and_nothing_panics() {
    let source = read("examples/rules/algebra.rules") + &read("examples/rules/layouts.rules");
    let mut state = 1u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let scraps = [
        "%", "?", "{", "}", "(", ")", "#9", "..", "=>", "where ", "rule ", "1e", "-", "é", "\"", "[1, ", "|",
    ];
    for _ in 0..3000 {
        let mut text: Vec<char> = source.chars().collect();
        for _ in 0..=below(3) {
            let at = below(text.len());
            match below(3) {
                0 => drop(text.drain(at..(at + below(9)).min(text.len()))),
                1 => drop(text.splice(at..at, scraps[below(scraps.len())].chars())),
                _ => text.swap(at, (at + 1) % source.len().min(source.chars().count())),
            }
        }
        let text: String = text.into_iter().collect();
        if let Err(found) = parse(&text) {
            assert!(found.iter().all(|d| d.code.starts_with("P6")), "{found:?}\n{text}");
        }
    }
}
