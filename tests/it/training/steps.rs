//! Ten steps of AdamW under every plan, against ten steps on one device; and what a step measures: bytes and memory.

use std::path::Path;

use ithaca_kernels::store::{Layered, RandomTensors, Renamed, SafeTensorsFile, TensorSource, Tensors};
use ithaca_kernels::{Outputs, cpu};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::{Compiled, compile};
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::import::{Capacity, Mode, Workload, program};
use ithaca_passes::shard::strategy::parse_mesh;
use ithaca_passes::shard::{HeadSplit, ShardOptions, Zero};
use ithaca_passes::{memory, plan};

use crate::golden::workload;
use crate::tier;

/// Largest accepted distance of a weight after ten steps, relative to its norm.
const TOLERANCE: f64 = 1e-5;

/// The same for a ring around latent attention, where AdamW turns the rounding of gradients that are nearly zero into steps:
/// 1.2e-5 was seen.
const OF_RINGS_WITH_EXPERTS: f64 = 2e-5;

fn golden(name: &str) -> (serde_json::Value, SafeTensorsFile, SafeTensorsFile) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
    let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
    let open = |file| SafeTensorsFile::open(dir.join(file)).unwrap();
    (serde_json::from_str(&text).unwrap(), open("io.safetensors"), open("model.safetensors"))
}

/// The program of `config` on batches of these lengths, laid out by a plan.
fn compiled(config: &serde_json::Value, lengths: &Workload, plan: &Plan) -> Compiled {
    let workload = Workload { mode: Mode::Train, training: plan.training.clone(), ..lengths.clone() };
    let module = program(config, "m", &workload).unwrap_or_else(|d| panic!("{}: {d:?}", plan.strategy));
    let mut options = ShardOptions::new(plan.strategy, parse_mesh(plan.mesh).unwrap());
    options.zero = plan.zero;
    options.heads = HeadSplit::Pad;
    let cluster = Cluster::named("dgx-h100").unwrap();
    compile(&module, &options, &cluster).unwrap_or_else(|d| panic!("{}: {d:?}", plan.strategy))
}

/// The weights after `n` steps on the same batch, and the last run.
fn steps(
    compiled: &Compiled,
    io: &dyn TensorSource,
    weights: &dyn TensorSource,
    n: usize,
) -> (Outputs<f32>, cpu::Execution) {
    let run = |weights: &dyn TensorSource| {
        cpu::execute(&compiled.schedule, weights, io, &cpu::Options::default()).unwrap()
    };
    let mut execution = run(weights);
    for _ in 1..n {
        let kept = Tensors::from(&execution.kept);
        execution = run(&Layered::new(&kept, weights));
    }
    // What stages of a pipeline keep apart is no weight either.
    let is_weight =
        |name: &&String| !["grad.", "optimizer.", "stage"].iter().any(|prefix| name.starts_with(prefix));
    let names: Vec<String> = execution.kept.keys().filter(is_weight).cloned().collect();
    let updated = names.into_iter().map(|name| (name.clone(), execution.kept[&name].clone())).collect();
    (updated, execution)
}

#[derive(Clone)]
struct Plan {
    strategy: &'static str,
    mesh: &'static str,
    zero: Zero,
    training: Training,
}

fn plans() -> Vec<Plan> {
    let training = Training { clip: Some(1.0), ..Training::default() };
    let plan = |strategy, mesh| Plan { strategy, mesh, zero: Zero::Off, training: training.clone() };
    let mut plans = vec![
        plan("data-parallel", "dp=2"),
        plan("ulysses", "ulysses=4"),
        plan("ring", "ring=4"),
        plan("megatron-tp-sp", "tp=4"),
        plan("usp", "ring=2,ulysses=2"),
        plan("megatron-tp+ulysses", "ulysses=2,tp=2"),
    ];
    for zero in Zero::ALL {
        plans.push(Plan { zero, ..plan("data-parallel+ulysses", "dp=2,ulysses=2") });
    }
    // No dimension of the weights divides by three.
    for (zero, strategy, mesh) in [
        (Zero::Gradients, "ring", "ring=3"),
        (Zero::Parameters, "ring", "ring=3"),
        (Zero::Parameters, "megatron-tp-sp+ring", "ring=3,tp=2"),
    ] {
        plans.push(Plan { zero, ..plan(strategy, mesh) });
    }
    for recompute in Recompute::ALL {
        let training = Training { recompute, ..training.clone() };
        plans.push(Plan { training, ..plan("ulysses", "ulysses=2") });
    }
    for (strategy, mesh) in [("ulysses", "ulysses=2"), ("ring", "ring=2"), ("megatron-tp-sp", "tp=2")] {
        for every in [2, 3] {
            let training = Training { recompute: Recompute::Full { every }, ..training.clone() };
            plans.push(Plan { training, ..plan(strategy, mesh) });
        }
        for loss_chunks in [2, 4] {
            let training = Training { loss_chunks, ..training.clone() };
            plans.push(Plan { training, ..plan(strategy, mesh) });
        }
    }
    let both = Training { recompute: Recompute::Full { every: 2 }, loss_chunks: 4, ..training.clone() };
    let zero = Zero::Parameters;
    plans.push(Plan { training: both, zero, ..plan("data-parallel+ulysses", "dp=2,ulysses=2") });
    let training = Training { micro_batches: 2, ..training.clone() };
    let zero = Zero::ParametersAbove(256);
    plans.push(Plan { training: training.clone(), zero, ..plan("ulysses", "ulysses=2") });
    plans.push(Plan { training, ..plan("ulysses", "ulysses=2") });
    plans
}

