//! New tokens behind tokens of caches: whether a ring of ranks sends fewer bytes with keys going round or with queries.
//!
//! On each of the steps of a ring of `N` ranks, `T` new tokens behind `P` cached ones, of each sequence and layer: keys and values take
//! `2 (T + P) / N · kv heads · (width · bytes and a scale if they have one)`, queries `T / N · heads · width · bytes`, and the partial
//! result that travels with them `T / N · heads · (value width · bytes of partials + 4)`
//! (Yang et al., arXiv 2411.01783, section 3.4, which leaves the partial result to an all-to-all at the end).

use ithaca_ir::ops::Attention;
use ithaca_ir::units::bytes;
use ithaca_ir::{DType, Module, Op, Space, TensorType};
use ithaca_passes::movement::Partials;

/// What goes round, in bytes of a token.
struct Messages {
    /// New tokens.
    new: u64,
    /// Tokens of a cache, the new ones included.
    all: u64,
    /// Keys and values of a cached token.
    keys: u64,
    /// The queries of a new token, and their partial results.
    queries: u64,
}

impl Messages {
    fn of(space: &Space, a: &Attention, operands: &[&TensorType], partials: Partials) -> Self {
        let [heads, kv_heads, width] = [a.heads, a.kv_heads, a.width].map(|dim| space.size(dim));
        let value_width = space.size(a.value_width(operands[2]));
        let partial = match partials {
            Partials::F32 => DType::F32,
            Partials::Bf16 => DType::BF16,
        };
        let scale = if a.scaled { DType::F32.bytes() } else { 0 };
        let of_cache = operands[1].dtype.bytes();
        Self {
            new: space.dims[a.queries].valid,
            all: space.dims[a.keys].valid,
            keys: kv_heads * ((width + value_width) * of_cache + 2 * scale),
            queries: heads
                * (width * operands[0].dtype.bytes() + value_width * partial.bytes() + DType::F32.bytes()),
        }
    }

    /// The share of new tokens up to which queries are fewer bytes.
    fn threshold(&self) -> f64 {
        self.keys as f64 / self.queries as f64
    }
}

/// The messages of both ways for the attention of a program over the largest caches; nothing where it reads none.
pub(super) fn text(program: &Module, partials: Partials) -> Option<String> {
    let nodes = program.functions.values().flat_map(|f| f.nodes.iter().map(move |node| (f, node)));
    let messages = nodes.filter_map(|(function, node)| match &node.op {
        Op::Attention(a) if a.starts => {
            Some(Messages::of(&program.space, a, &function.operand_types(node), partials))
        }
        _ => None,
    });
    let found = messages.max_by_key(|messages| messages.all)?;
    let Messages { new, all, keys, queries } = found;
    let (sent_keys, sent_queries) = (all * keys, new * queries);
    let less = if sent_queries <= sent_keys { "pass-q" } else { "ring" };
    Some(format!(
        "bytes that go round a ring, of a sequence and layer, with {new} of {all} tokens new: {} with keys (`ring`), {} with queries \
         and partial results in {} (`pass-q`); {less} sends less, for queries do where at most {:.1} % of the tokens are new\n",
        bytes(sent_keys),
        bytes(sent_queries),
        partials.name(),
        100.0 * found.threshold().min(1.0)
    ))
}

#[cfg(test)]
mod tests {
    use ithaca_passes::import::{self, Workload};
    use serde_json::json;

    use super::*;

    fn said(new: u64, all: u64, cache_type: Option<DType>, partials: Partials) -> String {
        let config = json!({"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"});
        let workload = Workload { cache_type, ..Workload::cached(1, new, all) };
        text(&import::program(&config, "m", &workload).unwrap(), partials).unwrap()
    }

    #[test]
    fn queries_are_less_where_few_tokens_are_new() {
        // Eight heads of eight: queries of 128 bytes and results of 128 or 256, and logarithms; keys and values of 64.
        let few = said(64, 1024, None, Partials::Bf16);
        assert!(few.contains("pass-q sends less") && few.contains("at most 22.2 %"), "{few}");
        assert!(said(256, 1024, None, Partials::Bf16).contains("; ring sends less"));
        assert!(said(64, 1024, None, Partials::F32).contains("at most 15.4 %"));
        assert!(said(64, 1024, Some(DType::F8E4M3), Partials::Bf16).contains("at most 16.7 %"));
    }
}
