//! Random schedules run to their end: models, strategies, meshes and options drawn at random, in forward passes and training
//! steps, on two streams a rank, with a limit on waiting, NaN looked for and every byte counted.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

use ithaca_ir::schedule::{self, Schedule};
use ithaca_ir::{Diagnostics, Module, traffic};
use ithaca_kernels::cpu::{self, LookForNan};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Storage, compare, oracle};
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::{
    HeadSplit, OrderChoice, STRATEGIES, SequenceFit, ShardOptions, Strategy, Zero, parse_mesh,
};
use serde_json::{Value, json};

use crate::generate::Choices;
use crate::tier;
use crate::training::sharded;

/// Schedules of the suite: by default, and of the full tier.
const SCHEDULES: [u64; 2] = [40, 200];

/// The most ranks of a mesh.
const MAX_RANKS: u64 = 8;

/// What single precision leaves.
const CLOSE: f64 = 2e-3;

/// A workload of a model, and how it is laid out.
pub(crate) struct Drawn {
    pub(crate) config: Value,
    pub(crate) workload: Workload,
    pub(crate) options: ShardOptions,
}

pub(crate) fn draw(seed: u64) -> Drawn {
    let choices = &mut Choices::from_seed(seed);
    // Every strategy in turn, so that none is left to chance.
    let all: Vec<&dyn Strategy> = STRATEGIES.iter().copied().filter(|s| s.name() != "ep").collect();
    let mut strategies = vec![all[seed as usize % all.len()]];
    for _ in 0..choices.below(3) {
        let name = choices.one_of(&["data-parallel", "megatron-tp", "megatron-tp-sp", "ulysses", "pipeline"]);
        let other = all.iter().copied().find(|s| s.name() == name);
        let free = |axis: &&str| strategies.iter().all(|s| !s.axes().contains(axis));
        strategies.extend(other.filter(|s| s.axes().iter().all(free)));
    }
    let mut mesh: Vec<(&str, u64)> = Vec::new();
    let mut ranks = 1;
    for axis in strategies.iter().flat_map(|s| s.axes()) {
        let fits: Vec<u64> = [2, 2, 4, 3].into_iter().filter(|n| n * ranks <= MAX_RANKS).collect();
        let size = if fits.is_empty() { 1 } else { choices.one_of(&fits) };
        ranks *= size;
        mesh.push((axis, size));
    }
    let axis = |name: &str| mesh.iter().find(|a| a.0 == name).map_or(1, |a| a.1);
    let (dp, stages) = (axis("dp"), axis("pp"));
    let heads_degree = axis("ulysses") * axis("tp") * if mesh.iter().any(|a| a.0 == "cp") { 2 } else { 1 };
    let (kv_heads, group) = (heads_degree * choices.one_of(&[1, 1, 2]), choices.one_of(&[1, 2]));
    let trains = stages > 1 || choices.once_in(2);
    let training = Training {
        recompute: choices.one_of(&[
            Recompute::None,
            Recompute::Selective,
            Recompute::FULL,
            Recompute::Full { every: 2 },
            Recompute::KeepAttention,
        ]),
        loss_chunks: choices.one_of(&[1, 1, 2]),
        micro_batches: if stages > 1 { 2 * stages } else { choices.one_of(&[1, 1, 2]) },
        stages,
        pipeline: choices.one_of(&PipelineOrder::ALL),
        clip: choices.one_of(&[None, Some(0.1)]),
        ..Training::default()
    };
    let layers =
        if stages > 1 { training.n_chunks() + choices.below(2) as u64 } else { choices.one_of(&[2, 1, 3]) };
    let split = ranks / dp / stages;
    let tokens = 2 * split * choices.one_of(&[1, 2]);
    let batch = dp * choices.one_of(&[1, 2]) * if trains { training.micro_batches } else { 1 };
    let windows = strategies.iter().any(|s| ["window-halo", "streaming"].contains(&s.name()));
    let workload = Workload {
        mode: if trains { Mode::Train } else { Mode::Prefill },
        training,
        ..Workload::prefill(batch, tokens.max(4) - u64::from(choices.once_in(6)))
    };
    let names: Vec<&str> = strategies.iter().map(|s| s.name()).collect();
    let mesh: Vec<String> = mesh.iter().map(|(axis, size)| format!("{axis}={size}")).collect();
    let orders = [None, None, None, Some(OrderChoice::Contiguous), Some(OrderChoice::Zigzag)];
    let options = ShardOptions {
        order: choices.one_of(&orders),
        heads: choices.one_of(&[HeadSplit::Even, HeadSplit::Even, HeadSplit::Uneven]),
        sequence: choices.one_of(&[SequenceFit::Auto, SequenceFit::Uneven]),
        zero: if trains { choices.one_of(&Zero::ALL) } else { Zero::Off },
        fusion: choices.one_of(&[
            Fusion::NONE,
            Fusion::PACK,
            Fusion::overlap(2),
            Fusion::overlap(3),
            Fusion::parse("prefetch+pack").unwrap(),
            Fusion::PACK.folded(),
            Fusion::overlap(2).folded(),
            Fusion::parse("prefetch+fold+pack").unwrap(),
        ]),
        ..ShardOptions::new(names.join("+"), parse_mesh(&mesh.join(",")).unwrap())
    };
    Drawn { config: config(choices, (kv_heads * group, kv_heads), layers, windows), workload, options }
}

