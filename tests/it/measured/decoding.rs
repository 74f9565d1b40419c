//! Steps that decode one token of each sequence.

use ithaca_ir::Op;
use ithaca_ir::mask::Mask;
use ithaca_ir::ops::{Attention, AttentionDims};
use ithaca_ir::{DType, Dim, Mesh, Space, TensorType};
use ithaca_passes::cluster::{Cluster, Runtime, Sourced};
use ithaca_passes::compile::compile;
use ithaca_passes::cost::op_seconds;
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Workload, program};
use ithaca_passes::shard::{ShardOptions, parse_mesh};
use ithaca_passes::simulate::simulate;
use serde_json::{Value, json};

use super::{Compared, Group, Row, Use};

pub(super) fn groups() -> Vec<Group> {
    vec![gpt_fast(), meta_attention(), meta_steps()]
}

/// A cluster as servers decode on it, with changes to its runtime.
fn serving(cluster: Cluster, changes: &str) -> Cluster {
    let usual: Runtime = cluster.decoding_runtime();
    let runtime = if changes.is_empty() { usual } else { usual.changed(changes).unwrap() };
    cluster.with_runtime(runtime).unwrap()
}

/// Milliseconds of a step, with kernels fused as `plan` does without further options.
fn step(cluster: &Cluster, config: &Value, (batch, context): (u64, u64), layout: (&str, &str)) -> f64 {
    let module =
        program(config, "model", &Workload::decode(batch, context)).unwrap_or_else(|e| panic!("{e:?}"));
    let fusion = Fusion::parse("fold+pack").unwrap();
    let options = ShardOptions { fusion, ..ShardOptions::new(layout.0, parse_mesh(layout.1).unwrap()) };
    let compiled = compile(&module, &options, cluster).unwrap_or_else(|e| panic!("{layout:?}: {e:?}"));
    simulate(cluster, &compiled.schedule).seconds * 1e3
}

/// gpt-fast: Llama-2-7B in bf16 on A100-80GB, one sequence of some hundred tokens, all-reduces by a kernel of its own.
fn gpt_fast() -> Group {
    let cluster = serving(Cluster::named("dgx-a100-80gb").unwrap(), "");
    let config = json!({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "vocab_size": 32000, "torch_dtype": "bfloat16"
    });
    let rows = [(1, 104.9), (2, 168.8), (4, 254.0), (8, 328.4)];
    let rows = rows.map(|(tp, measured)| {
        let ms = step(&cluster, &config, (1, 256), ("megatron-tp", &format!("tp={tp}")));
        Row { name: format!("tp={tp}"), measured, simulated: 1e3 / ms, by: Use::Fitted }
    });
    Group { source: "gpt-fast, 7B on A100, tokens/s", compared: Compared::Absolutely, rows: rows.to_vec() }
}

/// The H100 of Meta's measurements (arXiv 2411.01783), which has 2.4 TB/s, with NCCL.
fn grand_teton() -> Cluster {
    let mut cluster = Cluster::named("dgx-h100").unwrap();
    let source = || "Llama 3 405B on H100 96 GB HBM2e".to_owned();
    cluster.accelerator.memory_bandwidth = Sourced { value: 2.4e12, source: source() };
    cluster.accelerator.memory_bytes = Sourced { value: 96_000_000_000, source: source() };
    serving(cluster, "nccl")
}

/// Meta, table 8: microseconds of one attention over 128 Ki keys, and over the half and the quarter that a rank has.
fn meta_attention() -> Group {
    let cluster = grand_teton();
    let rows = [(128, 38.9), (64, 22.0), (32, 14.7)].map(|(kilo, measured)| {
        let simulated = cached_attention(&cluster, kilo << 10) * 1e6;
        Row { name: format!("{kilo} Ki keys"), measured, simulated, by: Use::Fitted }
    });
    Group {
        source: "Meta, one attention of decoding, us",
        compared: Compared::Absolutely,
        rows: rows.to_vec(),
    }
}

/// Seconds of attention of 16 heads and a key/value head, 128 wide, over a cache.
fn cached_attention(cluster: &Cluster, keys: u64) -> f64 {
    let mut space = Space { mesh: Mesh::single(), ..Space::default() };
    let [b, s, kv, h, k, d] = [("b", 1), ("s", 1), ("kv", keys), ("h", 16), ("k", 1), ("d", 128)]
        .map(|(name, size)| space.dims.push(Dim::new(name, size)));
    let dims = AttentionDims { heads: h, kv_heads: k, queries: s, keys: kv, width: d };
    let attention = Attention { starts: true, ..Attention::new(dims, Mask::Causal, 0.1) };
    let q = TensorType::new(DType::BF16, [b, s, h, d]);
    let [keys, values] = [(); 2].map(|()| TensorType::new(DType::BF16, [b, kv, k, d]));
    let start = TensorType::new(DType::I32, [b]);
    op_seconds(cluster, &space, &Op::Attention(attention), &[&q, &keys, &values, &start], &[&q])
}

/// Meta, table 6: milliseconds a token of Llama 3 405B, one sequence, `tp=8`. Weights of its feed-forward networks had 8 bits, as
/// many bytes as networks half as wide have here.
fn meta_steps() -> Group {
    let cluster = grand_teton();
    let config = json!({
        "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248 / 2, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072, "vocab_size": 128_256, "torch_dtype": "bfloat16"
    });
    let rows = [(8, 44.51), (32, 44.64), (128, 46.26)].map(|(kilo, measured)| {
        let simulated = step(&cluster, &config, (1, kilo << 10), ("megatron-tp", "tp=8"));
        Row { name: format!("{kilo} Ki tokens"), measured, simulated, by: Use::HeldOut }
    });
    Group { source: "Meta, 405B on 8 H100, ms a token", compared: Compared::Absolutely, rows: rows.to_vec() }
}
