//! Experts and latent attention: published descriptions, spellings, refusals.

use ithaca_ir::ops::Pairs;
use ithaca_ir::ops::experts::{ExpertGroups, Experts, Gates, Route, Scoring};
use ithaca_ir::verify::verify;

use super::*;

fn mixtral() -> Value {
    json!({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 32000})
}

fn qwen3_moe() -> Value {
    json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_sliding_window": false, "vocab_size": 151936})
}

fn deepseek() -> Value {
    json!({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"},
        "seq_aux": true, "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280})
}

/// The routes of a module, one for each kind of block with experts.
fn routes(module: &Module) -> Vec<Route> {
    let found = nodes(module).filter_map(|(_, n)| match &n.op {
        Op::Experts(Experts::Route(route)) => Some(route.clone()),
        _ => None,
    });
    found.collect()
}

fn runs(module: &Module) -> Vec<(String, std::ops::Range<u64>)> {
    let main = &module.functions[module.main().unwrap()];
    let run = |n: &Node| match &n.op {
        Op::Call { callee, layers, .. } => Some((module.functions[*callee].name.clone(), layers.clone())),
        _ => None,
    };
    main.nodes.iter().filter_map(run).filter(|(name, _)| name.starts_with("block")).collect()
}

#[test]
fn published_descriptions_are_read_as_they_are() {
    for (config, scoring, gates, scale, groups) in [
        (mixtral(), Scoring::Softmax, Gates::Shares, 1.0, None),
        (qwen3_moe(), Scoring::Softmax, Gates::Shares, 1.0, None),
        (deepseek(), Scoring::Sigmoid, Gates::Shares, 2.5, Some(ExpertGroups { count: 8, kept: 4 })),
    ] {
        let module = ok(&config);
        verify(&module).unwrap();
        let found = routes(&module);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].scoring, found[0].gates), (scoring, gates));
        assert_eq!((found[0].scale, found[0].groups), (scale, groups));
        let size = |name: &str| module.space.size(module.space.dim(name).unwrap());
        assert_eq!(size("e"), size("r"));
    }
}

#[test]
fn the_first_layers_of_deepseek_are_dense_and_scores_are_sharpened() {
    let module = ok(&deepseek());
    let found = runs(&module);
    assert_eq!(found, [("block_dense".to_owned(), 0..3), ("block_experts".to_owned(), 3..61)]);
    let found: Vec<&Op> = nodes(&module).map(|(_, n)| &n.op).collect();
    let scale = found.iter().find_map(|op| if let Op::Attention(a) = op { Some(a.scale) } else { None });
    let mscale = 0.1 * 40f64.ln() + 1.0;
    let expected = mscale * mscale / 192f64.sqrt();
    assert!((scale.unwrap() - expected).abs() < 1e-12, "{scale:?} is not {expected}");
    let rotary = found.iter().find_map(|op| if let Op::Rotary(r) = op { Some(r) } else { None }).unwrap();
    assert_eq!((rotary.width, rotary.pairs, rotary.amplitude()), (64, Pairs::Neighbours, 1.0));
}

#[test]
fn layers_without_experts_are_those_that_the_description_names() {
    let config =
        with(&qwen3_moe(), json!({"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}));
    let names: Vec<(String, u64)> = runs(&ok(&config)).into_iter().map(|(n, r)| (n, r.start)).collect();
    // Layers 1 and 5 have experts: every second but the third.
    let expected = [("block_dense", 0), ("block_experts", 1), ("block_dense", 2), ("block_experts", 5)];
    assert_eq!(names, expected.map(|(n, at)| (n.to_owned(), at)));
}

#[test]
fn what_is_not_computed_is_refused() {
    refused(&with(&mixtral(), json!({"num_experts_per_tok": 9})), "M07", &["9", "8 experts"]);
    refused(
        &with(&mixtral(), json!({"num_local_experts": 1_u64 << 31})),
        "M04",
        &["2147483648 experts of 14336"],
    );
    let narrow = json!({"num_local_experts": 1_u64 << 31, "intermediate_size": 16});
    refused(&with(&mixtral(), narrow), "M04", &["2147483648 experts have", "slots"]);
    refused(&with(&mixtral(), json!({"num_hidden_layers": 1_u64 << 62})), "M04", &["1 to 65536 layers"]);
    refused(&with(&mixtral(), json!({"num_experts": 4})), "M07", &["num_local_experts", "4"]);
    refused(&with(&mixtral(), json!({"router_jitter_noise": 0.1})), "M05", &["router_jitter_noise"]);
    refused(&with(&mixtral(), json!({"output_router_logits": true})), "M05", &["output_router_logits"]);
    refused(&with(&mixtral(), json!({"moe_intermediate_size": 64})), "M05", &["moe_intermediate_size"]);
    refused(&with(&qwen3_moe(), json!({"mlp_only_layers": ["0"]})), "M03", &["a list of counts"]);
    refused(&with(&qwen3_moe(), json!({"n_routed_experts": 8})), "M05", &["n_routed_experts"]);
    refused(&with(&deepseek(), json!({"num_key_value_heads": 16})), "M07", &["16", "128 heads"]);
    refused(&with(&deepseek(), json!({"head_dim": 128})), "M07", &["head_dim", "64"]);
    refused(&with(&deepseek(), json!({"n_group": 7})), "M07", &["256 experts do not divide"]);
    refused(&with(&deepseek(), json!({"topk_group": 9})), "M07", &["topk_group", "9"]);
    refused(&with(&deepseek(), json!({"n_group": 256})), "M07", &["two best"]);
    refused(&with(&deepseek(), json!({"num_experts_per_tok": 129})), "M07", &["129", "4 groups of 32"]);
    refused(&with(&deepseek(), json!({"scoring_func": "softmax"})), "M05", &["scoring_func"]);
    refused(&with(&deepseek(), json!({"topk_method": "greedy"})), "M05", &["topk_method"]);
    refused(&with(&deepseek(), json!({"quantization_config": {"bits": 8}})), "M05", &["quantization_config"]);
    let blocks = |size: u64| {
        json!({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [size, size]}})
    };
    ok(&with(&deepseek(), blocks(128)));
    refused(&with(&deepseek(), blocks(64)), "M05", &["quantization_config"]);
    refused(&with(&deepseek(), json!({"surprise": 1})), "M06", &["surprise"]);
}

#[test]
fn small_models_keep_the_structure() {
    for config in [mixtral(), qwen3_moe(), deepseek()] {
        let small = shrink(&config, &[], &Shrink::to(4096, 32, 8)).unwrap();
        let (large, module) = (ok(&config), import(&small, "m", &Workload::prefill(1, 32)).unwrap());
        verify(&module).unwrap();
        let kinds = |m: &Module| -> Vec<String> { m.functions.values().map(|f| f.name.clone()).collect() };
        assert_eq!(kinds(&module), kinds(&large));
        let routed =
            |m: &Module| routes(m).into_iter().map(|r| (r.scoring, r.gates, r.groups)).collect::<Vec<_>>();
        assert_eq!(routed(&module), routed(&large));
        let size = |m: &Module, name: &str| m.space.size(m.space.dim(name).unwrap());
        assert_eq!(size(&module, "e") % 8, size(&large, "e") % 8);
        assert!(size(&module, "e") <= 16);
        assert!(size(&module, "x") <= 48 && size(&module, "m") <= 1024);
    }
}
