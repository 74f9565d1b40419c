//! Training steps of models with experts as emitted programs on the host: outputs and state after several steps,
//! against the whole program in double precision.

use ithaca_ir::Module;
use ithaca_kernels::store::{Layered, RandomTensors, Renamed, SafeTensorsFile, TensorSource, Tensors};
use ithaca_passes::differentiate::Training;
use ithaca_passes::import::{Capacity, Mode, Workload, program};
use serde_json::Value;

use super::pipeline::{Step, check, expected, options};
use super::{can_run_in_full, root};
use crate::golden::workload;

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
        Step { module: module.clone(), options: options(strategy, mesh), sources, expected }
    });
    check(&steps.collect::<Vec<_>>());
}
