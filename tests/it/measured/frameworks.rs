//! Training steps that frameworks were published with, each under the layout that its publication states.

use ithaca_passes::cluster::Cluster;
use ithaca_passes::differentiate::{GradientType, PipelineOrder, Recompute, Training};
use ithaca_passes::import::{ExpertBound, Mode, Workload, import};
use ithaca_passes::plan::model_flops;
use ithaca_passes::shard::Zero;
use serde_json::{Value, json};

use super::training::{Step, gpt};
use super::{Compared, Group, Row, Use};

/// Groups of steps, in the default tier a part of those that compile soon.
pub(super) fn groups(all: bool) -> Vec<Group> {
    let [every, others] = if all { [1, 3] } else { [16, 64] };
    let mut groups = vec![
        // The kernel is that of the publication's script.
        llm_foundry("a100-80gb", every, ("dgx-a100-80gb", "flash-1"), Compared::Absolutely),
        // Slower by one factor, as performance.md says.
        llm_foundry("a100-40gb", others, ("dgx-a100-40gb", "flash-1"), Compared::AsRatios),
        llm_foundry("h100-80gb", others, ("dgx-h100", "flash-2"), Compared::AsRatios),
        fms(),
    ];
    groups.extend(if all { nemo() } else { Vec::new() });
    groups
}

/// MosaicML llm-foundry, training benchmarks of MPT models (2023 and 2024): tokens a second and GPU, weights split over all
/// GPUs. Each row of its tables in bf16 for this GPU, or every so many.
fn llm_foundry(gpu: &str, every: usize, (cluster, kernel): (&str, &str), compared: Compared) -> Group {
    let cluster = Cluster::named(cluster).and_then(|c| c.with_attention_kernel(kernel)).unwrap();
    let table = include_str!("../../files/measured/llm-foundry.csv");
    let rows = table.lines().skip(1).map(|line| Vec::from_iter(line.split(',')));
    let row = |columns: Vec<&str>| {
        let number = |i: usize| columns[i].parse::<u64>().unwrap();
        let (sequence, gpus, sequences, micro_batches) = (number(1), number(2), number(4), number(5));
        let sizes = match columns[0] {
            "125m" => [768, 12, 12],
            "350m" => [1024, 24, 16],
            "760m" => [1536, 24, 12],
            "1b" => [2048, 24, 16],
            "3b" => [2560, 32, 20],
            "7b" => [4096, 32, 32],
            "13b" => [5120, 40, 40],
            "30b" => [7168, 48, 56],
            "70b" => [8192, 80, 64],
            other => panic!("`{other}` is no MPT model"),
        };
        let mut config = without_dropout(gpt(sizes, sequence));
        config["vocab_size"] = json!(50_432);
        let recompute = if columns[7] == "full" { Recompute::FULL } else { Recompute::None };
        let training = Training { micro_batches, recompute, ..Training::default() };
        let mesh = format!("dp={gpus}");
        let layout = ("data-parallel", mesh.as_str());
        let zero = if number(6) == 3 { Zero::Parameters } else { Zero::Gradients };
        let batch = sequences * micro_batches * gpus;
        let step = Step { config, batch, sequence, training, layout, zero, fuse: fuse(zero) };
        let simulated = (batch * sequence / gpus) as f64 / step.seconds(&cluster);
        let name = format!("{} on {gpus}, {sequences} x {sequence}", columns[0]);
        Row { name, measured: columns[8].parse().unwrap(), simulated, by: Use::HeldOut }
    };
    let rows = rows.filter(|columns| columns[3] == gpu).step_by(every).map(row).collect();
    let source = match gpu {
        "a100-80gb" => "llm-foundry, MPT on A100-80GB, tokens/s a GPU",
        "a100-40gb" => "llm-foundry, MPT on A100-40GB, tokens/s a GPU",
        _ => "llm-foundry, MPT on H100, tokens/s a GPU",
    };
    Group { source, compared, rows }
}

/// As `plan` prices a step at first.
fn fuse(zero: Zero) -> &'static str {
    if zero == Zero::Parameters { "prefetch+fold+pack" } else { "fold+pack" }
}

fn without_dropout(mut config: Value) -> Value {
    for dropout in ["resid_pdrop", "embd_pdrop", "attn_pdrop"] {
        config[dropout] = json!(0.0);
    }
    config
}

