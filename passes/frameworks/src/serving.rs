//! Servers: vLLM, SGLang and TensorRT-LLM.

use std::fmt::Write;

use ithaca_import::{Facts, Mode};
use ithaca_ir::DType;
use ithaca_layout::shard::Zero;

use crate::change::Change;
use crate::comment::{Subject, commented};
use crate::layout::{Layout, Role, TokenOrder};
use crate::rules::{Copies, Rules};
use crate::setting::{Setting, Settings};
use crate::shell;

/// The order of ranks of vLLM and SGLang, fastest first. Replicas are processes of their own.
pub(crate) const ORDER: [Role; 5] =
    [Role::DecodeContext, Role::Tensor, Role::Tokens, Role::Stages, Role::Data];

/// The rules of all servers.
fn serves(rules: &mut Rules<'_>) {
    let (layout, facts, title) = (rules.layout, rules.facts, rules.title);
    rules.unsupported();
    rules.refuse(
        layout.mode == Mode::Train,
        || format!("the plan is a training step, and {title} serves"),
        None,
    );
    rules.refuse(
        !facts.is_decoder,
        || format!("{} is not a decoder, and exports to {title} are for decoders", facts.family),
        None,
    );
    rules.refuse(
        layout.zero != Zero::Off,
        || format!("ranks of the plan hold parts of weights (ZeRO {}), and those of {title} hold weights whole or by heads and widths", layout.zero),
        Change::Zero(Zero::Off),
    );
    rules.refuse(
        layout.sequence_parallel,
        || format!("the plan splits the residual stream over the ranks that split weights, and {title} keeps it whole"),
        Change::SequenceParallel(false),
    );
    rules.refuse(
        layout.degree(Role::Heads) > 1,
        || format!("the plan splits prompts outside attention and heads inside, and {title} splits weights by heads instead"),
        Change::Role(Role::Heads, Role::Tensor),
    );
    rules.refuse(
        layout.degree(Role::Cache) > 1,
        || format!("caches of the plan are split over {} ranks with whole weights, and {title} splits them over ranks that split weights", layout.degree(Role::Cache)),
        Change::Role(Role::Cache, Role::DecodeContext),
    );
    rules.refuse(
        layout.degree(Role::Experts) > 1,
        || format!("ranks of the plan split experts only, and {title} splits experts over ranks that split weights or the batch"),
        Change::Role(Role::Experts, Role::Tensor),
    );
    rules.refuse(
        layout.dtype == DType::F64,
        || format!("the plan computes in f64, and {title} does not"),
        None,
    );
    rules.refuse(
        layout.pages.and_then(|pages| pages.host).is_some_and(|pages| pages > 0),
        || {
            format!(
                "the plan has pages of caches in host memory, and exports to {title} keep them on the devices"
            )
        },
        None,
    );
    rules.refuse(
        layout.cache_type.is_some_and(|cache| cache != DType::F8E4M3),
        || format!("caches of the plan have another type than activations, and those of {title} have it in f8e4m3 only"),
        None,
    );
    rules.tensor_heads(Copies::Allowed);
    rules.experts();
}

/// A note on caches of eight bits.
pub(crate) fn notes(layout: &Layout, title: &str) -> Vec<String> {
    let scaled = layout.cache_type.map(|cache| {
        format!(
            "caches in {cache} have a scale for each token and head in the plan; {title} takes scales from the checkpoint, or 1"
        )
    });
    scaled.into_iter().collect()
}

/// Experts of servers are split over all ranks of a stage.
fn all_experts(rules: &mut Rules<'_>) {
    let (layout, title) = (rules.layout, rules.title);
    let all = layout.tensor() * layout.context() * layout.data();
    rules.refuse(
        layout.experts() > 1 && layout.experts() != all,
        || format!("experts of the plan are split over {} ranks, and {title} splits them over all {all} of a stage", layout.experts()),
        Change::ExpertsOverAll,
    );
}

/// The rules that vLLM checks.
pub(crate) fn vllm(rules: &mut Rules<'_>) {
    serves(rules);
    all_experts(rules);
    let (layout, facts, title) = (rules.layout, rules.facts, rules.title);
    let (tokens, tensor, dcp) =
        (layout.degree(Role::Tokens), layout.tensor(), layout.degree(Role::DecodeContext));
    rules.refuse(
        tokens > 1 && !facts.is_latent,
        || format!("the plan splits the tokens of prompts over {tokens} ranks, and {title} does so for models with latent attention only"),
        Change::Role(Role::Tokens, Role::Tensor),
    );
    let is_gathered = layout.movement.as_deref() == Some("gather");
    rules.refuse(
        tokens > 1 && facts.is_latent && !is_gathered,
        || format!("keys of the plan do not meet queries by a gather, and those of {title} do"),
        Change::Movement("gather"),
    );
    rules.refuse(
        tokens > 1 && facts.is_latent && layout.order != TokenOrder::Zigzag,
        || format!("tokens of the plan are not in zigzag order, and those of {title} are"),
        Change::Order(TokenOrder::Zigzag),
    );
    context(rules, true);
    rules.refuse(
        dcp > 1 && tokens > 1 && ![1, tokens, tensor * tokens].contains(&dcp),
        || format!("the plan splits caches over {dcp} ranks beside {tokens} that split prompts, and {title} over 1, {tokens} or {}", tensor * tokens),
        None,
    );
}

