//! Megatron-LM, and NeMo, which configures the same library: rules, rank order and names.

use ithaca_differentiate::{DropoutChoice, PipelineOrder, Recompute};
use ithaca_import::{Facts, LlamaFacts, Mode};
use ithaca_ir::DType;
use ithaca_layout::shard::Zero;

use crate::change::Change;
use crate::context;
use crate::layout::{Axis, Layout, Role};
use crate::order::Permutation;
use crate::rules::{Copies, Rules};
use crate::setting::{Settings, precision};

/// The order of ranks, fastest first.
const ORDER: [Role; 5] = [Role::Tensor, Role::Heads, Role::Tokens, Role::Data, Role::Stages];

/// The order with `--use-tp-pp-dp-mapping`.
const STAGES_INSIDE: [Role; 5] = [Role::Tensor, Role::Heads, Role::Tokens, Role::Stages, Role::Data];

/// The rules that Megatron-LM checks, and choices that it lacks.
pub(crate) fn check(rules: &mut Rules<'_>) {
    let (layout, facts, title) = (rules.layout, rules.facts, rules.title);
    rules.unsupported();
    rules.trains();
    rules.keeps_states();
    rules.tensor_heads(Copies::Allowed);
    rules.experts();
    context::check(rules);
    let (tensor, context) = (layout.tensor(), layout.context());
    if layout.sequence_parallel {
        rules.sequence(tensor * context, &format!("tensor degree {tensor} times context degree {context}"));
    }
    rules.refuse(
        facts.experts.is_some() && layout.experts() > 1 && tensor > 1 && !layout.sequence_parallel,
        || format!("experts are split and the residual stream is whole on {tensor} ranks, and {title} needs sequence parallelism there"),
        Change::SequenceParallel(true),
    );
    rules.refuse(
        !experts_are_contiguous(layout),
        || format!("experts are split over ranks that {title} does not number in a row"),
        None,
    );
    rules.batch();
    if layout.mode != Mode::Train {
        return;
    }
    rules.pipeline(&[PipelineOrder::OneForwardOneBackward, PipelineOrder::Interleaved]);
    let (stages, micro_batches) = (layout.stages(), layout.micro_batches());
    rules.refuse(
        layout.chunks() > 1 && !micro_batches.is_multiple_of(stages),
        || format!("{micro_batches} micro-batches are not divisible by {stages} interleaved stages, as {title} needs"),
        Change::Pipeline(PipelineOrder::OneForwardOneBackward),
    );
    rules.recompute(
        |policy| matches!(policy, Recompute::None | Recompute::Selective | Recompute::Full { .. }),
        |_| Recompute::FULL,
    );
    rules.whole_loss();
    let optimizer = layout.training.optimizer.is_none();
    rules.refuse(optimizer, || format!("the plan has no optimizer, and a step of {title} has one"), None);
}

/// Whether the ranks that split experts, after those that split their width, are the fastest in the second grid of ranks.
fn experts_are_contiguous(layout: &Layout) -> bool {
    let splits_width = |axis: &&&Axis| axis.role == Role::Tensor && !axis.splits_experts;
    let order = |role: Role| ORDER.iter().position(|other| *other == role);
    let mut axes: Vec<&Axis> = layout.axes.iter().rev().collect();
    axes.sort_by_key(|axis| order(axis.role));
    let rest = axes.iter().filter(|axis| !splits_width(axis)).skip_while(|axis| axis.splits_experts);
    let widths_first = axes.iter().skip_while(splits_width).all(|axis| !splits_width(&axis));
    layout.experts() == 1 || (widths_first && rest.into_iter().all(|axis| !axis.splits_experts))
}

/// The order of ranks: the nearer to the mesh of the two that there are.
pub(crate) fn order(layout: &Layout) -> Permutation {
    let usual = Permutation::new(layout, &ORDER);
    let inside = Permutation::new(layout, &STAGES_INSIDE);
    if !usual.is_identity() && inside.is_identity() { inside } else { usual }
}

