//! Long steps beside steps that are compiled whole.

use ithaca_differentiate::{PipelineOrder, Recompute};
use ithaca_import::{self as import, Mode, Workload};
use ithaca_ir::verify::verify;
use ithaca_layout::compile::{self, Compiled};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::{ShardOptions, Zero, parse_mesh};
use serde_json::{Value, json};

use super::*;

/// How far the time of a long step may be from that of the whole one, in parts: the first micro-batches wait for links in an order
/// of their own.
const NEAR: f64 = 1e-3;

fn config(name: &str, layers: u64) -> Value {
    let path = format!("{}/../../examples/{name}/config.json", env!("CARGO_MANIFEST_DIR"));
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    config["num_hidden_layers"] = json!(layers);
    config
}

fn compiled(config: &Value, training: &Training, options: &ShardOptions) -> Compiled {
    let batch = 8 * training.micro_batches;
    let workload =
        Workload { mode: Mode::Train, training: training.clone(), ..Workload::prefill(batch, 4096) };
    let module = import::program(config, "model", &workload).unwrap();
    let cluster = Cluster::named("dgx-h100").unwrap();
    compile::draft_with(&Registry::default(), verify(&module).unwrap(), options, &cluster).unwrap()
}

#[test]
fn long_steps_are_as_if_compiled_whole() {
    use PipelineOrder::{Gpipe, Interleaved, OneForwardOneBackward, ZbH1};
    let cluster = Cluster::named("dgx-h100").unwrap();
    let of = |stages: u64, pipeline, chunks, recompute| Training {
        micro_batches: 30 * stages,
        stages,
        pipeline,
        chunks,
        recompute,
        ..Training::default()
    };
    let cases = [
        (
            "llama-3-8b",
            "pipeline+megatron-tp",
            "pp=2,tp=4",
            Zero::Off,
            of(2, OneForwardOneBackward, 1, Recompute::None),
        ),
        (
            "llama-3-8b",
            "pipeline+megatron-tp-sp+data-parallel",
            "pp=4,dp=2,tp=2",
            Zero::Optimizer,
            of(4, ZbH1, 1, Recompute::None),
        ),
        (
            "llama-3-8b",
            "pipeline+ring",
            "pp=4,ring=2",
            Zero::Off,
            of(4, Interleaved, 2, Recompute::Selective),
        ),
        (
            "mixtral-8x7b",
            "pipeline+ulysses+ep",
            "pp=2,ulysses=4",
            Zero::Gradients,
            of(2, Gpipe, 1, Recompute::Full { every: 1 }),
        ),
    ];
    for (name, strategy, mesh, zero, training) in cases {
        let config = config(name, 8);
        let options = ShardOptions {
            strategy: strategy.to_owned(),
            mesh: parse_mesh(mesh).unwrap(),
            zero,
            fusion: zero.usual_fusion(),
            ..ShardOptions::default()
        };
        let of = |batch: u64, training: &Training| {
            assert_eq!(batch, 8 * training.micro_batches);
            Ok::<_, ()>(compiled(&config, training, &options))
        };
        let long = Step::of(&cluster, (8 * training.micro_batches, &training), of).unwrap();
        assert!(long.shorter.is_some());
        let whole = Step::whole(&cluster, compiled(&config, &training, &options));
        assert_eq!(long.dimensions(), whole.dimensions(), "{strategy}");
        assert_eq!(long.collectives(), whole.collectives(), "{strategy}");
        assert_eq!(long.pipeline(), whole.pipeline());
        // Tensors of other micro-batches have other names.
        let memory = |step: &Step| {
            let mut memory = step.memory.clone();
            memory.largest.iter_mut().for_each(|held| held.name.clear());
            memory
        };
        assert_eq!(memory(&long), memory(&whole), "{strategy}");
        assert_eq!(long.compiled.choices, whole.compiled.choices, "{strategy}");
        assert_eq!(long.compiled.notes, whole.compiled.notes, "{strategy}");
        let [told, simulated] = [&long, &whole].map(|step| &step.simulation);
        let parts = [(told.seconds, simulated.seconds), (told.compute, simulated.compute)];
        for (told, simulated) in parts {
            assert!((told / simulated - 1.0).abs() < NEAR, "{strategy}: {told} for {simulated}");
        }
    }
}

#[test]
fn memory_of_a_stage_does_not_grow_with_micro_batches() {
    for strategy in ["pipeline+megatron-tp", "pipeline+megatron-tp-sp"] {
        let options = ShardOptions {
            strategy: strategy.to_owned(),
            mesh: parse_mesh("pp=4,tp=2").unwrap(),
            ..ShardOptions::default()
        };
        let arena = |micro_batches: u64| {
            let training = Training { micro_batches, stages: 4, ..Training::default() };
            compiled(&config("llama-3-8b", 4), &training, &options).schedule.arena_bytes()
        };
        assert_eq!(arena(16), arena(32), "{strategy}");
    }
}
