//! Refusals, defaults and spellings. Other tests compare imported programs with the library's logits.

use ithaca_ir::module::Node;
use ithaca_ir::ops::{Rotary, Scaling};
use ithaca_ir::{DType, Level, Mask, Module, Op};
use serde_json::{Value, json};

use super::*;

mod encoders;
mod experts;
mod rotary;
mod windows;

const EXAMPLES: [&str; 16] = [
    "bert-large-uncased",
    "flan-t5-xl",
    "gemma-2-9b",
    "gpt2",
    "llama-3-70b",
    "llama-3-8b",
    "llama-3.1-405b",
    "mistral-7b",
    "olmo-2-7b",
    "phi-3-mini",
    "pythia-6.9b",
    "qwen2.5-14b",
    "qwen2.5-7b",
    "qwen3-8b",
    "starcoder2-7b",
    "t5-3b",
];

fn example(name: &str) -> Value {
    let path = format!("{}/../../examples/{name}/config.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// `base` with the fields of `changes` in place of its own.
fn with(base: &Value, changes: Value) -> Value {
    let mut config = base.clone();
    let fields = config.as_object_mut().unwrap();
    for (name, value) in changes.as_object().unwrap() {
        fields.insert(name.clone(), value.clone());
    }
    config
}

fn small(model_type: &str) -> Value {
    let sizes = json!({"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8});
    let config = json!({ "model_type": model_type });
    match model_type {
        "gpt2" => with(
            &config,
            json!({"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}),
        ),
        "gpt_neox" => {
            let mut config = with(&config, sizes);
            config
                .as_object_mut()
                .unwrap()
                .retain(|name, _| name != "num_key_value_heads" && name != "head_dim");
            config
        }
        _ => with(&config, sizes),
    }
}

fn ok(config: &Value) -> Module {
    import(config, "m", &Workload::prefill(1, 16)).unwrap_or_else(|e| panic!("{}", e.render(None)))
}

/// Checks the code of a refusal, and that its message holds each of `words`.
fn refused(config: &Value, code: &str, words: &[&str]) {
    let error = import(config, "m", &Workload::prefill(1, 16)).map(|_| ()).unwrap_err();
    assert_eq!(error.code, code, "{}", error.message);
    for word in words {
        assert!(error.message.contains(word), "`{}` names `{word}`", error.message);
    }
}

fn nodes(module: &Module) -> impl Iterator<Item = (&str, &Node)> {
    module.functions.values().flat_map(|f| f.nodes.iter().map(move |n| (f.name.as_str(), n)))
}

fn rotary(config: &Value) -> Rotary {
    let module = ok(config);
    let found = nodes(&module).find_map(|(_, n)| match &n.op {
        Op::Rotary(r) => Some(r.clone()),
        _ => None,
    });
    found.unwrap()
}

/// The mask of each layer.
fn masks(config: &Value) -> Vec<Mask> {
    let module = ok(config);
    let main = &module.functions[module.main().unwrap()];
    let mut masks = Vec::new();
    for node in &main.nodes {
        let Op::Call { callee, layers, .. } = &node.op else { continue };
        for inner in &module.functions[*callee].nodes {
            if let Op::Attention(a) = &inner.op {
                masks.extend(layers.clone().map(|_| a.mask.clone()));
            }
        }
    }
    masks
}

fn window(n: u64) -> Mask {
    Mask::Window { left: Some(n - 1), right: Some(0) }
}

#[test]
fn examples_are_imported_with_few_functions() {
    for name in EXAMPLES {
        let module = import(&example(name), name, &Workload::prefill(1, 512)).unwrap();
        assert_eq!(module.level, Level::Program);
        let names: Vec<&str> = module.functions.values().map(|f| f.name.as_str()).collect();
        let expected: &[&str] = match name {
            "gemma-2-9b" => &["embed", "block_window", "block_full", "head", "main"],
            "flan-t5-xl" | "t5-3b" => &[
                "embed_encoder",
                "encoder_block",
                "encoder_norm",
                "embed_decoder",
                "decoder_block",
                "head",
                "main",
            ],
            _ => &["embed", "block", "head", "main"],
        };
        assert_eq!(names, expected, "{name}");
    }
}

#[test]
fn example_parameters_are_counted_as_published() {
    for (name, expected) in [
        ("llama-3-8b", 8_030_261_248_u64),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_241_732_096),
        ("phi-3-mini", 3_821_079_552),
        ("gpt2", 124_439_808),
        ("gemma-2-9b", 9_241_705_984),
        ("olmo-2-7b", 7_298_617_344),
        ("gemma-7b", 8_537_680_896),
        ("starcoder2-7b", 7_173_923_840),
        ("pythia-6.9b", 6_857_302_016),
        ("t5-3b", 2_851_598_336),
        ("flan-t5-xl", 2_849_757_184),
        ("bert-large-uncased", 335_174_458),
        ("smollm3-3b", 3_075_098_624),
        ("seed-oss-36b", 36_151_104_512),
        ("kimi-k2", 1_026_408_232_448),
        // Without the layer that predicts a further token.
        ("glm-4.5", 352_797_829_024),
    ] {
        let module = import(&example(name), name, &Workload::prefill(1, 64)).unwrap();
        let counts = module.run_counts();
        let mut seen = Vec::new();
        let mut total = 0;
        for (function, runs) in module.functions.values().zip(counts) {
            for node in &function.nodes {
                let Op::Param(binding) = &node.op else { continue };
                // A tied table is one tensor; kinds of layers share names, each for its own layers.
                let of = binding.is_per_layer().then(|| function.name.clone());
                let key = (binding.name.clone(), binding.window.clone(), of);
                if !seen.contains(&key) {
                    let runs = if binding.is_per_layer() { runs } else { 1 };
                    total += module.space.shape(function.ty(node.result())).iter().product::<u64>() * runs;
                    seen.push(key);
                }
            }
        }
        assert_eq!(total, expected, "{name}");
    }
}

#[test]
fn absent_fields_mean_what_the_library_says() {
    let size = |config: &Value, name: &str| {
        let module = ok(config);
        module.space.dim(name).map(|d| module.space.size(d))
    };
    let bare = |family: &str| json!({ "model_type": family });
    // `k` exists only where key/value heads are fewer.
    for (family, m, h, k, d, f, v) in [
        ("llama", 4096, 32, None, 128, 11_008, 32_000),
        ("mistral", 4096, 32, Some(8), 128, 14_336, 32_000),
        ("qwen2", 4096, 32, None, 128, 22_016, 151_936),
        ("qwen3", 4096, 32, None, 128, 22_016, 151_936),
        ("phi3", 3072, 32, None, 96, 8192, 32_064),
        ("gpt2", 768, 12, None, 64, 3072, 50_257),
        ("gemma2", 2304, 8, Some(4), 256, 9216, 256_000),
        ("olmo2", 4096, 32, None, 128, 11_008, 50_304),
        ("olmo3", 4096, 32, None, 128, 11_008, 50_304),
        ("exaone4", 4096, 32, None, 128, 16_384, 102_400),
        ("gemma", 3072, 16, None, 256, 24_576, 256_000),
        ("granite", 4096, 32, None, 128, 11_008, 32_000),
        ("arcee", 2560, 32, None, 80, 18_432, 32_000),
        ("ernie4_5", 1024, 16, Some(2), 128, 3072, 103_424),
        ("starcoder2", 3072, 24, Some(2), 128, 12_288, 49_152),
        ("gpt_neox", 6144, 64, None, 96, 24_576, 50_432),
    ] {
        let sizes = ["m", "h", "k", "d", "f", "v"].map(|name| size(&bare(family), name));
        assert_eq!(sizes, [Some(m), Some(h), k, Some(d), Some(f), Some(v)], "{family}");
    }
    // Null differs from absent: it means as many key/value heads as query heads.
    assert_eq!(size(&with(&small("mistral"), json!({"num_key_value_heads": null})), "k"), None);
    let fewer = json!({"model_type": "mistral", "num_attention_heads": 16, "hidden_size": 64});
    assert_eq!(size(&fewer, "k"), Some(8));
    assert_eq!(size(&with(&small("qwen3"), json!({"hidden_size": 48})), "d"), Some(8));
    refused(&with(&small("qwen3"), json!({"head_dim": null})), "M03", &["head_dim"]);
    refused(&with(&small("llama"), json!({"hidden_size": null})), "M03", &["hidden_size"]);
}

#[test]
fn fields_that_change_the_computation_are_refused_by_name() {
    for (field, value) in [
        ("quantization_config", json!({"quant_method": "gptq", "bits": 4})),
        ("pretraining_tp", json!(2)),
        ("num_experts", json!(8)),
        ("num_local_experts", json!(8)),
        ("logit_scale", json!(0.5)),
        ("logits_scaling", json!(8.0)),
        ("final_logit_softcapping", json!(30.0)),
        ("attn_logit_softcapping", json!(50.0)),
        ("query_pre_attn_scalar", json!(256)),
        ("is_encoder_decoder", json!(true)),
        ("is_causal", json!(false)),
        ("use_mrope", json!(true)),
        ("per_layer_config", json!({"0": {"hidden_size": 8}})),
        ("hidden_act", json!("mish")),
        ("dtype", json!("float8_e4m3fn")),
    ] {
        let config = with(&small("llama"), json!({ field: value }));
        let error = import(&config, "m", &Workload::prefill(1, 16)).unwrap_err();
        assert_eq!(error.code, "M05", "{field}: {}", error.message);
        assert!(error.message.contains(field) || field == "dtype", "{field}: {}", error.message);
    }
    refused(&with(&small("gpt2"), json!({"add_cross_attention": true})), "M05", &["add_cross_attention"]);
    refused(
        &with(&small("llama"), json!({"use_parallel_residual": true})),
        "M06",
        &["use_parallel_residual"],
    );
    refused(&with(&small("qwen2"), json!({"qkv_bias": false})), "M06", &["qkv_bias"]);
    // The library does not read these fields in these families, or gives them another meaning.
    refused(&with(&small("gpt_neox"), json!({"num_key_value_heads": 2})), "M06", &["num_key_value_heads"]);
    refused(&with(&small("gpt_neox"), json!({"rope_theta": 1e5})), "M06", &["rope_theta"]);
    refused(&with(&small("starcoder2"), json!({"norm_type": "rms_norm"})), "M05", &["norm_type"]);
    refused(&with(&small("starcoder2"), json!({"layer_norm_epsilon": 1e-3})), "M05", &["layer_norm_epsilon"]);
    refused(&with(&small("olmo2"), json!({"clip_qkv": 8.0})), "M06", &["clip_qkv"]);
    refused(&with(&small("olmo3"), json!({"rope_theta": 1e4})), "M07", &["rope_theta"]);
    let flat = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0}});
    refused(&with(&small("olmo3"), flat), "M07", &["rope_parameters"]);
    refused(&with(&small("exaone4"), json!({"sliding_window_pattern": "LGLL"})), "M05", &["LGLL"]);
    refused(&with(&small("minimax_m2"), json!({"rotary_dim": 7})), "M07", &["7"]);
    refused(&with(&small("gemma2"), json!({"hidden_act": "relu"})), "M07", &["hidden_act"]);
    refused(&with(&small("gemma2"), json!({"sliding_window_size": 9})), "M05", &["sliding_window_size"]);
    refused(
        &with(&small("gemma2"), json!({"attn_logit_softcapping": 0.0})),
        "M04",
        &["attn_logit_softcapping"],
    );
    refused(&with(&small("gemma2"), json!({"query_pre_attn_scalar": -1})), "M04", &["query_pre_attn_scalar"]);
}

#[test]
fn neutral_and_inert_fields_are_accepted() {
    let neutral = json!({"pretraining_tp": 1, "logit_scale": 1.0, "quantization_config": null, "num_experts": 0,
        "is_encoder_decoder": false, "use_mrope": false, "pruned_heads": {}, "per_layer_config": null});
    ok(&with(&small("llama"), neutral));
    let inert = json!({"_name_or_path": "x", "initializer_range": 0.02, "use_cache": false, "eos_token_id": [1, 2],
        "transformers_version": "4.1", "attention_dropout": 0.1, "temperature": 0.6, "brand_new": null});
    ok(&with(&small("llama"), inert));
}

#[test]
fn unknown_fields_can_be_declared_inert_and_known_ones_cannot() {
    let config = with(
        &small("llama"),
        json!({"note": "mine", "rope_scaling": {"type": "linear", "factor": 2, "x": 1}}),
    );
    let ignoring = |names: &[&str]| Workload {
        ignore: names.iter().map(|&n| n.to_owned()).collect(),
        ..Workload::prefill(1, 16)
    };
    assert_eq!(import(&config, "m", &ignoring(&["note"])).unwrap_err().code, "M06");
    assert!(import(&config, "m", &ignoring(&["note", "rope_scaling.x"])).is_ok());
    let error = import(&config, "m", &ignoring(&["note", "rope_scaling.x", "hidden_size"])).unwrap_err();
    assert_eq!(error.code, "M12");
    let quantised = with(&small("llama"), json!({"quantization_config": {"bits": 4}}));
    assert!(import(&quantised, "m", &ignoring(&["quantization_config"])).is_ok());
}

#[test]
fn sizes_that_do_not_fit_are_refused_with_their_numbers() {
    let llama = |changes: Value| with(&small("llama"), changes);
    refused(&llama(json!({"num_key_value_heads": 3})), "M07", &["4", "3"]);
    refused(&llama(json!({"head_dim": null, "hidden_size": 30})), "M07", &["30", "4"]);
    refused(&with(&small("gpt2"), json!({"n_embd": 30})), "M07", &["n_embd", "30"]);
    refused(&with(&small("gpt2"), json!({"hidden_size": 64})), "M07", &["n_embd", "hidden_size"]);
    for bad in [json!(0), json!(-1), json!(1.5), json!(1e300), json!(u64::MAX)] {
        for field in ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"] {
            refused(&llama(json!({ field: bad.clone() })), "M04", &[field]);
        }
    }
    refused(&llama(json!({"num_hidden_layers": 1_000_000_000})), "M04", &["num_hidden_layers", "1000000000"]);
    refused(&llama(json!({"num_hidden_layers": 0})), "M04", &["num_hidden_layers"]);
    refused(&llama(json!({"num_hidden_layers": "2"})), "M03", &["num_hidden_layers"]);
    refused(&llama(json!({"hidden_size": "4096"})), "M03", &["hidden_size"]);
    refused(&llama(json!({"hidden_size": 1u64 << 40, "vocab_size": 1u64 << 40})), "M04", &["embedding"]);
    refused(&llama(json!({"rms_norm_eps": -1e-6})), "M04", &["rms_norm_eps"]);
    refused(&llama(json!({"tie_word_embeddings": "yes"})), "M03", &["tie_word_embeddings"]);
}

#[test]
fn models_that_are_not_there_are_refused() {
    refused(&json!([1]), "M01", &["a list"]);
    refused(&json!({}), "M02", &["model_type"]);
    refused(&json!({"model_type": "mt5"}), "M02", &["mt5"]);
    let near = import(&json!({"model_type": "Llama"}), "m", &Workload::prefill(1, 1)).unwrap_err();
    assert!(near.helps.iter().any(|h| h.contains("`llama`")), "{:?}", near.helps);
    // A family that would refuse the description is not proposed.
    let other = json!({
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "softmax"
    });
    let near = import(&other, "m", &Workload::prefill(1, 1)).unwrap_err();
    assert!(near.helps[0].contains("`deepseek_v3`") && near.helps[0].contains("`scoring_func`"), "{near:?}");
    assert!(!near.helps.iter().any(|h| h.contains("did you mean")), "{near:?}");
    // Models of text and images have their text part elsewhere.
    refused(&json!({"model_type": "gemma3"}), "M02", &["gemma3"]);
    refused(
        &with(&small("llama"), json!({"architectures": ["LlamaForSequenceClassification"]})),
        "M11",
        &["Class"],
    );
}

#[test]
fn workloads_are_checked() {
    let refused = |workload: &Workload, code: &str| {
        assert_eq!(import(&small("gpt2"), "m", workload).unwrap_err().code, code);
    };
    refused(&Workload::prefill(1, 17), "M08");
    refused(&Workload::prefill(0, 16), "M10");
    refused(&Workload::prefill(1, 0), "M10");
    refused(&Workload::prefill(1, u64::MAX), "M10");
    refused(&Workload { dtype: Some(DType::I32), ..Workload::prefill(1, 16) }, "M10");
    refused(&Workload { mode: Mode::Decode, ..Workload::prefill(1, 16) }, "M09");
}

#[test]
fn the_element_type_comes_from_the_workload_then_the_description() {
    let dtype = |config: &Value, dtype: Option<DType>| {
        let module = import(config, "m", &Workload { dtype, ..Workload::prefill(1, 16) }).unwrap();
        let main = &module.functions[module.main().unwrap()];
        main.ty(main.outputs[0].value).dtype
    };
    let config = with(&small("llama"), json!({"torch_dtype": "bfloat16"}));
    assert_eq!(dtype(&config, None), DType::BF16);
    assert_eq!(dtype(&config, Some(DType::F32)), DType::F32);
    assert_eq!(dtype(&with(&config, json!({"dtype": "torch.float16"})), None), DType::F16);
    assert_eq!(dtype(&small("llama"), None), DType::F32);
}

#[test]
fn scores_scaled_by_depth_give_each_layer_its_function() {
    let config =
        with(&small("gpt2"), json!({"scale_attn_by_inverse_layer_idx": true, "scale_attn_weights": false}));
    let module = ok(&config);
    let scales: Vec<f64> = nodes(&module)
        .filter_map(|(_, n)| match &n.op {
            Op::Attention(a) => Some(a.scale),
            _ => None,
        })
        .collect();
    assert_eq!(scales, [1.0, 0.5]);
    assert!(module.function("block_0").is_some() && module.function("block_1").is_some());
}

#[test]
fn tied_tables_are_one_tensor() {
    for (family, tied, name) in [
        ("llama", false, "lm_head.weight"),
        ("qwen2", true, "model.embed_tokens.weight"),
        ("gpt2", true, "transformer.wte.weight"),
        ("gpt2", false, "lm_head.weight"),
        ("gemma2", true, "model.embed_tokens.weight"),
        ("starcoder2", false, "lm_head.weight"),
        ("gpt_neox", false, "embed_out.weight"),
        ("gpt_neox", true, "gpt_neox.embed_in.weight"),
    ] {
        let module = ok(&with(&small(family), json!({ "tie_word_embeddings": tied })));
        let head = &module.functions[module.function("head").unwrap()];
        let bound = head.nodes.iter().any(|n| matches!(&n.op, Op::Param(b) if b.name == name));
        assert!(bound, "the head of {family} reads {name}");
    }
}

#[test]
fn small_models_keep_the_structure() {
    let options = Shrink::to(131_072, 64, 8);
    for name in EXAMPLES {
        let config = example(name);
        let small = shrink(&config, &[], &options).unwrap();
        let sequence = Workload::prefill(1, 64);
        let (large, small) =
            (import(&config, name, &sequence).unwrap(), import(&small, name, &sequence).unwrap());
        let size = |m: &Module, dim: &str| m.space.dim(dim).map(|d| m.space.size(d));
        for dim in ["h", "k"] {
            assert_eq!(size(&large, dim), size(&small, dim), "{dim} of {name}");
        }
        for dim in ["f", "v"] {
            let divides = |m: &Module| [2, 4, 8].map(|n| size(m, dim).unwrap().is_multiple_of(n));
            assert_eq!(divides(&large), divides(&small), "{dim} of {name}");
        }
        assert!(size(&small, "d").unwrap() <= 16 && size(&small, "v").unwrap() < 200, "{name}");
        // The small model has fewer layers, so fewer runs of one kind if kinds alternate.
        let blocks = |m: &Module| -> Vec<(String, &str)> {
            let nodes = nodes(m).filter(|(f, _)| *f != "main");
            nodes.map(|(f, n)| (f.to_owned(), n.op.name())).collect()
        };
        assert_eq!(blocks(&large), blocks(&small), "{name}");
    }
}

#[test]
fn small_models_keep_windows_in_proportion_and_kinds_of_layers() {
    let options = Shrink::to(4096, 64, 4);
    let config = with(
        &small("qwen2"),
        json!({"num_hidden_layers": 12, "use_sliding_window": true, "sliding_window": 1024, "max_window_layers": 9}),
    );
    assert_eq!(masks(&shrink(&config, &[], &options).unwrap()), [Mask::Causal, window(16)]);
    let mistral = with(&small("mistral"), json!({"num_hidden_layers": 7}));
    assert_eq!(masks(&shrink(&mistral, &[], &options).unwrap()), [window(64), window(64)]);
    let phi = with(&small("phi3"), json!({"head_dim": 96, "partial_rotary_factor": 0.75}));
    let turned = rotary(&shrink(&phi, &[], &options).unwrap());
    assert_eq!(turned.width, 6);
}
