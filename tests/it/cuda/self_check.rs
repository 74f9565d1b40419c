//! How emitted programs judge themselves: a step in half precision agrees with one device's, though an optimizer makes whole
//! steps of rounding; and errors are found.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ithaca_ir::ops::state;
use ithaca_ir::verify::verify;
use ithaca_ir::{Diagnostics, Module};
use ithaca_kernels::Outputs;
use ithaca_kernels::store::{self, RandomTensors, Stored};
use ithaca_kernels::tensor::Tensor;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{PipelineOrder, Training};
use ithaca_passes::import::{Labels, Mode, Workload, program};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use serde_json::{Value, json};

use super::distributed::noise;
use super::together::{self, Case, Sources};
use super::{can_run, can_run_in_full, compiler, emitted, module, root, write_program};

fn model(kind: &str, dtype: &str) -> Value {
    json!({
        "model_type": kind, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": false,
        "torch_dtype": dtype,
    })
}

fn step(config: &Value, training: Training, labels: Labels) -> Module {
    let workload = Workload { mode: Mode::Train, training, labels, ..Workload::prefill(4, 16) };
    program(config, "m", &workload).unwrap_or_else(|d: Diagnostics| panic!("{}", d[0].render(None)))
}

fn case(whole: &Module, options: &ShardOptions, steps: usize) -> Case {
    let name = format!("{} {} zero={}", options.strategy, options.mesh, options.zero);
    let compiled =
        compile(whole, options, &Volume).unwrap_or_else(|d| panic!("{name}: {}", d[0].render(None)));
    Case {
        name,
        schedule: compiled.schedule,
        reference: Some(lower(verify(whole).unwrap()).unwrap()),
        sources: Sources::of(&RandomTensors::of_module(whole, 13)),
        steps,
    }
}

/// The output of the first program's self-check, and its exit status.
fn check_itself(case: &Case, out: &Path) -> (Option<i32>, String) {
    let [weights, inputs] = case.sources.files(&case.schedule, out.join("in.safetensors"));
    let run = Command::new("bash")
        .arg(root().join("tests/cuda/host/run.sh"))
        .arg(out)
        .arg(case.schedule.space.mesh.ranks().to_string())
        .args(["--weights".as_ref(), weights.as_os_str(), "--inputs".as_ref(), inputs.as_os_str()])
        .args(["--steps", &case.steps.to_string(), "--self-check"])
        .env(together::WHICH, "0")
        .output()
        .unwrap();
    let said = [run.stdout, run.stderr].concat();
    (run.status.code(), String::from_utf8_lossy(&said).into_owned())
}

fn options(strategy: &str, mesh: &str) -> ShardOptions {
    ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
}

/// Some elements of some weights have gradients that are rounding alone, and go either way.
#[test]
fn steps_in_half_precision_agree_with_themselves_on_one_device() {
    if !can_run_in_full() {
        return;
    }
    for dtype in ["bfloat16", "float16"] {
        let clipped = Training { clip: Some(1.0), ..Training::default() };
        let whole = step(&model("llama", dtype), clipped.clone(), Labels::default());
        let staged = Training {
            stages: 2,
            pipeline: PipelineOrder::OneForwardOneBackward,
            micro_batches: 2,
            ..clipped.clone()
        };
        let staged = step(&model("llama", dtype), staged, Labels::default());
        // Biases of keys have gradients that are zero but for rounding, and labels are the tokens themselves.
        let with_biases = step(&model("qwen2", dtype), clipped, Labels { ahead: 1, ..Labels::default() });
        let parameters =
            ShardOptions { zero: Zero::Parameters, ..options("data-parallel+ring", "dp=2,ring=2") };
        let persistent = ShardOptions { zero: Zero::ParametersAbove(0), ..options("data-parallel", "dp=2") };
        let cases = vec![
            case(&whole, &options("ulysses", "ulysses=2"), 2),
            case(&whole, &parameters, 2),
            case(&whole, &persistent, 2),
            case(&staged, &options("megatron-tp-sp+pipeline", "pp=2,tp=2"), 2),
            case(&with_biases, &options("ring", "ring=2"), 1),
        ];
        // Every other one, and the others in the other type.
        let others = usize::from(dtype == "float16");
        let cases: Vec<_> = cases.into_iter().skip(others).step_by(2).collect();
        together::run(&cases);
    }
}

