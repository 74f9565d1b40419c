//! accelerate: a `ParallelismConfig` in Python.

use std::fmt::Write;

use ithaca_differentiate::Recompute;
use ithaca_import::{Facts, Mode};
use ithaca_ir::DType;
use ithaca_layout::shard::Zero;

use crate::change::Change;
use crate::comment::commented;
use crate::deepspeed;
use crate::layout::{Layout, Role, TokenOrder};
use crate::rules::{Copies, Rules};
use crate::setting::{Settings, precision, python};

/// The order of ranks, fastest first.
pub(crate) const ORDER: [Role; 4] = [Role::Tensor, Role::Heads, Role::Tokens, Role::Data];

/// The rules that accelerate checks, and choices that it lacks.
pub(crate) fn check(rules: &mut Rules<'_>) {
    let (layout, facts, title) = (rules.layout, rules.facts, rules.title);
    rules.unsupported();
    rules.trains();
    rules.keeps_states();
    rules.tensor_heads(Copies::Refused);
    let (heads, tokens, tensor, data) =
        (layout.degree(Role::Heads), layout.degree(Role::Tokens), layout.tensor(), layout.data());
    if heads > 1 {
        deepspeed::check_sums(rules);
    } else {
        rules.sums_in_f32();
    }
    let stages = layout.stages();
    rules.refuse(stages > 1, || format!("the plan has {stages} stages, and {title} has no pipeline"), None);
    rules.refuse(
        layout.experts() > 1,
        || format!("the plan splits experts over {} ranks, and ParallelismConfig of {title} has no expert parallelism", layout.experts()),
        None,
    );
    rules.refuse(
        layout.sequence_parallel,
        || format!("the plan splits the residual stream over the ranks that split weights, which is no option of {title}"),
        Change::SequenceParallel(false),
    );
    rules.refuse(
        heads > 1 && tokens > 1,
        || format!("the plan splits heads over {heads} ranks and tokens over {tokens} inside attention, and {title} has sp or cp"),
        Change::TokensToHeads,
    );
    rules.movement(&["gather", "rotate"], "has allgather and alltoall (a ring)");
    rules.refuse(
        layout.token_axes() > 1,
        || format!("the plan splits tokens over two axes, and {title} over one of {tokens} ranks"),
        Change::OneRing,
    );
    rules.refuse(
        tokens > 1 && layout.order != TokenOrder::Zigzag,
        || format!("tokens of the plan are not in zigzag order, and {title} deals them so"),
        Change::Order(TokenOrder::Zigzag),
    );
    if tokens > 1 {
        rules.sequence(2 * tokens, &format!("2 · cp_size {tokens}"));
        rules.refuse(
            facts.has_window,
            || format!("layers have a sliding window, and context parallelism of {title} sets causal masks"),
            Change::TokensToHeads,
        );
    }
    if heads > 1 {
        let (q, kv) = (facts.heads, facts.kv_heads.max(1));
        rules.refuse(
            !q.is_multiple_of(heads) || (!kv.is_multiple_of(heads) && !heads.is_multiple_of(kv)),
            || format!("{q} query heads and {kv} key/value heads do not divide over sp_size {heads}, as {title} needs"),
            None,
        );
        rules.sequence(heads, &format!("sp_size {heads}"));
        rules.refuse(
            tensor > 1,
            || format!("the plan joins Ulysses over {heads} ranks and tensor parallelism over {tensor}, and DeepSpeed behind {title} has one of them"),
            None,
        );
    }
    rules.refuse(
        layout.zero == Zero::Off && heads == 1 && data > 1 && (tensor > 1 || tokens > 1),
        || format!("data-parallel ranks of the plan hold whole weights, and {title} needs dp_shard_size > 1 beside tp and cp"),
        (layout.mode == Mode::Train).then_some(Change::Zero(Zero::Gradients)),
    );
    if layout.mode != Mode::Train {
        return;
    }
    rules.refuse(
        layout.zero == Zero::Optimizer && heads == 1,
        || format!("the plan splits optimizer states only (ZeRO 1), and FSDP of {title} splits gradients and parameters too"),
        Change::Zero(Zero::Gradients),
    );
    rules.refuse(
        layout.zero == Zero::Off && tokens > 1 && data == 1,
        || format!("ranks of the plan that split tokens hold whole weights, and FSDP of {title} always covers them"),
        Change::Zero(Zero::Gradients),
    );
    rules.whole_loss();
    rules.full_recompute();
}

fn is_sharded(layout: &Layout) -> bool {
    layout.zero != Zero::Off && layout.degree(Role::Heads) == 1 && layout.data() * layout.context() > 1
}

