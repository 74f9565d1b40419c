//! What of activations is there at a time: groups of layers that are computed again together, and the loss in parts.

use ithaca_ir::verify::verify;
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Storage, cpu, oracle};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::shard::{SequenceFit, ShardOptions, Zero, parse_mesh};
use ithaca_passes::{lower, memory};
use serde_json::json;

use super::pipeline::against_whole;
use super::sharded::{deep_llama, per_rank, step};

fn options(strategy: &str, mesh: &str) -> ShardOptions {
    ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
}

#[test]
fn groups_and_parts_make_the_step_of_one_device() {
    let plain = Training { clip: Some(0.1), ..Training::default() };
    let of =
        |every, loss_chunks| Training { recompute: Recompute::Full { every }, loss_chunks, ..plain.clone() };
    let mut wrong = Vec::new();
    // Layers that do not divide, groups of all of them, and more than there are.
    for (training, strategy, mesh) in [
        (of(2, 1), "ring", "ring=2"),
        (of(5, 2), "megatron-tp", "tp=2"),
        (of(8, 4), "ulysses+megatron-tp-sp", "ulysses=2,tp=2"),
        (Training { micro_batches: 2, ..of(3, 2) }, "usp", "ring=2,ulysses=2"),
        (Training { stages: 2, micro_batches: 2, ..of(2, 2) }, "pipeline+ulysses", "pp=2,ulysses=2"),
        (
            Training { stages: 2, micro_batches: 2, pipeline: PipelineOrder::Interleaved, ..of(2, 4) },
            "pipeline+megatron-tp-sp",
            "pp=2,tp=2",
        ),
    ] {
        wrong.extend(against_whole(&deep_llama(5), training, &options(strategy, mesh)));
    }
    let zero = ShardOptions { zero: Zero::Parameters, ..options("data-parallel+ulysses", "dp=2,ulysses=2") };
    wrong.extend(against_whole(&deep_llama(7), of(3, 2), &zero));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn parts_of_a_padded_sequence_are_parts_of_what_ranks_hold() {
    let training = Training { loss_chunks: 2, ..Training::default() };
    let short = Workload { mode: Mode::Train, training, ..Workload::prefill(2, 14) };
    let module = program(&deep_llama(2), "m", &short).unwrap();
    let uneven = ShardOptions { sequence: SequenceFit::Uneven, ..options("ulysses", "ulysses=2") };
    let refused = per_rank(&module, &uneven).unwrap_err();
    assert!(refused.starts_with("error[P57]: 14 tokens s on 2 ranks"), "{refused}");
    let padded = ShardOptions { sequence: SequenceFit::Pad, ..options("ulysses", "ulysses=2") };
    let ranks = per_rank(&module, &padded).unwrap();
    let random = RandomTensors::of_module(&module, 7);
    let run = |module| oracle::step::<f64>(module, &random, &random, Storage::Wide).unwrap();
    let (whole, found) = (run(&module), run(&ranks));
    for (expected, found) in [(&whole.outputs, &found.outputs), (&whole.kept, &found.kept)] {
        let all = ithaca_kernels::compare::outputs(found, expected);
        let wrong: Vec<_> = all.iter().filter(|c| !c.verdict.within(1e-9)).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

#[test]
fn a_head_that_drops_does_so_alike_in_parts() {
    let config = json!({
        "model_type": "t5", "d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 4, "num_layers": 2, "vocab_size": 32,
        "dropout_rate": 0.25,
    });
    let of = |loss_chunks| {
        let training = Training { loss_chunks, ..Training::default() };
        step(&config, training)
    };
    let (plain, parts) = (of(1), of(2));
    let random = RandomTensors::of_module(&plain, 7);
    let run = |module| oracle::step::<f64>(module, &random, &random, Storage::Wide).unwrap();
    let expected = run(&plain);
    let mut modules = vec![parts.clone()];
    for (strategy, mesh) in [("ulysses", "ulysses=2"), ("megatron-tp-sp", "tp=2")] {
        modules.push(per_rank(&parts, &options(strategy, mesh)).unwrap());
    }
    for found in modules.iter().map(run) {
        for (expected, found) in [(&expected.outputs, &found.outputs), (&expected.kept, &found.kept)] {
            let all = ithaca_kernels::compare::outputs(found, expected);
            let wrong: Vec<_> = all.iter().filter(|c| !c.verdict.within(1e-9)).collect();
            assert!(wrong.is_empty(), "{wrong:?}");
        }
    }
}

/// The memory that is planned for a step, which is that which the runtime takes.
fn planned(training: Training, strategy: &str, mesh: &str) -> memory::Memory {
    let mut config = deep_llama(8);
    // A vocabulary beside which layers are small.
    config["vocab_size"] = json!(1024);
    let module = step(&config, Training { optimizer: None, ..training });
    let ranks = per_rank(&module, &options(strategy, mesh)).unwrap();
    let schedule = lower::lower(verify(&ranks).unwrap()).unwrap();
    let random = RandomTensors::of_module(&module, 7);
    let measured = cpu::execute(&schedule, &random, &random, &cpu::Options::default())
        .unwrap()
        .peak_at(&schedule.space.mesh, None);
    let cluster = Cluster::named("dgx-h100").unwrap();
    let planned = memory::of_schedule(&cluster, &schedule);
    assert_eq!(measured.arena, planned.arena);
    assert_eq!(measured.parameters, planned.parameters);
    assert_eq!(measured.states, planned.gradients + planned.optimizer + planned.states);
    assert_eq!(measured.total(), planned.total);
    planned
}

#[test]
fn groups_and_parts_take_less_memory() {
    let every = |every| Training { recompute: Recompute::Full { every }, ..Training::default() };
    for (strategy, mesh) in [("single", ""), ("ulysses", "ulysses=2"), ("megatron-tp-sp", "tp=2")] {
        let arena = |training| planned(training, strategy, mesh).arena;
        let nothing = arena(Training::default());
        assert!(arena(every(2)) < nothing, "{strategy}");
        let parts = |loss_chunks| planned(Training { loss_chunks, ..every(1) }, strategy, mesh);
        let [whole, halves, quarters] = [1, 2, 4].map(parts);
        assert!(
            quarters.arena < halves.arena && halves.arena < whole.arena,
            "{strategy}: {whole:?}, {halves:?}, {quarters:?}"
        );
        // Of the head the logits are the largest at the peak, and no logits of all tokens are where they are in parts.
        let of_head = |m: &memory::Memory| {
            m.largest.iter().filter(|h| h.name.starts_with("@head")).map(|h| h.bytes).max()
        };
        assert!(of_head(&quarters) < of_head(&whole), "{strategy}: {whole:?}, {quarters:?}");
    }
}
