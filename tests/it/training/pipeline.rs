//! Pipelines: a step in stages is the step of one device, on virtual ranks and as a schedule, in every order and beside
//! every other form of parallelism.

use ithaca_ir::{Module, diagnostic, schedule, text};
use ithaca_kernels::store::{RandomTensors, SafeTensorsFile};
use ithaca_kernels::{Outputs, Storage, compare, cpu, oracle};
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::lower;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use serde_json::{Value, json};

use super::sharded::per_rank;

/// What double precision leaves of the order of summation.
const EXACT: f64 = 1e-9;

/// What single precision does.
const SINGLE: f64 = 2e-4;

fn llama(layers: u64, tied: bool) -> Value {
    json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": tied,
    })
}

fn step(config: &Value, training: Training) -> Module {
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(8, 16) };
    program(config, "m", &workload).unwrap_or_else(|d| panic!("{}", diagnostic::render(&d, None)))
}

fn staged(stages: u64, pipeline: PipelineOrder, micro_batches: u64) -> Training {
    Training { stages, pipeline, micro_batches, clip: Some(0.1), ..Training::default() }
}

fn options(strategy: &str, mesh: &str) -> ShardOptions {
    ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
}

/// What of `expected` is found otherwise; what stages keep apart is theirs.
fn differences(found: &Outputs<f64>, expected: &Outputs<f64>, tolerance: f64) -> Vec<String> {
    let found: Outputs<f64> = found
        .iter()
        .filter(|(name, _)| !name.starts_with("stage"))
        .map(|(name, t)| (name.clone(), t.clone()))
        .collect();
    let all = compare::outputs(&found, expected);
    all.iter().filter(|c| !c.verdict.within(tolerance)).map(|c| format!("{c:?}")).collect()
}

/// What differs between a step in stages, laid out and lowered, and the step of one device.
fn against_whole(config: &Value, training: Training, options: &ShardOptions) -> Vec<String> {
    let title = format!("{} {} {training:?}", options.strategy, options.mesh);
    let named = |all: Vec<String>, what: &str| -> Vec<String> {
        all.into_iter().map(|d| format!("{title}, {what}: {d}")).collect()
    };
    let one = Training { stages: 1, micro_batches: 1, ..training.clone() };
    let whole = step(config, one);
    let staged = step(config, training.clone());
    assert_eq!(text::parse(&text::print(&staged)).unwrap(), staged, "{title}");
    let random = RandomTensors::of_module(&whole, 7);
    let run = |module: &Module| oracle::step::<f64>(module, &random, &random, Storage::Wide);
    let expected = run(&whole).unwrap();
    let found = run(&staged).unwrap();
    let mut wrong = named(differences(&found.outputs, &expected.outputs, EXACT), "in stages");
    wrong.extend(named(differences(&found.kept, &expected.kept, EXACT), "in stages"));

    let ranks = match per_rank(&staged, options) {
        Ok(ranks) => ranks,
        Err(refusal) => return named(vec![refusal], "laid out"),
    };
    assert_eq!(text::parse(&text::print(&ranks)).unwrap(), ranks, "{title}");
    let found = run(&ranks).unwrap_or_else(|e| panic!("{title}: {e}"));
    wrong.extend(named(differences(&found.outputs, &expected.outputs, EXACT), "on ranks"));
    wrong.extend(named(differences(&found.kept, &expected.kept, EXACT), "on ranks"));

    let verified = ithaca_ir::verify::verify(&ranks).unwrap();
    let lowered = lower::lower(verified).unwrap();
    schedule::verify(&lowered).unwrap_or_else(|d| panic!("{title}: {}", diagnostic::render(&d, None)));
    assert_eq!(schedule::parse(&schedule::print(&lowered)).unwrap(), lowered, "{title}");
    let found = cpu::execute(&lowered, &random, &random, &cpu::Options::default())
        .unwrap_or_else(|e| panic!("{title}: {e}"));
    let wide = |outputs: &Outputs<f32>| -> Outputs<f64> {
        outputs.iter().map(|(name, t)| (name.clone(), t.map(f64::from))).collect()
    };
    wrong.extend(named(differences(&wide(&found.outputs), &expected.outputs, SINGLE), "executed"));
    wrong.extend(named(differences(&wide(&found.kept), &expected.kept, SINGLE), "executed"));
    let promised = ithaca_ir::traffic::of_module(&ranks);
    if found.traffic != promised {
        wrong.push(format!("{title}: sent {:?}, promised {promised:?}", found.traffic));
    }
    wrong
}

#[test]
fn every_order_makes_the_same_step() {
    let mut wrong = Vec::new();
    for (order, tied) in PipelineOrder::ALL.into_iter().zip([true, false, true]) {
        for (strategy, mesh) in [("pipeline", "pp=2"), ("pipeline+ulysses", "pp=2,ulysses=2")] {
            wrong.extend(against_whole(&llama(4, tied), staged(2, order, 4), &options(strategy, mesh)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
