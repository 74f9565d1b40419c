//! Random requests: models, strategies, meshes and options, in forward passes and training steps. Each is refused with a
//! diagnostic, or it compiles, prints what parses as the same, runs to its end, sends the bytes of its plan and is judged right.

use std::time::Duration;

use ithaca_ir::{Diagnostics, schedule, text, traffic};
use ithaca_kernels::Storage;
use ithaca_kernels::cpu::{self, LookForNan};
use ithaca_kernels::oracle::Results;
use ithaca_kernels::step_checker::StepChecker;
use ithaca_kernels::store::RandomTensors;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::{
    HeadSplit, OrderChoice, STRATEGIES, SequenceFit, ShardOptions, Strategy, Zero, parse_mesh,
};
use serde_json::{Value, json};

use super::{Choices, is_refusal};

/// The most ranks of a mesh.
const MAX_RANKS: u64 = 8;

/// A workload of a model, and how it is laid out.
pub struct Drawn {
    /// The description of the model.
    pub config: Value,
    /// The workload.
    pub workload: Workload,
    /// The layout.
    pub options: ShardOptions,
}

/// Draws a request; `first` numbers its first strategy.
pub fn draw(first: usize, choices: &mut Choices) -> Drawn {
    let all: Vec<&dyn Strategy> = STRATEGIES.iter().copied().filter(|s| s.name() != "ep").collect();
    let mut strategies = vec![all[first % all.len()]];
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
            fusion("prefetch+pack"),
            Fusion::PACK.folded(),
            Fusion::overlap(2).folded(),
            fusion("prefetch+fold+pack"),
        ]),
        ..ShardOptions::new(names.join("+"), parse_mesh(&mesh.join(",")).expect("axes have names and sizes"))
    };
    Drawn { config: config(choices, (kv_heads * group, kv_heads), layers, windows), workload, options }
}

fn fusion(text: &str) -> Fusion {
    Fusion::parse(text).expect("fusions are spelt right")
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
pub fn options() -> cpu::Options {
    let timeout = Some(Duration::from_secs(120));
    cpu::Options { timeout, look_for_nan: LookForNan::Writes, ..cpu::Options::default() }
}

/// Checks a request, with tensors drawn from `seed`; gives the code of the refusal where it is refused.
///
/// # Errors
/// What is wrong, in words.
pub fn check(
    Drawn { config, workload, options: layout }: &Drawn,
    seed: u64,
) -> Result<Option<&'static str>, String> {
    let title = format!(
        "{:?}, {} on {}, zero {}, {}, {:?}",
        workload.mode,
        layout.strategy,
        layout.mesh,
        layout.zero.stage(),
        layout.fusion,
        workload.training
    );
    let refusal = |diagnostics: Diagnostics| {
        is_refusal(&diagnostics).map_err(|why| format!("{title}: {why}"))?;
        match diagnostics[0].code {
            // What the passes find wrong with each other is no refusal.
            "P01" | "P02" | "P03" | "P04" => Err(format!("{title}: {}", diagnostics[0].message)),
            code if code.starts_with(['S', 'V']) => {
                Err(format!("{title}: {code} {}", diagnostics[0].message))
            }
            code => Ok(Some(code)),
        }
    };
    let module = match program(config, "m", workload) {
        Ok(module) => module,
        Err(diagnostics) => return refusal(diagnostics),
    };
    let compiled = match compile(&module, layout, &Volume) {
        Ok(compiled) => compiled,
        Err(diagnostics) => return refusal(diagnostics),
    };
    if text::parse(&text::print(&compiled.per_rank)).as_ref() != Ok(&compiled.per_rank) {
        return Err(format!("{title}: the per-rank program is not what its text says"));
    }
    if schedule::parse(&schedule::print(&compiled.schedule)).as_ref() != Ok(&compiled.schedule) {
        return Err(format!("{title}: the schedule is not what its text says"));
    }
    let tensors = RandomTensors::of_module(&module, seed);
    let ran = cpu::execute(&compiled.schedule, &tensors, &tensors, &options())
        .map_err(|error| format!("{title}: {error}"))?;
    if !traffic::agree(&traffic::of_module(&compiled.per_rank), &ran.traffic) {
        return Err(format!("{title}: it sends other bytes than the program"));
    }
    // Stages keep gradients of a tied weight apart, which the whole program has as one.
    let whole =
        Workload { training: Training { stages: 1, ..workload.training.clone() }, ..workload.clone() };
    let whole = program(config, "m", &whole).map_err(|_| format!("{title}: it has stages only"))?;
    let checker = StepChecker { program: &whole, storage: Storage::Wide, parts: layout.mesh.ranks() };
    let found = Results { outputs: ran.outputs, kept: ran.kept };
    let rows = checker.step((&tensors, &tensors), &found).map_err(|error| format!("{title}: {error}"))?;
    match rows.iter().find(|row| !checker.accepts(row)) {
        Some(row) => Err(format!("{title}: {row:?}")),
        None => Ok(None),
    }
}
