//! Fuzz targets as functions of bytes, and the seeds of each. A function panics where something is wrong: a parser that panics
//! or accepts what it cannot print, a refusal without a reason, a verdict that is false.
//!
//! `cargo fuzz` runs them for hours ([docs/book/src/security.md](../../docs/book/src/security.md)), and the tests of the main workspace run them
//! on the seeds and on some mutations of these.

mod choices;
pub mod request;

use std::path::{Path, PathBuf};

use ithaca::evaluate::Oracle;
use ithaca_ir::{Diagnostic, Module, diagnostic, schedule, text, verify};
use ithaca_kernels::launch;
use ithaca_kernels::store::{SafeTensorsFile, TensorSource};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::import::{self, Mode, Workload};
use ithaca_passes::plan::Plan;
use ithaca_passes::registry::Registry;
use ithaca_passes::rules;
use serde_json::Value;

pub use choices::Choices;

/// A target.
pub struct Target {
    /// Its name, which the binary has as well.
    pub name: &'static str,
    /// Checks what some bytes do.
    pub run: fn(&[u8]),
    /// Bytes to begin with, where the folder is that of the repository.
    pub seeds: fn(&Path) -> Vec<Vec<u8>>,
}

/// All targets.
pub const TARGETS: [Target; 9] = [
    Target { name: "config", run: config, seeds: configs },
    Target { name: "plan", run: plan, seeds: plans },
    Target { name: "cluster", run: cluster, seeds: clusters },
    Target { name: "program", run: program, seeds: programs },
    Target { name: "schedule", run: schedule, seeds: schedules },
    Target { name: "rules", run: rules, seeds: rule_files },
    Target { name: "safetensors", run: safetensors, seeds: tensors },
    Target { name: "frames", run: frames, seeds: framed },
    Target { name: "request", run: request, seeds: requests },
];

/// Whether diagnostics are a refusal: there is one, each has a code and a message, and all can be rendered.
///
/// # Errors
/// What is missing.
pub fn is_refusal(diagnostics: &[Diagnostic]) -> Result<(), String> {
    if diagnostics.is_empty() {
        return Err("a refusal without a diagnostic".to_owned());
    }
    let known =
        |code: &str| ithaca::codes::sections().iter().any(|(_, codes)| codes.iter().any(|c| c.code == code));
    match diagnostics.iter().find(|d| d.message.is_empty() || !known(d.code)) {
        Some(bad) => Err(format!("a diagnostic without a message or with an unknown code: {bad:?}")),
        None => Ok(drop(diagnostic::render(diagnostics, None))),
    }
}

fn refused(diagnostics: &[Diagnostic]) {
    if let Err(why) = is_refusal(diagnostics) {
        panic!("{why}");
    }
}

/// That a program is what its text says.
fn prints(module: &Module) {
    let printed = text::print(module);
    match text::parse(&printed) {
        Ok(parsed) => assert!(parsed == *module, "printed and parsed it is another program:\n{printed}"),
        Err(diagnostics) => panic!("what is printed does not parse: {diagnostics:?}\n{printed}"),
    }
}

/// A model's `config.json`.
pub fn config(data: &[u8]) {
    let Ok(config) = serde_json::from_slice::<Value>(data) else { return };
    let config = import::text_part(&config);
    for mode in [Mode::Prefill, Mode::Train] {
        let workload = Workload { mode, ..Workload::prefill(2, 16) };
        match import::program(&config, "m", &workload) {
            Ok(module) => {
                prints(&module);
                assert!(verify::verify(&module).is_ok(), "an imported program is legal");
            }
            Err(diagnostics) => refused(&diagnostics),
        }
    }
}

/// A plan: read, written, compiled.
pub fn plan(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let registry = Registry::default();
    match Plan::from_json(&registry, "plan.json", text) {
        Ok(plan) => {
            let again = Plan::from_json(&registry, "plan.json", &plan.to_json());
            assert!(
                again.is_ok_and(|again| again.to_json() == plan.to_json()),
                "a written plan is read as it was"
            );
            if let Err(diagnostics) = plan.compile(&registry) {
                refused(&diagnostics);
            }
        }
        Err(diagnostic) => refused(std::slice::from_ref(&diagnostic)),
    }
}

/// A cluster file.
pub fn cluster(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Cluster::parse("cluster.toml", text) {
        Ok(cluster) => {
            let written = cluster.to_toml();
            let again = Cluster::parse("cluster.toml", &written);
            assert!(
                again.is_ok_and(|again| again == cluster),
                "a written cluster is read as it was:\n{written}"
            );
        }
        Err(diagnostic) => refused(std::slice::from_ref(&diagnostic)),
    }
}

