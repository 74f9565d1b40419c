//! Every strategy computes what the whole program does, on every golden: per-rank programs on virtual ranks in double
//! precision, and schedules on the runtime, whose counted bytes are those of the program.

use std::path::PathBuf;

use ithaca_ir::{Module, traffic};
use ithaca_kernels::store::{self, TensorSource};
use ithaca_kernels::{compare, cpu, oracle};
use ithaca_passes::compile::compile;
use ithaca_passes::import::import;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::{ShardOptions, parse_mesh};

/// What double precision leaves of the order of summation.
pub(crate) const EXACT: f64 = 1e-9;

/// What single precision leaves, against logits of another implementation.
pub(crate) const CLOSE: f64 = 1e-5;

/// Strategies with meshes.
pub(crate) const LAYOUTS: [(&str, &str); 12] = [
    ("data-parallel", "dp=2"),
    ("ulysses", "ulysses=2"),
    ("ulysses", "ulysses=4"),
    ("ulysses", "ulysses=8"),
    ("megatron-tp", "tp=2"),
    ("megatron-tp", "tp=4"),
    ("megatron-tp-sp", "tp=2"),
    ("megatron-tp-sp", "tp=4"),
    ("ulysses+megatron-tp", "ulysses=2,tp=2"),
    ("ulysses+megatron-tp", "tp=2,ulysses=2"),
    ("ulysses+megatron-tp-sp", "ulysses=2,tp=2"),
    ("data-parallel+ulysses+megatron-tp-sp", "dp=2,tp=2,ulysses=2"),
];

/// A golden as it lies in its folder.
pub(crate) struct Golden {
    pub(crate) name: String,
    pub(crate) module: Module,
    pub(crate) weights: Box<dyn TensorSource>,
    pub(crate) io: Box<dyn TensorSource>,
}

/// Every golden, in order of names.
pub(crate) fn goldens() -> Vec<Golden> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    folders.retain(|f| f.join("config.json").exists());
    folders.sort();
    folders.iter().map(|folder| golden(folder)).collect()
}

/// The golden in a folder.
pub(crate) fn golden(folder: &std::path::Path) -> Golden {
    let name = folder.file_name().unwrap().to_string_lossy().into_owned();
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let io = store::open(folder.join("io.safetensors")).unwrap();
    let workload = crate::goldens::workload(io.as_ref());
    let module = import(&serde_json::from_str(&config).unwrap(), &name, &workload).unwrap();
    Golden { name, module, weights: store::open(folder.join("model.safetensors")).unwrap(), io }
}

/// Why a layout is not legal for a module, by the rules as the systems state them.
fn illegal(module: &Module, options: &ShardOptions) -> bool {
    let size = |dim: &str| module.space.dim(dim).map_or(1, |d| module.space.size(d));
    let axis = |name: &str| options.mesh.axis(name).map_or(1, |a| options.mesh.size(a));
    let (dp, u, t) = (axis("dp"), axis("ulysses"), axis("tp"));
    let kv = if module.space.dim("k").is_some() { size("k") } else { size("h") };
    let heads = u * t;
    let sequence = if options.strategy.contains("-sp") { u * t } else { u };
    size("h") % heads != 0
        || (kv % heads != 0 && heads % kv != 0)
        || size("s") % sequence != 0
        || module.space.dim("t").is_some_and(|d| !module.space.size(d).is_multiple_of(sequence))
        || size("f") % t != 0
        || size("b") % dp != 0
}

#[test]
fn goldens_under_every_strategy() {
    let mut failures = Vec::new();
    let mut ran = 0;
    for Golden { name, module, weights, io } in goldens() {
        let (weights, io) = (weights.as_ref(), io.as_ref());
        let whole = oracle::run::<f64>(&module, weights, io).unwrap();
        for (strategy, mesh) in LAYOUTS {
            let options = ShardOptions::new(strategy, parse_mesh(mesh).unwrap());
            let mut fail = |what: String| failures.push(format!("{name}, {strategy} {mesh}: {what}"));
            let compiled = match compile(&module, &options, &Volume) {
                Ok(_) if illegal(&module, &options) => {
                    fail("compiled, though it is not legal".to_owned());
                    continue;
                }
                Ok(compiled) => compiled,
                Err(_) if illegal(&module, &options) => continue,
                Err(refusal) => {
                    fail(format!("refused: {}", refusal[0]));
                    continue;
                }
            };
            ran += 1;
            let ranks = oracle::run_ranks::<f64>(&compiled.per_rank, weights, io).unwrap();
            for comparison in compare::outputs(&ranks, &whole) {
                if !comparison.verdict.within(EXACT) {
                    fail(format!("per-rank program: {comparison:?}"));
                }
            }
            let run = cpu::execute(&compiled.schedule, weights, io, &cpu::Options::default()).unwrap();
            for comparison in compare::with_source(&run.outputs, io).unwrap() {
                if !comparison.verdict.within(CLOSE) {
                    fail(format!("schedule: {comparison:?}"));
                }
            }
            if run.traffic != traffic::of_module(&compiled.per_rank) {
                fail(format!(
                    "sent {:?}, promised {:?}",
                    run.traffic,
                    traffic::of_module(&compiled.per_rank)
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(ran > 150, "only {ran} layouts were legal");
}
