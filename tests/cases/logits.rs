//! Models of the HuggingFace library, run from their descriptions and weights, against the logits that it computed.

use ithaca_ir::verify::verify;
use ithaca_kernels::compare::{self, Verdict};
use ithaca_kernels::oracle::{self, Interpreted};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::golden::{self, CLOSE, Golden, imported};
use crate::{open, report, trial};

pub(crate) fn trials() -> Vec<Trial> {
    let names = golden::names();
    assert!(names.len() >= 30, "goldens are committed with the repository");
    let mut trials = Vec::new();
    for name in &names {
        trials.push(trial(name, format!("logits::{name}"), |golden| {
            let wrong = [wrong::<f32>(golden, &golden.config), wrong::<f64>(golden, &golden.config)];
            report(&wrong.concat())
        }));
        trials.push(trial(
            name,
            format!("older_spelling::{name}"),
            the_older_spelling_gives_the_same_program,
        ));
    }
    for (name, pointer, value) in telling_fields() {
        let title = format!("sensitive::{name}{}", pointer.replace('/', "::"));
        trials.push(Trial::test(title, move || Ok(sensitive(&open(name), pointer, value)?)));
    }
    trials
}

/// Outputs of `config`, computed in `T`, that are not the library's.
fn wrong<T: Interpreted>(golden: &Golden, config: &Value) -> Vec<String> {
    let wrong = errors::<T>(golden, config).into_iter().filter(|(_, verdict)| !verdict.within(CLOSE));
    wrong.map(|(name, verdict)| format!("{name}: {verdict:?}")).collect()
}

/// How far the outputs of `config`, computed in `T`, are from the library's.
fn errors<T: Interpreted>(golden: &Golden, config: &Value) -> Vec<(String, Verdict)> {
    let module = imported(config, &golden.name, &golden.io);
    verify(&module).unwrap();
    let outputs = oracle::run::<T>(&module, &golden.weights, &golden.io).unwrap();
    let compared = compare::with_source(&outputs, &golden.io).unwrap();
    assert_eq!(compared.len(), outputs.len(), "the library has every output");
    compared.into_iter().map(|c| (c.name, c.verdict)).collect()
}

/// Fields that goldens cover: a wrong reading of any of them shows.
fn telling_fields() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("llama-biases-one-kv-head", "/rms_norm_eps", json!(1e-6)),
        ("llama-biases-one-kv-head", "/attention_bias", json!(false)),
        ("llama-biases-one-kv-head", "/mlp_bias", json!(false)),
        ("llama-biases-one-kv-head", "/hidden_act", json!("silu")),
        ("llama-rope-linear", "/rope_parameters/factor", json!(2.0)),
        ("llama-rope-llama3", "/rope_parameters/low_freq_factor", json!(2.0)),
        ("llama-rope-llama3", "/rope_parameters/original_max_position_embeddings", json!(128)),
        ("llama-rope-yarn", "/rope_parameters/factor", json!(2.0)),
        ("qwen3-rope-yarn-mscale", "/rope_parameters/mscale", json!(1.3)),
        ("qwen3-rope-yarn-mscale", "/rope_parameters/beta_fast", json!(32)),
        ("qwen3-rope-yarn-mscale", "/rope_parameters/truncate", json!(true)),
        ("mistral-window-head-dim", "/sliding_window", json!(8)),
        ("mistral-window-head-dim", "/rope_parameters/rope_theta", json!(10_000.0)),
        ("qwen2-late-windows", "/max_window_layers", json!(2)),
        ("qwen2-late-windows", "/layer_types/0", json!("sliding_attention")),
        ("phi3-partial-window", "/rope_parameters/partial_rotary_factor", json!(0.5)),
        ("phi3-partial-window", "/sliding_window", json!(10)),
        ("olmo2", "/rms_norm_eps", json!(1e-5)),
        ("olmo2-biases-head-dim", "/attention_bias", json!(false)),
        ("starcoder2-window", "/sliding_window", json!(10)),
        ("starcoder2-window", "/norm_epsilon", json!(1e-5)),
        ("starcoder2-window", "/use_bias", json!(false)),
        ("starcoder2-no-bias", "/hidden_act", json!("silu")),
        ("gpt-neox", "/rope_parameters/partial_rotary_factor", json!(0.5)),
        ("gpt-neox", "/use_parallel_residual", json!(false)),
        ("gpt-neox", "/attention_bias", json!(false)),
        ("gpt-neox-serial", "/use_parallel_residual", json!(true)),
        ("gpt-neox-serial", "/rope_parameters/factor", json!(1.0)),
        ("gemma2", "/attn_logit_softcapping", json!(50.0)),
        ("gemma2", "/final_logit_softcapping", json!(30.0)),
        ("gemma2", "/query_pre_attn_scalar", json!(16)),
        ("gemma2", "/sliding_window", json!(8)),
        ("gemma2", "/layer_types/0", json!("full_attention")),
        ("gemma2", "/hidden_activation", json!("gelu")),
        ("gemma2-uncapped-biases", "/attn_logit_softcapping", json!(2.0)),
        ("gemma3", "/rope_parameters/sliding_attention/rope_theta", json!(200.0)),
        ("gemma3", "/rope_parameters/full_attention/factor", json!(2.0)),
        ("gemma3", "/sliding_window", json!(8)),
        ("gemma3", "/query_pre_attn_scalar", json!(16)),
        ("gpt-oss", "/swiglu_limit", json!(0.8)),
        ("gpt-oss", "/sliding_window", json!(8)),
        ("gpt-oss", "/rope_parameters/truncate", json!(true)),
        ("llama4", "/attention_chunk_size", json!(8)),
        ("llama4", "/floor_scale", json!(8)),
        ("llama4", "/attn_scale", json!(0.2)),
        ("llama4", "/attn_temperature_tuning", json!(false)),
        ("llama4", "/no_rope_layers/1", json!(1)),
        ("llama4", "/use_qk_norm", json!(false)),
        ("llama4", "/layer_types/0", json!("full_attention")),
        ("glm4", "/rope_parameters/partial_rotary_factor", json!(0.75)),
        ("glm4", "/attention_bias", json!(false)),
        ("glm4-moe", "/attention_bias", json!(false)),
        ("glm4-moe", "/use_qk_norm", json!(false)),
        ("glm4-moe", "/routed_scaling_factor", json!(1.0)),
        ("glm4-moe", "/rope_parameters/partial_rotary_factor", json!(0.75)),
        ("seed-oss", "/attention_out_bias", json!(false)),
        ("gemma", "/rope_parameters/rope_theta", json!(400.0)),
        ("granite", "/embedding_multiplier", json!(3.0)),
        ("granite", "/residual_multiplier", json!(0.5)),
        ("granite", "/attention_multiplier", json!(0.25)),
        ("granite", "/logits_scaling", json!(1.5)),
        ("arcee", "/hidden_act", json!("relu")),
        ("ernie4-5", "/use_bias", json!(false)),
        ("olmo3", "/sliding_window", json!(8)),
        ("olmo3", "/rope_parameters/full_attention/factor", json!(2.0)),
        ("exaone4", "/sliding_window", json!(8)),
        ("exaone4", "/layer_types/2", json!("sliding_attention")),
        ("minimax-m2", "/rope_parameters/partial_rotary_factor", json!(0.75)),
        ("minimax-m2", "/num_experts_per_tok", json!(3)),
        ("smollm3", "/no_rope_layers", json!([1, 0, 1, 1, 1])),
        ("smollm3", "/sliding_window", json!(9)),
        ("mistral3", "/text_config/rope_parameters/rope_theta", json!(400.0)),
        ("gpt2-inner-gelu", "/activation_function", json!("relu")),
        ("gpt2-scaled-by-layer", "/scale_attn_by_inverse_layer_idx", json!(false)),
        ("t5", "/relative_attention_max_distance", json!(40)),
        ("t5", "/dense_act_fn", json!("gelu")),
        ("t5-gated-own-head", "/relative_attention_max_distance", json!(100)),
        ("t5-gated-own-head", "/layer_norm_epsilon", json!(1e-6)),
        ("t5-gated-own-head", "/dense_act_fn", json!("silu")),
        ("t5-gated-own-head", "/scale_decoder_outputs", json!(true)),
        ("bert", "/layer_norm_eps", json!(1e-12)),
        ("bert", "/hidden_act", json!("relu")),
        ("bert-masked-lm", "/hidden_act", json!("gelu")),
    ]
}