/// A program in text form.
pub fn program(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    match text::parse(source) {
        Ok(module) => {
            prints(&module);
            if let Err(diagnostics) = verify::verify(&module) {
                refused(&diagnostics);
            }
        }
        Err(diagnostics) => refused(&diagnostics),
    }
}

/// A schedule in text form.
pub fn schedule(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    match schedule::parse(source) {
        Ok(parsed) => {
            let printed = schedule::print(&parsed);
            let again = schedule::parse(&printed);
            assert!(
                again.is_ok_and(|again| again == parsed),
                "printed and parsed it is another schedule:\n{printed}"
            );
            if let Err(diagnostics) = schedule::verify(&parsed) {
                refused(&diagnostics);
            }
        }
        Err(diagnostics) => refused(&diagnostics),
    }
}

/// Rewrite rules.
pub fn rules(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    if let Err(diagnostics) = rules::parse(source).and_then(|rules| rules::check(rules, &Oracle)) {
        refused(&diagnostics);
    }
}

/// A file of tensors.
pub fn safetensors(data: &[u8]) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("x.safetensors");
    std::fs::write(&path, data).expect("a temporary file");
    let Ok(file) = SafeTensorsFile::open(&path) else { return };
    for name in file.names() {
        // The header may describe what the file cannot have, which is refused as it is read.
        if let (Some(shape), Ok(tensor)) = (file.shape(&name), file.read(&name)) {
            let n = tensor.shape.iter().product::<usize>();
            assert!(tensor.data.len() == n && shape.iter().product::<u64>() == n as u64, "{name}");
        }
        let _ = file.raw(&name);
    }
}

/// What another process sends.
pub fn frames(data: &[u8]) {
    launch::read_frames(data);
}

/// A request, spelt by numbers.
pub fn request(data: &[u8]) {
    let choices = &mut Choices::from_bytes(data);
    let (first, seed) = (choices.below(1 << 16), choices.below(1 << 16) as u64);
    if let Err(why) = request::check(&request::draw(first, choices), seed) {
        panic!("{why}");
    }
}

/// The files below a folder with an extension, sorted.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let (mut found, mut open) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The longest seed: longer ones are mutated seldom where it matters.
const LONGEST: usize = 1 << 16;

/// The contents of the files in folders of the repository.
fn contents(root: &Path, folders: &[&str], extension: &str) -> Vec<Vec<u8>> {
    let paths = folders.iter().flat_map(|folder| files(&root.join(folder), extension));
    let texts = paths.filter_map(|path| std::fs::read(path).ok());
    texts.filter(|text| text.len() <= LONGEST).collect()
}

fn configs(root: &Path) -> Vec<Vec<u8>> {
    contents(root, &["examples", "tests/goldens"], "json")
}

/// Plans as the command writes them.
fn plans(root: &Path) -> Vec<Vec<u8>> {
    use clap::Parser;
    let registry = Registry::default();
    let plan = |line: &str| {
        let mut arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        arguments[2] = root.join(&arguments[2]).display().to_string();
        let cli = ithaca::cli::Cli::try_parse_from(&arguments).expect("the arguments are right");
        let (progress, environment) = (&mut |_: &str| {}, &|_: &str| -> Option<String> { None });
        let mut session =
            ithaca::commands::Session { registry: &registry, progress, arguments, width: 100, environment };
        let done = ithaca::commands::run(cli, &mut session).expect("a seed is planned");
        done.text.into_bytes()
    };
    [
        "ithaca plan examples/llama-3-8b --gpus 8 --seq 1024 --strategy ulysses --mesh ulysses=8 --json",
        "ithaca plan examples/gpt2 --gpus 4 --seq 128 --mode train --strategy ring --mesh ring=4 --json",
        "ithaca plan examples/mixtral-8x7b --gpus 8 --seq 256 --strategy ulysses+ep --mesh ulysses=4,ep=2 --json",
    ]
    .map(plan)
    .into()
}

fn clusters(root: &Path) -> Vec<Vec<u8>> {
    contents(root, &["passes/plan/clusters"], "toml")
}

fn programs(root: &Path) -> Vec<Vec<u8>> {
    contents(root, &["examples", "tests/files"], "ith")
}

fn schedules(root: &Path) -> Vec<Vec<u8>> {
    contents(root, &["tests/files/schedule", "tests/files/roundtrip"], "ith")
}

fn rule_files(root: &Path) -> Vec<Vec<u8>> {
    contents(root, &["examples/rules", "tests/files/rules", "passes"], "rules")
}

fn tensors(root: &Path) -> Vec<Vec<u8>> {
    contents(root, &["tests/goldens"], "safetensors")
}

fn framed(_: &Path) -> Vec<Vec<u8>> {
    launch::example_frames()
}

fn requests(_: &Path) -> Vec<Vec<u8>> {
    (0..64).map(|seed| Choices::from_seed(seed).to_bytes()).collect()
}