/// IBM fms-fsdp, Llama models on 128 A100-80GB (2024), 2 sequences of 4 096 tokens a GPU. How many layers of 34B and 70B are
/// computed again follows from the utilizations that are published beside, 0.74 with recomputation and 0.55 without: all. For 13B
/// it is a part that is not stated.
fn fms() -> Group {
    let cluster = Cluster::named("dgx-a100-80gb").unwrap();
    let models = [
        ("7B", [4096, 11_008, 32, 32, 32], Recompute::None, 4550.0),
        ("34B", [8192, 22_016, 64, 8, 48], Recompute::FULL, 820.0),
        ("70B", [8192, 28_672, 64, 8, 80], Recompute::FULL, 410.0),
    ];
    let rows = models.into_iter().map(|(name, [hidden, width, heads, kv_heads, layers], recompute, measured)| {
        let config = json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096, "vocab_size": 32000, "torch_dtype": "bfloat16"
        });
        let training = Training { recompute, ..Training::default() };
        let layout = ("data-parallel", "dp=128");
        let step = Step { config, batch: 256, sequence: 4096, training, layout, zero: Zero::Parameters, fuse: fuse(Zero::Parameters) };
        let simulated = 2.0 * 4096.0 / step.seconds(&cluster);
        Row { name: name.to_owned(), measured, simulated, by: Use::HeldOut }
    });
    Group {
        source: "fms-fsdp, Llama on 128 A100, tokens/s a GPU",
        compared: Compared::Absolutely,
        rows: rows.collect(),
    }
}

/// A step of NVIDIA's: its name, model and layers; sequences and their tokens; degrees of pp, dp, cp, tp; chunks of a stage,
/// micro-batches, seconds.
type Nemo = (&'static str, &'static str, u64, u64, u64, [u64; 4], u64, u64, f64);

