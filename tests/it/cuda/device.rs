//! The runtime on devices without one: its launches run on the host, on the kernels that a C++ compiler made of the very
//! same sources. The runtime passes every test that emitted programs pass.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use ithaca_ir::schedule::{Schedule, Stream};
use ithaca_ir::timeline::Span;
use ithaca_ir::traffic::{self, Traffic};
use ithaca_ir::verify::verify;
use ithaca_ir::{DType, Rank};
use ithaca_kernels::cuda::catalogue::catalogue;
use ithaca_kernels::cuda::collectives::InProcess;
use ithaca_kernels::cuda::{self, Clock, Host, HostKernels, Options};
use ithaca_kernels::store::{Layered, RandomTensors, SafeTensorsFile, TensorSource, Tensors};
use ithaca_kernels::tensor::Tensor;
use ithaca_kernels::{Outputs, cpu, oracle};
use ithaca_passes::compile;
use ithaca_passes::import::Workload;
use ithaca_passes::lower::lower;
use ithaca_passes::pass::Volume;

use super::distributed::module;
use super::{can_run, compiler, root};
use crate::tier;

pub(super) fn compile(kernels: &BTreeSet<String>) -> Arc<HostKernels> {
    compile_with(kernels, &[])
}

/// The same with macros defined.
pub(super) fn compile_with(kernels: &BTreeSet<String>, macros: &[&str]) -> Arc<HostKernels> {
    let headers = root().join("tests/cuda/host");
    Arc::new(
        HostKernels::compile(&compiler().to_string_lossy(), &headers, kernels, macros)
            .unwrap_or_else(|e| panic!("{e}")),
    )
}

/// Those of single precision, compiled once.
pub(super) fn single() -> Arc<HostKernels> {
    static SINGLE: OnceLock<Arc<HostKernels>> = OnceLock::new();
    SINGLE.get_or_init(|| compile(&catalogue(&[DType::F32, DType::I32, DType::Bool]))).clone()
}

