//! torchtitan: a Python function that sets a `Trainer.Config`.

use std::fmt::Write;

use ithaca_differentiate::{PipelineOrder, Recompute};
use ithaca_import::{Facts, Mode};
use ithaca_layout::shard::Zero;

use crate::change::Change;
use crate::comment::commented;
use crate::layout::{Layout, Role, TokenOrder};
use crate::rules::{Copies, Rules};
use crate::schedule;
use crate::setting::{Setting, Settings, python};

/// The order of ranks, fastest first.
pub(crate) const ORDER: [Role; 4] = [Role::Tensor, Role::Tokens, Role::Data, Role::Stages];

/// The rules that torchtitan checks, and choices that it lacks.
pub(crate) fn check(rules: &mut Rules<'_>) {
    let (layout, title) = (rules.layout, rules.title);
    rules.unsupported();
    rules.trains();
    rules.keeps_states();
    rules.sums_in_f32();
    rules.tensor_heads(Copies::Refused);
    rules.experts();
    let (heads, tokens, tensor) = (layout.degree(Role::Heads), layout.degree(Role::Tokens), layout.tensor());
    rules.refuse(
        heads > 1,
        || format!("the plan splits heads inside attention, and {title} gathers keys and values of tokens (context parallelism)"),
        Change::HeadsToTokens("gather"),
    );
    if heads == 1 {
        rules.movement(&["gather"], "gathers keys and values");
    }
    rules.refuse(
        layout.token_axes() > 1,
        || format!("the plan splits tokens over two axes, and {title} over one of {tokens} ranks"),
        Change::OneRing,
    );
    rules.refuse(
        tokens > 1 && !matches!(layout.order, TokenOrder::Contiguous | TokenOrder::Zigzag),
        || {
            format!(
                "tokens of the plan are dealt in blocks, and {title} deals them in zigzag (headtail) or not"
            )
        },
        Change::Order(TokenOrder::Zigzag),
    );
    rules.sequence(
        if tensor * tokens > 1 { 2 * tensor * tokens } else { 1 },
        &format!("2 · tensor degree {tensor} · context degree {tokens}"),
    );
    let experts_over = layout.data() * tokens * tensor;
    rules.refuse(
        layout.experts() > 1 && !experts_over.is_multiple_of(layout.experts()),
        || {
            format!(
                "expert degree {} does not divide {experts_over}, the ranks of a stage, as {title} needs",
                layout.experts()
            )
        },
        None,
    );
    if layout.mode != Mode::Train {
        return;
    }
    rules.refuse(
        layout.zero == Zero::Optimizer,
        || format!("the plan splits optimizer states only (ZeRO 1), and FSDP of {title} splits gradients and parameters too"),
        Change::Zero(Zero::Gradients),
    );
    rules.refuse(
        layout.zero == Zero::Off && tokens > 1,
        || format!("ranks of the plan that split tokens hold whole weights, and FSDP of {title} always covers them"),
        Change::Zero(Zero::Gradients),
    );
    rules.refuse(
        layout.zero == Zero::Off && layout.data() > 1 && layout.experts() > 1,
        || format!("data-parallel ranks of the plan hold whole weights, and {title} splits experts over ranks of FSDP"),
        Change::Zero(Zero::Gradients),
    );
    rules.full_recompute();
    let (stages, micro_batches) = (layout.stages(), layout.micro_batches());
    rules.refuse(
        stages > 1 && layout.training.pipeline == PipelineOrder::OneForwardOneBackward && micro_batches < stages,
        || format!("{micro_batches} micro-batches are fewer than {stages} stages, and 1F1B of {title} needs as many"),
        None,
    );
    rules.refuse(
        layout.training.loss_chunks > 1 && stages > 1,
        || {
            format!(
                "the plan computes the loss in {} parts behind a pipeline, and {title} in one there",
                layout.training.loss_chunks
            )
        },
        Change::WholeLoss,
    );
    rules.batch();
}

