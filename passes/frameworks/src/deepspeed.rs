//! DeepSpeed: Ulysses, AutoTP, AutoEP, pipelines and ZeRO, as a JSON configuration.

use ithaca_differentiate::{GradientType, Offload, PipelineOrder, Recompute};
use ithaca_import::{Facts, Mode};
use ithaca_ir::DType;
use ithaca_layout::shard::Zero;

use crate::change::Change;
use crate::layout::{Layout, Role};
use crate::rules::{Copies, Rules};
use crate::setting::{Settings, precision};

/// The order of ranks, fastest first.
pub(crate) const ORDER: [Role; 4] = [Role::Tensor, Role::Heads, Role::Data, Role::Stages];

/// The rules that DeepSpeed checks, and choices that it lacks.
pub(crate) fn check(rules: &mut Rules<'_>) {
    let (layout, facts, title) = (rules.layout, rules.facts, rules.title);
    rules.unsupported();
    rules.trains();
    rules.tensor_heads(Copies::Allowed);
    rules.experts();
    let (heads, tokens, tensor, stages) =
        (layout.degree(Role::Heads), layout.degree(Role::Tokens), layout.tensor(), layout.stages());
    rules.refuse(
        tokens > 1,
        || format!("the plan splits tokens inside attention, and {title} splits heads there (Ulysses)"),
        Change::TokensToHeads,
    );
    rules.refuse(
        layout.sequence_parallel,
        || format!("the plan splits the residual stream over the ranks that split weights, and AutoTP of {title} does not"),
        Change::SequenceParallel(false),
    );
    if heads > 1 {
        let (q, kv) = (facts.heads, facts.kv_heads.max(1));
        rules.refuse(
            !q.is_multiple_of(heads),
            || {
                format!(
                    "{q} query heads are not divisible by sequence-parallel degree {heads}, as {title} needs"
                )
            },
            None,
        );
        rules.refuse(
            !facts.is_latent && !kv.is_multiple_of(heads) && !heads.is_multiple_of(kv),
            || format!("{kv} key/value heads are no multiple and no divisor of sequence-parallel degree {heads}, as {title} needs"),
            None,
        );
        rules.sequence(heads, &format!("sequence-parallel degree {heads}"));
    }
    for (name, degree) in [("tensor", tensor), ("pipeline", stages)] {
        rules.refuse(
            heads > 1 && degree > 1,
            || format!("the plan joins Ulysses over {heads} ranks and {name} parallelism over {degree}, and {title} numbers ranks for one of them"),
            None,
        );
    }
    rules.refuse(
        layout.experts() > 1 && layout.expert_tensor() > 1,
        || format!("the plan splits experts and their width, and AutoEP of {title} splits experts only"),
        None,
    );
    if layout.mode != Mode::Train {
        return;
    }
    check_sums(rules);
    let stage = layout.zero.stage();
    rules.refuse(
        layout.training.offload == Offload::Optimizer && stage == 0,
        || format!("the plan has the states of the optimizer in host memory without ZeRO, and {title} needs ZeRO 1 for it"),
        Change::Zero(Zero::Optimizer),
    );
    rules.refuse(
        stages > 1 && stage > 1,
        || {
            format!(
                "the plan has {stages} stages and ZeRO {stage}, and a pipeline of {title} has ZeRO 1 at most"
            )
        },
        Change::Zero(Zero::Optimizer),
    );
    rules.refuse(
        layout.experts() > 1 && stage == 3 && (tensor > 1 || heads > 1),
        || format!("AutoEP of {title} has ZeRO 3 without tensor and sequence parallelism only"),
        Change::Zero(Zero::Gradients),
    );
    rules.pipeline(&[PipelineOrder::OneForwardOneBackward]);
    if stages > 1 {
        rules.even_stages();
    }
    rules.full_recompute();
    if heads == 1 {
        rules.whole_loss();
    }
    rules.batch();
}

/// Gradients have another type than weights with ZeRO only.
pub(crate) fn check_sums(rules: &mut Rules<'_>) {
    let layout = rules.layout;
    let is_mixed = layout.gradients().is_some_and(|dtype| dtype != layout.dtype);
    rules.refuse(
        is_mixed && stage(layout) == 0,
        || {
            format!(
                "gradients of the plan are summed in f32 without ZeRO, and DeepSpeed sums them in {}, that of the weights, then",
                layout.dtype
            )
        },
        Change::Gradients(GradientType::Weights),
    );
}

