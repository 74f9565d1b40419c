//! Goldens: models of the HuggingFace library with what it computed of them, forward and backward.
//!
//! Every folder of `tests/goldens` with a description, weights and expectations is one; `make.py` there makes more.

use std::path::{Path, PathBuf};

use ithaca_ir::Module;
use ithaca_kernels::store::{MODEL_PREFIXES, Renamed, SafeTensorsFile, TensorSource};
use ithaca_passes::import::{Workload, import};
use serde_json::Value;

/// The error that double precision leaves, whatever the order of summation.
pub(crate) const EXACT: f64 = 1e-9;

/// The error that single precision leaves, beside logits of another implementation.
pub(crate) const CLOSE: f64 = 1e-5;

/// A golden as its folder holds it.
pub(crate) struct Golden {
    pub(crate) name: String,
    pub(crate) config: Value,
    /// A prefill of the inputs.
    pub(crate) module: Module,
    /// By the names of the program.
    pub(crate) weights: Renamed<'static, SafeTensorsFile>,
    pub(crate) io: SafeTensorsFile,
}

/// The names of all goldens, sorted.
pub(crate) fn names() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let is_golden = |folder: &PathBuf| {
        ["config.json", "model.safetensors", "io.safetensors"].iter().all(|f| folder.join(f).is_file())
    };
    let entries = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).filter(is_golden);
    let mut names: Vec<String> =
        entries.map(|folder| folder.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

impl Golden {
    /// Opens the golden of this name.
    pub(crate) fn open(name: &str) -> Golden {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
        let open = |file| SafeTensorsFile::open(folder.join(file)).unwrap();
        let io = open("io.safetensors");
        let weights = Renamed::new(open("model.safetensors"), &MODEL_PREFIXES);
        let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        let module = imported(&config, name, &io);
        Golden { name: name.to_owned(), config, module, weights, io }
    }
}

/// A description as a prefill of the lengths of `io`.
pub(crate) fn imported(config: &Value, name: &str, io: &dyn TensorSource) -> Module {
    import(config, name, &workload(io)).unwrap_or_else(|e| panic!("{name}: {}", e.render(None)))
}

/// A prefill of the lengths of `io`.
pub(crate) fn workload(io: &dyn TensorSource) -> Workload {
    let shape = io.shape("input_ids").unwrap();
    let target_sequence = io.shape("decoder_input_ids").map(|s| s[1]);
    Workload { target_sequence, ..Workload::prefill(shape[0], shape[1]) }
}
