//! Schedules of every strategy: forward passes and training steps, with micro-batches, stages, experts and ZeRO.

use ithaca_ir::schedule::Schedule;
use ithaca_ir::{Diagnostics, Mesh, Module, diagnostic, text};
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::fuse::{Fusion, Messages};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::pass::Volume;
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh, parse_movement};
use serde_json::{Value, json};

/// A schedule and the program that it was made of.
pub(super) struct Case {
    pub(super) title: String,
    pub(super) per_rank: Module,
    pub(super) schedule: Schedule,
}

fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": true,
    })
}

fn windowed() -> Value {
    let mut config = llama();
    config["model_type"] = json!("mistral");
    config["sliding_window"] = json!(4);
    config
}

fn experts() -> Value {
    let mut config = llama();
    config["model_type"] = json!("mixtral");
    config["num_local_experts"] = json!(4);
    config["num_experts_per_tok"] = json!(2);
    config
}

fn workload(mode: Mode, training: Training) -> Workload {
    match mode {
        Mode::Decode => Workload::decode(4, 16),
        Mode::Prefill | Mode::Train => Workload { mode, training, ..Workload::prefill(4, 16) },
    }
}

/// A case, or why there is none.
fn case(config: &Value, workload: &Workload, options: &ShardOptions) -> Result<Case, String> {
    let module = program(config, "m", workload).map_err(said)?;
    let what = format!("{} {:?} zero={}", config["model_type"], workload.mode, options.zero.stage());
    laid_out(&module, &what, options)
}

fn laid_out(module: &Module, what: &str, options: &ShardOptions) -> Result<Case, String> {
    let compiled = compile(module, options, &Volume).map_err(said)?;
    let title = format!("{} {}, {what}", options.strategy, options.mesh);
    Ok(Case { title, per_rank: compiled.per_rank.into_module(), schedule: compiled.schedule })
}

fn said(diagnostics: Diagnostics) -> String {
    diagnostic::render(&diagnostics, None)
}

/// Attention forward and backward, written out: a window with sinks no model here has, and decoding has no backward pass.
const WRITTEN: [(&str, &str, &str); 2] = [
    ("streaming", "ring=4", include_str!("../../files/passes/streaming.ith")),
    ("decode-reduce", "cp=4", include_str!("../../files/passes/decode-reduce.ith")),
];