/// Takes ten steps under each plan; what differs from ten steps on one device.
fn differences(
    config: &serde_json::Value,
    lengths: &Workload,
    (io, weights): (&dyn TensorSource, &dyn TensorSource),
    plans: &[Plan],
) -> String {
    let training = Training { clip: Some(1.0), ..Training::default() };
    let single = Plan { strategy: "single", mesh: "", zero: Zero::Off, training };
    let (expected, _) = steps(&compiled(config, lengths, &single), io, weights, 10);
    let mut report = String::new();
    for plan in tier::one_in(6, plans) {
        let compiled = compiled(config, lengths, plan);
        let (found, execution) = steps(&compiled, io, weights, 10);
        let what = format!("{} {} {:?} {:?}", plan.strategy, plan.mesh, plan.zero, plan.training);
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
        let tolerance = if plan.strategy == "ring+ep" { OF_RINGS_WITH_EXPERTS } else { TOLERANCE };
        for (name, tensor) in &found {
            let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
                tensor.data.iter().zip(&expected[name].data).map(|(&a, &b)| f(a.into(), b.into())).sum()
            };
            let (difference, norm) = (sum(&|a, b| (a - b) * (a - b)), sum(&|_, b| b * b));
            let distance = if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() };
            if distance.is_nan() || distance > tolerance {
                report.push_str(&format!("{what}: {name} is {distance:.1e} off\n"));
            }
        }
        // What was promised is what was counted.
        let promised = plan::collectives(&compiled.per_rank);
        let counted: Vec<_> = execution
            .traffic
            .iter()
            .map(|t| (t.kind.as_str(), t.axis.as_str(), t.phase.name(), t.count, t.bytes_sent_per_rank))
            .collect();
        let promised: Vec<_> = promised
            .iter()
            .map(|c| (c.kind.as_str(), c.axis.as_str(), c.phase.as_str(), c.count, c.bytes_sent_per_rank))
            .collect();
        assert_eq!(counted, promised, "{what}");
        let mesh = &compiled.schedule.space.mesh;
        let cluster = Cluster::named("dgx-h100").unwrap();
        for (at, planned) in memory::of_stages(&cluster, &compiled.schedule) {
            let measured = execution.peak_at(mesh, at);
            assert_eq!(measured.arena, planned.arena, "{what} {at:?}");
            assert_eq!(measured.parameters, planned.parameters, "{what} {at:?}");
            assert_eq!(
                measured.states,
                planned.gradients + planned.optimizer + planned.states,
                "{what} {at:?}"
            );
            assert_eq!(measured.inputs, planned.inputs, "{what} {at:?}");
            assert_eq!(measured.total(), planned.total, "{what} {at:?}");
        }
    }
    report
}

#[test]
fn ten_steps_give_the_weights_of_one_device() {
    let (config, io, weights) = golden("llama-gqa");
    let report = differences(&config, &workload(&io), (&io, &weights), &plans());
    assert!(report.is_empty(), "{report}");
}

fn staged(stages: u64, pipeline: PipelineOrder, micro_batches: u64) -> Training {
    Training { stages, pipeline, micro_batches, clip: Some(1.0), ..Training::default() }
}

