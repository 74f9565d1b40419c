//! Tensors in wires, on devices: the emitted program and the runtime compute the same as with packed messages.

use ithaca_ir::schedule::{Place, Schedule, Work};
use ithaca_ir::{Module, Op};
use ithaca_kernels::store::{RandomTensors, SafeTensorsFile, TensorSource};
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::Training;
use ithaca_passes::fuse::{Fusion, Messages};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::ShardOptions;
use serde_json::json;

use super::{can_run_in_full, case, compare, logits_on_host, module, options, pipeline, root};

fn folded(options: ShardOptions, messages: Messages) -> ShardOptions {
    ShardOptions { fusion: Fusion { messages, ..Fusion::NONE }.folded(), ..options }
}

/// Operations that write or read a tensor in a wire.
fn at_wires(schedule: &Schedule) -> Vec<&'static str> {
    let mut names = Vec::new();
    for frame in schedule.frames.values() {
        for task in &frame.tasks {
            let Work::Compute(op) = &task.work else { continue };
            let mut buffers = task.reads.iter().chain(&task.writes);
            if buffers.any(|&b| matches!(frame.buffers[b].place, Place::Inside { .. })) {
                names.push(op.name());
            }
        }
    }
    names.sort_unstable();
    names.dedup();
    names
}

fn schedule(module: &Module, options: &ShardOptions) -> Schedule {
    compile(module, options, &Volume).unwrap_or_else(|d| panic!("{}", d[0].render(None))).schedule
}

#[test]
fn goldens_that_are_not_packed_on_the_host() {
    if !can_run_in_full() {
        return;
    }
    let attention = ["attention", "rotary"];
    let layouts = [
        ("llama-gqa", "ulysses", &[("ulysses", "4")][..], Messages::Packed, &attention[..]),
        // Keys and values travel on, and queries alone are no more than they.
        ("llama-gqa", "usp", &[("ring", "2"), ("ulysses", "2")], Messages::Packed, &attention[1..]),
        ("llama-gqa", "megatron-cp-allgather", &[("cp", "2")], Messages::Packed, &["attention"]),
        ("llama-gqa", "ulysses", &[("ulysses", "2")], Messages::Chunked(2), &["attention", "join", "take"]),
    ];
    let cases = layouts.map(|(golden, strategy, axes, messages, at)| {
        let directory = root().join("tests/goldens").join(golden);
        let module = module(&directory, &Workload::prefill(2, 64));
        let case = case(&directory, &module, &folded(options(strategy, axes), messages));
        let found = at_wires(&case.schedule);
        assert!(at.iter().all(|name| found.contains(name)), "{strategy} {messages:?}: {found:?}");
        case
    });
    for ((golden, strategy, _, messages, _), logits) in layouts.into_iter().zip(logits_on_host(&cases)) {
        let file = root().join("tests/goldens").join(golden).join("io.safetensors");
        let error = compare(&logits, &SafeTensorsFile::open(file).unwrap().read("logits").unwrap());
        assert!(error < 1e-5, "{golden} under {strategy} {messages:?}: error {error:.3e}");
    }
}

/// Heads are wide enough that a product of each peer's is worth while: projections write to wires too, and backward
/// attention does.
#[test]
fn a_step_that_is_not_packed_on_the_host() {
    if !can_run_in_full() {
        return;
    }
    let config = json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32,
        "tie_word_embeddings": false,
    });
    let workload = Workload { mode: Mode::Train, training: Training::default(), ..Workload::prefill(2, 16) };
    let whole = program(&config, "m", &workload).unwrap();
    let options = folded(pipeline::options("ulysses", "ulysses=2"), Messages::Packed);
    let at = at_wires(&schedule(&whole, &options));
    for name in [Op::Einsum.name(), "attention_backward", "rotary"] {
        assert!(at.contains(&name), "{name}: {at:?}");
    }
    let sources = RandomTensors::of_module(&whole, 11);
    let expected = pipeline::expected(&whole, &sources);
    pipeline::check(&[pipeline::Step { module: whole, options, sources: &sources, expected: &expected }]);
}