/// The settings of a layout, by the names of flags.
pub(crate) fn settings(layout: &Layout, facts: &Facts, set: &mut Settings) {
    set.degree("tensor-model-parallel-size", layout.tensor());
    // At tensor degree 1 the flag is dropped without a word.
    set.flag("sequence-parallel", layout.sequence_parallel && layout.tensor() > 1);
    set.degree("context-parallel-size", layout.context());
    if let Some(kind) = context::comm_type(layout) {
        set.set("cp-comm-type", kind);
        if kind == "a2a+p2p" {
            set.set(
                "hierarchical-context-parallel-sizes",
                vec![layout.degree(Role::Heads), layout.degree(Role::Tokens)],
            );
        }
    }
    set.degree("pipeline-model-parallel-size", layout.stages());
    if layout.stages() > 1 {
        let n = layout.stages() * layout.chunks();
        if !layout.is_even() || !facts.layers.is_multiple_of(n) {
            if !layout.chunk_layers.is_empty() {
                set.set("pipeline-model-parallel-layout", chunks(&layout.chunk_layers));
            }
        } else {
            set.degree("num-virtual-stages-per-pipeline-rank", layout.chunks());
        }
        let (usual, inside) = (Permutation::new(layout, &ORDER), Permutation::new(layout, &STAGES_INSIDE));
        set.flag("use-tp-pp-dp-mapping", !usual.is_identity() && inside.is_identity());
    }
    if facts.experts.is_some() {
        set.degree("expert-model-parallel-size", layout.experts());
        if layout.expert_tensor() != layout.tensor() {
            set.set("expert-tensor-parallel-size", layout.expert_tensor());
        }
    }
    if layout.mode == Mode::Train {
        match layout.zero {
            Zero::Off => {}
            Zero::Optimizer => set.flag("use-distributed-optimizer", true),
            Zero::Gradients | Zero::Parameters | Zero::ParametersAbove(_) => {
                set.flag("use-distributed-optimizer", true);
                set.flag("use-megatron-fsdp", true);
                let strategy =
                    if layout.zero == Zero::Gradients { "optim_grads" } else { "optim_grads_params" };
                set.set("data-parallel-sharding-strategy", strategy);
                set.set("ckpt-format", "fsdp_dtensor");
                set.flag("no-gradient-accumulation-fusion", true);
            }
        }
        match layout.training.recompute {
            Recompute::None | Recompute::KeepAttention => {}
            Recompute::Selective => {
                set.set("recompute-granularity", "selective");
                set.set("recompute-modules", vec!["core_attn"]);
            }
            Recompute::Full { every } => {
                set.set("recompute-granularity", "full");
                set.set("recompute-method", "uniform");
                set.set("recompute-num-layers", every);
            }
        }
    }
}

/// The layers of chunks as a pipeline layout: `Et*10|t*11L`.
fn chunks(layers: &[u64]) -> String {
    let of_stage = |&n: &u64| if n == 0 { String::new() } else { format!("t*{n}") };
    let stages: Vec<String> = layers.iter().map(of_stage).collect();
    format!("E{}L", stages.join("|"))
}

/// The settings of the workload and of the model.
pub(crate) fn workload(layout: &Layout, facts: &Facts, set: &mut Settings) {
    set.set("micro-batch-size", layout.micro_batch());
    set.set("global-batch-size", layout.batch);
    set.set("seq-length", layout.sequence);
    set.set("max-position-embeddings", facts.max_positions.max(layout.sequence));
    set.flag("bf16", layout.dtype == DType::BF16);
    set.flag("fp16", layout.dtype == DType::F16);
    // In bf16 sums are in f32, in f16 they are not, unless a flag says so.
    set.flag("grad-reduce-in-bf16", layout.gradients() == Some(DType::BF16));
    let is_wide = layout.dtype == DType::F16 && layout.gradients() == Some(DType::F32);
    set.flag("accumulate-allreduce-grads-in-fp32", is_wide);
    for (key, dtype) in fsdp_types(layout) {
        set.set(key, precision(dtype));
    }
}

