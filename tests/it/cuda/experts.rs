//! Training steps of models with experts as emitted programs on the host: outputs and state after several steps,
//! against the whole program in double precision; and the end of a run that exceeds a bound.

use std::fs;
use std::process::Command;

use ithaca_ir::Module;
use ithaca_ir::verify::verify;
use ithaca_kernels::cuda::collectives::InProcess;
use ithaca_kernels::cuda::{self, Host};
use ithaca_kernels::store::{Layered, RandomTensors, Renamed, SafeTensorsFile, TensorSource, Tensors};
use ithaca_kernels::{compare, cpu};
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::Training;
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Capacity, ExpertBound, Mode, Workload, program};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::ShardOptions;
use serde_json::Value;

use super::device::steps_on_device;
use super::distributed::module;
use super::pipeline::{Step, check, expected, options};
use super::together::Sources;
use super::{can_run, can_run_in_full, device, root, write_program};
use crate::golden::{CLOSE, Golden, workload};

/// A golden with experts, with capacity for all tokens or for some, and its inputs.
fn golden(name: &str, capacity: Option<&str>) -> (Module, Tensors) {
    let folder = root().join("tests/goldens").join(name);
    let open = |file| SafeTensorsFile::open(folder.join(file)).unwrap();
    let (io, weights) = (open("io.safetensors"), open("model.safetensors"));
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
    let capacity = capacity.map(|text| Capacity::parse(text).unwrap());
    let training = Training { clip: Some(1.0), ..Training::default() };
    let workload = Workload { mode: Mode::Train, training, capacity, ..workload(&io) };
    let module = program(&config, name, &workload).unwrap_or_else(|d| panic!("{d:?}"));
    let weights = Renamed::new(&weights, &[]);
    // Files have more than a step starts from, such as gradients.
    let files = Layered::new(&weights, &io);
    let mut sources = Tensors::new();
    for name in RandomTensors::of_module(&module, 0).names() {
        sources.insert(name.as_str(), files.read(&name).unwrap());
    }
    (module, sources)
}

#[test]
fn training_with_experts_on_the_host() {
    if !can_run_in_full() {
        return;
    }
    let layouts = [
        ("mixtral", None, "ep", "ep=2"),
        ("mixtral", Some("0.75/8"), "ulysses+ep", "ulysses=2,ep=2"),
        ("qwen3-moe", None, "ulysses+ep", "ulysses=4"),
        ("deepseek-v3", None, "ep", "ep=4"),
        ("deepseek-v3", Some("0.75/8"), "data-parallel+ep", "dp=2"),
    ];
    let goldens = layouts.map(|(name, capacity, ..)| {
        let (module, sources) = golden(name, capacity);
        let expected = expected(&module, &sources);
        (module, sources, expected)
    });
    let steps = layouts.iter().zip(&goldens).map(|((.., strategy, mesh), (module, sources, expected))| {
        // Chunks of experts, whose slots lie in those of all experts.
        let fusion = Fusion::overlap(2).folded();
        let options = ShardOptions { fusion, ..options(strategy, mesh) };
        Step { module: module.clone(), options, sources, expected }
    });
    check(&steps.collect::<Vec<_>>());
}

/// Devices send the slots that tokens fill, as this machine does: as many bytes, and the same numbers.
#[test]
fn filled_slots_are_sent_between_devices() {
    if !can_run() {
        return;
    }
    let Golden { module, weights, io, .. } = Golden::open("mixtral");
    for (mesh, fusion) in [("ring=4", Fusion::PACK), ("ring=2", Fusion::overlap(2).folded())] {
        let options = ShardOptions { fusion, ..options("ring+ep", mesh) };
        let schedule = compile(&module, &options, &Volume).unwrap().schedule;
        let expected = cpu::execute(&schedule, &weights, &io, &cpu::Options::default()).unwrap();
        let host = Host::new(device::kernels_for([&schedule]));
        let collectives = InProcess::new(&host, options.mesh.ranks()).unwrap();
        let found =
            cuda::execute_on(&schedule, &host, &collectives, (&weights, &io), &cuda::Options::default());
        let found = found.unwrap();
        assert_eq!(found.traffic, expected.traffic);
        let exchange = found.traffic.iter().find(|row| row.kind == "all_to_all").unwrap();
        assert!(exchange.filled_bytes_per_rank < Some(exchange.bytes_sent_per_rank), "{exchange:?}");
        for comparison in compare::outputs(&found.outputs, &expected.outputs) {
            assert!(comparison.verdict.within(CLOSE), "{comparison:?}");
        }
    }
}