/// An optimizer that is told another learning rate for one weight, on the ranks and not on one device.
#[test]
fn a_wrong_weight_is_found() {
    if !can_run_in_full() {
        return;
    }
    let whole = step(&model("llama", "bfloat16"), Training::default(), Labels::default());
    let mut case = case(&whole, &options("ulysses", "ulysses=2"), 3);
    // Small weights, so that queries and keys have hardly a gradient.
    if let Sources::Tensors(tensors) = &mut case.sources {
        let matrices = tensors.iter_mut().filter(|(name, t)| name.ends_with("weight") && t.shape.len() == 2);
        matrices.for_each(|(_, t)| t.data.iter_mut().for_each(|x| *x *= 0.1));
    }
    let out = tempfile::tempdir().unwrap();
    write_program(&case.schedule, case.reference.as_ref(), out.path());
    let (status, said) = check_itself(&case, out.path());
    assert_eq!(status, Some(0), "{said}");
    let judged = said.lines().find(|line| line.contains("were judged by how far steps can take them"));
    assert!(judged.is_some_and(|line| line.starts_with("self-check: ")), "{said}");

    let main = out.path().join("main.cu");
    let emitted = fs::read_to_string(&main).unwrap();
    // Further steps would carry it to all others.
    case.steps = 1;
    let constants = "AdamW{0.001,";
    assert!(emitted.find(constants) < emitted.find("namespace whole"));
    for (wrong, of) in [("AdamW{0.05,", "a rate that is too high"), ("AdamW{-0.05,", "the other direction")] {
        fs::write(&main, emitted.replacen(constants, wrong, 1)).unwrap();
        let (status, said) = check_itself(&case, out.path());
        assert_eq!(status, Some(1), "{of}: {said}");
        let failed: Vec<&str> = said.lines().filter(|line| line.ends_with("FAILED")).collect();
        assert_eq!(failed.len(), 2, "{of}: {failed:?}");
        let is_one = |line: &&str| line.contains("model.embed_tokens.weight");
        assert!(
            failed.iter().all(is_one) && failed.iter().any(|line| line.contains(state::MASTER)),
            "{failed:?}"
        );
    }
}

/// Reads two files and prints the verdict of every tensor: its largest error, the relative one, and how many elements were
/// judged by reach.
const JUDGE: &str = r#"
#include "runtime/compare.hpp"
using namespace ithaca;
static std::vector<HostTensor> all_of(const char* path) {
    TensorFiles files;
    files.add(path);
    std::vector<HostTensor> out;
    for (const auto& [name, t] : files.tensors()) {
        out.push_back({name, DType::F64, t.shape, {}});
        int64_t n = 1;
        for (int64_t extent : t.shape) n *= extent;
        for (int64_t i = 0; i < n; ++i) out.back().values.push_back(load_element(t.dtype, t.data, i));
    }
    return out;
}
int main(int, char** argv) {
    const auto ours = all_of(argv[1]), theirs = all_of(argv[2]);
    Judge judge;
    judge.after(theirs);
    judge.expect(theirs, std::atof(argv[3]));
    for (size_t i = 0; i < ours.size(); ++i) {
        const Verdict v = judge.compare(ours[i], theirs[i]);
        std::printf("%s %.17g %.17g %lld\n", ours[i].name.c_str(), v.largest, v.relative, static_cast<long long>(v.by_reach));
    }
}
"#;

/// The judge of emitted programs, compiled.
fn judge(out: &Path) -> PathBuf {
    let whole = module(&root().join("tests/goldens/llama-gqa"), &Workload::prefill(1, 8));
    write_program(&lower(verify(&whole).unwrap()).unwrap(), None, out);
    let (source, program) = (out.join("judge.cu"), out.join("judge"));
    fs::write(&source, JUDGE).unwrap();
    let run = Command::new(compiler())
        .args(["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-x", "c++", "-isystem"])
        .arg(root().join("tests/cuda/host"))
        .args(["-I".as_ref(), out.as_os_str(), "-o".as_ref(), program.as_os_str(), source.as_os_str()])
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    program
}

