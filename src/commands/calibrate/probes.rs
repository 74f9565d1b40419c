//! The programs that are timed: steps of small transformers for kernels, and chains of collectives.

use ithaca_ir::schedule::Schedule;
use ithaca_ir::{DType, Module, text};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::{compile, compile_by};
use ithaca_passes::differentiate::Training;
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::lower::Packing;
use ithaca_passes::pass::Unwatched;
use ithaca_passes::shard::{ShardOptions, parse_mesh};
use serde_json::{Value, json};

use crate::error::Result;

/// A program that is timed.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    /// The program with its weights and inputs.
    pub(super) module: Module,
    pub(super) schedule: Schedule,
}

/// Sizes of a transformer and of its workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    feed_forward: u64,
    vocabulary: u64,
    tokens: u64,
}

/// Of a processor: narrow and wide heads, few and many tokens; products from the size of a cache to that of a step.
pub(super) const CPU_SIZES: [Sizes; 3] = [
    Sizes { hidden: 192, heads: 6, kv_heads: 2, feed_forward: 512, vocabulary: 500, tokens: 96 },
    Sizes { hidden: 320, heads: 5, kv_heads: 5, feed_forward: 1280, vocabulary: 1000, tokens: 384 },
    Sizes { hidden: 512, heads: 4, kv_heads: 2, feed_forward: 1536, vocabulary: 2000, tokens: 1280 },
];

/// The same of a GPU: long sequences, since shorter kernels end before the next is launched, and few weights, since all of them are
/// read back from the device.
pub(super) const CUDA_SIZES: [Sizes; 2] = [
    Sizes { hidden: 1024, heads: 16, kv_heads: 4, feed_forward: 2816, vocabulary: 4096, tokens: 1024 },
    Sizes { hidden: 1024, heads: 8, kv_heads: 8, feed_forward: 4096, vocabulary: 4096, tokens: 8192 },
];

/// The widest of a GPU, without training.
pub(super) const CUDA_WIDE: Sizes =
    Sizes { hidden: 4096, heads: 32, kv_heads: 8, feed_forward: 8192, vocabulary: 2048, tokens: 4096 };

/// The kinds of transformer: with RMS norm, rotary positions and a gate, and with layer norm, learned positions and biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Gpt2,
}

