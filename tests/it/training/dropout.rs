//! Dropout in training: every layout drops the same, and every layer, step and micro-batch drops otherwise.

use ithaca_ir::ops::random;
use ithaca_ir::{Module, Op, diagnostic, text};
use ithaca_kernels::store::{Layered, RandomTensors, Tensors};
use ithaca_kernels::{Outputs, Storage, compare, cpu, oracle};
use ithaca_passes::differentiate::{DropoutChoice, PipelineOrder, Recompute, Training};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::lower;
use ithaca_passes::shard::{AttentionChoice, OrderChoice, ShardOptions, Zero, parse_mesh, parse_movement};
use serde_json::{Value, json};

use super::sharded::per_rank;

/// What double precision leaves of the order of summation.
const EXACT: f64 = 1e-9;

/// What single precision does.
const SINGLE: f64 = 5e-4;

fn decoder(family: &str, more: Value) -> Value {
    let mut config = json!({
        "model_type": family, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "attention_dropout": 0.2,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Models that drop wherever their families do.
fn models() -> Vec<(&'static str, Value)> {
    let shares = json!({"resid_pdrop": 0.3, "residual_dropout": 0.3, "embedding_dropout": 0.1});
    let mut neox = decoder("gpt_neox", json!({"hidden_dropout": 0.3, "rotary_pct": 0.5}));
    neox.as_object_mut().unwrap().remove("num_key_value_heads");
    let phi3 = json!({"resid_pdrop": shares["resid_pdrop"], "pad_token_id": 0});
    let starcoder2 = json!({"residual_dropout": 0.3, "embedding_dropout": 0.1});
    vec![
        ("llama", decoder("llama", json!({"head_dim": 4}))),
        ("phi3", decoder("phi3", phi3)),
        ("starcoder2", decoder("starcoder2", starcoder2)),
        ("gpt_neox", neox),
        (
            "gpt2",
            json!({"model_type": "gpt2", "n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 4, "vocab_size": 32,
                "n_positions": 16, "attn_pdrop": 0.2, "resid_pdrop": 0.3, "embd_pdrop": 0.1}),
        ),
        (
            "bert",
            json!({"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 16, "vocab_size": 32,
                "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
                "max_position_embeddings": 16, "attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.3}),
        ),
        (
            "t5",
            json!({"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 2,
                "vocab_size": 32, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
                "dropout_rate": 0.2}),
        ),
    ]
}

fn step(config: &Value, training: Training) -> Module {
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(4, 16) };
    program(config, "m", &workload).unwrap_or_else(|d| panic!("{}", diagnostic::render(&d, None)))
}

fn options(strategy: &str, mesh: &str) -> ShardOptions {
    ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
}

fn wrong(found: &Outputs<f64>, expected: &Outputs<f64>, tolerance: f64) -> Vec<String> {
    let all = compare::outputs(found, expected);
    all.iter().filter(|c| !c.verdict.within(tolerance)).map(|c| format!("{c:?}")).collect()
}

fn wide(outputs: &Outputs<f32>) -> Outputs<f64> {
    outputs.iter().map(|(name, t)| (name.clone(), t.map(f64::from))).collect()
}

/// What of a step on ranks, interpreted and executed, differs from the whole step.
fn differences(title: &str, module: &Module, options: &ShardOptions) -> Vec<String> {
    let title = format!("{title}, {} {}", options.strategy, options.mesh);
    let named = |what: &str, all: Vec<String>| -> Vec<String> {
        all.into_iter().map(|d| format!("{title}, {what}: {d}")).collect()
    };
    let random = RandomTensors::of_module(module, 7);
    let run = |module: &Module| oracle::step::<f64>(module, &random, &random, Storage::Wide);
    let whole = run(module).unwrap();
    let ranks = match per_rank(module, options) {
        Ok(ranks) => ranks,
        Err(refusal) => return named("laid out", vec![refusal]),
    };
    assert_eq!(text::parse(&text::print(&ranks)).unwrap(), ranks, "{title}");
    let masks = ranks.functions.values().flat_map(|f| {
        f.nodes
            .iter()
            .filter(|n| n.op.is_communication() || n.op == Op::Reshard)
            .filter(|n| f.ty(n.operands[0]).dtype == ithaca_ir::DType::Bool)
    });
    assert_eq!(masks.count(), 0, "{title}: masks travel");
    let found = run(&ranks).unwrap_or_else(|e| panic!("{title}: {e}"));
    let mut all = named("on ranks", wrong(&found.outputs, &whole.outputs, EXACT));
    all.extend(named("on ranks", wrong(&found.kept, &whole.kept, EXACT)));
    let lowered = lower::lower(ithaca_ir::verify::verify(&ranks).unwrap()).unwrap();
    let found = cpu::execute(&lowered, &random, &random, &cpu::Options::default())
        .unwrap_or_else(|e| panic!("{title}: {e}"));
    all.extend(named("executed", wrong(&wide(&found.outputs), &whole.outputs, SINGLE)));
    all
}

const LAYOUTS: [(&str, &str); 5] = [
    ("data-parallel", "dp=2"),
    ("ulysses", "ulysses=2"),
    ("ring", "ring=4"),
    ("megatron-tp-sp", "tp=2"),
    ("data-parallel+ring+megatron-tp", "dp=2,ring=2,tp=2"),
];

#[test]
fn every_layout_drops_what_one_device_drops() {
    let mut all = Vec::new();
    for (family, config) in models() {
        let module = step(&config, Training::default());
        assert_eq!(text::parse(&text::print(&module)).unwrap(), module, "{family}");
        for (strategy, mesh) in LAYOUTS {
            all.extend(differences(family, &module, &options(strategy, mesh)));
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn every_movement_and_order_takes_the_key_along() {
    let mut all = Vec::new();
    let module = step(&models()[0].1, Training::default());
    for (strategy, mesh) in [
        ("usp", "ring=2,ulysses=2"),
        ("megatron-cp-allgather", "cp=2"),
        ("dist-flash", "ring=4"),
        ("pass-q", "ring=2"),
        ("sparse-fetch", "ring=2"),
        ("loongtrain", "ulysses=1,outer=2,ring=2"),
    ] {
        all.extend(differences("llama", &module, &options(strategy, mesh)));
    }
    for order in ["contiguous", "zigzag", "striped"] {
        let order = OrderChoice::parse(order).unwrap();
        let ordered = ShardOptions { order: Some(order), ..options("ring", "ring=2") };
        all.extend(differences("llama", &module, &ordered));
    }
    let groups = AttentionChoice {
        movement: Some(parse_movement("gather(groups=2)").unwrap()),
        ..AttentionChoice::default()
    };
    for (_, config) in models().into_iter().filter(|(family, _)| matches!(*family, "t5" | "llama")) {
        let module = step(&config, Training::default());
        let gathered = ShardOptions { attention: groups.clone(), ..options("ring", "ring=2") };
        all.extend(differences("in groups", &module, &gathered));
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn what_is_drawn_again_is_what_was_drawn() {
    for (family, config) in models() {
        let kept = |recompute| {
            let module = step(&config, Training { recompute, ..Training::default() });
            let random = RandomTensors::of_module(&module, 7);
            oracle::step::<f64>(&module, &random, &random, Storage::Wide).unwrap().kept
        };
        let expected = kept(Recompute::None);
        for recompute in Recompute::ALL {
            let all = wrong(&kept(recompute), &expected, EXACT);
            assert!(all.is_empty(), "{family}, {recompute}: {}", all.join("\n"));
        }
    }
    let mut all = Vec::new();
    for recompute in Recompute::ALL {
        let module = step(&models()[4].1, Training { recompute, micro_batches: 2, ..Training::default() });
        let zero =
            ShardOptions { zero: Zero::Parameters, ..options("data-parallel+ulysses", "dp=2,ulysses=2") };
        all.extend(differences("gpt2", &module, &zero));
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn stages_of_a_pipeline_draw_what_a_loop_over_micro_batches_draws() {
    let config = &models()[4].1;
    let loops = step(config, Training { micro_batches: 2, ..Training::default() });
    let random = RandomTensors::of_module(&loops, 7);
    let run = |module: &Module| oracle::step::<f64>(module, &random, &random, Storage::Wide).unwrap();
    let expected = run(&loops);
    let own = |found: &Outputs<f64>| -> Outputs<f64> {
        found.iter().filter(|(n, _)| !n.starts_with("stage")).map(|(n, t)| (n.clone(), t.clone())).collect()
    };
    for pipeline in [PipelineOrder::Gpipe, PipelineOrder::OneForwardOneBackward] {
        let training = Training { micro_batches: 2, stages: 2, pipeline, ..Training::default() };
        let staged = step(config, training);
        let ranks = per_rank(&staged, &options("pipeline+ulysses", "pp=2,ulysses=2")).unwrap();
        for module in [&staged, &ranks] {
            let found = run(module);
            let all = wrong(&own(&found.kept), &expected.kept, EXACT);
            assert!(all.is_empty(), "{pipeline:?}: {}", all.join("\n"));
            assert!(wrong(&found.outputs, &expected.outputs, EXACT).is_empty());
        }
    }
}

#[test]
fn nothing_is_dropped_where_that_is_asked_for() {
    for (family, config) in models() {
        let mut plain = config.clone();
        for (name, share) in plain.as_object_mut().unwrap() {
            if name.contains("drop") {
                *share = json!(0.0);
            }
        }
        let off = step(&config, Training { dropout: DropoutChoice::Off, ..Training::default() });
        let random = RandomTensors::of_module(&off, 7);
        let run = |module: &Module| oracle::step::<f64>(module, &random, &random, Storage::Wide).unwrap();
        let (found, expected) = (run(&off), run(&step(&plain, Training::default())));
        assert!(wrong(&found.kept, &expected.kept, 0.0).is_empty(), "{family}");
        let dropped = run(&step(&config, Training::default()));
        assert!(!wrong(&dropped.outputs, &expected.outputs, 1e-6).is_empty(), "{family} drops nothing");
    }
}

#[test]
fn each_step_drops_otherwise_and_the_same_when_it_is_resumed() {
    let config = &models()[4].1;
    let mut training = Training::default();
    training.set("lr", "0").unwrap();
    let module = step(config, training);
    let random = RandomTensors::of_module(&module, 7);
    let losses = |from: Outputs<f64>, n: usize| -> (Vec<f64>, Outputs<f64>) {
        let mut kept = from;
        let mut losses = Vec::new();
        for _ in 0..n {
            let before = Tensors::from(&kept);
            let over = Layered::new(&before, &random);
            let found = oracle::step::<f64>(&module, &over, &random, Storage::Wide).unwrap();
            losses.push(found.outputs["loss"].data[0]);
            kept = found.kept;
        }
        (losses, kept)
    };
    let (all, _) = losses(Outputs::new(), 4);
    // Weights stay as they are but for their decay, which a rate of zero is without; only what is dropped changes.
    for (i, a) in all.iter().enumerate() {
        assert!(all[..i].iter().all(|b| (a - b).abs() > 1e-6), "{all:?}");
    }
    let (first, kept) = losses(Outputs::new(), 2);
    let (last, _) = losses(kept, 2);
    assert_eq!([first, last].concat(), all, "a step that is resumed draws what it would have drawn");
}

#[test]
fn layers_steps_micro_batches_and_places_draw_masks_of_their_own() {
    const N: u64 = 20_000;
    let rate = 0.3;
    let root = random::key(0);
    let mask = |key: i32, seed: u64| -> Vec<bool> {
        let from = random::start(key, seed);
        (0..N).map(|i| !random::is_below(random::mix(from, i), rate)).collect()
    };
    let key =
        |step: i64, micro: i64, layer: i64| [step, micro, layer].into_iter().fold(root, random::fold_in);
    let masks = [
        mask(key(0, 0, 0), 0),
        mask(key(1, 0, 0), 0),
        mask(key(0, 1, 0), 0),
        mask(key(0, 0, 1), 0),
        mask(key(0, 0, 0), 1),
    ];
    let deviation = |share: f64| (share * (1.0 - share) / N as f64).sqrt();
    for (i, a) in masks.iter().enumerate() {
        let kept = a.iter().filter(|&&k| k).count() as f64 / N as f64;
        assert!((kept - (1.0 - rate)).abs() < 4.0 * deviation(rate), "mask {i} keeps {kept}");
        for b in &masks[..i] {
            let both = a.iter().zip(b).filter(|&(&a, &b)| a && b).count() as f64 / N as f64;
            let share = (1.0 - rate) * (1.0 - rate);
            assert!((both - share).abs() < 4.0 * deviation(share), "masks agree on {both} of {share}");
        }
    }
}