/// The result of a step on one weight with gradients of every size, and on another whose gradient is rounding alone.
fn left_by_a_step() -> Outputs<f64> {
    const N: usize = 64;
    let sizes = |i: usize| 10f64.powi(-(i as i32 % 10));
    let scaled = |seed, f: fn(f64) -> f64| {
        let data = noise(&[N], seed).data.iter().enumerate().map(|(i, x)| f(x * sizes(i))).collect();
        Tensor::new(vec![N], data)
    };
    let rounding = |by: f64| noise(&[N], 3).map(|x| x * by);
    [
        ("w".to_owned(), noise(&[N], 1)),
        (format!("{}w", state::MASTER), noise(&[N], 2)),
        (format!("{}w", state::GRADIENT), scaled(4, |x| x)),
        (format!("{}w", state::FIRST_MOMENT), scaled(4, |x| 0.1 * x)),
        (format!("{}w", state::SECOND_MOMENT), scaled(4, |x| 1e-3 * x * x)),
        ("bias".to_owned(), Tensor::filled(vec![N], 0.0)),
        (format!("{}bias", state::GRADIENT), rounding(1e-9)),
        (format!("{}bias", state::FIRST_MOMENT), rounding(1e-10)),
        (format!("{}bias", state::SECOND_MOMENT), rounding(1e-9).map(|x| 1e-3 * x * x)),
        ("loss".to_owned(), Tensor::new(vec![1], vec![0.5])),
    ]
    .into_iter()
    .collect()
}

/// The verdict that the rules give.
#[derive(Debug)]
struct Stated {
    largest: f64,
    relative: f64,
    by_reach: u64,
}

/// The rules, stated once more: an element of a weight whose gradient is at most 1e-5 of the largest of all gradients may differ by
/// twice the reach of the steps; gradients and moments that are rounding are measured by 1e-4 of the largest of their kind.
fn stated(name: &str, found: &Outputs<f64>, expected: &Outputs<f64>, reach: f64) -> Stated {
    let largest_of = |prefix: &str| {
        let tensors = expected.iter().filter(|(name, _)| name.starts_with(prefix));
        tensors.flat_map(|(_, t)| &t.data).fold(0.0, |a: f64, x| a.max(x.abs()))
    };
    let weight = name.strip_prefix(state::MASTER).unwrap_or(name);
    let gradient = expected.get(&format!("{}{weight}", state::GRADIENT));
    let floor = if name.starts_with(state::SECOND_MOMENT) {
        1e-8 * largest_of(state::SECOND_MOMENT)
    } else {
        let kind = [state::GRADIENT, state::FIRST_MOMENT].into_iter().find(|kind| name.starts_with(kind));
        kind.map_or(0.0, |kind| (1e-4 * largest_of(kind)).min(1e-5))
    };
    let (found, expected) = (&found[name], &expected[name]);
    let (mut stated, mut squares) = (Stated { largest: 0.0, relative: 0.0, by_reach: 0 }, 0.0);
    for (i, (a, b)) in found.data.iter().zip(&expected.data).enumerate() {
        let apart = (a - b).abs();
        let is_rounding = gradient.is_some_and(|g| g.data[i].abs() <= 1e-5 * largest_of(state::GRADIENT));
        if is_rounding && apart <= 2.0 * reach {
            stated.by_reach += u64::from(apart > 1e-3 * reach);
            continue;
        }
        stated.largest = stated.largest.max(apart);
        squares += apart * apart;
    }
    let norm: f64 = expected.data.iter().map(|x| x * x).sum();
    let size = norm.max(if norm > 0.0 { floor * floor * expected.data.len() as f64 } else { 0.0 });
    stated.relative = if squares == 0.0 { 0.0 } else { (squares / size).sqrt() };
    stated
}