/// The rules of caches that are split by tokens.
fn context(rules: &mut Rules<'_>, is_strict: bool) {
    let (layout, facts, title) = (rules.layout, rules.facts, rules.title);
    let (tensor, dcp) = (layout.tensor(), layout.degree(Role::DecodeContext));
    if dcp == 1 {
        return;
    }
    let (q, kv) = (facts.heads, facts.kv_heads.max(1));
    rules.refuse(
        !facts.is_latent && (tensor <= kv || dcp > tensor / kv),
        || {
            format!(
                "caches of the plan are split over {dcp} ranks by tokens, and {title} splits them over at most {}: {tensor} ranks that split \
                 weights for {kv} key/value heads",
                (tensor / kv).max(1)
            )
        },
        Change::Role(Role::DecodeContext, Role::Tensor),
    );
    rules.refuse(
        is_strict && !facts.is_latent && !(q / kv).is_multiple_of(dcp),
        || format!("{} query heads for each key/value head are not divisible by decode context degree {dcp}, as {title} needs", q / kv),
        Change::Role(Role::DecodeContext, Role::Tensor),
    );
}

/// The rules that SGLang checks, and one that it checks on one platform only: a cache that is split otherwise is corrupted without a word.
pub(crate) fn sglang(rules: &mut Rules<'_>) {
    serves(rules);
    let (layout, title) = (rules.layout, rules.title);
    let tokens = layout.degree(Role::Tokens);
    rules.refuse(
        tokens > 1,
        || format!("the plan splits the tokens of prompts over {tokens} ranks by a layout that {title} has for single models only"),
        Change::Role(Role::Tokens, Role::Tensor),
    );
    context(rules, false);
    let (experts, tensor) = (layout.experts(), layout.tensor());
    rules.refuse(
        experts > 1 && layout.splits_experts_over(Role::Data),
        || format!("experts of the plan are split over {experts} ranks with sequences of their own, and replicas of {title} share none"),
        Change::ExpertsOverWeights,
    );
    rules.refuse(
        experts > 1 && !layout.splits_experts_over(Role::Data) && experts != tensor,
        || format!("experts of the plan are split over {experts} ranks, and {title} splits them over the {tensor} ranks that split weights"),
        Change::ExpertsOverWeights,
    );
}

/// The rules that TensorRT-LLM checks.
pub(crate) fn tensorrt_llm(rules: &mut Rules<'_>) {
    serves(rules);
    let (layout, title) = (rules.layout, rules.title);
    let (tokens, dcp, data, tensor) =
        (layout.degree(Role::Tokens), layout.degree(Role::DecodeContext), layout.data(), layout.tensor());
    rules.refuse(
        tokens > 1,
        || format!("the plan splits the tokens of prompts over {tokens} ranks, and {title} does so for single models only"),
        Change::Role(Role::Tokens, Role::Tensor),
    );
    rules.refuse(
        dcp > 1,
        || format!("caches of the plan are split over {dcp} ranks by tokens, and Helix of {title} does so on servers that decode only"),
        Change::Role(Role::DecodeContext, Role::Tensor),
    );
    rules.refuse(
        data > 1,
        || format!("the plan has {data} replicas, and a server of {title} is one: plan for a replica, and start {data}"),
        None,
    );
    rules.refuse(
        layout.experts() > 1 && layout.experts() * layout.expert_tensor() != tensor,
        || format!("experts of the plan are not split over the {tensor} ranks that split weights, and those of {title} are"),
        Change::ExpertsOverWeights,
    );
}

/// The flags of vLLM.
pub(crate) fn vllm_settings(layout: &Layout, facts: &Facts, set: &mut Settings) {
    set.set("tensor-parallel-size", layout.tensor());
    set.degree("pipeline-parallel-size", layout.stages());
    set.degree("data-parallel-size", layout.data());
    set.degree("prefill-context-parallel-size", layout.degree(Role::Tokens));
    let dcp = layout.degree(Role::DecodeContext);
    set.degree("decode-context-parallel-size", dcp);
    if let (TokenOrder::Striped(block), true) = (&layout.order, dcp > 1) {
        set.degree("cp-kv-cache-interleave-size", *block);
    }
    set.flag("enable-expert-parallel", facts.experts.is_some() && layout.experts() > 1);
}

