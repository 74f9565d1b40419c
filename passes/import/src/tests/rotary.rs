//! Rotary angles: spellings, scalings, the part of a head that is turned, refusals.

use super::*;

#[test]
fn both_spellings_of_rope_agree() {
    let base = small("llama");
    for (old, new) in [
        (json!({"rope_theta": 500.0}), json!({"rope_parameters": {"rope_theta": 500.0}})),
        (
            json!({"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2}}),
            json!({"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}}),
        ),
        (
            json!({"rope_theta": 500.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
            json!({"rope_parameters": {"rope_theta": 500.0, "rope_type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 2048}}),
        ),
        (json!({"rope_scaling": null}), json!({"rope_parameters": null})),
    ] {
        assert_eq!(rotary(&with(&base, old)), rotary(&with(&base, new)));
    }
    assert_eq!(rotary(&base).theta, 10_000.0);
}

#[test]
fn yarn_follows_the_attention_factor_rule() {
    let attention = |changes: Value| {
        let rope =
            with(&json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}), changes);
        match rotary(&with(&small("qwen3"), json!({ "rope_scaling": rope }))).scaling {
            Scaling::Yarn { attention, .. } => attention,
            other => panic!("{other:?} is not yarn"),
        }
    };
    let sharpened = |mscale: f64| 0.1 * mscale * 4.0_f64.ln() + 1.0;
    assert_eq!(attention(json!({})), sharpened(1.0));
    assert_eq!(attention(json!({"attention_factor": 1.25, "mscale": 3.0, "mscale_all_dim": 1.0})), 1.25);
    assert_eq!(attention(json!({"mscale": 0.5, "mscale_all_dim": 2.0})), sharpened(0.5) / sharpened(2.0));
    assert_eq!(attention(json!({"mscale": 0.5, "mscale_all_dim": 0})), sharpened(1.0));
    assert_eq!(attention(json!({"factor": 0.5})), 1.0);
}

#[test]
fn yarn_reads_its_ramp_and_a_null_factor_is_the_ratio_of_lengths() {
    let rope = json!({"type": "yarn", "factor": null, "original_max_position_embeddings": 512, "beta_fast": 0,
        "beta_slow": 2, "truncate": false});
    let scaling = rotary(&with(&small("llama"), json!({ "rope_scaling": rope }))).scaling;
    let Scaling::Yarn { factor, beta_fast, beta_slow, original, truncate, .. } = scaling else {
        panic!("{scaling:?} is not yarn");
    };
    assert_eq!((factor, beta_fast, beta_slow, original, truncate), (4.0, 32.0, 2.0, 512.0, false));
}

#[test]
fn rope_that_is_not_understood_is_refused() {
    let rope = |value: Value| with(&small("llama"), json!({ "rope_scaling": value }));
    refused(&rope(json!({"type": "dynamic", "factor": 2.0})), "M05", &["rope_scaling.rope_type", "dynamic"]);
    refused(&rope(json!({"rope_type": "longrope"})), "M05", &["longrope"]);
    refused(&rope(json!({"type": "linear"})), "M03", &["rope_scaling.factor"]);
    refused(&rope(json!({"type": "linear", "factor": 0})), "M04", &["rope_scaling.factor"]);
    refused(&rope(json!({"type": "linear", "factor": "2"})), "M03", &["rope_scaling.factor"]);
    refused(
        &rope(json!({"type": "linear", "factor": 2, "beta_fast": 3})),
        "M06",
        &["rope_scaling.beta_fast"],
    );
    refused(&rope(json!({"type": "linear", "rope_type": "yarn", "factor": 2})), "M07", &["linear", "yarn"]);
    refused(&rope(json!("linear")), "M03", &["rope_scaling"]);
    let llama3 = json!({"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 2});
    refused(&rope(llama3), "M04", &["high_freq_factor"]);
    refused(
        &with(&small("phi3"), json!({"rope_scaling": {"type": "yarn", "factor": 2.0}})),
        "M05",
        &["yarn"],
    );
    let twice = json!({"rope_scaling": {"type": "linear", "factor": 2},
        "rope_parameters": {"rope_type": "linear", "factor": 4}});
    refused(&with(&small("llama"), twice), "M07", &["rope_parameters", "rope_scaling"]);
    let bases = json!({"rope_theta": 5, "rope_parameters": {"rope_theta": 6}});
    refused(&with(&small("llama"), bases), "M07", &["rope_theta"]);
    refused(&with(&small("llama"), json!({"partial_rotary_factor": 0.5})), "M05", &["partial_rotary_factor"]);
}

#[test]
fn heads_that_cannot_be_turned_are_refused() {
    refused(&with(&small("llama"), json!({"head_dim": 7})), "M07", &["7"]);
    refused(&with(&small("phi3"), json!({"partial_rotary_factor": 0.4})), "M07", &["3 of the 8"]);
    assert_eq!(rotary(&with(&small("phi3"), json!({"partial_rotary_factor": 0.5}))).width, 4);
}

#[test]
fn parameters_may_be_nested_by_type_of_layer() {
    let config = with(
        &small("qwen3"),
        json!({"use_sliding_window": true, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 7e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    );
    let module = ok(&config);
    let bases = |name: &str| {
        let function = &module.functions[module.function(name).unwrap()];
        let rotaries = function.nodes.iter().filter_map(|n| match &n.op {
            Op::Rotary(r) => Some((r.theta, r.scaling.clone())),
            _ => None,
        });
        rotaries.collect::<Vec<_>>()
    };
    assert_eq!(bases("block_window"), vec![(1e4, Scaling::None); 2]);
    assert_eq!(bases("block_full"), vec![(7e5, Scaling::Linear { factor: 8.0 }); 2]);
}

#[test]
fn a_quarter_of_a_head_is_rotated_by_default_in_gpt_neox() {
    let neox = |changes: Value| rotary(&with(&small("gpt_neox"), changes));
    assert_eq!((neox(json!({})).width, neox(json!({})).theta), (2, 1e4));
    let older = neox(json!({"rotary_pct": 0.5, "rotary_emb_base": 500}));
    assert_eq!((older.width, older.theta), (4, 500.0));
    let newer = json!({"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}});
    assert_eq!(neox(newer), older);
    let both = json!({"rotary_pct": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}});
    refused(&with(&small("gpt_neox"), both), "M07", &["rotary_pct"]);
}