/// The golden tells another value of a field apart.
fn sensitive(golden: &Golden, pointer: &str, value: Value) -> Result<(), String> {
    let mut config = golden.config.clone();
    // A derived list of layer types is part of some descriptions; without it the other fields count.
    if pointer == "/max_window_layers" {
        config.as_object_mut().unwrap().remove("layer_types");
    }
    *config.pointer_mut(pointer).unwrap_or_else(|| panic!("{} has {pointer}", golden.name)) = value;
    let errors = errors::<f32>(golden, &config);
    let differs = errors.iter().any(|(_, verdict)| !verdict.within(10.0 * CLOSE));
    if differs { Ok(()) } else { Err(format!("{errors:?}")) }
}

/// A description written before `rope_parameters` and `dtype` gives the same program.
fn the_older_spelling_gives_the_same_program(golden: &Golden) -> Result<(), String> {
    let new = &golden.config;
    let Some(parameters) = new.get("rope_parameters").and_then(Value::as_object) else { return Ok(()) };
    let mut old = new.clone();
    let fields = old.as_object_mut().unwrap();
    let mut parameters = parameters.clone();
    fields.remove("rope_parameters");
    let (theta, part) = match new["model_type"].as_str() {
        Some("gpt_neox") => ("rotary_emb_base", "rotary_pct"),
        _ => ("rope_theta", "partial_rotary_factor"),
    };
    if let Some(window) = parameters.remove("sliding_attention") {
        // Of several types of layer the other's parameters are the model's, and the window's may have a base of its own.
        parameters = parameters.remove("full_attention").unwrap().as_object().unwrap().clone();
        if window["rope_theta"] != parameters["rope_theta"] {
            fields.insert("rope_local_base_freq".to_owned(), window["rope_theta"].clone());
        }
    }
    fields.insert(theta.to_owned(), parameters.remove("rope_theta").unwrap());
    if let Some(factor) = parameters.remove("partial_rotary_factor") {
        fields.insert(part.to_owned(), factor);
    }
    let kind = parameters.remove("rope_type").unwrap();
    let scaling = match kind.as_str() {
        Some("default") => Value::Null,
        _ => {
            parameters.insert("type".to_owned(), kind);
            Value::Object(parameters)
        }
    };
    fields.insert("rope_scaling".to_owned(), scaling);
    let dtype = fields.remove("dtype").unwrap();
    fields.insert("torch_dtype".to_owned(), dtype);
    let [new, old] = [new, &old].map(|config| imported(config, &golden.name, &golden.io));
    if new == old { Ok(()) } else { Err("the programs differ".to_owned()) }
}
