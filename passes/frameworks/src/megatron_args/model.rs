//! The architecture that Megatron-LM's flags describe, as a configuration of HuggingFace.

use serde_json::{Value, json};

use super::flags::{Flags, refusal};

/// The description of the model; nothing where no flag states an architecture. Parts that are not understood are refused.
pub(super) fn config(flags: &mut Flags) -> Option<Value> {
    let layers = flags.number("num-layers");
    let hidden = flags.number("hidden-size");
    let heads = flags.number("num-attention-heads");
    let ffn = flags.number("ffn-hidden-size");
    let is_grouped = flags.flag("group-query-attention");
    let groups = flags.number("num-query-groups");
    let width = flags.number("kv-channels");
    let vocab = flags.number("vocab-size").or_else(|| flags.number("padded-vocab-size"));
    let norm = flags.word("normalization");
    let eps = flags.real("norm-epsilon");
    let is_gated = flags.flag("swiglu");
    let has_no_bias = flags.flag("disable-bias-linear");
    let has_qkv_bias = flags.flag("add-qkv-bias");
    let has_qk_norm = flags.flag("qk-layernorm");
    let positions = flags.word("position-embedding-type");
    let old_positions = flags.flag("use-rotary-position-embeddings");
    flags.flag("no-position-embedding");
    let theta = flags.real("rotary-base");
    let share = flags.real("rotary-percent");
    let is_scaled = flags.flag("use-rope-scaling");
    let factor = flags.real("rope-scaling-factor");
    let is_untied = flags.flag("untie-embeddings-and-output-weights");
    let experts = flags.number("num-experts");
    let top = flags.number("moe-router-topk");
    let expert_ffn = flags.number("moe-ffn-hidden-size");
    let shared = flags.number("moe-shared-expert-intermediate-size");
    let (Some(layers), Some(hidden), Some(heads)) = (layers, hidden, heads) else { return None };
    let mut wrong = |is_wrong: bool, message: &str, help: &str| {
        if is_wrong {
            flags.refuse(refusal(message).help(help));
        }
    };
    let help = "name the folder of the model's `config.json` as MODEL: its architecture is taken from there";
    wrong(
        norm.as_deref() != Some("RMSNorm"),
        "layers with other norms than `--normalization RMSNorm` are not understood",
        help,
    );
    wrong(!is_gated, "an MLP without `--swiglu` is not understood", help);
    wrong(!has_no_bias, "layers without `--disable-bias-linear` have biases, which are not understood", help);
    let is_rotary = positions.as_deref() == Some("rope") || old_positions;
    wrong(!is_rotary, "positions other than `--position-embedding-type rope` are not understood", help);
    wrong(share.is_some_and(|share| share != 1.0), "`--rotary-percent` other than 1 is not understood", help);
    wrong(shared.is_some(), "`--moe-shared-expert-intermediate-size` is not understood", help);
    wrong(experts.is_some() && has_qkv_bias, "experts with `--add-qkv-bias` are not understood", help);
    wrong(vocab.is_none(), "`--vocab-size` is missing", "add it, or name a MODEL");
    wrong(
        is_grouped && groups.is_none(),
        "`--group-query-attention` goes with `--num-query-groups`",
        "add it",
    );
    let kv = if is_grouped { groups.unwrap_or(1) } else { heads };
    let family = match (experts, has_qkv_bias, has_qk_norm) {
        (Some(_), _, false) => ("mixtral", "MixtralForCausalLM"),
        (Some(_), _, true) => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        (None, _, true) => ("qwen3", "Qwen3ForCausalLM"),
        (None, true, false) => ("qwen2", "Qwen2ForCausalLM"),
        (None, false, false) => ("llama", "LlamaForCausalLM"),
    };
    // Megatron-LM's own default of a gated MLP.
    let ffn = ffn.unwrap_or(4 * hidden * 2 / 3 / 64 * 64);
    let mut config = json!({
        "model_type": family.0,
        "architectures": [family.1],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": width.unwrap_or(hidden / heads),
        "vocab_size": vocab.unwrap_or(1),
        "hidden_act": "silu",
        "rms_norm_eps": eps.unwrap_or(1e-5),
        "rope_theta": theta.unwrap_or(10000.0),
        "tie_word_embeddings": !is_untied,
    });
    if is_scaled {
        config["rope_scaling"] = json!({
            "rope_type": "llama3",
            "factor": factor.unwrap_or(8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
    }
    if let Some(experts) = experts {
        config["num_experts_per_tok"] = json!(top.unwrap_or(2));
        let width = expert_ffn.unwrap_or(ffn);
        if has_qk_norm {
            config["num_experts"] = json!(experts);
            config["moe_intermediate_size"] = json!(width);
            config["norm_topk_prob"] = json!(true);
        } else {
            config["num_local_experts"] = json!(experts);
            config["intermediate_size"] = json!(width);
        }
    }
    Some(config)
}