/// NVIDIA dgxc-benchmarking, 25.02 and 25.05: NeMo in bf16, seconds of a step. How products slow down under load on H100 and GB200 was
/// chosen after these errors were seen.
fn nemo() -> Vec<Group> {
    let h100: [Nemo; 11] = [
        ("Llama 3.1 8B on 8", "llama-3-8b", 32, 128, 8192, [1, 4, 2, 1], 1, 32, 12.78),
        ("Llama 3.1 8B on 64", "llama-3-8b", 32, 1024, 8192, [1, 32, 2, 1], 1, 32, 13.00),
        ("Llama 3.1 70B on 64", "llama-3-70b", 80, 128, 8192, [4, 2, 2, 4], 5, 64, 14.61),
        ("Llama 3.1 70B on 512", "llama-3-70b", 80, 1024, 8192, [4, 16, 2, 4], 5, 64, 14.80),
        ("Llama 3 70B on 32", "llama-3-70b", 80, 32, 4096, [4, 2, 1, 4], 5, 16, 3.36),
        ("7 layers of Llama 3.1 405B on 32", "llama-3.1-405b", 7, 126, 8192, [1, 2, 2, 8], 1, 63, 9.00),
        ("21 layers of Llama 3.1 405B on 96", "llama-3.1-405b", 21, 126, 8192, [3, 2, 2, 8], 7, 63, 8.87),
        ("Llama 3.1 405B on 576", "llama-3.1-405b", 126, 252, 8192, [9, 4, 2, 8], 7, 63, 17.50),
        ("Llama 3.1 405B on 512", "llama-3.1-405b", 126, 256, 8192, [8, 4, 2, 8], 8, 64, 19.81),
        ("GPT-3 175B on 128", "gpt", 96, 256, 2048, [8, 4, 1, 4], 12, 64, 8.309),
        ("GPT-3 175B on 1024", "gpt", 96, 2048, 2048, [8, 32, 1, 4], 12, 64, 8.453),
    ];
    let nemotron_h100: [Nemo; 14] = [
        ("Nemotron 15B on 16", "nemotron-15b", 32, 64, 4096, [1, 4, 1, 4], 1, 4, 2.812),
        ("Nemotron 15B on 32", "nemotron-15b", 32, 128, 4096, [1, 8, 1, 4], 1, 4, 2.824),
        ("Nemotron 15B on 64", "nemotron-15b", 32, 256, 4096, [1, 16, 1, 4], 1, 4, 2.845),
        ("Nemotron 15B on 128", "nemotron-15b", 32, 512, 4096, [1, 32, 1, 4], 1, 4, 2.859),
        ("Nemotron 15B on 256", "nemotron-15b", 32, 1024, 4096, [1, 64, 1, 4], 1, 4, 2.852),
        ("Nemotron 15B on 512", "nemotron-15b", 32, 2048, 4096, [1, 128, 1, 4], 1, 4, 2.875),
        ("Nemotron 15B on 1024", "nemotron-15b", 32, 4096, 4096, [1, 256, 1, 4], 1, 4, 2.895),
        ("Nemotron 15B on 2048", "nemotron-15b", 32, 8192, 4096, [1, 512, 1, 4], 1, 4, 2.887),
        ("Nemotron 15B on 16, 25.05", "nemotron-15b", 32, 64, 4096, [1, 8, 1, 2], 1, 4, 2.746),
        ("Nemotron 340B on 128", "nemotron-340b", 96, 32, 4096, [8, 2, 1, 8], 12, 16, 4.61),
        ("Nemotron 340B on 256", "nemotron-340b", 96, 64, 4096, [8, 4, 1, 8], 12, 16, 4.67),
        ("Nemotron 340B on 512", "nemotron-340b", 96, 128, 4096, [8, 8, 1, 8], 12, 16, 4.70),
        ("Nemotron 340B on 1024", "nemotron-340b", 96, 256, 4096, [8, 16, 1, 8], 12, 16, 4.73),
        ("Nemotron 340B on 2048", "nemotron-340b", 96, 512, 4096, [8, 32, 1, 8], 12, 16, 4.84),
    ];
    let gb200: [Nemo; 5] = [
        ("Nemotron 340B on 128", "nemotron-340b", 96, 32, 4096, [4, 4, 1, 8], 12, 8, 2.189),
        ("Nemotron 340B on 256", "nemotron-340b", 96, 64, 4096, [4, 8, 1, 8], 12, 8, 2.190),
        ("Nemotron 340B on 512", "nemotron-340b", 96, 128, 4096, [4, 16, 1, 8], 12, 8, 2.229),
        ("Llama 3.1 405B on 128", "llama-3.1-405b", 126, 64, 8192, [8, 2, 2, 4], 8, 32, 9.347),
        ("Llama 3.1 405B on 512", "llama-3.1-405b", 126, 256, 8192, [8, 8, 2, 4], 8, 32, 9.508),
    ];
    let of_h100 = Cluster::named("dgx-h100").and_then(|c| c.with_attention_kernel("cudnn")).unwrap();
    let of_gb200 = Cluster::named("gb200-nvl72").unwrap();
    let group = |source, cluster: &Cluster, rows: &[Nemo], by| {
        let rows = rows.iter().map(|row| Row { by, ..nemo_row(cluster, *row) }).collect();
        Group { source, compared: Compared::Absolutely, rows }
    };
    vec![
        group("NeMo on H100, seconds a step", &of_h100, &h100, Use::Fitted),
        group("NeMo, Nemotron-4 on H100, seconds a step", &of_h100, &nemotron_h100, Use::Fitted),
        group("NeMo on GB200, seconds a step", &of_gb200, &gb200, Use::Fitted),
        bridge(&of_gb200),
        grok(&of_h100),
        meta(&of_h100),
    ]
}

/// Meta (arXiv 2407.21783, table 4): Llama 3 405B, 16 Mi tokens a step, TFLOP/s of a GPU. Optimizer states and gradients are split, nothing is
/// computed again, and stages of eight chunks have a layer each, the first and the last chunk none. The row of 131 072 tokens is left
/// out: whether masked pairs count as FLOPs is not stated, and by that it differs by 40 %.
fn meta(cluster: &Cluster) -> Group {
    let rows = [("8192", "pp=16,dp=64,tp=8", 32, 430.0), ("16384", "pp=16,dp=128,tp=8", 16, 400.0)];
    let rows = rows.map(|(gpus, mesh, micro_batches, measured)| {
        let (batch, sequence) = (2048, 8192);
        let config = example("llama-3.1-405b");
        let forward =
            import(&config, "model", &Workload { mode: Mode::Train, ..Workload::prefill(batch, sequence) })
                .unwrap();
        let flops = model_flops(&forward, Mode::Train);
        let pipeline = PipelineOrder::Interleaved;
        let training = Training { stages: 16, micro_batches, pipeline, chunks: 8, ..Training::default() };
        let layout = ("pipeline+data-parallel+megatron-tp-sp", mesh);
        let step =
            Step { config, batch, sequence, training, layout, zero: Zero::Gradients, fuse: "fold+pack" };
        let simulated = flops / gpus.parse::<f64>().unwrap() / step.seconds(cluster) / 1e12;
        Row { name: format!("Llama 3 405B on {gpus}"), measured, simulated, by: Use::HeldOut }
    });
    Group {
        source: "Meta, Llama 3 405B on H100, TFLOP/s of a GPU",
        compared: Compared::Absolutely,
        rows: rows.to_vec(),
    }
}

