//! Emitted programs under bad conditions: ranks that do not join, outputs that are no files, integers that
//! mean nothing, frames that nobody calls.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ithaca_ir::verify::verify;
use ithaca_kernels::RunError;
use ithaca_kernels::cuda::collectives::InProcess;
use ithaca_kernels::cuda::{self as runtime, Host};
use ithaca_kernels::store::{self, RandomTensors, SafeTensorsFile, Stored, TensorSource, Tensors};
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::Training;
use ithaca_passes::import::Workload;
use ithaca_passes::lower::lower;
use ithaca_passes::pass::Volume;

use super::device::kernels_for;
use super::distributed::module;
use super::{can_run, can_run_in_full, found, options, root, write_program};
use crate::training::sharded::{deep_llama, step};

/// The limit that shows that no rank waited for ever.
const NOT_FOR_EVER: Duration = Duration::from_secs(200);

/// A model on four ranks, written as a program.
pub(super) fn program_of_four() -> tempfile::TempDir {
    let whole = super::module(&root().join("tests/goldens/llama-gqa"), &Workload::prefill(1, 8));
    let options = options("ulysses+megatron-tp", &[("ulysses", "2"), ("tp", "2")]);
    let out = tempfile::tempdir().unwrap();
    write_program(&compile(&whole, &options, &Volume).unwrap().schedule, None, out.path());
    out
}

#[test]
fn ranks_that_do_not_come_and_outputs_that_are_no_files() {
    if !can_run() {
        return;
    }
    let out = program_of_four();
    let run = |arguments: &[&str], environment: &[(&str, &str)]| {
        let mut command = Command::new("bash");
        command.arg(root().join("tests/cuda/host/run.sh")).arg(out.path()).args([
            "4",
            "--random-weights",
            "3",
        ]);
        command.args(arguments).envs(environment.iter().copied()).output().unwrap()
    };
    let at = |name: &str| out.path().join(name);
    let output = |path: &str| run(&["--output", path], &[]);

    // A link stays a link, and its target is replaced.
    fs::create_dir(at("there")).unwrap();
    fs::write(at("there/target"), "before").unwrap();
    fs::set_permissions(at("there/target"), Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink("there/target", at("link")).unwrap();
    std::os::unix::fs::symlink("there/nothing", at("dangling")).unwrap();
    for (link, target) in [("link", "there/target"), ("dangling", "there/nothing")] {
        let ran = output(at(link).to_str().unwrap());
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink());
        let written = SafeTensorsFile::open(at(target)).unwrap();
        assert_eq!(written.names(), ["logits"]);
    }
    assert_eq!(fs::read_dir(at("there")).unwrap().count(), 2);
    assert_eq!(fs::metadata(at("there/target")).unwrap().permissions().mode() & 0o777, 0o640);

    if found("mkfifo") && found("timeout") {
        let pipe = at("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let mut reader = Command::new("timeout");
        let reader = reader.args(["200", "cat"]).arg(&pipe).stdout(Stdio::piped()).spawn().unwrap();
        let ran = output(pipe.to_str().unwrap());
        let read = reader.wait_with_output().unwrap().stdout;
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo() && !at("pipe.new").exists());
        assert_eq!(read, fs::read(at("there/target")).unwrap());
    }
    let ran = output(at("there").to_str().unwrap());
    assert_eq!(ran.status.code(), Some(2));

    for (absent, says) in [
        ("NCCL_ON_HOST_ABSENT", "the communicator of all ranks: it has not ended after"),
        ("NCCL_ON_HOST_ABSENT_PART", "the communicators along `"),
    ] {
        let begun = Instant::now();
        let ran = run(&["--timeout", "1"], &[(absent, "2")]);
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(1), "{absent}: {said}");
        assert!(said.contains("error: rank ") && said.contains(says), "{absent}: {said}");
        assert!(begun.elapsed() < NOT_FOR_EVER);
    }
}