/// The kernels of schedules.
pub(super) fn kernels_for<'a>(schedules: impl IntoIterator<Item = &'a Schedule>) -> Arc<HostKernels> {
    let of =
        |schedule| cuda::kernels_of(schedule, &cuda::Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let kernels: BTreeSet<String> = schedules.into_iter().flat_map(of).collect();
    let known = catalogue(&DType::ALL);
    let unknown: Vec<&String> = kernels.difference(&known).collect();
    assert!(unknown.is_empty(), "the catalogue lacks {unknown:?}");
    let single = single();
    if single.has(&kernels) { single } else { compile(&kernels) }
}

/// The outputs of the last of several steps of a schedule, and the final state.
pub(super) fn steps_on_device(
    name: &str,
    schedule: &Schedule,
    kernels: &Arc<HostKernels>,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    steps: usize,
) -> (Outputs<f32>, Vec<Traffic>) {
    let (mut kept, mut outputs, mut traffic) = (Tensors::new(), Outputs::new(), Vec::new());
    for _ in 0..steps {
        let host = Host::new(kernels.clone());
        let collectives = InProcess::new(&host, schedule.space.mesh.ranks()).unwrap();
        let source = Layered::new(&kept, weights);
        let sources = (&source as &dyn TensorSource, inputs);
        let run = cuda::execute_on(schedule, &host, &collectives, sources, &Options::default());
        let execution = run.unwrap_or_else(|e| panic!("{name}: {e}"));
        kept = Tensors::from(&execution.kept);
        outputs = execution.outputs;
        outputs.extend(execution.kept);
        traffic = execution.traffic;
    }
    (outputs, traffic)
}

/// Compares outputs with those of the emitted program, which has the same kernels: only products may round otherwise.
pub(super) fn assert_same(name: &str, schedule: &Schedule, found: &Outputs<f32>, emitted: &SafeTensorsFile) {
    let buffers = schedule.frames.values().flat_map(|frame| frame.buffers.values());
    let halves = buffers.map(|buffer| buffer.dtype()).any(|t| matches!(t, DType::F16 | DType::BF16));
    let tolerance = if halves { 2e-2 } else { 1e-4 };
    assert!(!found.is_empty(), "{name}");
    for (output, found) in found {
        let emitted = emitted.read(output).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(found.shape, emitted.shape, "{name}: {output}");
        let distance = distance(&found.map(f64::from), &emitted);
        assert!(distance < tolerance, "{name}: {output} of the runtime is {distance:.1e} off");
    }
}

/// The distance relative to the norm; NaN and infinities have to agree on both sides.
pub(super) fn distance(found: &Tensor<f64>, expected: &Tensor<f64>) -> f64 {
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&a, &b) in found.data.iter().zip(&expected.data) {
        if !a.is_finite() || !b.is_finite() {
            if a.to_bits() != b.to_bits() {
                return f64::INFINITY;
            }
            continue;
        }
        difference += (a - b) * (a - b);
        norm += b * b;
    }
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

/// Runs a schedule on both runtimes and compares the bytes that ranks sent.
pub(super) fn assert_traffic(
    name: &str,
    schedule: &Schedule,
    (weights, inputs): (&dyn TensorSource, &dyn TensorSource),
    traffic: &[Traffic],
) {
    let execution = cpu::execute(schedule, weights, inputs, &cpu::Options::default()).unwrap();
    assert!(traffic::agree(&execution.traffic, traffic), "{name}");
}

/// The programs that `tests/gpu.sh` compares on a GPU, on the host: every kernel of one rank.
#[test]
fn programs_of_the_gpu_suite_agree_with_the_oracle() {
    if !can_run() {
        return;
    }
    let programs = [
        ("training", 1e-4),
        ("attention", 1e-4),
        ("attention_wide", 1e-4),
        ("tensor_cores", 2e-2),
        ("cached", 1e-4),
        ("slots", 2e-2),
    ];
    for (name, tolerance) in tier::one_in(2, programs) {
        let text = std::fs::read_to_string(root().join(format!("tests/gpu/{name}.ith"))).unwrap();
        let whole = module(&text);
        let sources = RandomTensors::of_module(&whole, 5);
        let schedule = lower(verify(&whole).unwrap()).unwrap();
        let kernels = kernels_for([&schedule]);
        let (found, traffic) = steps_on_device(name, &schedule, &kernels, &sources, &sources, 1);
        assert!(traffic.is_empty());
        for (output, expected) in oracle::run::<f64>(&whole, &sources, &sources).unwrap() {
            let distance = distance(&found[&output].map(f64::from), &expected);
            assert!(distance < tolerance, "{name}: {output} is {distance:.1e} off");
        }
    }
}

/// What ran when on the streams of a device has the form of other timelines: each rank, its tasks one after another on each
/// stream.
#[test]
fn tasks_are_timed_as_they_come() {
    if !can_run() {
        return;
    }
    let golden = root().join("tests/goldens/llama-gqa");
    let whole = super::module(&golden, &Workload::prefill(1, 8));
    let options = super::options("ulysses", &[("ulysses", "2")]);
    let schedule = compile::compile(&whole, &options, &Volume).unwrap().schedule;
    let sources = RandomTensors::of_module(&whole, 5);
    let host = Host::new(kernels_for([&schedule]));
    let collectives = InProcess::new(&host, 2).unwrap();
    let how = Options { clock: Clock::Streams, ..Options::default() };
    let on_device = cuda::execute_on(&schedule, &host, &collectives, (&sources, &sources), &how).unwrap();
    let traced = cpu::Options { trace: cpu::Trace::Spans, ..cpu::Options::default() };
    let here = cpu::execute(&schedule, &sources, &sources, &traced).unwrap();
    let names = |spans: &[Span]| {
        let mut names: Vec<_> =
            spans.iter().map(|s| (s.rank, s.frame.clone(), s.layer, s.task, s.name.clone())).collect();
        names.sort();
        names
    };
    assert_eq!(names(&on_device.spans), names(&here.spans));
    for (rank, stream) in
        [0, 1].into_iter().flat_map(|rank| [Stream::Compute, Stream::Comm].map(|stream| (Rank(rank), stream)))
    {
        let own: Vec<&Span> =
            on_device.spans.iter().filter(|s| s.rank == rank && s.stream == stream).collect();
        assert!(!own.is_empty() && own.iter().all(|s| s.start <= s.end));
        assert!(own.windows(2).all(|pair| pair[0].end <= pair[1].start), "{rank} {stream}");
    }
}

/// Without CUDA the command names every part that is missing.
#[test]
fn a_machine_without_cuda_is_told_what_is_missing() {
    if Path::new("/dev/nvidia0").exists() {
        return;
    }
    let run = Command::new(env!("CARGO_BIN_EXE_ithaca"))
        .args(["run", "tests/gpu/training.ith", "--device", "cuda"])
        .current_dir(root())
        .env_remove("CUDA_HOME")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success());
    for part in ["C20", "libcuda", "libnvrtc", "libcublasLt"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let graph = Command::new(env!("CARGO_BIN_EXE_ithaca"))
        .args(["run", "tests/gpu/training.ith", "--graph"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&graph.stderr).contains("--device cuda"));
}