/// A tiny model of one of the families.
fn config(choices: &mut Choices, (heads, kv_heads): (u64, u64), layers: u64, windows: bool) -> Value {
    let family = if windows { "mistral" } else { choices.one_of(&["llama", "qwen2", "gpt2", "llama"]) };
    if family == "gpt2" {
        return json!({
            "model_type": "gpt2", "n_embd": heads * 4, "n_head": heads, "n_layer": layers, "n_positions": 128,
            "vocab_size": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0
        });
    }
    let mut config = json!({
        "model_type": family, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4, "vocab_size": 48,
        "tie_word_embeddings": choices.once_in(2),
    });
    if windows {
        config["sliding_window"] = json!(4);
    }
    config
}

/// What a run is given: no rank may wait for long, and nothing may be NaN.
fn options() -> cpu::Options {
    let timeout = Some(Duration::from_secs(120));
    cpu::Options { timeout, look_for_nan: LookForNan::Writes, ..cpu::Options::default() }
}

/// Runs what `seed` draws; gives the code of the refusal if it is none.
///
/// # Errors
/// What is wrong, in words.
fn run(seed: u64) -> Result<Option<&'static str>, String> {
    let Drawn { config, workload, options: layout } = draw(seed);
    let title = format!(
        "ITHACA_SEED={seed}..{} {:?}, {} on {}, zero {}, {}, {:?}",
        seed + 1,
        workload.mode,
        layout.strategy,
        layout.mesh,
        layout.zero.stage(),
        layout.fusion,
        workload.training
    );
    let refusal = |diagnostics: Diagnostics| match diagnostics[0].code {
        // What the passes find wrong with each other is no refusal.
        "P01" | "P02" | "P03" | "P04" => Err(format!("{title}: {}", diagnostics[0].message)),
        code if code.starts_with(['S', 'V']) => Err(format!("{title}: {code} {}", diagnostics[0].message)),
        code => Ok(Some(code)),
    };
    let module = match program(&config, "m", &workload) {
        Ok(module) => module,
        Err(diagnostics) => return refusal(diagnostics),
    };
    let compiled = match compile(&module, &layout, &Volume) {
        Ok(compiled) => compiled,
        Err(diagnostics) => return refusal(diagnostics),
    };
    let tensors = RandomTensors::of_module(&module, seed);
    let found = cpu::execute(&compiled.schedule, &tensors, &tensors, &options())
        .map_err(|error| format!("{title}: {error}"))?;
    if !traffic::agree(&traffic::of_module(&compiled.per_rank), &found.traffic) {
        return Err(format!("{title}: it sends other bytes than the program"));
    }
    let whole = oracle::step::<f64>(&module, &tensors, &tensors, Storage::Wide).unwrap();
    for row in compare::outputs(&found.outputs, &whole.outputs) {
        if !row.verdict.within(CLOSE) {
            return Err(format!("{title}: {row:?}"));
        }
    }
    Ok(None)
}

#[test]
fn random_schedules_come_to_their_end() {
    let [few, all] = SCHEDULES;
    let seeds = tier::draws(few, all);
    let n = seeds.end - seeds.start;
    let (mut ran, mut refused, mut wrong) = (0, BTreeMap::new(), Vec::new());
    for seed in seeds {
        match run(seed) {
            Ok(None) => ran += 1,
            Ok(Some(code)) => *refused.entry(code).or_insert(0) += 1,
            Err(what) => wrong.push(what),
        }
    }
    let mut tally = format!("{ran} of {n} random schedules ran");
    write!(tally, ", refused: {refused:?}").unwrap();
    writeln!(std::io::stderr(), "{tally}").unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(n < 100 || 3 * ran > n, "{tally}");
}

/// A step, laid out.
fn compiled(strategy: &str, mesh: &str, fusion: Fusion) -> (Module, Schedule) {
    let training = Training { clip: Some(0.1), ..Training::default() };
    let module = sharded::step(&sharded::llama(4, 2, false), training);
    let options = ShardOptions {
        fusion,
        zero: Zero::Gradients,
        ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
    };
    let schedule = compile(&module, &options, &Volume).unwrap().schedule;
    (module, schedule)
}

#[test]
fn every_wait_that_is_dropped_is_noticed() {
    let (mut dropped, mut noticed) = (0, 0);
    for (strategy, mesh, fusion) in [
        ("ulysses", "ulysses=2", Fusion::overlap(2)),
        ("ring", "ring=2", Fusion::PACK),
        ("data-parallel+megatron-tp-sp", "dp=2,tp=2", Fusion::PACK),
    ] {
        let (module, good) = compiled(strategy, mesh, fusion);
        let tensors = RandomTensors::of_module(&module, 7);
        let expected = cpu::execute(&good, &tensors, &tensors, &options()).unwrap();
        for id in good.frames.ids() {
            for task in 0..good.frames[id].tasks.len() {
                for wait in 0..good.frames[id].tasks[task].waits.len() {
                    let mut mutant = good.clone();
                    mutant.frames[id].tasks[task].waits.remove(wait);
                    assert!(schedule::verify(&mutant).is_err(), "{strategy}: task {task} need not wait");
                    dropped += 1;
                    // What is read too early is NaN, and a rank may notice that first where it is looked for.
                    let options = cpu::Options { look_for_nan: LookForNan::Off, ..options() };
                    match cpu::execute(&mutant, &tensors, &tensors, &options) {
                        Err(error) => {
                            let error = error.to_string();
                            assert!(error.contains("nothing orders the two"), "{strategy}: {error}");
                            noticed += 1;
                        }
                        // The verifier asks for order where buffers of some rank could meet; here none do.
                        Ok(run) => assert_eq!(run.outputs, expected.outputs, "{strategy}"),
                    }
                }
            }
        }
    }
    assert!(dropped > 50 && 10 * noticed > 9 * dropped, "{noticed} of {dropped}");
}
