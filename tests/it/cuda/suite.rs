//! The programs and command lines of `tests/gpu.sh`, which needs a GPU, are valid and run on the CPU.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use ithaca_ir::text;
use ithaca_ir::verify::verify;
use ithaca_passes::compile::compile;
use ithaca_passes::pass::Volume;
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::parse_mesh;

use super::{found, options, root};
use crate::tier;

#[test]
fn the_gpu_suite_is_a_script_and_says_where_there_is_no_gpu() {
    if !found("bash") {
        return;
    }
    let script = root().join("tests/gpu.sh");
    let run = |arguments: &[&Path]| Command::new("bash").args(arguments).output().unwrap();
    assert!(run(&[Path::new("-n"), &script]).status.success());
    assert_eq!(run(&[&script]).status.code(), Some(2));
    let ithaca = Path::new(env!("CARGO_BIN_EXE_ithaca"));
    assert_eq!(run(&[&script, ithaca, Path::new("absent")]).status.code(), Some(2));
    if !Path::new("/dev/nvidia0").exists() {
        let run = run(&[&script, ithaca]);
        assert_eq!(run.status.code(), Some(77));
        assert!(String::from_utf8_lossy(&run.stderr).contains("no GPU at hand"));
    }
}

/// The programs that run on a GPU are programs.
#[test]
fn programs_of_the_gpu_suite_are_valid() {
    let mut found = 0;
    for entry in std::fs::read_dir(root().join("tests/gpu")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "ith") {
            continue;
        }
        let source = std::fs::read_to_string(&path).unwrap();
        let program = text::parse(&source).unwrap_or_else(|d| panic!("{}: {d:?}", path.display()));
        verify(&program).unwrap_or_else(|d| panic!("{}: {d:?}", path.display()));
        // As `run` compiles it.
        let compiled = compile(&program, &options("single", &[]), &Volume);
        compiled.unwrap_or_else(|d| panic!("{}: {d:?}", path.display()));
        found += 1;
    }
    assert!(found > 2, "only {found} programs");
}

/// The lines of `strategies.txt`: modes, subject, options.
fn lines() -> Vec<(Vec<String>, String, Vec<String>)> {
    let text = std::fs::read_to_string(root().join("tests/gpu/strategies.txt")).unwrap();
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let line = |line: &str| {
        let mut words = line.split_whitespace().map(str::to_owned);
        let (modes, subject) = (words.next().unwrap(), words.next().unwrap());
        (modes.split(',').map(str::to_owned).collect(), subject, words.collect())
    };
    lines.map(line).collect()
}

fn option<'a>(options: &'a [String], name: &str) -> Option<&'a str> {
    options.iter().position(|o| o == name).map(|at| options[at + 1].as_str())
}

/// Every strategy on 1, 2, 4 or 8 ranks, as many as it has.
#[test]
fn the_gpu_suite_has_every_strategy() {
    let mut seen: BTreeSet<(String, u64)> = BTreeSet::new();
    for (_, _, options) in lines() {
        let ranks = option(&options, "--mesh").map_or(1, |mesh| parse_mesh(mesh).unwrap().ranks());
        let strategy = option(&options, "--strategy").unwrap_or("single");
        seen.extend(strategy.split('+').map(|one| (one.to_owned(), ranks)));
    }
    for strategy in Registry::default().strategies() {
        let name = strategy.name();
        let expected: &[u64] = if name == "single" { &[1] } else { &[2, 4, 8] };
        for &ranks in expected {
            assert!(seen.contains(&(name.to_owned(), ranks)), "{name} on {ranks}");
        }
    }
}

/// Lines of some mode pass on the CPU, as the script would have them; the strategies' own tests run all of them.
fn pass(mode: &str) {
    let lines: Vec<_> = lines().into_iter().filter(|(modes, ..)| modes.iter().any(|m| m == mode)).collect();
    assert!(lines.len() > 5, "only {} lines for {mode}", lines.len());
    for (_, subject, options) in tier::one_in(6, lines.into_iter().step_by(3)) {
        let mut run = Command::new(env!("CARGO_BIN_EXE_ithaca"));
        run.arg("run").arg(root().join("tests").join(&subject)).args(&options);
        if mode != "program" {
            run.args(["--mode", mode, "--seq", "32", "--batch", "8"]);
        }
        let run = run.output().unwrap();
        let said = [run.stdout, run.stderr].concat();
        assert!(run.status.success(), "{mode} {subject} {options:?}: {}", String::from_utf8_lossy(&said));
    }
}

#[test]
fn forward_passes_of_the_gpu_suite_pass_on_the_cpu() {
    pass("prefill");
}

#[test]
fn training_steps_of_the_gpu_suite_pass_on_the_cpu() {
    pass("train");
}

#[test]
fn attention_of_the_gpu_suite_passes_on_the_cpu() {
    pass("program");
}