/// Routers without weights send all tokens to the first experts, which have slots for half of them.
#[test]
fn a_bound_that_tokens_exceed_is_found_on_devices() {
    if !can_run() {
        return;
    }
    let Golden { config, weights, io, .. } = Golden::open("mixtral");
    let expert_bound = Some(ExpertBound::parse("1").unwrap());
    let module = program(&config, "mixtral", &Workload { expert_bound, ..workload(&io) }).unwrap();
    let schedule = compile(&module, &options("megatron-tp", "tp=2"), &Volume).unwrap().schedule;
    let routers = weights.names().into_iter().filter(|name| name.ends_with("gate.weight"));
    let routers: Tensors = routers
        .map(|name| {
            let tensor = weights.read(&name).unwrap().map(|_| 0.0);
            (name, tensor)
        })
        .collect();
    let weights = Layered::new(&routers, &weights);
    let says = "expert 1 was chosen by 128 of 128 tokens and has slots for 64; `--expert-bound 2.00` has slots for all of";

    let host = Host::new(device::kernels_for([&schedule]));
    let collectives = InProcess::new(&host, 2).unwrap();
    let refused =
        cuda::execute_on(&schedule, &host, &collectives, (&weights, &io), &cuda::Options::default());
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains(says), "{refused}");

    if !can_run_in_full() {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    write_program(&schedule, None, out.path());
    let files = Sources::of(&Layered::new(&weights, &io)).files(&schedule, out.path().join("in.safetensors"));
    let ran = Command::new("bash")
        .arg(root().join("tests/cuda/host/run.sh"))
        .arg(out.path())
        .args([
            "2".as_ref(),
            "--weights".as_ref(),
            files[0].as_os_str(),
            "--inputs".as_ref(),
            files[1].as_os_str(),
        ])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(!ran.status.success() && said.contains(says), "{said}");
}

/// Experts that no token chose have weights that are no numbers: of few slots the device does not read them, as this machine does not.
#[test]
fn weights_that_no_token_needs_are_not_read() {
    const EXPERTS: usize = 24;
    if !can_run() {
        return;
    }
    let whole = module(&fs::read_to_string(root().join("tests/gpu/slots.ith")).unwrap());
    let sources = RandomTensors::of_module(&whole, 5);
    let mut tensors = Tensors::new();
    for name in sources.names() {
        let mut tensor = sources.read(&name).unwrap();
        let each = tensor.data.len() / EXPERTS;
        for (i, x) in tensor.data.iter_mut().enumerate() {
            match name.as_str() {
                "logits" => *x += if [3, 17].contains(&(i % EXPERTS)) { 100.0 } else { 0.0 },
                "tokens" => {}
                _ if ![3, 17].contains(&(i / each)) => *x = f64::NAN,
                _ => {}
            }
        }
        tensors.insert(name.as_str(), tensor);
    }
    let schedule = lower(verify(&whole).unwrap()).unwrap();
    let (found, _) =
        steps_on_device("slots", &schedule, &device::kernels_for([&schedule]), &tensors, &tensors, 1);
    let expected = cpu::execute(&schedule, &tensors, &tensors, &cpu::Options::default()).unwrap().outputs;
    for (output, expected) in expected {
        let distance = device::distance(&found[&output].map(f64::from), &expected.map(f64::from));
        assert!(
            expected.data.iter().all(|x| x.is_finite()) && distance < 2e-2,
            "{output} is {distance:.1e} off"
        );
    }
}
