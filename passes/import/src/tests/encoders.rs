//! T5 and BERT: structure, spellings, refusals, and dropout in training.

use ithaca_ir::ops::{Attention, Dropout, Keyed, RelativeBias, Sides};
use ithaca_ir::verify::verify;

use super::*;

fn t5() -> Value {
    json!({"model_type": "t5", "vocab_size": 32, "d_model": 24, "d_kv": 8, "num_heads": 4, "d_ff": 48,
        "num_layers": 2, "num_decoder_layers": 3, "dropout_rate": 0.0})
}

fn bert() -> Value {
    json!({"model_type": "bert", "vocab_size": 32, "hidden_size": 32, "num_attention_heads": 4,
        "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 16})
}

fn attentions(module: &Module) -> Vec<Attention> {
    let found = nodes(module).filter_map(|(_, n)| match &n.op {
        Op::Attention(a) => Some(a.clone()),
        _ => None,
    });
    found.collect()
}

fn names(module: &Module) -> Vec<String> {
    let bound = nodes(module).filter_map(|(_, n)| match &n.op {
        Op::Param(b) | Op::Input(b) => Some(b.name.clone()),
        _ => None,
    });
    bound.collect()
}

/// Outputs as `name[dims]`.
fn outputs(module: &Module) -> Vec<String> {
    let main = &module.functions[module.main().unwrap()];
    let spell = |o: &ithaca_ir::module::Output| {
        let dims = main.ty(o.value).dims.iter().map(|&d| module.space.dims[d].name.as_str());
        format!("{}[{}]", o.name.clone().unwrap(), dims.collect::<Vec<_>>().join(" "))
    };
    main.outputs.iter().map(spell).collect()
}

#[test]
fn a_t5_attends_to_itself_with_biases_and_to_the_encoder_without() {
    let workload = Workload { target_sequence: Some(6), ..Workload::prefill(2, 16) };
    let module = import(&t5(), "m", &workload).unwrap();
    verify(&module).unwrap();
    let dim = |name: &str| module.space.dim(name).unwrap();
    let (s, t, r) = (dim("s"), dim("t"), dim("r"));
    assert_eq!([s, t].map(|d| module.space.size(d)), [16, 6]);
    let found = attentions(&module);
    let facts: Vec<_> = found.iter().map(|a| (a.queries, a.keys, a.mask.clone(), a.scale)).collect();
    assert_eq!(facts, [(s, s, Mask::Full, 1.0), (t, t, Mask::Causal, 1.0), (t, s, Mask::Full, 1.0)]);
    let bias = |sides| Some(RelativeBias { buckets: r, max_distance: 128, sides });
    let biases: Vec<_> = found.iter().map(|a| a.bias).collect();
    assert_eq!(biases, [bias(Sides::Both), bias(Sides::Before), None]);
    assert_eq!(outputs(&module), ["logits[b t v]"]);
    // The first layer's table serves all layers of its stack.
    let tables: Vec<String> =
        names(&module).into_iter().filter(|n| n.contains("relative_attention_bias")).collect();
    let table = |stack: &str| format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight");
    assert_eq!(tables, ["encoder", "decoder"].map(table));
    let main = &module.functions[module.main().unwrap()];
    let layers = main.nodes.iter().filter_map(|n| match &n.op {
        Op::Call { layers, .. } => Some(layers.end),
        _ => None,
    });
    assert_eq!(layers.collect::<Vec<_>>(), [1, 2, 1, 1, 3, 1]);
}

#[test]
fn the_target_of_a_t5_is_as_long_as_its_source_unless_told() {
    let module = ok(&t5());
    assert_eq!(module.space.size(module.space.dim("t").unwrap()), 16);
    for config in [small("llama"), bert()] {
        let workload = Workload { target_sequence: Some(6), ..Workload::prefill(1, 16) };
        let error = import(&config, "m", &workload).unwrap_err();
        assert_eq!(error.code, "M10", "{}", error.message);
    }
    let none = Workload { target_sequence: Some(0), ..Workload::prefill(1, 16) };
    assert_eq!(import(&t5(), "m", &none).unwrap_err().code, "M10");
}

#[test]
fn absent_fields_of_encoders_mean_what_the_library_says() {
    let size = |config: &Value, name: &str| {
        let module = ok(config);
        module.space.dim(name).map(|d| module.space.size(d))
    };
    let sizes = |model_type: &str, names: [&str; 7]| {
        names.map(|name| size(&json!({ "model_type": model_type }), name).unwrap())
    };
    assert_eq!(sizes("t5", ["m", "h", "d", "f", "v", "r", "b"]), [512, 8, 64, 2048, 32_128, 32, 1]);
    assert_eq!(sizes("bert", ["m", "h", "d", "f", "v", "p", "y"]), [768, 12, 64, 3072, 30_522, 512, 2]);
    // Aliases of the same fields.
    let aliases = json!({"model_type": "t5", "hidden_size": 24, "head_dim": 4, "num_attention_heads": 2});
    assert_eq!(["m", "d", "h"].map(|n| size(&aliases, n).unwrap()), [24, 4, 2]);
    refused(&with(&t5(), json!({"hidden_size": 25})), "M07", &["d_model", "hidden_size"]);
}

#[test]
fn the_head_of_a_t5_is_scaled_and_tied_as_its_fields_say() {
    let head = |changes: Value| {
        let module = ok(&with(&t5(), changes));
        let scale = nodes(&module).find_map(|(_, n)| match n.op {
            Op::Scale { factor } => Some(factor),
            _ => None,
        });
        (scale.is_some(), names(&module).contains(&"lm_head.weight".to_owned()))
    };
    let scaled_and_tied = (true, false);
    for plain in [json!({}), json!({"tie_word_embeddings": true}), json!({"tie_word_embeddings": null})] {
        assert_eq!(head(plain), scaled_and_tied);
    }
    assert_eq!(head(json!({"tie_word_embeddings": false})), (false, true));
    // Version 5 saves an untied model like this.
    let saved = json!({"tie_word_embeddings": true, "scale_decoder_outputs": false});
    assert_eq!(head(saved), (false, true));
    assert_eq!(head(json!({"tie_word_embeddings": false, "scale_decoder_outputs": true})), (true, true));
    let module = ok(&t5());
    let found = nodes(&module).any(|(_, n)| n.op == Op::Scale { factor: 24f64.powf(-0.5) });
    assert!(found, "the scale is that of the width of the stream");
}

#[test]
fn the_mlp_of_a_t5_follows_its_fields() {
    let functions = |changes: Value| -> (Vec<&'static str>, bool) {
        let module = ok(&with(&t5(), changes));
        let block = &module.functions[module.function("encoder_block").unwrap()];
        let unary = block.nodes.iter().filter(|n| matches!(n.op, Op::Unary(_))).map(|n| n.op.name());
        (unary.collect(), names(&module).iter().any(|n| n.ends_with("wi_1.weight")))
    };
    assert_eq!(functions(json!({})), (vec!["relu"], false));
    assert_eq!(functions(json!({"feed_forward_proj": "gated-gelu"})), (vec!["gelu_tanh"], true));
    assert_eq!(functions(json!({"feed_forward_proj": "gelu"})), (vec!["gelu"], false));
    assert_eq!(functions(json!({"feed_forward_proj": "gated-silu"})), (vec!["silu"], true));
    // A stated field takes precedence, as in the library.
    let written = json!({"feed_forward_proj": "gated-gelu", "dense_act_fn": "silu", "is_gated_act": false});
    assert_eq!(functions(written), (vec!["silu"], false));
    for bad in ["gated", "gated-", "plain-gelu", "gated-relu-2", "mish"] {
        refused(&with(&t5(), json!({"feed_forward_proj": bad})), "M05", &["feed_forward_proj", bad]);
    }
}

#[test]
fn t5s_that_are_not_understood_are_refused() {
    let t5 = |changes: Value| with(&t5(), changes);
    refused(&t5(json!({"is_encoder_decoder": false})), "M05", &["is_encoder_decoder"]);
    refused(&t5(json!({"tie_encoder_decoder": true})), "M05", &["tie_encoder_decoder"]);
    refused(
        &t5(json!({"relative_attention_num_buckets": 3})),
        "M07",
        &["relative_attention_num_buckets", "3"],
    );
    refused(&t5(json!({"relative_attention_max_distance": 16})), "M07", &["max_distance", "16"]);
    ok(&t5(json!({"relative_attention_max_distance": 17})));
    refused(&t5(json!({"architectures": ["T5EncoderModel"]})), "M11", &["T5EncoderModel"]);
    refused(&t5(json!({"rope_theta": 1e4})), "M06", &["rope_theta"]);
    refused(&t5(json!({"num_layers": 1_000_000})), "M04", &["num_layers"]);
    refused(&t5(json!({"num_decoder_layers": 0})), "M04", &["num_decoder_layers"]);
    refused(&t5(json!({"d_kv": 1u64 << 39})), "M04", &["heads"]);
    refused(&t5(json!({"decoder_start_token_id": 1u64 << 40})), "M03", &["decoder_start_token_id"]);
    ok(&t5(json!({"decoder_start_token_id": null, "pad_token_id": null})));
    ok(&t5(json!({"n_positions": 8, "output_past": true, "num_decoder_layers": null})));
}

#[test]
fn a_bert_has_the_head_that_its_architecture_says() {
    let of = |changes: Value| ok(&with(&bert(), changes));
    let model = of(json!({"architectures": ["BertModel"]}));
    verify(&model).unwrap();
    assert_eq!(outputs(&model), ["last_hidden_state[b s m]", "pooler_output[b n]"]);
    assert_eq!(model, of(json!({})));
    assert!(names(&model).contains(&"embeddings.word_embeddings.weight".to_owned()));
    let masked = of(json!({"architectures": ["BertForMaskedLM"]}));
    verify(&masked).unwrap();
    assert_eq!(outputs(&masked), ["logits[b s v]"]);
    let count = |m: &Module, name: &str| names(m).iter().filter(|n| *n == name).count();
    assert_eq!(count(&masked, "bert.embeddings.word_embeddings.weight"), 2);
    let own = of(json!({"architectures": ["BertForMaskedLM"], "tie_word_embeddings": false}));
    assert_eq!(count(&own, "bert.embeddings.word_embeddings.weight"), 1);
    assert_eq!(count(&own, "cls.predictions.decoder.bias"), 1);
    for module in [model, masked, own] {
        assert!(attentions(&module).iter().all(|a| a.mask == Mask::Full && a.scale == 1.0 / 8f64.sqrt()));
        assert_eq!(count(&module, "token_type_ids"), 1);
    }
}

#[test]
fn berts_that_are_not_understood_are_refused() {
    let bert = |changes: Value| with(&bert(), changes);
    for other in ["BertForPreTraining", "BertLMHeadModel", "BertForSequenceClassification"] {
        refused(&bert(json!({"architectures": [other]})), "M11", &[other]);
    }
    refused(&bert(json!({"is_decoder": true})), "M05", &["is_decoder"]);
    refused(&bert(json!({"add_cross_attention": true})), "M05", &["add_cross_attention"]);
    refused(&bert(json!({"position_embedding_type": "relative_key"})), "M05", &["position_embedding_type"]);
    refused(&bert(json!({"embedding_size": 8})), "M06", &["embedding_size"]);
    refused(&bert(json!({"num_attention_heads": 5})), "M07", &["32", "5"]);
    let long = import(&bert(json!({})), "m", &Workload::prefill(1, 17)).unwrap_err();
    assert_eq!(long.code, "M08");
    assert!(long.message.contains("max_position_embeddings"), "{}", long.message);
    ok(&bert(
        json!({"is_decoder": false, "position_embedding_type": "absolute", "pooler_type": "first_token_transform",
        "directionality": "bidi", "classifier_dropout": null, "chunk_size_feed_forward": 4}),
    ));
}

#[test]
fn dropout_is_for_training() {
    let dropouts = |config: &Value, mode: Mode| -> Vec<Option<Dropout>> {
        let model = family::read(config, &[]).unwrap();
        let workload = Workload { mode, ..Workload::prefill(1, 16) };
        model.check(&workload).unwrap();
        let module = build::module(&model, "m", &workload).unwrap();
        verify(&module).unwrap();
        attentions(&module).iter().map(|a| a.dropout).collect()
    };
    let tenth = Some(Dropout { rate: 0.1, seed: 0, keyed: Keyed::Position });
    let llama = with(&small("llama"), json!({"attention_dropout": 0.1}));
    let gpt2 = with(&small("gpt2"), json!({"attn_pdrop": 0.1, "resid_pdrop": 0, "embd_pdrop": 0.0}));
    let bert = with(
        &bert(),
        json!({"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.0}),
    );
    for config in [llama, gpt2, bert] {
        assert_eq!(dropouts(&config, Mode::Prefill), [None]);
        assert_eq!(dropouts(&config, Mode::Train), [tenth]);
    }
    assert_eq!(dropouts(&small("llama"), Mode::Train), [None]);
    assert_eq!(dropouts(&t5(), Mode::Train), [None; 3]);
    // Dropout in the library: GPT-2 and BERT after the embedding and twice in a block; T5 after both embeddings and
    // both last norms, three times in an encoder block and four times in a decoder block, including inside the MLP.
    let places = |config: &Value| -> Vec<(String, usize)> {
        let module =
            import(config, "m", &Workload { mode: Mode::Train, ..Workload::prefill(1, 16) }).unwrap();
        let drops = |f: &ithaca_ir::Function| f.nodes.iter().filter(|n| n.op.name() == "dropout").count();
        let found = module.functions.values().map(|f| (f.name.clone(), drops(f)));
        found.filter(|(_, n)| *n > 0).collect()
    };
    let named = |found: &[(&str, usize)]| -> Vec<(String, usize)> {
        found.iter().map(|&(name, n)| (name.to_owned(), n)).collect()
    };
    assert_eq!(places(&small("gpt2")), named(&[("embed", 1), ("block", 2)]));
    let bert = json!({"model_type": "bert", "architectures": ["BertForMaskedLM"]});
    assert_eq!(places(&bert), named(&[("embed", 1), ("block", 2)]));
    let t5 = with(&t5(), json!({"dropout_rate": 0.1}));
    let expected = [
        ("embed_encoder", 1),
        ("encoder_block", 3),
        ("encoder_norm", 1),
        ("embed_decoder", 1),
        ("decoder_block", 4),
        ("head", 1),
    ];
    assert_eq!(places(&t5), named(&expected));
    let phi3 = with(&small("phi3"), json!({"embd_pdrop": 0.5, "resid_pdrop": 0.5}));
    assert_eq!(places(&phi3), named(&[("block", 2)]), "the library drops nothing of the embedding");
    let ignore = ["dropout_rate".to_owned()];
    assert_eq!(family::read(&t5, &ignore).unwrap().dropout, spec::Dropouts::default());
    refused(&with(&small("llama"), json!({"attention_dropout": 1.0})), "M04", &["attention_dropout", "1"]);
    refused(&with(&small("llama"), json!({"attention_dropout": "no"})), "M03", &["attention_dropout"]);
    ok(&with(&small("llama"), json!({"attention_dropout": null})));
}

#[test]
fn small_t5s_and_berts_keep_what_tells_them_apart() {
    let options = Shrink::to(512, 32, 8);
    let large = example("t5-3b");
    let small = shrink(&large, &[], &options).unwrap();
    let module = ok(&small);
    let size = |name: &str| module.space.size(module.space.dim(name).unwrap());
    // 32 heads of 128 are four times as wide as the stream of 1024.
    assert_eq!(["h", "d", "m", "r"].map(size), [32, 8, 64, 32]);
    let bert = shrink(&example("bert-large-uncased"), &[], &options).unwrap();
    assert_eq!(bert["max_position_embeddings"], 32);
    let kept = |config: &Value, module: &Module| {
        let large = import(config, "m", &Workload::prefill(1, 16)).unwrap();
        names(&large) == names(module)
    };
    assert!(kept(&large, &module) && kept(&example("bert-large-uncased"), &ok(&bert)));
}

/// The library's bucket of every offset, as `tests/goldens/make.py` writes it.
#[test]
fn buckets_of_relative_positions_are_the_librarys() {
    let path = format!("{}/../../tests/goldens/t5-buckets.json", env!("CARGO_MANIFEST_DIR"));
    let tables: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut wrong = Vec::new();
    for table in tables.as_array().unwrap() {
        let number = |value: &Value| value.as_i64().unwrap();
        let sides = if table["sides"] == "both" { Sides::Both } else { Sides::Before };
        let (buckets, max_distance) =
            (table["buckets"].as_u64().unwrap(), table["max_distance"].as_u64().unwrap());
        let module = ok(&t5());
        let bias = RelativeBias { buckets: module.space.dim("r").unwrap(), max_distance, sides };
        let starts = table["starts"].as_array().unwrap();
        for (i, start) in starts.iter().enumerate() {
            let end = starts.get(i + 1).map_or(&table["end"], |next| &next[0]);
            for offset in number(&start[0])..number(end) {
                let (got, expected) = (bias.bucket(buckets, offset), start[1].as_u64().unwrap());
                if got != expected {
                    wrong.push(format!(
                        "{sides:?} {buckets} {max_distance}: {offset} is in {got}, not {expected}"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