/// The flags of SGLang.
pub(crate) fn sglang_settings(layout: &Layout, facts: &Facts, set: &mut Settings) {
    set.set("tp-size", layout.tensor());
    set.degree("pp-size", layout.stages());
    set.degree("dp-size", layout.data());
    set.degree("dcp-size", layout.degree(Role::DecodeContext));
    if facts.experts.is_some() {
        set.degree("ep-size", layout.experts());
    }
}

/// The fields of TensorRT-LLM.
pub(crate) fn tensorrt_llm_settings(layout: &Layout, facts: &Facts, set: &mut Settings) {
    set.set("tensor_parallel_size", layout.tensor());
    set.degree("pipeline_parallel_size", layout.stages());
    if facts.experts.is_some() {
        set.set("moe_expert_parallel_size", layout.experts());
        set.set("moe_tensor_parallel_size", layout.expert_tensor());
    }
}

fn dtype(layout: &Layout) -> &'static str {
    match layout.dtype {
        DType::F16 => "float16",
        DType::F32 => "float32",
        _ => "bfloat16",
    }
}

/// Caches of eight bits, as vLLM and SGLang spell them.
fn cache_type(layout: &Layout, set: &mut Settings) {
    if layout.cache_type.is_some() {
        set.set("kv-cache-dtype", "fp8_e4m3");
    }
}

/// Tokens of a sequence that the server has room for.
fn context_length(layout: &Layout) -> u64 {
    layout.cache.unwrap_or(layout.sequence).max(layout.sequence)
}

/// A script that starts vLLM.
pub(crate) fn vllm_text(layout: &Layout, facts: &Facts, subject: &Subject, notes: &[String]) -> String {
    let (mut set, mut others) = (Settings::default(), Settings::default());
    vllm_settings(layout, facts, &mut set);
    others.set("dtype", dtype(layout));
    others.set("max-model-len", context_length(layout));
    others.set("max-num-seqs", layout.batch.div_ceil(layout.data().max(1)));
    others.degree("block-size", layout.pages.map_or(1, |pages| pages.tokens));
    cache_type(layout, &mut others);
    script(layout, subject, notes, "exec vllm serve \"$MODEL\"", &[&set.0, &others.0])
}

/// A script that starts SGLang.
pub(crate) fn sglang_text(layout: &Layout, facts: &Facts, subject: &Subject, notes: &[String]) -> String {
    let (mut set, mut others) = (Settings::default(), Settings::default());
    sglang_settings(layout, facts, &mut set);
    others.set("dtype", dtype(layout));
    others.set("context-length", context_length(layout));
    others.set("max-running-requests", layout.batch);
    others.degree("page-size", layout.pages.map_or(1, |pages| pages.tokens));
    cache_type(layout, &mut others);
    script(
        layout,
        subject,
        notes,
        "exec python -m sglang.launch_server --model-path \"$MODEL\"",
        &[&set.0, &others.0],
    )
}

fn script(layout: &Layout, subject: &Subject, notes: &[String], head: &str, groups: &[&[Setting]]) -> String {
    let mut out = String::from("#!/usr/bin/env bash\n");
    out += &commented(notes, "# ");
    let (replicas, node) = (layout.data().max(1), subject.node.max(1));
    let per_replica = layout.ranks() / replicas;
    let nodes = match node / per_replica.max(1) {
        0 => format!("A replica spans {} nodes", per_replica.div_ceil(node)),
        on_a_node => format!("{replicas} replicas need {} nodes", replicas.div_ceil(on_a_node)),
    };
    if layout.ranks() > node {
        let _ = writeln!(out, "# {nodes}: start them as the server's manual says.");
    }
    let _ = writeln!(out, "set -euo pipefail\n: \"${{MODEL:?the path or name of {}}}\"", subject.model);
    out + &shell::command(head, groups)
}

/// The YAML of `trtllm-serve --config`.
pub(crate) fn tensorrt_llm_text(layout: &Layout, facts: &Facts, notes: &[String]) -> String {
    let mut set = Settings::default();
    tensorrt_llm_settings(layout, facts, &mut set);
    set.set("max_batch_size", layout.batch);
    set.set("max_seq_len", context_length(layout));
    set.set("dtype", dtype(layout));
    let mut out = commented(notes, "# ");
    for Setting { key, value } in &set.0 {
        let _ = writeln!(out, "{key}: {value}");
    }
    if layout.pages.is_some() || layout.cache_type.is_some() {
        out += "kv_cache_config:\n";
    }
    if let Some(pages) = layout.pages {
        let _ = writeln!(out, "  tokens_per_block: {}", pages.tokens);
    }
    if layout.cache_type.is_some() {
        out += "  dtype: fp8\n";
    }
    out
}