/// A rank takes a row that it lacks as one that another rank has, so the loss would look right.
#[test]
fn tokens_and_labels_that_no_rank_has_are_refused() {
    if !can_run_in_full() {
        return;
    }
    // Frames are given micro-batches of inputs, and parts of these.
    let training = Training { loss_chunks: 2, micro_batches: 2, ..Training::default() };
    let whole = step(&deep_llama(2), training);
    let out = tempfile::tempdir().unwrap();
    let schedule = compile(&whole, &options("megatron-tp", &[("tp", "2")]), &Volume).unwrap().schedule;
    write_program(&schedule, None, out.path());
    let random = RandomTensors::of_module(&whole, 3);
    let file = out.path().join("inputs.safetensors");
    let says = |name: &str, value: f64| {
        let [mut ids, mut labels] = ["input_ids", "labels"].map(|name| random.read(name).unwrap());
        let changed = if name == "labels" { &mut labels } else { &mut ids };
        changed.data[17] = value;
        store::write(&file, &[("input_ids", Stored::I64, &ids), ("labels", Stored::I64, &labels)]).unwrap();
        let ran = Command::new("bash")
            .arg(root().join("tests/cuda/host/run.sh"))
            .arg(out.path())
            .args(["2", "--random-weights", "3", "--inputs"])
            .arg(&file)
            .output()
            .unwrap();
        (ran.status.code(), String::from_utf8_lossy(&ran.stderr).into_owned())
    };
    for (name, value) in [("input_ids", 127.0), ("labels", 127.0), ("labels", -100.0)] {
        let (status, said) = says(name, value);
        assert_eq!(status, Some(0), "{name} {value}: {said}");
    }
    let tokens = "but the model needs integers from 0 and below 128\n";
    let labels = "but the model needs integers from 0 and below 128, or -100\n";
    let too_large = "which is not a 32-bit integer\n";
    for (name, value, why) in [
        ("input_ids", 128.0, tokens),
        ("input_ids", -100.0, tokens),
        ("input_ids", 4294967301.0, too_large),
        ("labels", 128.0, labels),
        ("labels", -1.0, labels),
        ("labels", 4294967301.0, too_large),
    ] {
        let (status, said) = says(name, value);
        assert_eq!(status, Some(2), "{name} {value}: {said}");
        let error = format!("error: tensor `{name}` holds {value} at 17, {why}");
        assert!(said.contains(&error), "{name} {value}: {said}");
    }
}

/// The same by the CUDA runtime, on this machine in the place of a device.
#[test]
fn tokens_and_labels_that_no_rank_has_are_refused_by_the_runtime() {
    if !can_run() {
        return;
    }
    let training = Training { loss_chunks: 2, micro_batches: 2, ..Training::default() };
    let whole = step(&deep_llama(2), training);
    let schedule = compile(&whole, &options("megatron-tp", &[("tp", "2")]), &Volume).unwrap().schedule;
    let random = RandomTensors::of_module(&whole, 3);
    let host = Host::new(kernels_for([&schedule]));
    let says = |name: &str, value: f64| {
        let mut inputs = Tensors::new();
        for one in ["input_ids", "labels"] {
            let mut tensor = random.read(one).unwrap();
            if one == name {
                tensor.data[17] = value;
            }
            inputs.insert(one, tensor);
        }
        let collectives = InProcess::new(&host, 2).unwrap();
        let how = runtime::Options::default();
        runtime::execute_on(&schedule, &host, &collectives, (&random, &inputs), &how).map(drop)
    };
    for (name, value) in [("input_ids", 127.0), ("labels", 127.0), ("labels", -100.0)] {
        says(name, value).unwrap_or_else(|e| panic!("{name} {value}: {e}"));
    }
    for value in [128.0, -100.0] {
        let error = says("input_ids", value).unwrap_err();
        assert!(matches!(error, RunError::TokenOutOfRange { rows: 128, .. }), "{value}: {error}");
    }
    for value in [128.0, -1.0] {
        let error = says("labels", value).unwrap_err();
        assert!(matches!(error, RunError::LabelOutOfRange { labels: 128, .. }), "{value}: {error}");
    }
}

#[test]
fn frames_that_nobody_calls_are_left_out() {
    let whole = module(
        "ithaca 1 program\nmodel \"m\"\ndim k = 4\ndim l = 2\n\nfunc @spare() {\n  \
         %w = param {name=\"spare.{layer}\"} : f64[k l]\n  %y = tanh %w : f64[k l]\n  return %y\n}\n\nfunc @used(%x: f32[k l]) {\n  \
         %w = param {name=\"used.{layer}\"} : f32[k l]\n  %y = add %x, %w : f32[k l]\n  return %y\n}\n\nfunc @main() {\n  \
         %x = input {name=\"x\"} : f32[k l]\n  %y = call %x {callee=@used, layers=2..4} : f32[k l]\n  return y = %y\n}\n",
    );
    let schedule = lower(verify(&whole).unwrap()).unwrap();
    assert!(schedule.frames.values().any(|frame| frame.name == "spare"), "frames are as functions are");
    let files = super::emitted(&schedule, None);
    let text = |path: &str| &files.iter().find(|file| file.path == path).unwrap().contents;
    let main = text("main.cu");
    assert!(!main.contains("spare"), "{main}");
    assert!(main.contains("{\"used.{layer}\"") && main.contains(", 2, 4, is_held_"), "{main}");
    assert!(!main.contains("DType::F64"));
}
