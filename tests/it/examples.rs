//! The models of `examples/`: their programs verify and survive the text form, and their small forms run.

use std::path::{Path, PathBuf};

use ithaca_ir::text::{parse, print};
use ithaca_ir::verify::verify;
use ithaca_ir::{Module, Op};
use ithaca_kernels::oracle;
use ithaca_kernels::store::RandomTensors;
use ithaca_passes::import::{Shrink, Workload, families, import, shrink};
use serde_json::Value;

/// Names and descriptions, sorted.
fn examples() -> Vec<(String, Value)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let entries = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path());
    let mut dirs: Vec<PathBuf> = entries.filter(|dir| dir.join("config.json").is_file()).collect();
    dirs.sort();
    let read = |dir: PathBuf| {
        let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        (name, serde_json::from_str(&config).unwrap())
    };
    dirs.into_iter().map(read).collect()
}

#[test]
fn programs_verify_and_survive_the_text_form() {
    let examples = examples();
    for (family, _) in families() {
        assert!(examples.iter().any(|(_, c)| c["model_type"] == family), "{family} has an example");
    }
    for (name, config) in examples {
        let module = import(&config, &name, &Workload::prefill(1, 512)).unwrap();
        verify(&module).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        let text = print(&module);
        // Where layers of two kinds alternate, each run is a call.
        let lines = text.lines().filter(|line| !line.contains(" = call ")).count();
        let functions = module.functions.len();
        // A block of a mixture has a router and experts beside what a plain block has.
        // Biases of experts are products with the filled slots, and gates are bounded by operations of their own.
        let mut ops = module.functions.values().flat_map(|f| &f.nodes);
        let most = match (module_has_experts(&module), ops.any(|node| matches!(node.op, Op::Clamp { .. }))) {
            (true, true) => 36,
            (true, false) => 32,
            (false, _) => 25,
        };
        assert!(lines < most * functions, "{name} has {lines} lines in {functions} functions");
        assert_eq!(parse(&text).unwrap(), module, "{name}");
    }
}

#[test]
fn small_forms_run() {
    for (name, config) in examples() {
        let options = Shrink::to(131_072, 16, 8);
        let small = shrink(&config, &[], &options).unwrap();
        let module = import(&small, &name, &Workload::prefill(1, 16)).unwrap();
        let random = RandomTensors::of_module(&module, 1);
        let outputs = oracle::run::<f32>(&module, &random, &random).unwrap();
        let logits = &outputs["logits"];
        assert!(logits.data.iter().all(|x| x.is_finite()), "{name}");
        let mean = logits.data.iter().sum::<f32>() / logits.data.len() as f32;
        assert!(logits.data.iter().any(|x| (x - mean).abs() > 1e-3), "{name} computes something");
    }
}

fn module_has_experts(module: &Module) -> bool {
    let mut nodes = module.functions.values().flat_map(|f| &f.nodes);
    nodes.any(|n| matches!(n.op, Op::Experts(_)))
}