/// The stage of ZeRO: 1 where no rank shares weights with another, and gradients have a type of their own, which it has then only.
pub(crate) fn stage(layout: &Layout) -> u64 {
    let is_alone = layout.data() * layout.degree(Role::Heads) == 1;
    let is_mixed = layout.gradients().is_some_and(|dtype| dtype != layout.dtype);
    layout.zero.stage().max(u64::from(is_alone && is_mixed))
}

/// The keys of the configuration.
pub(crate) fn settings(layout: &Layout, facts: &Facts, set: &mut Settings) {
    set.degree("sequence_parallel_size", layout.degree(Role::Heads));
    set.degree("tensor_parallel.autotp_size", layout.tensor());
    if facts.experts.is_some() && layout.experts() > 1 {
        set.flag("expert_parallel.enabled", true);
        set.set("expert_parallel.autoep_size", layout.experts());
    }
    if layout.mode == Mode::Train && stage(layout) > 0 {
        set.set("zero_optimization.stage", stage(layout));
        if layout.training.offload == Offload::Optimizer {
            set.set("zero_optimization.offload_optimizer.device", "cpu");
            set.flag("zero_optimization.offload_optimizer.pin_memory", true);
        }
    }
}

/// The keys of the workload.
pub(crate) fn workload(layout: &Layout, set: &mut Settings) {
    set.set("train_batch_size", layout.batch);
    set.set("train_micro_batch_size_per_gpu", layout.micro_batch());
    set.set("gradient_accumulation_steps", layout.micro_batches());
    if let Some(clip) = layout.training.clip {
        set.set("gradient_clipping", clip);
    }
    set.flag("bf16.enabled", layout.dtype == DType::BF16);
    set.flag("fp16.enabled", layout.dtype == DType::F16);
    if let Some(dtype) = layout.gradients() {
        set.set("data_types.grad_accum_dtype", precision(dtype));
    }
    if let Some(adamw) = layout.training.optimizer.filter(|_| layout.mode == Mode::Train) {
        set.set("optimizer.type", "AdamW");
        set.set("optimizer.params.lr", adamw.lr);
        set.set("optimizer.params.betas", vec![adamw.beta1, adamw.beta2]);
        set.set("optimizer.params.eps", adamw.eps);
        set.set("optimizer.params.weight_decay", adamw.weight_decay);
    }
}

/// The parts of the layout that are calls of a program, not keys.
pub(crate) fn notes(layout: &Layout, facts: &Facts) -> Vec<String> {
    let mut notes = Vec::new();
    let (heads, stages) = (layout.degree(Role::Heads), layout.stages());
    if heads > 1 {
        notes.push(format!(
            "call UlyssesSPAttentionHF.register_with_transformers(…, sequence_parallel_size={heads}, micro_batch_size={}) before the \
             model is made; ranks take contiguous tokens",
            layout.micro_batch()
        ));
    }
    if layout.training.loss_chunks > 1 && layout.mode == Mode::Train {
        notes.push(format!(
            "compute the loss by TiledFusedLogitsLoss with {} shards (deepspeed.runtime.sequence_parallel.ulysses_sp)",
            layout.training.loss_chunks
        ));
    }
    if stages > 1 {
        notes.push(format!(
            "the model is a PipelineModule(…, num_stages={stages}, partition_method=\"uniform\")"
        ));
    }
    if layout.mode == Mode::Train && layout.training.recompute != Recompute::None {
        notes.push("activation checkpointing is a call: model.gradient_checkpointing_enable()".to_owned());
    }
    if layout.mode == Mode::Train && layout.training.offload == Offload::Optimizer {
        notes.push(
            "DeepSpeed updates weights on the processor, and the plan prices updates on the GPUs".to_owned(),
        );
    }
    if layout.tensor() > facts.kv_heads.max(1) {
        notes.push("AutoTP copies key/value heads, and warns".to_owned());
    }
    if layout.mode != Mode::Train {
        notes.push("the plan is a forward pass; the keys are those of its layout".to_owned());
    }
    notes
}