fn config(family: Family, sizes: Sizes) -> Value {
    let Sizes { hidden, heads, kv_heads, feed_forward, vocabulary, tokens } = sizes;
    match family {
        Family::Llama => json!({
            "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "intermediate_size": feed_forward, "num_hidden_layers": 2, "vocab_size": vocabulary,
            "max_position_embeddings": tokens, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": false,
        }),
        Family::Gpt2 => json!({
            "model_type": "gpt2", "n_embd": hidden, "n_head": heads, "n_inner": feed_forward, "n_layer": 2,
            "vocab_size": vocabulary, "n_positions": tokens, "activation_function": "gelu_new", "attn_pdrop": 0.0,
            "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        }),
    }
}

/// A step of a transformer on so many ranks, a sequence on each: no rank waits for another in its forward pass, nor in the
/// backward passes of all micro-batches but the last.
pub(super) fn step(
    (family, sizes): (Family, Sizes),
    mode: Mode,
    (ranks, dtype): (u64, DType),
    cluster: &Cluster,
) -> Result<Probe> {
    let micro_batches = if mode == Mode::Train && ranks > 1 { 3 } else { 1 };
    let training = Training { micro_batches, ..Training::default() };
    let workload = Workload {
        mode,
        training,
        dtype: Some(dtype),
        ..Workload::prefill(ranks * micro_batches, sizes.tokens)
    };
    let module = program(&config(family, sizes), "probe", &workload)?;
    let mesh = if ranks > 1 { format!("dp={ranks}") } else { String::new() };
    let strategy = if ranks > 1 { "data-parallel" } else { "single" };
    let options = ShardOptions { fusion: Fusion::PACK, ..ShardOptions::new(strategy, parse_mesh(&mesh)?) };
    let schedule = compile(&module, &options, cluster)?.schedule;
    Ok(Probe { module, schedule })
}

/// Chains of collectives, each of which needs the one before.
pub(super) const CHAINS: [Chain; 4] =
    [Chain::AllReduce, Chain::GatherScatter, Chain::AllToAll, Chain::Permute];

/// A chain of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chain {
    AllReduce,
    /// All-gathers and reduce-scatters in turn.
    GatherScatter,
    AllToAll,
    Permute,
}

/// Links of a chain.
const LINKS: u64 = 4;

/// Elements of a row.
const ROW: u64 = 64;

/// A chain of collectives on so many ranks, of about so many bytes as measurements name them.
pub(super) fn chain(chain: Chain, ranks: u64, bytes: u64, cluster: &Cluster) -> Result<Probe> {
    let rows = match chain {
        Chain::AllReduce | Chain::GatherScatter => bytes / (4 * ROW),
        Chain::AllToAll | Chain::Permute => bytes * ranks / (4 * ROW),
    };
    let rows = rows.next_multiple_of(ranks);
    let mut body = String::new();
    // Products with a row for each rank make partial sums at little cost.
    let partial = |body: &mut String, x: &str, i: u64| {
        body.push_str(&format!("  %b{i} = einsum %{x}, %w : f32[s k@g]\n"));
        body.push_str(&format!("  %c{i} = einsum %b{i}, %v : f32[s d] partial(g)\n"));
    };
    let begins = match chain {
        Chain::AllReduce => "f32[s d]",
        Chain::GatherScatter | Chain::AllToAll | Chain::Permute => "f32[s@g d]",
    };
    let weights = match chain {
        Chain::AllReduce | Chain::GatherScatter => {
            "  %w = input {name=\"w\"} : f32[d k@g]\n  %v = input {name=\"v\"} : f32[k@g d]\n"
        }
        Chain::AllToAll | Chain::Permute => "",
    };
    for i in 0..LINKS {
        let (from, to) = (format!("x{i}"), format!("x{}", i + 1));
        match chain {
            Chain::AllReduce => {
                partial(&mut body, &from, i);
                body.push_str(&format!("  %{to} = all_reduce %c{i} {{axis=g}} : f32[s d]\n"));
            }
            Chain::GatherScatter => {
                body.push_str(&format!("  %a{i} = all_gather %{from} {{axis=g, dim=s}} : f32[s d]\n"));
                partial(&mut body, &format!("a{i}"), i);
                body.push_str(&format!("  %{to} = reduce_scatter %c{i} {{axis=g, dim=s}} : f32[s@g d]\n"));
            }
            Chain::AllToAll => {
                body.push_str(&format!(
                    "  %a{i} = all_to_all %{from} {{axis=g, split=d, concat=s}} : f32[s d@g]\n"
                ));
                body.push_str(&format!(
                    "  %{to} = all_to_all %a{i} {{axis=g, split=s, concat=d}} : f32[s@g d]\n"
                ));
            }
            Chain::Permute => {
                let by = (i + 1) % ranks;
                let ends = if by == 0 { "f32[s@g d]".to_owned() } else { format!("f32[s@g+{by} d]") };
                body.push_str(&format!("  %{to} = permute %{from} : {ends}\n"));
            }
        }
    }
    let source = format!(
        "ithaca 1 per_rank\nmodel \"chain\"\nmesh g={ranks}\ndim s = {rows}\ndim d = {ROW}\ndim k = {ranks}\n\nfunc @main() {{\n  \
         %x0 = input {{name=\"x\"}} : {begins}\n{weights}{body}  return x = %x{LINKS}\n}}\n"
    );
    let module = text::parse(&source)?;
    let schedule = compile_by(&[], Packing::Folded, &module, cluster, &mut Unwatched)?.schedule;
    Ok(Probe { module, schedule })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_probe_compiles() {
        let cluster = Cluster::named("cpu").unwrap();
        for of in CHAINS {
            for ranks in [2, 4, 8] {
                chain(of, ranks, 1 << 14, &cluster).unwrap();
            }
        }
        for (family, mode) in [(Family::Llama, Mode::Prefill), (Family::Gpt2, Mode::Train)] {
            for ranks in [1, 2] {
                step((family, CPU_SIZES[0]), mode, (ranks, DType::F32), &cluster).unwrap();
            }
            for sizes in CUDA_SIZES {
                step((family, sizes), mode, (1, DType::BF16), &cluster).unwrap();
            }
        }
        step((Family::Llama, CUDA_WIDE), Mode::Prefill, (1, DType::BF16), &cluster).unwrap();
    }
}
