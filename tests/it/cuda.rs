//! Emitted CUDA programs: they run on the host against the goldens, and nvcc compiles them.
//!
//! Without a GPU the very same sources are compiled by a host compiler against the headers of `tests/cuda/host`, one
//! process per rank. Where no compiler is found a test says so and does nothing.

mod decoding;
mod device;
mod distributed;
mod emitted;
mod everything;
mod experts;
mod faults;
mod flash;
mod folded;
mod pipeline;
mod profile;
mod rows;
mod self_check;
mod steps;
mod suite;
mod together;
mod training;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use ithaca_codegen::cuda;
use ithaca_ir::schedule::{self, Schedule};
use ithaca_ir::verify::verify;
use ithaca_ir::{Mask, Module};
use ithaca_kernels::oracle;
use ithaca_kernels::store::{SafeTensorsFile, TensorSource};
use ithaca_kernels::tensor::Tensor;
use ithaca_passes::compile::compile;
use ithaca_passes::import::{Mode, Workload, import};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::ShardOptions;
use serde_json::Value;

use self::together::{Case, Sources};
use crate::masks::masked;
use crate::require::skip;
use crate::tier;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn module(directory: &Path, workload: &Workload) -> Module {
    let text = fs::read_to_string(directory.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    import(&config, "model", workload).unwrap_or_else(|e| panic!("{}", e.render(None)))
}

fn options(strategy: &str, axes: &[(&str, &str)]) -> ShardOptions {
    let strategy = [("strategy".to_owned(), strategy.to_owned())];
    let axes = axes.iter().map(|&(k, v)| (k.to_owned(), v.to_owned()));
    ShardOptions::from_pipeline(&strategy.into_iter().chain(axes).collect::<Vec<_>>()).unwrap()
}

/// Emits `module` with its reference into a directory.
fn emit(module: &Module, options: &ShardOptions, out: &Path) {
    let compiled = compile(module, options, &Volume).unwrap();
    let whole = lower(verify(module).unwrap()).unwrap();
    write_program(&compiled.schedule, Some(&whole), out);
}

/// The files of the program of a schedule.
fn emitted(schedule: &Schedule, reference: Option<&Schedule>) -> Vec<cuda::File> {
    emitted_steps([schedule].into(), reference.map(|schedule| [schedule].into()))
}

/// The schedules of a program: of a step, and maybe of prompts.
#[derive(Clone, Copy)]
struct Steps<'a> {
    step: &'a Schedule,
    prompts: Option<&'a Schedule>,
}

impl<'a> From<[&'a Schedule; 1]> for Steps<'a> {
    fn from([step]: [&'a Schedule; 1]) -> Self {
        Self { step, prompts: None }
    }
}

