//! Training steps that frameworks were published with, each under the layout that its publication states. No figure of a
//! profile was chosen by these rows.

use ithaca_passes::cluster::Cluster;
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::shard::Zero;
use serde_json::{Value, json};

use super::training::{Step, gpt};
use super::{Compared, Group, Row, Use};

/// Groups of steps; those of the default tier compile within a second.
pub(super) fn groups(all: bool) -> Vec<Group> {
    let n = if all { usize::MAX } else { 4 };
    vec![llm_foundry(n), fms(n.min(3)), nvidia(if all { usize::MAX } else { 0 })]
}

/// A row of MosaicML's table: hidden size, heads and layers; tokens of a sequence, GPUs, sequences of a micro-batch on a GPU,
/// micro-batches, whether layers are computed again, tokens a second and GPU.
type Mpt = ([u64; 3], u64, u64, u64, u64, bool, f64);

const MPT_1B: [u64; 3] = [2048, 16, 24];
const MPT_3B: [u64; 3] = [2560, 20, 32];
const MPT_7B: [u64; 3] = [4096, 32, 32];
const MPT_13B: [u64; 3] = [5120, 40, 40];
const MPT_30B: [u64; 3] = [7168, 56, 48];
const MPT_70B: [u64; 3] = [8192, 64, 80];

/// MosaicML llm-foundry, training benchmarks of MPT models on A100-80GB (2023): all weights split over all GPUs, the first
/// flash attention.
fn llm_foundry(n: usize) -> Group {
    let rows: [Mpt; 28] = [
        (MPT_1B, 2048, 8, 14, 4, false, 20_513.0),
        (MPT_7B, 2048, 8, 6, 2, false, 4_641.0),
        (MPT_7B, 8192, 8, 8, 2, true, 3_206.0),
        (MPT_13B, 32_768, 8, 1, 3, true, 1_016.0),
        (MPT_1B, 512, 8, 56, 4, false, 23_148.0),
        (MPT_1B, 8192, 8, 3, 4, false, 13_814.0),
        (MPT_1B, 32_768, 8, 1, 4, false, 6_275.0),
        (MPT_1B, 65_536, 8, 1, 2, true, 3_044.0),
        (MPT_3B, 512, 8, 40, 6, false, 12_127.0),
        (MPT_3B, 2048, 8, 10, 2, false, 10_811.0),
        (MPT_3B, 16_384, 8, 1, 6, false, 5_529.0),
        (MPT_3B, 32_768, 8, 3, 6, true, 3_029.0),
        (MPT_3B, 65_536, 8, 1, 2, true, 1_767.0),
        (MPT_7B, 1024, 8, 64, 2, true, 4_357.0),
        (MPT_7B, 4096, 8, 16, 2, true, 3_684.0),
        (MPT_7B, 16_384, 8, 4, 2, true, 2_453.0),
        (MPT_7B, 32_768, 8, 2, 2, true, 1_672.0),
        (MPT_7B, 65_536, 8, 1, 2, true, 1_013.0),
        (MPT_13B, 1024, 8, 40, 3, true, 2_330.0),
        (MPT_13B, 2048, 8, 2, 3, false, 2_262.0),
        (MPT_13B, 4096, 8, 10, 3, true, 2_060.0),
        (MPT_13B, 8192, 8, 5, 3, true, 1_795.0),
        (MPT_13B, 16_384, 8, 3, 3, true, 1_431.0),
        (MPT_30B, 512, 8, 12, 21, true, 967.0),
        (MPT_30B, 2048, 8, 3, 21, true, 916.0),
        (MPT_30B, 4096, 8, 1, 21, true, 814.0),
        (MPT_70B, 2048, 64, 8, 4, true, 410.0),
        (MPT_70B, 2048, 32, 2, 16, true, 373.0),
    ];
    let cluster = Cluster::named("dgx-a100-80gb").and_then(|c| c.with_attention_kernel("flash-1")).unwrap();
    let row =
        |&([hidden, heads, layers], sequence, gpus, sequences, micro_batches, again, measured): &Mpt| {
            let batch = sequences * micro_batches * gpus;
            let mut config = gpt([hidden, layers, heads], sequence);
            for dropout in ["resid_pdrop", "embd_pdrop", "attn_pdrop"] {
                config[dropout] = json!(0.0);
            }
            config["vocab_size"] = json!(50_432);
            let recompute = if again { Recompute::FULL } else { Recompute::None };
            let training = Training { micro_batches, recompute, ..Training::default() };
            let mesh = format!("dp={gpus}");
            let layout = ("data-parallel", mesh.as_str());
            let step = Step { config, batch, sequence, training, layout, zero: Zero::Parameters };
            let simulated = (batch * sequence / gpus) as f64 / step.seconds(&cluster);
            let name = format!("{hidden} wide, {sequences} x {sequence} on {gpus}");
            Row { name, measured, simulated, by: Use::HeldOut }
        };
    let rows = rows.iter().take(n).map(row).collect();
    Group { source: "llm-foundry, MPT on A100, tokens/s a GPU", compared: Compared::Absolutely, rows }
}

