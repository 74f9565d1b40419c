//! Windows and caps of attention, by family and by layer.

use super::*;

#[test]
fn windows_follow_the_family() {
    assert_eq!(masks(&small("llama")), [Mask::Causal, Mask::Causal]);
    assert_eq!(masks(&small("mistral")), [window(4096), window(4096)]);
    assert_eq!(
        masks(&with(&small("mistral"), json!({"sliding_window": null}))),
        [Mask::Causal, Mask::Causal]
    );
    assert_eq!(masks(&with(&small("phi3"), json!({"sliding_window": 5}))), [window(5), window(5)]);
    let qwen = |changes: Value| masks(&with(&small("qwen2"), changes));
    assert_eq!(qwen(json!({"sliding_window": 5})), [Mask::Causal, Mask::Causal]);
    let used = json!({"sliding_window": 5, "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(qwen(used), [Mask::Causal, window(5)]);
    let late = json!({"sliding_window": 5, "use_sliding_window": true});
    assert_eq!(qwen(late), [Mask::Causal, Mask::Causal]);
    let listed = json!({"sliding_window": 5, "use_sliding_window": true,
        "layer_types": ["sliding_attention", "full_attention"]});
    assert_eq!(qwen(listed), [window(5), Mask::Causal]);
}

#[test]
fn windows_and_caps_of_gemma_follow_its_fields() {
    let gemma = |changes: Value| with(&small("gemma2"), changes);
    assert_eq!(masks(&small("gemma2")), [window(4096), Mask::Causal]);
    assert_eq!(
        masks(&gemma(json!({"layer_types": ["full_attention", "full_attention"]}))),
        [Mask::Causal, Mask::Causal]
    );
    refused(&gemma(json!({"sliding_window": null})), "M07", &["sliding_window"]);
    let caps = |config: &Value| -> Vec<Option<f64>> {
        let module = ok(config);
        let found = nodes(&module).filter_map(|(_, n)| match &n.op {
            Op::Attention(a) => Some(a.softcap),
            _ => None,
        });
        found.collect()
    };
    assert_eq!(caps(&small("gemma2")), [Some(50.0); 2]);
    assert_eq!(caps(&gemma(json!({"attn_logit_softcapping": null}))), [None; 2]);
    let capped = |config: &Value| nodes(&ok(config)).any(|(f, n)| f == "head" && n.op.name() == "tanh");
    assert!(capped(&small("gemma2")));
    assert!(!capped(&gemma(json!({"final_logit_softcapping": null}))));
}

#[test]
fn windows_that_do_not_fit_are_refused() {
    let types = json!(["sliding_attention", "full_attention"]);
    refused(&with(&small("qwen2"), json!({"layer_types": types})), "M07", &["sliding_attention"]);
    refused(
        &with(&small("qwen2"), json!({"layer_types": ["full_attention"]})),
        "M07",
        &["layer_types", "1", "2"],
    );
    let linear = json!(["linear_attention", "full_attention"]);
    refused(&with(&small("qwen3"), json!({"layer_types": linear})), "M05", &["linear_attention"]);
    refused(&with(&small("llama"), json!({"sliding_window": 8})), "M06", &["sliding_window"]);
    refused(&with(&small("mistral"), json!({"layer_types": types})), "M06", &["layer_types"]);
    refused(&with(&small("mistral"), json!({"sliding_window": 0})), "M04", &["sliding_window", "0"]);
}