/// The files of the program of such schedules.
fn emitted_steps(ranks: Steps<'_>, reference: Option<Steps<'_>>) -> Vec<cuda::File> {
    fn verified(steps: Steps<'_>) -> cuda::Steps<'_> {
        let prompts = steps.prompts.map(|prompts| schedule::verify(prompts).unwrap());
        cuda::Steps { step: schedule::verify(steps.step).unwrap(), prompts, handover: None }
    }
    cuda::emit(verified(ranks), reference.map(verified)).unwrap_or_else(|d| panic!("{}", d[0].render(None)))
}

/// Writes the program of a schedule into a directory.
fn write_program(schedule: &Schedule, reference: Option<&Schedule>, out: &Path) {
    write_files(&emitted(schedule, reference), out);
}

fn write_files(files: &[cuda::File], out: &Path) {
    for file in files {
        let path = out.join(&file.path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &file.contents).unwrap();
    }
}

fn found(tool: &str) -> bool {
    Command::new(tool).arg("--version").output().is_ok_and(|o| o.status.success())
}

/// Whether emitted programs run on this machine.
fn can_run() -> bool {
    let can = found("g++") && found("bash");
    if !can {
        skip("g++", &"g++ and bash are needed");
    }
    can
}

/// The same for a test of the full tier.
fn can_run_in_full() -> bool {
    tier::is_full_or_says_so() && can_run()
}

/// A C++ compiler that compiles nothing twice.
fn compiler() -> PathBuf {
    root().join("tests/cuda/host/compile.sh")
}

/// A layout of `module`, with weights and inputs of the golden in `directory`, as a program that checks itself.
fn case(directory: &Path, module: &Module, options: &ShardOptions) -> Case {
    let whole = lower(verify(module).unwrap()).unwrap();
    Case {
        name: format!("{} under {} {}", directory.display(), options.strategy, options.mesh),
        schedule: compile(module, options, &Volume).unwrap().schedule,
        reference: Some(whole),
        sources: Sources::Golden(directory.to_owned()),
        steps: 1,
    }
}

/// The logits of programs.
fn logits_on_host(cases: &[Case]) -> Vec<Tensor<f64>> {
    let (_out, outputs) = together::run(cases);
    outputs.iter().map(|outputs| outputs.read("logits").unwrap()).collect()
}

/// The largest difference.
fn compare(found: &Tensor<f64>, expected: &Tensor<f64>) -> f64 {
    assert_eq!(found.shape, expected.shape);
    found.data.iter().zip(&expected.data).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// A program that computes logits, and the ones that it should compute.
struct Expected {
    case: Case,
    logits: Tensor<f64>,
}

/// Layouts of goldens.
fn goldens() -> Vec<Expected> {
    let goldens = [
        ("llama-gqa", "ulysses", &[("ulysses", "8")][..]),
        ("llama-gqa", "ulysses", &[("ulysses", "3"), ("heads", "uneven"), ("sequence", "pad")]),
        ("mistral-swa", "megatron-tp-sp", &[("tp", "2")]),
        ("qwen2", "ulysses+megatron-tp", &[("ulysses", "2"), ("tp", "2")]),
        ("gpt2", "megatron-tp", &[("tp", "2")]),
        ("olmo2", "megatron-tp", &[("tp", "8")]),
        ("gpt-neox", "ulysses", &[("ulysses", "2")]),
        ("gemma2", "ulysses+megatron-tp-sp", &[("ulysses", "2"), ("tp", "2")]),
        ("qwen2", "ulysses", &[("ulysses", "6"), ("heads", "pad"), ("sequence", "pad")]),
        ("llama-gqa", "ring+megatron-tp", &[("ring", "2"), ("tp", "2"), ("order", "striped")]),
        ("mistral-swa", "sparse-fetch", &[("ring", "4")]),
    ];
    let expected = |(golden, strategy, axes): (&str, &str, &[(&str, &str)])| {
        let directory = root().join("tests/goldens").join(golden);
        let io = SafeTensorsFile::open(directory.join("io.safetensors")).unwrap();
        let shape = io.shape("input_ids").unwrap();
        let module = module(&directory, &Workload::prefill(shape[0], shape[1]));
        let case = case(&directory, &module, &options(strategy, axes));
        Expected { case, logits: io.read("logits").unwrap() }
    };
    tier::one_in(8, goldens).into_iter().map(expected).collect()
}

/// A golden with other masks.
fn masks() -> Vec<Expected> {
    let directory = root().join("tests/goldens/llama-gqa");
    let weights = SafeTensorsFile::open(directory.join("model.safetensors")).unwrap();
    let io = SafeTensorsFile::open(directory.join("io.safetensors")).unwrap();
    let shape = io.shape("input_ids").unwrap();
    let n = shape[1];
    let window = |left, right| Mask::Window { left: Some(left), right: Some(right) };
    // The first three are emitted as tables of strips.
    let masks = [
        Mask::All(vec![Mask::Documents(vec![0, 3, n - 2, n]), Mask::Causal]),
        Mask::Any(vec![window(2, 0), Mask::Sinks(1), Mask::Blocks { size: 3, rows: vec![vec![1], vec![]] }]),
        // Queries of the third block see nothing.
        Mask::All(vec![Mask::Blocks { size: 2, rows: vec![vec![0, 2], vec![1], vec![]] }, window(4, 4)]),
        Mask::All(vec![Mask::CausalAtEnd { queries: n, keys: n }, window(3, 9)]),
        Mask::Full,
    ];
    let plain = module(&directory, &Workload::prefill(shape[0], n));
    let even = options("ulysses", &[("ulysses", "2")]);
    // No query sees the keys of padding.
    let padded = options("ulysses", &[("ulysses", "3"), ("heads", "uneven"), ("sequence", "pad")]);
    let expected = |mask: &Mask| {
        let module = masked(&plain, mask);
        let mut case = case(&directory, &module, if *mask == Mask::Full { &padded } else { &even });
        case.name = format!("{}, {mask:?}", case.name);
        Expected { case, logits: oracle::run::<f64>(&module, &weights, &io).unwrap()["logits"].clone() }
    };
    masks.iter().map(expected).collect()
}

/// One program for all of them is compiled in less time than two.
#[test]
fn emitted_programs_agree_with_the_goldens_and_follow_any_mask_on_the_host() {
    if !can_run() {
        return;
    }
    let (cases, expected): (Vec<_>, Vec<_>) =
        goldens().into_iter().chain(masks()).map(|Expected { case, logits }| (case, logits)).unzip();
    for ((case, found), expected) in cases.iter().zip(logits_on_host(&cases)).zip(&expected) {
        let error = compare(&found, expected);
        assert!(error < 1e-5, "{}: error {error:.3e}", case.name);
    }
}

#[test]
fn the_source_does_not_grow_with_the_ranks() {
    let directory = root().join("examples/llama-3.1-405b");
    let module = module(&directory, &Workload::prefill(1, 131_072));
    let length = |ranks: &str| {
        let options = options("ulysses+megatron-tp", &[("ulysses", ranks), ("tp", "8")]);
        let schedule = compile(&module, &options, &Volume).unwrap().schedule;
        emitted(&schedule, None)[0].contents.len()
    };
    // Beyond 8 heads in all, key/value heads are copied, which adds tasks; from then on nothing changes but digits.
    assert!(length("16").abs_diff(length("2")) < 500);
}

#[test]
#[expect(clippy::print_stderr, reason = "the time is a figure to look at, not one to assert")]
fn device_programs_do_not_grow_with_the_ranks() {
    let directory = root().join("examples/llama-3.1-405b");
    let training = Workload { mode: Mode::Train, ..Workload::prefill(128, 131_072) };
    let module = module(&directory, &training);
    let size = |data: &str| {
        let options =
            options("data-parallel+ulysses+megatron-tp", &[("dp", data), ("ulysses", "16"), ("tp", "8")]);
        let schedule = compile(&module, &options, &Volume).unwrap().schedule;
        let begun = Instant::now();
        let program = ithaca_device::lower(&schedule, ithaca_device::Options::default()).unwrap();
        eprintln!("device program for dp={data},ulysses=16,tp=8: {:.2?}", begun.elapsed());
        let steps = program.frames.values().flat_map(|frame| &frame.steps);
        let alternatives = |step: &ithaca_device::Step| match &step.work {
            ithaca_device::Work::Records(records) => records.alternatives.len(),
            ithaca_device::Work::Call(_) => 1,
        };
        (steps.map(alternatives).sum::<usize>(), program.records().count(), program.tables.len())
    };
    // Every rank has more than one sequence of the batch: where it has one, other kernels copy.
    assert_eq!(size("2"), size("64"));
}

#[test]
fn the_emitted_program_reads_as_it_was_reviewed() {
    let directory = root().join("tests/goldens/llama-gqa");
    let module = module(&directory, &Workload::prefill(1, 32));
    let schedule = compile(&module, &options("ulysses", &[("ulysses", "2")]), &Volume).unwrap().schedule;
    let files = emitted(&schedule, None);
    let main = files.iter().find(|f| f.path.ends_with("main.cu")).unwrap();
    insta::assert_snapshot!("main_cu_of_llama_gqa", main.contents);
}

/// Directories of CUDA and NCCL, from the environment.
fn homes() -> Option<(PathBuf, PathBuf)> {
    let home =
        |name, file| std::env::var_os(name).map(PathBuf::from).filter(|home| home.join(file).is_file());
    let homes = home("CUDA_HOME", "bin/nvcc").zip(home("NCCL_HOME", "include/nccl.h"));
    if homes.is_none() {
        skip("nvcc", &"nvcc and NCCL are needed: eval \"$(.ci/install-cuda.sh DIR)\"");
    }
    homes
}

#[test]
fn nvcc_compiles_for_every_architecture_without_warnings() {
    if !tier::is_full_or_says_so() {
        return;
    }
    let Some((cuda, nccl)) = homes() else { return };
    let causal = module(&root().join("examples/llama-3-8b"), &Workload::prefill(1, 131_072));
    // A mask that is a table, and a reference to check against.
    let packed = masked(&causal, &Mask::All(vec![Mask::Documents(vec![0, 7, 131_072]), Mask::Causal]));
    let out = tempfile::tempdir().unwrap();
    emit(&packed, &options("ulysses+megatron-tp-sp", &[("ulysses", "4"), ("tp", "2")]), out.path());
    make_without_warnings("every architecture", out.path(), &[], &cuda, &nccl);
}

/// Compiles a program with nvcc.
fn make_without_warnings(name: &str, program: &Path, more: &[&str], cuda: &Path, nccl: &Path) {
    let make = Command::new("make")
        .arg("-C")
        .arg(program)
        .args(more)
        .arg(format!("CUDA_HOME={}", cuda.display()))
        .arg(format!("NCCL_HOME={}", nccl.display()))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&make.stdout) + String::from_utf8_lossy(&make.stderr);
    assert!(make.status.success() && !text.contains("warning"), "{name}: {text}");
}
