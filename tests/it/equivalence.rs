//! Every strategy computes what the whole program does: per-rank programs on virtual ranks, in double precision.

use std::path::PathBuf;

use ithaca_kernels::oracle;
use ithaca_kernels::store;
use ithaca_passes::compile::compile;
use ithaca_passes::import::{Workload, import};
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::{ShardOptions, parse_mesh};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

#[test]
fn goldens_under_every_strategy() {
    let mut failures = Vec::new();
    let mut names: Vec<String> = std::fs::read_dir(golden(""))
        .unwrap()
        .map(|e| e.unwrap())
        .filter(|e| e.path().join("config.json").exists())
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in &names {
        let config: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(golden(name).join("config.json")).unwrap())
                .unwrap();
        let inputs = store::open(golden(name).join("io.safetensors")).unwrap();
        let weights = store::open(golden(name).join("model.safetensors")).unwrap();
        let shape = inputs.shape("input_ids").unwrap();
        let module = import(&config, name, &Workload::prefill(shape[0], shape[1])).unwrap();
        let whole = oracle::run::<f64>(&module, weights.as_ref(), inputs.as_ref()).unwrap();
        for (strategy, mesh) in [
            ("ulysses", "ulysses=2"),
            ("ulysses", "ulysses=4"),
            ("ulysses", "ulysses=8"),
            ("megatron-tp", "tp=2"),
            ("megatron-tp", "tp=4"),
            ("megatron-tp-sp", "tp=2"),
            ("megatron-tp-sp", "tp=4"),
            ("ulysses+megatron-tp", "ulysses=2,tp=2"),
            ("ulysses+megatron-tp-sp", "tp=2,ulysses=2"),
        ] {
            let options = ShardOptions::new(strategy, parse_mesh(mesh).unwrap());
            let compiled = match compile(&module, &options, &Volume) {
                Ok(c) => c,
                Err(e) => {
                    eprintln!("{name} {strategy} {mesh}: refused {}", e[0]);
                    continue;
                }
            };
            match oracle::run_ranks::<f64>(&compiled.per_rank, weights.as_ref(), inputs.as_ref()) {
                Ok(outputs) => {
                    let (a, b) = (&outputs["logits"], &whole["logits"]);
                    let error = a.data.iter().zip(&b.data).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
                    let t: Vec<String> = ithaca_ir::traffic::of_module(&compiled.per_rank)
                        .iter()
                        .map(|t| format!("{} x{} {}B", t.kind, t.count, t.bytes_sent_per_rank))
                        .collect();
                    eprintln!(
                        "{name} {strategy} {mesh}: {error:e} arena {} {}",
                        compiled.schedule.arena_bytes(),
                        t.join("; ")
                    );
                    if error > 1e-9 {
                        failures.push(format!("{name} {strategy} {mesh}: {error:e}"));
                    }
                }
                Err(e) => failures.push(format!("{name} {strategy} {mesh}: {e}")),
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
