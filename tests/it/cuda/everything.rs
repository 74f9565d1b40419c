//! Every strategy of the registry, forward and in training, and every way to distribute attention, as CUDA that nvcc
//! compiles.
//!
//! All programs are one source, each in a namespace of its own and otherwise as it is emitted, so that what they share
//! is compiled once. nvcc reads a source once for the host and once for the device, where nothing but kernels is made, and
//! the host's compiler then makes code that nobody runs. So the device's turn is given as few programs as call all that any
//! calls, which brings in the same kernels, and the host's compiler checks without making code. Whole programs are compiled
//! and linked by other tests.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use ithaca_codegen::cuda;
use ithaca_ir::mesh::Mesh;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::text;
use ithaca_ir::verify::verify;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::fuse::{Fusion, Messages};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::pipeline;
use ithaca_passes::shard::{STRATEGIES, ShardOptions, Strategy, Zero, parse_mesh};
use serde_json::{Value, json};

use super::homes;
use crate::filetests::files;

/// A small model of each kind, in bf16.
fn configs() -> Vec<Value> {
    let of = |model_type: &str, more: &[(&str, Value)]| {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "vocab_size": 64,
            "torch_dtype": "bfloat16",
        });
        for (key, value) in more {
            config[*key] = value.clone();
        }
        config
    };
    vec![
        of("llama", &[]),
        of("mistral", &[("sliding_window", json!(8))]),
        of("mixtral", &[("num_local_experts", json!(4)), ("num_experts_per_tok", json!(2))]),
    ]
}

/// The schedules of a strategy, of the first model that it suits: forward, unless only a step has stages, and in training.
fn of_strategy(strategy: &dyn Strategy, fusion: Fusion) -> Vec<(String, Schedule)> {
    let mesh = Mesh::new(strategy.axes().iter().map(|&axis| (axis, 2)));
    let options = ShardOptions { fusion, ..ShardOptions::new(strategy.name(), mesh) };
    let is_staged = strategy.name() == "pipeline";
    let training = Training {
        stages: if is_staged { 2 } else { 1 },
        micro_batches: if is_staged { 2 } else { 1 },
        ..Training::default()
    };
    let forward = Workload::prefill(2, 64);
    let training = Workload { mode: Mode::Train, training, ..forward.clone() };
    let workloads = [("forward", forward), ("training", training)];
    let first = |workload: &Workload| {
        let modules = configs().into_iter().filter_map(|config| program(&config, "model", workload).ok());
        modules.map(|module| compile(&module, &options, &Volume)).find_map(Result::ok)
    };
    let workloads = workloads.into_iter().filter(|(mode, _)| !is_staged || *mode == "training");
    workloads
        .filter_map(|(mode, workload)| {
            Some((format!("{} {mode}", strategy.name()), first(&workload)?.schedule))
        })
        .collect()
}

/// A step whose layers gather weights for the next and reduce gradients of the one before.
fn prefetched() -> Schedule {
    let training = Training { recompute: Recompute::FULL, ..Training::default() };
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(2, 64) };
    let mut config = configs().swap_remove(0);
    config["num_hidden_layers"] = json!(5);
    let options = ShardOptions {
        zero: Zero::Parameters,
        fusion: Fusion::parse("prefetch+pack").unwrap(),
        ..ShardOptions::new("ulysses", parse_mesh("ulysses=2").unwrap())
    };
    compile(&program(&config, "model", &workload).unwrap(), &options, &Volume).unwrap().schedule
}

/// The schedules of the ways to distribute attention.
fn of_files() -> Vec<(String, Schedule)> {
    let mut schedules = Vec::new();
    for (path, source) in files("passes") {
        let Some(stages) = source.lines().next().and_then(|line| line.strip_prefix("// ")) else { continue };
        let passes = pipeline::parse(stages).unwrap();
        let program = text::parse(&source).unwrap();
        let ranks = run_passes(program, &passes, &mut Context::new(&Volume), &mut Unwatched).unwrap();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        schedules.push((name, lower(verify(&ranks).unwrap()).unwrap()));
    }
    schedules
}

/// The functions of the runtime that the tasks of a program call, with the template's arguments.
fn called(main: &str) -> BTreeSet<&str> {
    let calls = main.split(", layer); ").skip(1);
    calls.filter_map(|call| call.split_once('(').map(|(function, _)| function)).collect()
}