/// IBM fms-fsdp, Llama models on 128 A100-80GB (2024), 2 sequences of 4 096 tokens a GPU; those that compute all layers again or
/// none.
fn fms(n: usize) -> Group {
    let cluster = Cluster::named("dgx-a100-80gb").unwrap();
    let models = [
        ("7B", [4096, 11_008, 32, 32, 32], Recompute::None, 4550.0),
        ("34B", [8192, 22_016, 64, 8, 48], Recompute::FULL, 820.0),
        ("70B", [8192, 28_672, 64, 8, 80], Recompute::FULL, 410.0),
    ];
    let rows = models.into_iter().take(n).map(|(name, [hidden, width, heads, kv_heads, layers], recompute, measured)| {
        let config = json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096, "vocab_size": 32000, "torch_dtype": "bfloat16"
        });
        let training = Training { recompute, ..Training::default() };
        let layout = ("data-parallel", "dp=128");
        let step = Step { config, batch: 256, sequence: 4096, training, layout, zero: Zero::Parameters };
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

/// NVIDIA dgxc-benchmarking, 25.02 and 25.05: NeMo on H100 in bf16, seconds of a step.
fn nvidia(n: usize) -> Group {
    let rows: [Nemo; 8] = [
        ("Llama 3.1 8B on 8", "llama-3-8b", 32, 128, 8192, [1, 4, 2, 1], 1, 32, 12.78),
        ("Llama 3.1 8B on 64", "llama-3-8b", 32, 1024, 8192, [1, 32, 2, 1], 1, 32, 13.00),
        ("Llama 3.1 70B on 64", "llama-3-70b", 80, 128, 8192, [4, 2, 2, 4], 5, 64, 14.61),
        ("Llama 3 70B on 32", "llama-3-70b", 80, 32, 4096, [4, 2, 1, 4], 5, 16, 3.36),
        ("7 layers of Llama 3.1 405B on 32", "llama-3.1-405b", 7, 126, 8192, [1, 2, 2, 8], 1, 63, 9.00),
        ("21 layers of Llama 3.1 405B on 96", "llama-3.1-405b", 21, 126, 8192, [3, 2, 2, 8], 7, 63, 8.87),
        ("Llama 3.1 405B on 576", "llama-3.1-405b", 126, 252, 8192, [9, 4, 2, 8], 7, 63, 17.50),
        ("GPT-3 175B on 128", "gpt", 96, 256, 2048, [8, 4, 1, 4], 12, 64, 8.309),
    ];
    let cluster = Cluster::named("dgx-h100").and_then(|c| c.with_attention_kernel("cudnn")).unwrap();
    let row = |(name, model, layers, batch, sequence, degrees, chunks, micro_batches, measured): Nemo| {
        let mut config = if model == "gpt" {
            gpt([12_288, layers, 96], sequence)
        } else {
            let path = format!("{}/examples/{model}/config.json", env!("CARGO_MANIFEST_DIR"));
            serde_json::from_str::<Value>(&std::fs::read_to_string(path).unwrap()).unwrap()
        };
        for dropout in ["resid_pdrop", "embd_pdrop", "attn_pdrop"] {
            config[dropout] = json!(0.0);
        }
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
        let stages = degrees[0];
        let pipeline =
            if chunks > 1 { PipelineOrder::Interleaved } else { PipelineOrder::OneForwardOneBackward };
        let training =
            Training { stages, micro_batches, pipeline, chunks: chunks.max(2), ..Training::default() };
        let (strategy, mesh) = (strategies.join("+"), mesh.join(","));
        let layout = (strategy.as_str(), mesh.as_str());
        let step = Step { config, batch, sequence, training, layout, zero: Zero::Optimizer };
        Row { name: name.to_owned(), measured, simulated: step.seconds(&cluster), by: Use::HeldOut }
    };
    let rows = rows.into_iter().take(n).map(row).collect();
    Group { source: "NeMo on H100, seconds a step", compared: Compared::Absolutely, rows }
}