/// The types in which Megatron's FSDP sums and sends gradients, which are those of weights unless flags say otherwise.
pub(crate) fn fsdp_types(layout: &Layout) -> Vec<(&'static str, DType)> {
    let is_fsdp = layout.zero >= Zero::Gradients;
    match layout.gradients().filter(|&sums| is_fsdp && sums != layout.dtype) {
        Some(sums) => {
            vec![("megatron-fsdp-main-grads-dtype", sums), ("megatron-fsdp-grad-comm-dtype", layout.dtype)]
        }
        None => Vec::new(),
    }
}

/// The settings of the optimizer.
pub(crate) fn optimizer(layout: &Layout, set: &mut Settings) {
    let Some(adamw) = layout.training.optimizer.filter(|_| layout.mode == Mode::Train) else { return };
    set.set("optimizer", "adam");
    set.set("lr", adamw.lr);
    set.set("adam-beta1", adamw.beta1);
    set.set("adam-beta2", adamw.beta2);
    set.set("adam-eps", adamw.eps);
    set.set("weight-decay", adamw.weight_decay);
    set.set("clip-grad", layout.training.clip.unwrap_or(0.0));
}

/// The settings of the architecture, where it is one that flags describe.
pub(crate) fn architecture(layout: &Layout, facts: &Facts, set: &mut Settings) -> bool {
    let Some(LlamaFacts { theta, scaling, has_qkv_bias, has_qk_norm }) = facts.llama else { return false };
    set.set("num-layers", facts.layers);
    set.set("hidden-size", facts.hidden);
    set.set("ffn-hidden-size", facts.ffn);
    set.set("num-attention-heads", facts.heads);
    if facts.kv_heads != facts.heads {
        set.flag("group-query-attention", true);
        set.set("num-query-groups", facts.kv_heads);
    }
    set.set("kv-channels", facts.head_dim);
    set.set("vocab-size", facts.vocab);
    set.set("normalization", "RMSNorm");
    set.set("norm-epsilon", facts.eps);
    set.flag("swiglu", true);
    set.flag("disable-bias-linear", true);
    set.flag("add-qkv-bias", has_qkv_bias);
    set.flag("qk-layernorm", has_qk_norm);
    set.set("position-embedding-type", "rope");
    set.set("rotary-base", serde_json::json!(theta as u64));
    if let Some(factor) = scaling {
        set.flag("use-rope-scaling", true);
        set.set("rope-scaling-factor", factor);
    }
    set.flag("untie-embeddings-and-output-weights", !facts.is_tied);
    let drops = layout.mode == Mode::Train && layout.training.dropout == DropoutChoice::Config;
    set.set("attention-dropout", if drops { facts.attention_dropout } else { 0.0 });
    set.set("hidden-dropout", if drops { facts.hidden_dropout } else { 0.0 });
    if let Some(experts) = facts.experts {
        set.set("num-experts", experts.count);
        set.set("moe-router-topk", experts.top);
        set.set("moe-ffn-hidden-size", experts.ffn);
        if let Some(shared) = experts.shared {
            set.set("moe-shared-expert-intermediate-size", shared);
        }
        set.set("moe-token-dispatcher-type", "alltoall");
        set.set("moe-router-load-balancing-type", "none");
        set.flag("moe-grouped-gemm", true);
    }
    true
}

/// Differences that change neither time nor memory of the plan.
pub(crate) fn notes(layout: &Layout, facts: &Facts) -> Vec<String> {
    let mut notes = Vec::new();
    if layout.degree(Role::Heads) > 1 && layout.degree(Role::Tokens) == 1 {
        notes.push("Megatron-LM deals tokens to ranks in zigzag also with a2a; all-to-alls and attention are the same".to_owned());
    }
    if facts.experts.is_some() {
        notes
            .push("experts take all tokens that choose them; the plan reserves slots for a bound".to_owned());
    }
    let unit = 128 * layout.tensor();
    if !facts.vocab.is_multiple_of(unit) {
        notes.push(format!(
            "Megatron-LM pads the vocabulary from {} to {} tokens",
            facts.vocab,
            facts.vocab.next_multiple_of(unit)
        ));
    }
    if layout.mode != Mode::Train {
        notes.push("the plan is a forward pass; the flags are those of its layout".to_owned());
    }
    notes
}