/// Programs that call together what all of them call: always the last, then those with the most that is new.
fn that_call_all(programs: &[String]) -> BTreeSet<usize> {
    let calls: Vec<BTreeSet<&str>> = programs.iter().map(|main| called(main)).collect();
    let mut chosen: BTreeSet<usize> = [programs.len() - 1].into();
    let mut left: BTreeSet<&str> = calls.iter().flatten().copied().collect();
    assert!(left.len() > 30 && left.contains("einsum"), "{left:?}");
    left.retain(|function| !calls[programs.len() - 1].contains(function));
    while !left.is_empty() {
        let new = |i: &usize| calls[*i].intersection(&left).count();
        let most = (0..programs.len()).max_by_key(new).expect("there are programs");
        left.retain(|function| !calls[most].contains(function));
        chosen.insert(most);
    }
    chosen
}

/// Writes the programs of all schedules as one.
fn write_together(schedules: &[(String, Schedule)], out: &Path) {
    let (mut programs, mut types) = (Vec::new(), Vec::new());
    for (i, (name, schedule)) in schedules.iter().enumerate() {
        let files = cuda::emit(schedule, None, ithaca_kernels::cuda::SOURCES)
            .unwrap_or_else(|d| panic!("{name}: {}", d[0]));
        for file in files {
            match file.path.as_str() {
                "main.cu" => {
                    fs::write(out.join(format!("main_{i}.cuh")), &file.contents).unwrap();
                    programs.push(file.contents);
                }
                "runtime/config.hpp" => types.push(file.contents),
                _ => {
                    let path = out.join(&file.path);
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    fs::write(path, &file.contents).unwrap();
                }
            }
        }
    }
    let for_device = that_call_all(&programs);
    let of = |i: usize| {
        let name = &schedules[i].0;
        format!(
            "// {name}\n#define ranks ranks_{i}\n#define main main_{i}\n#include \"main_{i}.cuh\"\n#undef main\n#undef ranks\n"
        )
    };
    let mut main: String = for_device.iter().map(|&i| of(i)).collect();
    main.push_str("#ifndef __CUDA_ARCH__\n");
    main.extend((0..schedules.len()).filter(|i| !for_device.contains(i)).map(of));
    main.push_str("#endif\n");
    let last = schedules.len() - 1;
    writeln!(main, "int main(int argc, char** argv) {{ return main_{last}(argc, argv); }}").unwrap();
    fs::write(out.join("main.cu"), main).unwrap();
    // Of each type the larger answer: whether any program has it.
    let lines = types[0].lines().enumerate();
    let any = lines.map(|(i, _)| types.iter().filter_map(|t| t.lines().nth(i)).max().unwrap());
    let config: Vec<&str> = any.collect();
    fs::write(out.join("runtime/config.hpp"), config.join("\n") + "\n").unwrap();
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that needs nvcc says why it did nothing")]
fn nvcc_compiles_every_strategy_forward_and_training() {
    let mut schedules = Vec::new();
    let of_files = of_files();
    for strategy in STRATEGIES {
        let found = of_strategy(*strategy, Fusion::NONE);
        let by_itself = of_files.iter().any(|(name, _)| name == strategy.name());
        assert!(by_itself || !found.is_empty(), "nothing has the strategy {}", strategy.name());
        schedules.extend(found);
    }
    let trained = schedules.iter().filter(|(name, _)| name.ends_with("training")).count();
    assert!(trained + 3 > STRATEGIES.len(), "only {trained} strategies in training");
    schedules.extend(of_files);
    // Tensors that lie in wires.
    for strategy in
        STRATEGIES.iter().filter(|s| ["ulysses", "usp", "megatron-cp-allgather"].contains(&s.name()))
    {
        for messages in [Messages::Packed, Messages::Chunked(2)] {
            schedules.extend(of_strategy(*strategy, Fusion { messages, ..Fusion::NONE }.folded()));
        }
    }
    schedules.push(("layers for their neighbours".to_owned(), prefetched()));
    let out = tempfile::tempdir().unwrap();
    write_together(&schedules, out.path());
    let Some((cuda, nccl)) = homes() else {
        eprintln!("skipped: nvcc and NCCL are needed: eval \"$(.ci/install-cuda.sh DIR)\"");
        return;
    };
    let mut nvcc = Command::new(cuda.join("bin/nvcc"));
    nvcc.args([
        "-std=c++17",
        "-I.",
        "-gencode",
        "arch=compute_90,code=sm_90",
        "--cuda",
        "-o",
        "main.ii",
        "main.cu",
    ]);
    quietly(nvcc.arg("-I").arg(nccl.join("include")).current_dir(out.path()));
    let mut host = Command::new("g++");
    quietly(
        host.args(["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "main.ii"]).current_dir(out.path()),
    );
}

/// Runs a compiler, which has nothing to say.
fn quietly(compiler: &mut Command) {
    let run = compiler.output().unwrap();
    let text = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && !text.contains("warning"), "{compiler:?}: {text}");
}