#[test]
fn ten_steps_in_stages_give_the_weights_of_one_device() {
    let plan = |strategy, mesh, training: Training| Plan { strategy, mesh, zero: Zero::Off, training };
    let mut plans = Vec::new();
    for order in PipelineOrder::ALL {
        plans.push(plan("pipeline", "pp=2", staged(2, order, 4)));
        plans.push(plan("pipeline+ulysses", "pp=2,ulysses=2", staged(2, order, 4)));
    }
    let order = PipelineOrder::OneForwardOneBackward;
    plans.push(plan("pipeline", "pp=4", staged(4, order, 8)));
    plans.push(plan("pipeline+ring", "ring=2,pp=2", staged(2, order, 4)));
    plans.push(plan("pipeline+megatron-tp-sp", "pp=2,tp=2", staged(2, order, 2)));
    for zero in Zero::ALL.into_iter().chain([Zero::ParametersAbove(128)]) {
        plans.push(Plan { zero, ..plan("data-parallel+pipeline", "dp=2,pp=2", staged(2, order, 4)) });
    }
    let all = plan("data-parallel+pipeline+ulysses", "dp=2,pp=2,ulysses=2", staged(2, order, 4));
    plans.push(Plan { zero: Zero::Parameters, ..all });
    for tied in [true, false] {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32,
            "tie_word_embeddings": tied,
        });
        let lengths = Workload::prefill(8, 16);
        let whole = Workload { mode: Mode::Train, ..lengths.clone() };
        let random = RandomTensors::of_module(&program(&config, "m", &whole).unwrap(), 5);
        let report = differences(&config, &lengths, (&random, &random), &plans);
        assert!(report.is_empty(), "tied={tied}: {report}");
    }
}

/// Nothing of a padded head may reach a weight: neither by its gradient nor by the norm that clips it.
#[test]
fn ten_steps_with_padded_heads_give_the_weights_of_one_device() {
    let training = Training { clip: Some(1.0), ..Training::default() };
    let plan = |strategy, mesh, zero| Plan { strategy, mesh, zero, training: training.clone() };
    let plans = [
        plan("megatron-tp-sp", "tp=4", Zero::Off),
        plan("ulysses", "ulysses=8", Zero::Off),
        plan("data-parallel+ulysses", "dp=2,ulysses=4", Zero::Parameters),
        plan("usp", "ring=2,ulysses=4", Zero::Off),
    ];
    // Groups with padding, key/value heads of padding, and both.
    for (heads, kv_heads) in [(7, 1), (6, 3), (9, 3)] {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4, "vocab_size": 32,
        });
        let lengths = Workload::prefill(2, 16);
        let whole = Workload { mode: Mode::Train, ..lengths.clone() };
        let random = RandomTensors::of_module(&program(&config, "m", &whole).unwrap(), 5);
        let report = differences(&config, &lengths, (&random, &random), &plans);
        assert!(report.is_empty(), "{heads}/{kv_heads}: {report}");
    }
}

#[test]
fn ten_steps_of_experts_give_the_weights_of_one_device() {
    let training = Training { clip: Some(1.0), ..Training::default() };
    let plan = |strategy, mesh| Plan { strategy, mesh, zero: Zero::Off, training: training.clone() };
    let mut plans = vec![
        plan("ep", "ep=2"),
        plan("ep", "ep=4"),
        plan("ulysses+ep", "ulysses=2,ep=2"),
        plan("ulysses+ep", "ulysses=4"),
        plan("data-parallel+ep", "dp=2"),
        plan("data-parallel-ep", "dp=2,ep=2"),
        plan("ring+ep", "ring=4"),
    ];
    plans.push(Plan { zero: Zero::Parameters, ..plan("data-parallel+ulysses+ep", "dp=2,ulysses=2") });
    plans.push(Plan { zero: Zero::Optimizer, ..plan("data-parallel-ep+ulysses", "dp=1,ep=2,ulysses=2") });
    plans.push(Plan { zero: Zero::Parameters, ..plan("data-parallel-ep", "dp=2,ep=2") });
    let two = Training { stages: 2, micro_batches: 2, ..training.clone() };
    plans.push(Plan { training: two, ..plan("pipeline+ep", "pp=2,ep=2") });
    for name in tier::one_in(3, ["mixtral", "qwen3-moe", "deepseek-v3"]) {
        let (config, io, weights) = golden(name);
        let weights = Renamed::new(&weights, &[]);
        // Dropless, and of one model with tokens that are dropped.
        let capacities: &[Option<&str>] = if name == "mixtral" { &[None, Some("0.75/8")] } else { &[None] };
        for capacity in capacities {
            let capacity = capacity.map(|text| Capacity::parse(text).unwrap());
            let lengths = Workload { capacity, ..workload(&io) };
            let report = differences(&config, &lengths, (&io, &weights), &plans);
            assert!(report.is_empty(), "{name}, {capacity:?}: {report}");
        }
    }
}