#[test]
fn emitted_programs_judge_rounding_by_reach() {
    if !can_run() {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let program = judge(out.path());
    let expected = left_by_a_step();
    let write = |name: &str, tensors: &Outputs<f64>| -> PathBuf {
        let path = out.path().join(name);
        let stored: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), Stored::F64, t)).collect();
        store::write(&path, &stored).unwrap();
        path
    };
    let verdicts = |found: &Outputs<f64>, reach: f64| -> Vec<(String, f64, f64, u64)> {
        let (ours, theirs) = (write("ours", found), write("theirs", &expected));
        let run = Command::new(&program).args([ours, theirs]).arg(format!("{reach:e}")).output().unwrap();
        let said = String::from_utf8(run.stdout).unwrap();
        let one = |line: &str| {
            let [name, largest, relative, by_reach] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            (name.to_owned(), largest.parse().unwrap(), relative.parse().unwrap(), by_reach.parse().unwrap())
        };
        said.lines().map(one).collect()
    };
    let moved = |by: f64, seed: usize| -> Outputs<f64> {
        let one = |(name, t): (&String, &Tensor<f64>)| {
            let noise = noise(&t.shape, seed);
            let by = if name.contains('.') && !name.starts_with(state::MASTER) { 1e-14 } else { by };
            let data = t.data.iter().zip(&noise.data).map(|(x, y)| x + by * y).collect();
            (name.clone(), Tensor::new(t.shape.clone(), data))
        };
        expected.iter().map(one).collect()
    };
    let mut by_reach_of_all = 0;
    for (by, reach) in [(1e-3, 1e-3), (1e-3, 4e-4), (1e-3, 0.0), (1e-6, 1e-3), (1e-1, 1e-3)] {
        let found = moved(by, 7);
        for (name, largest, relative, by_reach) in verdicts(&found, reach) {
            let same = |a: f64, b: f64| (a.is_infinite() && a == b) || (a - b).abs() <= 1e-9 * b.abs();
            let stated = stated(&name, &found, &expected, reach);
            by_reach_of_all += by_reach;
            assert_eq!(by_reach, stated.by_reach, "{name} by {by} within {reach}");
            assert!(same(largest, stated.largest), "{name} by {by} within {reach}: {largest}, {stated:?}");
            assert!(same(relative, stated.relative), "{name} by {by} within {reach}: {relative}, {stated:?}");
        }
    }
    assert!(by_reach_of_all > 100);

    // One element of a weight whose gradient is above the noise differs by as much as a step can move it.
    let mut wrong = expected.clone();
    let gradient = &expected[&format!("{}w", state::GRADIENT)];
    let largest = (0..64).max_by(|&a, &b| gradient.data[a].abs().total_cmp(&gradient.data[b].abs())).unwrap();
    wrong["w"].data[largest] += 1e-3;
    let row = verdicts(&wrong, 1e-3).into_iter().find(|row| row.0 == "w").unwrap();
    assert!(row.3 == 0 && row.1 > 9e-4, "{row:?}");
    // NaN passes no tolerance.
    wrong["bias"].data[0] = f64::NAN;
    let row = verdicts(&wrong, 1e-3).into_iter().find(|row| row.0 == "bias").unwrap();
    assert!(row.1.is_nan() && row.2.is_nan(), "{row:?}");
}

/// Names that emitted programs state once more.
#[test]
fn emitted_programs_have_the_names_of_states() {
    let whole = module(&root().join("tests/goldens/llama-gqa"), &Workload::prefill(1, 8));
    let files = emitted(&lower(verify(&whole).unwrap()).unwrap(), None);
    let said = |file: &str, name: &str| -> String {
        let text = &files.iter().find(|f| f.path == file).unwrap().contents;
        let value = text.split_once(&format!(" {name} = ")).unwrap_or_else(|| panic!("{name}")).1;
        value.split_once(';').unwrap().0.trim_matches('"').to_owned()
    };
    for (name, prefix) in [
        ("kGradient", state::GRADIENT),
        ("kFirstMoment", state::FIRST_MOMENT),
        ("kSecondMoment", state::SECOND_MOMENT),
        ("kMaster", state::MASTER),
    ] {
        assert_eq!(said("runtime/source.hpp", name), prefix, "{name}");
    }
}