/// dgxc-benchmarking, 25.02: layers of Grok-1 on H100, seconds a step, where the number of micro-batches that it states is that of its
/// batch. Experts are split over eight ranks with other sequences; their tokens are taken to be even.
fn grok(cluster: &Cluster) -> Group {
    // GPUs, tokens of a sequence, layers, stages, cp, chunks, seconds.
    let rows = [
        (32, 4096, 4, 1, 1, 1, 10.70),
        (64, 8192, 8, 1, 2, 1, 21.42),
        (128, 8192, 16, 2, 2, 8, 20.73),
        (256, 8192, 32, 4, 2, 8, 20.83),
        (512, 8192, 64, 8, 2, 8, 21.01),
        (1024, 8192, 64, 8, 2, 8, 21.20),
        (2048, 8192, 64, 8, 2, 8, 21.29),
    ];
    let row = |(gpus, sequence, layers, stages, cp, chunks, measured): (
        u64,
        u64,
        u64,
        u64,
        u64,
        u64,
        f64,
    )| {
        let data = gpus / (stages * cp * 4);
        let config = json!({
            "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 6144,
            "intermediate_size": 32_768, "num_hidden_layers": layers, "num_attention_heads": 48,
            "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 8192,
            "vocab_size": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 10_000, "num_local_experts": 8,
            "num_experts_per_tok": 2, "attention_dropout": 0.0, "router_jitter_noise": 0.0, "sliding_window": null,
            "tie_word_embeddings": true, "torch_dtype": "bfloat16"
        });
        let pipeline =
            if chunks > 1 { PipelineOrder::Interleaved } else { PipelineOrder::OneForwardOneBackward };
        let (gradients, chunks) = (GradientType::Weights, chunks.max(2));
        let training =
            Training { stages, micro_batches: 128, pipeline, chunks, gradients, ..Training::default() };
        let axes = [
            ("pipeline", format!("pp={stages}"), stages > 1),
            ("data-parallel-ep", format!("dp={},ep=8", data / 8), true),
            ("megatron-cp-p2p", format!("cp={cp}"), cp > 1),
            ("megatron-tp-sp", "tp=4".to_owned(), true),
        ];
        let axes = axes.iter().filter(|(_, _, is_used)| *is_used);
        let strategy: Vec<&str> = axes.clone().map(|(strategy, _, _)| *strategy).collect();
        let mesh: Vec<&str> = axes.map(|(_, mesh, _)| mesh.as_str()).collect();
        let (strategy, mesh) = (strategy.join("+"), mesh.join(","));
        let layout = (strategy.as_str(), mesh.as_str());
        let (batch, zero, fuse) = (data * 128, Zero::Optimizer, "fold+overlap(chunks=4)");
        let step = Step { config, batch, sequence, training, layout, zero, fuse };
        let simulated = step.seconds_with(cluster, Some(ExpertBound { permille: 1000 }));
        Row { name: format!("{layers} layers on {gpus}"), measured, simulated, by: Use::HeldOut }
    };
    let rows = rows.into_iter().map(row).collect();
    Group { source: "NeMo, Grok-1 on H100, seconds a step", compared: Compared::Absolutely, rows }
}

