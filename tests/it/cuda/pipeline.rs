//! Training steps in stages as emitted programs on the host: outputs and state after several
//! steps, against the whole program in double precision, and against themselves on one device.

use ithaca_ir::verify::verify;
use ithaca_ir::{Diagnostics, Module, Op, Space, TensorType};
use ithaca_kernels::store::{Layered, RandomTensors, TensorSource, Tensors};
use ithaca_kernels::{Outputs, Storage, oracle};
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{PipelineOrder, Training};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::{Prices, Volume};
use ithaca_passes::shard::{HeadSplit, ShardOptions, Zero, parse_mesh};
use serde_json::{Value, json};

use super::together::{self, Case, Sources};
use super::{can_run, can_run_in_full};

const STEPS: usize = 2;

/// Largest accepted distance of a tensor, relative to its norm; AdamW divides a rounded number by its own size.
const TOLERANCE: f64 = 1e-4;

fn llama(layers: u64, tied: bool) -> Value {
    json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": tied,
    })
}

fn step(config: &Value, training: Training, batch: u64) -> Module {
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(batch, 16) };
    program(config, "m", &workload).unwrap_or_else(|d: Diagnostics| panic!("{}", d[0].render(None)))
}

fn staged(stages: u64, pipeline: PipelineOrder, micro_batches: u64) -> Training {
    Training { stages, pipeline, micro_batches, clip: Some(1.0), ..Training::default() }
}

pub(super) fn options(strategy: &str, mesh: &str) -> ShardOptions {
    ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
}

/// The results of several steps of `whole`.
pub(super) fn expected(whole: &Module, sources: &dyn TensorSource) -> Outputs<f64> {
    let (mut kept, mut outputs) = (Tensors::new(), Outputs::new());
    for _ in 0..STEPS {
        let results =
            oracle::step::<f64>(whole, &Layered::new(&kept, sources), sources, Storage::Wide).unwrap();
        kept = Tensors::from(&results.kept);
        outputs = results.outputs;
        outputs.extend(results.kept);
    }
    outputs
}

/// A step, its layout, its inputs and the results of several such steps.
pub(super) struct Step<'a> {
    pub(super) module: Module,
    pub(super) options: ShardOptions,
    pub(super) sources: &'a dyn TensorSource,
    pub(super) expected: &'a Outputs<f64>,
}

/// Prices at which stages are far apart: ranks that hold the same send parts of it.
struct FarApart;

impl Prices for FarApart {
    fn collective_seconds(&self, space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> f64 {
        let distance = if from.layout.at == to.layout.at { 1.0 } else { 1000.0 };
        distance * Volume.collective_seconds(space, op, from, to)
    }
}

/// Runs several of each of these steps, and compares all that they give.
pub(super) fn check(steps: &[Step<'_>]) {
    let cases: Vec<Case> = steps
        .iter()
        .map(|Step { module, options, sources, .. }| {
            let name = format!("{} {} zero={}", options.strategy, options.mesh, options.zero.stage());
            let compiled = compile(module, options, &FarApart)
                .unwrap_or_else(|d| panic!("{name}: {}", d[0].render(None)));
            let reference = Some(lower(verify(module).unwrap()).unwrap());
            Case {
                name,
                schedule: compiled.schedule,
                reference,
                sources: Sources::of(*sources),
                steps: STEPS,
            }
        })
        .collect();
    let (_out, outputs) = together::run(&cases);
    for ((step, Case { name, .. }), found) in steps.iter().zip(&cases).zip(&outputs) {
        for (output, expected) in step.expected {
            let found = found.read(output).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(found.shape, expected.shape, "{name}: {output}");
            let sum = |f: fn(f64, f64) -> f64| -> f64 {
                found.data.iter().zip(&expected.data).map(|(&a, &b)| f(a, b)).sum()
            };
            let (difference, norm) = (sum(|a, b| (a - b) * (a - b)), sum(|_, b| b * b));
            let distance = if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() };
            assert!(distance < TOLERANCE, "{name}: {output} is {distance:.1e} off");
        }
    }
}

#[test]
fn stages_of_every_order_on_the_host() {
    if !can_run() {
        return;
    }
    let layouts = [
        (PipelineOrder::Gpipe, true, "pipeline", "pp=2"),
        (PipelineOrder::OneForwardOneBackward, true, "pipeline+ulysses", "pp=2,ulysses=2"),
        (PipelineOrder::Interleaved, false, "pipeline+ulysses", "pp=2,ulysses=2"),
        (PipelineOrder::Interleaved, true, "pipeline", "pp=2"),
        (PipelineOrder::ZbH1, true, "pipeline+megatron-tp", "pp=2,tp=2"),
    ];
    let ones = layouts.map(|(_, tied, ..)| {
        let one = step(&llama(4, tied), Training { clip: Some(1.0), ..Training::default() }, 8);
        let sources = RandomTensors::of_module(&one, 11);
        let expected = expected(&one, &sources);
        (sources, expected)
    });
    let steps = layouts.iter().zip(&ones).map(|(&(order, tied, strategy, mesh), (sources, expected))| Step {
        module: step(&llama(4, tied), staged(2, order, 4), 8),
        options: options(strategy, mesh),
        sources,
        expected,
    });
    check(&steps.collect::<Vec<_>>());
}

#[test]
fn stages_beside_other_forms_of_parallelism_on_the_host() {
    if !can_run_in_full() {
        return;
    }
    let one = step(&llama(4, true), Training { clip: Some(1.0), ..Training::default() }, 8);
    let sources = RandomTensors::of_module(&one, 12);
    let expected = expected(&one, &sources);
    let in_order = |stages, micro_batches| {
        step(&llama(4, true), staged(stages, PipelineOrder::OneForwardOneBackward, micro_batches), 8)
    };
    let of = |module, options| Step { module, options, sources: &sources, expected: &expected };
    let data_parallel = options("data-parallel+pipeline", "dp=2,pp=2");
    // Three heads on two ranks, and six over two key/value heads on four.
    let odd = [(3, 3), (6, 2)].map(|(heads, kv_heads)| {
        let mut config = llama(2, false);
        config["num_attention_heads"] = heads.into();
        config["num_key_value_heads"] = kv_heads.into();
        let one = step(&config, Training::default(), 2);
        let sources = RandomTensors::of_module(&one, 13);
        let expected = self::expected(&one, &sources);
        (one, sources, expected)
    });
    let padded = |strategy, mesh| ShardOptions { heads: HeadSplit::Pad, ..options(strategy, mesh) };
    let of_odd = |i: usize, options| {
        let (module, sources, expected) = &odd[i];
        Step { module: module.clone(), options, sources, expected }
    };
    check(&[
        of_odd(0, padded("megatron-tp", "tp=2")),
        of_odd(1, padded("ulysses", "ulysses=4")),
        of(in_order(4, 4), options("pipeline+ring", "pp=4,ring=2")),
        of(in_order(2, 2), options("pipeline+megatron-tp-sp", "tp=2,pp=2")),
        of(in_order(2, 2), ShardOptions { zero: Zero::Off, ..data_parallel.clone() }),
        of(in_order(2, 2), ShardOptions { zero: Zero::Parameters, ..data_parallel }),
    ]);
}