/// Every strategy, forward and training where it is legal for some small model, and what strategies leave open.
pub(super) fn corpus() -> Vec<Case> {
    let mut cases = Vec::new();
    for strategy in Registry::default().strategies() {
        let name = strategy.name();
        // Pipelines stand below.
        if name == "pipeline" || WRITTEN.iter().any(|(written, ..)| *written == name) {
            continue;
        }
        let sizes = |n: u64| Mesh::new(strategy.axes().iter().map(|&axis| (axis, n)));
        let before = cases.len();
        let models = [llama(), windowed(), experts()];
        for mode in [Mode::Prefill, Mode::Train, Mode::Decode] {
            let one = models.iter().find_map(|config| {
                let workload = workload(mode, Training::default());
                let options = [4, 2].map(|n| ShardOptions::new(name, sizes(n)));
                // Of several axes there are ranks enough with two along each.
                let options = &options[usize::from(strategy.axes().len() > 1)..];
                options.iter().find_map(|options| case(config, &workload, options).ok())
            });
            cases.extend(one);
        }
        assert!(cases.len() > before, "`{name}` is legal for no model");
    }
    let options = |strategy: &str, mesh: &str| ShardOptions::new(strategy, parse_mesh(mesh).unwrap());
    for (strategy, mesh, text) in WRITTEN {
        let module = text::parse(text).unwrap();
        cases.push(laid_out(&module, "written out", &options(strategy, mesh)).unwrap());
    }
    let mut add = |config: &Value, training: Training, options: ShardOptions| {
        let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(8, 16) };
        let made = case(config, &workload, &options);
        cases.push(made.unwrap_or_else(|d| panic!("{} {}: {d}", options.strategy, options.mesh)));
    };
    for zero in Zero::ALL {
        add(&llama(), Training::default(), ShardOptions { zero, ..options("data-parallel", "dp=2") });
    }
    let micro = Training { micro_batches: 2, clip: Some(0.1), ..Training::default() };
    add(
        &llama(),
        micro,
        ShardOptions { zero: Zero::Parameters, ..options("data-parallel+ulysses", "dp=2,ulysses=2") },
    );
    add(&experts(), Training::default(), options("ulysses+ep", "ulysses=2,ep=2"));
    add(&llama(), Training::default(), options("data-parallel+ring+megatron-tp-sp", "dp=2,ring=2,tp=2"));
    for (order, strategy, mesh) in [
        (PipelineOrder::Gpipe, "pipeline", "pp=2"),
        (PipelineOrder::OneForwardOneBackward, "pipeline+ulysses", "pp=2,ulysses=2"),
        (PipelineOrder::Interleaved, "pipeline+megatron-tp", "pp=2,tp=2"),
        (PipelineOrder::OneForwardOneBackward, "pipeline+ring", "pp=4,ring=2"),
        (PipelineOrder::ZbH1, "pipeline+megatron-tp-sp", "pp=2,tp=2"),
    ] {
        let stages = if mesh.contains("pp=4") { 4 } else { 2 };
        let mut config = llama();
        config["num_hidden_layers"] = json!(4);
        let training =
            Training { stages, pipeline: order, micro_batches: 4, clip: Some(0.1), ..Training::default() };
        add(&config, training, options(strategy, mesh));
    }
    let mut grouped = options("megatron-cp-allgather", "cp=2");
    grouped.attention.movement = Some(parse_movement("gather(groups=2)").unwrap());
    add(&llama(), Training::default(), grouped);
    // Messages of several tensors, chunks, groups of layers, parts of the loss, dropout.
    let fused =
        |strategy: &str, mesh: &str, fusion, zero| ShardOptions { fusion, zero, ..options(strategy, mesh) };
    let folded = |messages| Fusion { messages, ..Fusion::NONE }.folded();
    for fusion in [Fusion::PACK, Fusion::overlap(2), folded(Messages::Packed), folded(Messages::Chunked(2))] {
        for (strategy, mesh, zero) in [
            ("ulysses", "ulysses=2", Zero::Off),
            ("ring", "ring=4", Zero::Off),
            ("megatron-tp-sp", "tp=2", Zero::Off),
            ("data-parallel", "dp=2", Zero::Off),
            ("data-parallel", "dp=2", Zero::Gradients),
            ("data-parallel+ulysses", "dp=2,ulysses=2", Zero::Parameters),
        ] {
            let training = Training { clip: Some(0.1), ..Training::default() };
            add(&llama(), training, fused(strategy, mesh, fusion, zero));
        }
    }
    // A forward pass keeps nothing, so queries, keys and values stay where they were received.
    for (strategy, mesh) in
        [("ulysses", "ulysses=4"), ("usp", "ring=2,ulysses=2"), ("megatron-cp-allgather", "cp=2")]
    {
        for messages in [Messages::Alone, Messages::Packed] {
            let workload = Workload::prefill(4, 16);
            cases.push(
                case(&llama(), &workload, &fused(strategy, mesh, folded(messages), Zero::Off)).unwrap(),
            );
        }
    }
    let mut add = |config: &Value, training: Training, options: ShardOptions| {
        let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(8, 16) };
        let made = case(config, &workload, &options);
        cases.push(made.unwrap_or_else(|d| panic!("{} {}: {d}", options.strategy, options.mesh)));
    };
    let stages = Training { stages: 2, micro_batches: 4, ..Training::default() };
    add(&llama(), stages, fused("pipeline+ulysses", "pp=2,ulysses=2", Fusion::overlap(2), Zero::Off));
    add(
        &experts(),
        Training::default(),
        fused("ulysses+ep", "ulysses=2,ep=2", Fusion::overlap(2), Zero::Off),
    );
    let mut deep = llama();
    deep["num_hidden_layers"] = json!(4);
    deep["attention_dropout"] = json!(0.1);
    let groups = Training { recompute: Recompute::Full { every: 2 }, loss_chunks: 2, ..Training::default() };
    add(&deep, groups.clone(), options("ulysses", "ulysses=2"));
    let layout = |fusion| fused("data-parallel+megatron-tp-sp", "dp=2,tp=2", fusion, Zero::Parameters);
    add(&deep, groups.clone(), layout(Fusion::PACK));
    // Layers that work for the next and for the one before.
    let ahead = Fusion::parse("prefetch+pack").unwrap();
    add(&deep, groups, layout(ahead));
    let again = Training { recompute: Recompute::FULL, ..Training::default() };
    add(&deep, again, fused("data-parallel+ulysses", "dp=2,ulysses=2", ahead, Zero::Parameters));
    cases
}
