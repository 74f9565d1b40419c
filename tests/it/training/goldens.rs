//! Loss and gradients of models of the HuggingFace library, against those that PyTorch computed.

use std::path::{Path, PathBuf};

use ithaca_kernels::oracle;
use ithaca_kernels::store::{FusedExperts, SafeTensorsFile, TensorSource};
use ithaca_kernels::{Outputs, Storage};
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::import::{Mode, Workload, program};

use crate::goldens::workload;

/// Largest accepted error of a loss or an element of a gradient.
const TOLERANCE: f64 = 1e-4;

/// The goldens that have gradients, with their names.
pub(super) fn with_gradients() -> Vec<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let mut found: Vec<(String, PathBuf)> = std::fs::read_dir(root)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|dir| dir.join("io.safetensors").is_file())
        .filter(|dir| !gradients(&SafeTensorsFile::open(dir.join("io.safetensors")).unwrap()).is_empty())
        .map(|dir| (dir.file_name().unwrap().to_str().unwrap().to_owned(), dir))
        .collect();
    found.sort();
    found
}

/// The names of gradients in a file.
fn gradients(io: &dyn TensorSource) -> Vec<String> {
    io.names().into_iter().filter(|name| name.starts_with("grad.")).collect()
}

/// What differs between a file and what a step computed, by name.
///
/// Experts of a file may be fused, so names are those of the step; that all gradients of the file were met shows in the
/// number of their elements.
pub(super) fn differences(io: &dyn TensorSource, outputs: &Outputs<f64>, kept: &Outputs<f64>) -> Vec<String> {
    let mut wrong = Vec::new();
    let elements = |shape: Vec<u64>| shape.iter().product::<u64>();
    let mut unmet: u64 = gradients(io).iter().filter_map(|name| io.shape(name)).map(elements).sum();
    let fused = FusedExperts::new(io);
    let found = kept.iter().chain(outputs).filter(|(name, _)| name.starts_with("grad.") || *name == "loss");
    for (name, found) in found {
        let Ok(expected) = fused.read(name) else { continue };
        if name != "loss" {
            unmet = unmet.saturating_sub(expected.data.len() as u64);
        }
        let errors = found.data.iter().zip(&expected.data).map(|(a, b)| (a - b).abs());
        let worst = errors.fold(0.0, |a: f64, b| if b <= a { a } else { b });
        if worst > TOLERANCE || worst.is_nan() || found.data.len() != expected.data.len() {
            wrong.push(format!("{name}: {worst:.1e}"));
        }
    }
    if unmet > 0 || !outputs.contains_key("loss") {
        wrong.push(format!("{unmet} elements of gradients, or the loss, are missing"));
    }
    wrong
}

#[test]
fn losses_and_gradients_agree_under_every_policy() {
    let goldens = with_gradients();
    assert!(goldens.len() >= 30, "goldens with gradients are committed with the repository");
    let mut report = String::new();
    for (name, dir) in goldens {
        let io = SafeTensorsFile::open(dir.join("io.safetensors")).unwrap();
        let weights = SafeTensorsFile::open(dir.join("model.safetensors")).unwrap();
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        for recompute in Recompute::ALL {
            let training = Training { recompute, ..Training::default() };
            let workload = Workload { mode: Mode::Train, training, ..workload(&io) };
            let module = program(&config, &name, &workload).unwrap_or_else(|d| panic!("{name}: {d:?}"));
            let step = oracle::step::<f64>(&module, &weights, &io, Storage::Wide).unwrap();
            for difference in differences(&io, &step.outputs, &step.kept) {
                report.push_str(&format!("{name}, recompute={recompute}: {difference}\n"));
            }
        }
    }
    assert!(report.is_empty(), "{report}");
}