/// The fields of the section `parallelism`.
pub(crate) fn settings(layout: &Layout, facts: &Facts, set: &mut Settings) {
    let (data, tokens) = (layout.data(), layout.degree(Role::Tokens));
    let is_sharded = layout.zero != Zero::Off && data * tokens > 1;
    let key = |name: &str| format!("parallelism.{name}");
    set.set(&key("data_parallel_replicate_degree"), if is_sharded { 1 } else { data });
    set.set(&key("data_parallel_shard_degree"), if is_sharded { data } else { 1 });
    if is_sharded {
        set.set(
            &key("fsdp_reshard_after_forward"),
            if layout.zero == Zero::Parameters { "always" } else { "never" },
        );
    }
    set.set(&key("tensor_parallel_degree"), layout.tensor());
    if layout.tensor() > 1 {
        set.set(&key("enable_sequence_parallel"), layout.sequence_parallel);
    }
    set.set(&key("context_parallel_degree"), tokens);
    if tokens > 1 {
        let balancer = (layout.order == TokenOrder::Zigzag).then_some("headtail");
        set.set(&key("context_parallel_load_balancer"), balancer);
    }
    set.set(&key("pipeline_parallel_degree"), layout.stages());
    if layout.stages() > 1 && layout.mode == Mode::Train {
        let name = match layout.training.pipeline {
            PipelineOrder::Gpipe => "GPipe",
            PipelineOrder::OneForwardOneBackward => "1F1B",
            PipelineOrder::Interleaved => "Interleaved1F1B",
            PipelineOrder::ZbH1 => "_PipelineScheduleRuntime",
        };
        set.set(&key("pipeline_parallel_schedule"), name);
        set.set(&key("pipeline_parallel_microbatch_size"), layout.micro_batch());
        if !layout.chunk_layers.is_empty() {
            set.set(&key("module_fqns_per_model_part"), modules(&layout.chunk_layers));
        }
    }
    set.set(&key("expert_parallel_degree"), if facts.experts.is_some() { layout.experts() } else { 1 });
}

/// The modules of each chunk of layers.
fn modules(layers: &[u64]) -> Vec<Vec<String>> {
    let (mut first, last) = (0, layers.len() - 1);
    let mut parts = Vec::new();
    for (i, n) in layers.iter().enumerate() {
        let mut names = Vec::new();
        names.extend((i == 0).then(|| "tok_embeddings".to_owned()));
        names.extend((first..first + n).map(|layer| format!("layers.{layer}")));
        first += n;
        if i == last {
            names.extend(["norm".to_owned(), "lm_head".to_owned()]);
        }
        parts.push(names);
    }
    parts
}

/// A function that sets a configuration.
pub(crate) fn text(layout: &Layout, facts: &Facts, notes: &[String]) -> String {
    let mut set = Settings::default();
    settings(layout, facts, &mut set);
    let is_staged = layout.stages() > 1;
    let local = if is_staged { layout.batch / layout.data() } else { layout.micro_batch() };
    set.set("training.local_batch_size", local);
    set.set("training.global_batch_size", layout.batch);
    set.set("training.seq_len", layout.sequence);
    // CUDA graphs, its default, go with neither pipelines nor most dispatchers of experts.
    set.flag("training.disable_cuda_graphs", is_staged || layout.experts() > 1);
    let is_trained = layout.mode == Mode::Train;
    let carries = is_staged && is_trained && layout.training.pipeline == PipelineOrder::ZbH1;
    let is_full = is_trained && layout.training.recompute == Recompute::FULL;
    let parts = if is_trained { layout.training.loss_chunks } else { 1 };
    let mut out = commented(notes, "# ");
    if carries {
        out += "import pathlib\nimport tempfile\n";
    }
    if is_full {
        out += "from torchtitan.distributed.activation_checkpoint import FullAC\n";
    }
    if parts > 1 {
        out += "from torchtitan.components.loss import ChunkedLossWrapper\n";
    }
    if carries {
        let rows = schedule::rows(layout);
        let _ = write!(
            out,
            "\n# A row for each rank of the pipeline: stage, pass (F, I gradients of inputs, W of weights), micro-batch.\nSCHEDULE = \"\"\"\\\n{rows}\"\"\"\n"
        );
    }
    out += "\n\ndef configure(config):\n    \"\"\"Sets the layout in a torchtitan.trainer.Trainer.Config, made by a function of a model's registry.\"\"\"\n";
    for Setting { key, value } in &set.0 {
        let _ = writeln!(out, "    config.{key} = {}", python(value));
    }
    if carries {
        out += "    path = pathlib.Path(tempfile.gettempdir()) / \"ithaca-schedule.csv\"\n    path.write_text(SCHEDULE)\n    config.parallelism.pipeline_parallel_schedule_csv = str(path)\n";
    }
    if is_trained {
        out += if is_full {
            "    config.activation_checkpoint = FullAC.Config()\n"
        } else {
            "    config.activation_checkpoint = None\n"
        };
    }
    if parts > 1 {
        let _ = writeln!(out, "    config.loss = ChunkedLossWrapper.Config(num_chunks={parts})");
    }
    out + "    return config\n"
}