/// Megatron-Bridge, performance summary of 25.11: Qwen3-235B in bf16 on 256 of GB200, tokens a second and GPU. Tokens were dealt to experts
/// evenly, so slots are those of an even share.
fn bridge(cluster: &Cluster) -> Group {
    let config = example("qwen3-235b-a22b");
    let (batch, sequence) = (8192, 4096);
    let training = Training {
        stages: 8,
        chunks: 3,
        pipeline: PipelineOrder::Interleaved,
        micro_batches: 256,
        gradients: GradientType::Weights,
        ..Training::default()
    };
    let layout = ("pipeline+data-parallel-ep", "pp=8,dp=1,ep=32");
    let step = Step {
        config,
        batch,
        sequence,
        training,
        layout,
        zero: Zero::Optimizer,
        fuse: fuse(Zero::Optimizer),
    };
    let seconds =
        |fuse| Step { fuse, ..step.clone() }.seconds_with(cluster, Some(ExpertBound { permille: 1000 }));
    let seconds = f64::min(seconds("fold+pack"), seconds("fold+overlap(chunks=2)"));
    let simulated = (batch * sequence / 256) as f64 / seconds;
    let row = Row { name: "Qwen3-235B on 256".to_owned(), measured: 4916.0, simulated, by: Use::Fitted };
    let source = "Megatron-Bridge on GB200, tokens/s a GPU";
    Group { source, compared: Compared::Absolutely, rows: vec![row] }
}

fn example(model: &str) -> Value {
    let path = format!("{}/examples/{model}/config.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The row of a step, in the faster of the ways to overlap tensor parallelism, as `plan` chooses it.
fn nemo_row(
    cluster: &Cluster,
    (name, model, layers, batch, sequence, degrees, chunks, micro_batches, measured): Nemo,
) -> Row {
    let mut config = match model {
        "gpt" => without_dropout(gpt([12_288, layers, 96], sequence)),
        "nemotron-15b" => nemotron([6144, 24_576, 48]),
        "nemotron-340b" => nemotron([18_432, 73_728, 96]),
        model => example(model),
    };
    config["num_hidden_layers"] = json!(layers);
    let axes = ["pp", "dp", "cp", "tp"].into_iter().zip(degrees).filter(|&(_, n)| n > 1);
    let mesh: Vec<String> = axes.clone().map(|(axis, n)| format!("{axis}={n}")).collect();
    let strategies: Vec<&str> = axes
        .map(|(axis, _)| match axis {
            "pp" => "pipeline",
            "dp" => "data-parallel",
            "cp" => "megatron-cp-p2p",
            _ => "megatron-tp-sp",
        })
        .collect();
    let [stages, .., tensor] = degrees;
    let pipeline = if chunks > 1 { PipelineOrder::Interleaved } else { PipelineOrder::OneForwardOneBackward };
    // `grad_reduce_in_fp32` of these recipes is false.
    let gradients = GradientType::Weights;
    let chunks = chunks.max(2);
    let stage_layers =
        if pipeline == PipelineOrder::Interleaved { even(layers, stages * chunks) } else { Vec::new() };
    let training =
        Training { stages, micro_batches, pipeline, chunks, stage_layers, gradients, ..Training::default() };
    let (strategy, mesh) = (strategies.join("+"), mesh.join(","));
    let seconds = |fuse| {
        let (config, training, layout) =
            (config.clone(), training.clone(), (strategy.as_str(), mesh.as_str()));
        Step { config, batch, sequence, training, layout, zero: Zero::Optimizer, fuse }.seconds(cluster)
    };
    let ways: &[&str] = if tensor > 1 { &["fold+pack", "fold+overlap(chunks=4)"] } else { &["fold+pack"] };
    let simulated = ways.iter().map(|way| seconds(way)).fold(f64::INFINITY, f64::min);
    Row { name: name.to_owned(), measured, simulated, by: Use::HeldOut }
}

/// As many layers in each chunk; where they do not divide, the embedding and the loss count as a layer of the first and the last.
fn even(layers: u64, chunks: u64) -> Vec<u64> {
    let n_ends = if layers.is_multiple_of(chunks) { 0 } else { 1 };
    let each = (layers + 2 * n_ends) / chunks;
    let of_chunk = |chunk| if chunk == 0 || chunk == chunks - 1 { each - n_ends } else { each };
    (0..chunks).map(of_chunk).collect()
}

/// A model of Nemotron-4's kind: layer norms, rotary positions, products without bias that are not gated, and an untied head. Its
/// squared ReLU costs what GELU does.
fn nemotron([hidden, width, heads]: [u64; 3]) -> Value {
    json!({
        "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": width, "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 256_000,
        "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "rope_theta": 10_000,
        "use_bias": false, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0
    })
}
