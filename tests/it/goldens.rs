//! Models of the HuggingFace library, run from its description and weights, against the logits it computed.
//!
//! Every directory of `tests/goldens` with a description, weights and expectations is one; `make.py` there makes more.

use std::path::{Path, PathBuf};

use ithaca_ir::Module;
use ithaca_ir::verify::verify;
use ithaca_kernels::oracle;
use ithaca_kernels::store::{SafeTensorsFile, TensorSource};
use ithaca_passes::import::{Workload, import};
use serde_json::{Value, json};

/// Largest accepted error of a logit.
const TOLERANCE: f64 = 1e-5;

/// The directories of goldens, sorted.
fn goldens() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let is_golden = |dir: &PathBuf| {
        ["config.json", "model.safetensors", "io.safetensors"].iter().all(|f| dir.join(f).is_file())
    };
    let entries = std::fs::read_dir(&root).unwrap().map(|e| e.unwrap().path());
    let mut dirs: Vec<PathBuf> = entries.filter(is_golden).collect();
    dirs.sort();
    dirs
}

fn config(dir: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
}

fn import_golden(dir: &Path, config: &Value, io: &SafeTensorsFile) -> Module {
    let name = dir.file_name().unwrap().to_str().unwrap();
    import(config, name, &workload(io)).unwrap_or_else(|e| panic!("{name}: {}", e.render(None)))
}

/// A prefill of the lengths of `io`.
pub(crate) fn workload(io: &dyn TensorSource) -> Workload {
    let shape = io.shape("input_ids").unwrap();
    let target_sequence = io.shape("decoder_input_ids").map(|s| s[1]);
    Workload { target_sequence, ..Workload::prefill(shape[0], shape[1]) }
}

/// The largest absolute error of the outputs of `config`, computed in `T`.
fn error<T: oracle::Interpreted>(dir: &Path, config: &Value) -> f64 {
    let io = SafeTensorsFile::open(dir.join("io.safetensors")).unwrap();
    let weights = SafeTensorsFile::open(dir.join("model.safetensors")).unwrap();
    let module = import_golden(dir, config, &io);
    verify(&module).unwrap();
    let outputs = oracle::run::<T>(&module, &weights, &io).unwrap();
    let mut largest = 0.0;
    for (name, got) in &outputs {
        let expected = io.read(name).unwrap();
        assert_eq!(got.shape, expected.shape, "{name} of {}", dir.display());
        let errors = got.data.iter().zip(&expected.data).map(|(a, b)| (a.to_f64() - b).abs());
        // A number that is none counts as wrong.
        largest = errors.fold(largest, |a, b| if b <= a { a } else { b });
    }
    largest
}

#[test]
fn logits_agree_in_both_precisions() {
    let dirs = goldens();
    assert!(dirs.len() >= 30, "goldens are committed with the repository");
    let mut report = String::new();
    let mut failed = false;
    for dir in dirs {
        let config = config(&dir);
        let (single, double) = (error::<f32>(&dir, &config), error::<f64>(&dir, &config));
        failed |= !(single <= TOLERANCE && double <= TOLERANCE);
        let name = dir.file_name().unwrap().display();
        report.push_str(&format!("{name}: f32 {single:.1e}, f64 {double:.1e}\n"));
    }
    assert!(!failed, "largest errors of logits:\n{report}");
}

/// A wrong reading of any of these would show: the goldens tell them apart.
#[test]
fn goldens_are_sensitive_to_what_they_cover() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    for (name, pointer, value) in [
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
    ] {
        let dir = root.join(name);
        let mut config = config(&dir);
        // A derived list of layer types is part of some descriptions; without it the other fields speak.
        if pointer == "/max_window_layers" {
            config.as_object_mut().unwrap().remove("layer_types");
        }
        *config.pointer_mut(pointer).unwrap_or_else(|| panic!("{name} has {pointer}")) = value;
        let error = error::<f32>(&dir, &config);
        assert!(error > 10.0 * TOLERANCE, "{name} with another {pointer} differs by {error:.1e} only");
    }
}

/// Descriptions written before `rope_parameters` and `dtype` give the same program.
#[test]
fn the_older_spelling_gives_the_same_program() {
    for dir in goldens() {
        let new = config(&dir);
        let Some(parameters) = new.get("rope_parameters").and_then(Value::as_object) else { continue };
        let mut old = new.clone();
        let fields = old.as_object_mut().unwrap();
        let mut parameters = parameters.clone();
        fields.remove("rope_parameters");
        let (theta, part) = match new["model_type"].as_str() {
            Some("gpt_neox") => ("rotary_emb_base", "rotary_pct"),
            _ => ("rope_theta", "partial_rotary_factor"),
        };
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
        let io = SafeTensorsFile::open(dir.join("io.safetensors")).unwrap();
        assert_eq!(import_golden(&dir, &new, &io), import_golden(&dir, &old, &io), "{}", dir.display());
    }
}