/// The arguments of `ParallelismConfig`.
pub(crate) fn settings(layout: &Layout, _facts: &Facts, set: &mut Settings) {
    let (data, heads) = (layout.data(), layout.degree(Role::Heads));
    if is_sharded(layout) {
        set.degree("dp_shard_size", data);
    } else if heads == 1 {
        set.degree("dp_replicate_size", data);
    }
    set.degree("tp_size", layout.tensor());
    set.degree("cp_size", layout.degree(Role::Tokens));
    set.degree("sp_size", heads);
    if heads > 1 {
        set.set("sp_backend", "deepspeed");
    }
}

/// A module with a function that makes an `Accelerator`.
pub(crate) fn text(layout: &Layout, facts: &Facts, notes: &[String]) -> String {
    let mut set = Settings::default();
    settings(layout, facts, &mut set);
    let (heads, tokens) = (layout.degree(Role::Heads), layout.degree(Role::Tokens));
    let mut out = commented(notes, "# ");
    let is_fsdp = is_sharded(layout) && layout.mode == Mode::Train;
    let mut others = Vec::new();
    others.extend((heads > 1).then_some("DeepSpeedSequenceParallelConfig"));
    others.extend((tokens > 1).then_some("TorchContextParallelConfig"));
    out += "from accelerate import Accelerator";
    out += if heads > 1 {
        ", DeepSpeedPlugin\n"
    } else if is_fsdp {
        ", FullyShardedDataParallelPlugin\n"
    } else {
        "\n"
    };
    out += "from accelerate.parallelism_config import ParallelismConfig\n";
    if !others.is_empty() {
        let _ = writeln!(out, "from accelerate.utils import {}", others.join(", "));
    }
    out += "\n\ndef accelerator():\n    \"\"\"The layout; call it in each process.\"\"\"\n    parallelism = ParallelismConfig(\n";
    for one in &set.0 {
        let value = match &one.value {
            serde_json::Value::String(text) => format!("{}=\"{text}\"", one.key),
            other => format!("{}={}", one.key, python(other)),
        };
        let _ = writeln!(out, "        {value},");
    }
    if tokens > 1 {
        let strategy = if layout.movement.as_deref() == Some("rotate") { "alltoall" } else { "allgather" };
        let _ =
            writeln!(out, "        cp_handler=TorchContextParallelConfig(cp_comm_strategy=\"{strategy}\"),");
    }
    if heads > 1 {
        let _ = writeln!(
            out,
            "        sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length={}, sp_seq_length_is_variable=False),",
            layout.sequence
        );
    }
    out += "    )\n";
    let mut arguments = vec!["parallelism_config=parallelism".to_owned()];
    match layout.dtype {
        DType::BF16 => arguments.push("mixed_precision=\"bf16\"".to_owned()),
        DType::F16 => arguments.push("mixed_precision=\"fp16\"".to_owned()),
        _ => {}
    }
    if layout.mode == Mode::Train {
        arguments.push(format!("gradient_accumulation_steps={}", layout.micro_batches()));
    }
    if heads > 1 {
        let stage = deepspeed::stage(layout);
        let _ = writeln!(
            out,
            "    plugin = DeepSpeedPlugin(zero_stage={stage}, gradient_accumulation_steps={})",
            layout.micro_batches()
        );
        if let Some(dtype) = layout.gradients() {
            let dtype = precision(dtype);
            let _ = writeln!(
                out,
                "    plugin.deepspeed_config[\"data_types\"] = {{\"grad_accum_dtype\": \"{dtype}\"}}"
            );
        }
        arguments.push("deepspeed_plugin=plugin".to_owned());
    } else if is_fsdp {
        let python = |is: bool| if is { "True" } else { "False" };
        let _ = writeln!(
            out,
            "    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward={}, activation_checkpointing={})",
            python(layout.zero == Zero::Parameters),
            python(layout.training.recompute == Recompute::FULL),
        );
        arguments.push("fsdp_plugin=plugin".to_owned());
    }
    let _ = write!(out, "    return Accelerator(\n        {},\n    )\n", arguments.join(",\n        "));
    out
}

/// The parts of the layout that are calls of a program.
pub(crate) fn notes(layout: &Layout) -> Vec<String> {
    let mut notes = Vec::new();
    if layout.mode == Mode::Train {
        notes.push(format!(
            "the data loader gives {} of {} tokens to a rank at once",
            counted(layout.micro_batch()),
            layout.sequence
        ));
        if layout.training.recompute == Recompute::FULL && !is_sharded(layout) {
            notes
                .push("activation checkpointing is a call: model.gradient_checkpointing_enable()".to_owned());
        }
    }
    if layout.tensor() > 1 {
        notes.push(format!(
            "load the model with the tensor-parallel plan of its class over {} ranks",
            layout.tensor()
        ));
    }
    if layout.degree(Role::Tokens) > 1 {
        notes.push(
            "wrap a step in accelerator.maybe_context_parallel(buffers=…, buffer_seq_dims=…)".to_owned(),
        );
    }
    notes
}

fn counted(n: u64) -> String {
    ithaca_ir::diagnostic::counted(n, "sequence")
}
