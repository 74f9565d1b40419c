//! Reads the command line of Megatron-LM: the layout that somebody runs, in the words of this program.
//!
//! Flags of the layout, the workload and the architecture are understood. Those that change neither the time nor the memory of a step
//! are ignored with a note. Every other flag is refused by name, unless the caller declares it to have no influence.

mod cut;
mod flags;
mod model;

use ithaca_ir::{Diagnostic, Diagnostics};
use serde_json::Value;

use cut::Cut;
pub use flags::words;
use flags::{Flags, refusal};

/// A layout that somebody runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The description of the model, if the flags state its architecture.
    pub config: Option<Value>,
    /// The workload as flags of this program.
    pub workload: Vec<String>,
    /// The layout and the training step as flags of this program.
    pub layout: Vec<String>,
    /// What has no influence on the price, and other remarks.
    pub notes: Vec<String>,
}

/// Reads the words of a command line for so many GPUs; `ignore` are flags that the caller declares to have no influence.
///
/// # Errors
/// `C21`, one for each flag that is missing, malformed or not understood, and for sizes that do not fit.
pub fn read(words: &[String], gpus: u64, ignore: &[String]) -> Result<Run, Diagnostics> {
    let mut flags = Flags::new(words, ignore);
    let config = model::config(&mut flags);
    let run = layout(&mut flags, gpus);
    let (notes, mut refusals) = flags.finish();
    match run {
        Ok((workload, layout, more)) if refusals.is_empty() => {
            Ok(Run { config, workload, layout, notes: [notes, more].concat() })
        }
        Ok(_) => Err(refusals),
        Err(mut wrong) => {
            refusals.append(&mut wrong);
            Err(refusals)
        }
    }
}

type Words = Vec<String>;

fn layout(flags: &mut Flags, gpus: u64) -> Result<(Words, Words, Vec<String>), Diagnostics> {
    let mut wrong: Diagnostics = Vec::new();
    let mut notes = Vec::new();
    let degree = |flags: &mut Flags, name: &str| flags.number(name).unwrap_or(1).max(1);
    let tensor = degree(flags, "tensor-model-parallel-size");
    let stages = degree(flags, "pipeline-model-parallel-size");
    let context = degree(flags, "context-parallel-size");
    let experts = degree(flags, "expert-model-parallel-size");
    let expert_tensor = flags.number("expert-tensor-parallel-size").unwrap_or(tensor);
    let is_split = flags.flag("sequence-parallel") && tensor > 1;
    let stages_inside = flags.flag("use-tp-pp-dp-mapping");
    let comm: Vec<String> = flags.words("cp-comm-type");
    let sizes: Vec<u64> =
        flags.words("hierarchical-context-parallel-sizes").iter().filter_map(|n| n.parse().ok()).collect();
    let micro = flags.number("micro-batch-size");
    let global = flags.number("global-batch-size");
    let sequence = flags.number("seq-length").or_else(|| flags.number("encoder-seq-length"));
    let is_bf16 = flags.flag("bf16");
    let is_f16 = flags.flag("fp16");
    let model = tensor.saturating_mul(stages).saturating_mul(context);
    if !gpus.is_multiple_of(model) {
        let message = format!("{gpus} GPUs are not divisible by {model}, tensor · pipeline · context degree");
        wrong.push(refusal(message).help("give the number of GPUs of the run by `--gpus`"));
    }
    let data = (gpus / model).max(1);
    for (flag, value) in [("micro-batch-size", micro), ("seq-length", sequence)] {
        if value.is_none() {
            wrong.push(refusal(format!("`--{flag}` is missing")));
        }
    }
    let (micro, sequence) = (micro.unwrap_or(1), sequence.unwrap_or(2 * context));
    let global = global.unwrap_or(micro * data);
    if wrong.is_empty() && !global.is_multiple_of(micro * data) {
        wrong.push(refusal(format!(
            "`--global-batch-size {global}` is not divisible by {}, `--micro-batch-size {micro}` times {data} data-parallel ranks",
            micro * data
        )));
    }
    let micro_batches = (global / (micro * data).max(1)).max(1);
    if !sequence.is_multiple_of(2 * context) && context > 1 {
        wrong.push(refusal(format!("`--seq-length {sequence}` is not divisible by 2 · {context}, the context degree, as Megatron-LM needs")));
    }
    // Strategies and axes, major to minor.
    let mut strategies: Vec<&str> = Vec::new();
    let mut axes: Vec<(&str, u64)> = Vec::new();
    let outer: [(&str, &str, u64); 2] = if stages_inside {
        [("data-parallel", "dp", data), ("pipeline", "pp", stages)]
    } else {
        [("pipeline", "pp", stages), ("data-parallel", "dp", data)]
    };
    // Experts over all ranks with tokens of their own need no axis.
    let is_over_tokens = context > 1 && experts > 1 && experts == data * context && expert_tensor == tensor;
    for (strategy, axis, n) in outer {
        if axis == "dp" && experts > 1 && !is_over_tokens {
            if context > 1 || !data.is_multiple_of(experts) || expert_tensor != tensor {
                let message = format!(
                    "`--expert-model-parallel-size {experts}` with context degree {context}, {data} data-parallel ranks and \
                     `--expert-tensor-parallel-size {expert_tensor}` has experts over ranks for which there is no strategy here"
                );
                let help = "with the tensor degree of attention, expert degrees that divide the data-parallel ranks are understood, \
                            and beside context parallelism those of all ranks that split tokens";
                wrong.push(refusal(message).help(help));
            }
            strategies.push("data-parallel-ep");
            axes.extend([("dp", data / experts.max(1)), ("ep", experts)]);
        } else if n > 1 {
            strategies.push(strategy);
            axes.push((axis, n));
        }
    }
    let kinds: Vec<&str> = comm.iter().map(String::as_str).collect();
    let mut order = None;
    if context > 1 {
        if kinds.windows(2).any(|pair| pair[0] != pair[1]) {
            wrong.push(refusal("`--cp-comm-type` has another type for each layer, which is not understood"));
        }
        order = Some("zigzag");
        match kinds.first().copied().unwrap_or("p2p") {
            "p2p" => {
                strategies.push("ring");
                axes.push(("ring", context));
            }
            "all_gather" => {
                strategies.push("megatron-cp-allgather");
                axes.push(("cp", context));
            }
            "a2a" => {
                strategies.push("ulysses");
                axes.push(("ulysses", context));
                order = None;
            }
            "a2a+p2p" => match sizes.as_slice() {
                [heads, ring] if heads * ring == context => {
                    strategies.push("usp");
                    axes.extend([("ring", *ring), ("ulysses", *heads)]);
                }
                _ => wrong.push(refusal(format!(
                    "`--hierarchical-context-parallel-sizes` is not two sizes whose product is the context degree {context}"
                ))),
            },
            "allgather" => wrong.push(
                refusal("`--cp-comm-type allgather` is the spelling of the help text, and attention takes `all_gather` only")
                    .help("write `--cp-comm-type all_gather`"),
            ),
            other => wrong.push(refusal(format!("`--cp-comm-type {other}` is not p2p, all_gather, a2a or a2a+p2p"))),
        }
    }
    if tensor > 1 {
        strategies.push(if is_split { "megatron-tp-sp" } else { "megatron-tp" });
        axes.push(("tp", tensor));
    }
    strategies.extend(is_over_tokens.then_some("ep"));
    let mut workload = vec![
        "--mode".to_owned(),
        "train".to_owned(),
        "--seq".to_owned(),
        sequence.to_string(),
        "--batch".to_owned(),
        global.to_string(),
        "--dtype".to_owned(),
        (if is_bf16 {
            "bf16"
        } else if is_f16 {
            "f16"
        } else {
            "f32"
        })
        .to_owned(),
    ];
    let attention_dropout = flags.real("attention-dropout");
    let hidden_dropout = flags.real("hidden-dropout");
    if attention_dropout.unwrap_or(0.1) != 0.0 || hidden_dropout.unwrap_or(0.1) != 0.0 {
        notes.push("dropout, 0.1 where `--attention-dropout` and `--hidden-dropout` do not state it, has no price here".to_owned());
    }
    workload.extend(["--train".to_owned(), "dropout=off".to_owned()]);
    let is_wide = flags.flag("accumulate-allreduce-grads-in-fp32");
    let is_narrow = flags.flag("grad-reduce-in-bf16");
    let is_fsdp = flags.flag("use-megatron-fsdp") | flags.flag("use-custom-fsdp");
    let of_fsdp = flags.word("megatron-fsdp-main-grads-dtype").filter(|dtype| dtype != "auto");
    let narrow = if is_bf16 { Some("bf16") } else { is_f16.then_some("fp16") };
    let sums_in_weights = match (is_fsdp, of_fsdp.as_deref()) {
        (true, Some("fp32")) => false,
        (true, Some(other)) if Some(other) != narrow => {
            wrong.push(refusal(format!(
                "`--megatron-fsdp-main-grads-dtype {other}` is neither fp32 nor the type of the weights"
            )));
            false
        }
        (true, _) => true,
        (false, _) => is_bf16 && is_narrow || is_f16 && !is_wide,
    };
    if sums_in_weights && narrow.is_some() {
        workload.extend(["--train".to_owned(), "gradients=weights".to_owned()]);
    }
    let mut options: Words = Vec::new();
    let mut option = |key: &str, value: String| options.extend([key.to_owned(), value]);
    option("--gpus", gpus.to_string());
    option("--strategy", if strategies.is_empty() { "single".to_owned() } else { strategies.join("+") });
    if !axes.is_empty() {
        let axes: Vec<String> = axes.iter().map(|(axis, n)| format!("{axis}={n}")).collect();
        option("--mesh", axes.join(","));
    }
    if let Some(order) = order {
        option("--order", order.to_owned());
    }
    match zero(flags, data * context) {
        // It has no weights that stay whole.
        Ok(3) => option("--zero", "3:none".to_owned()),
        Ok(stage) => option("--zero", stage.to_string()),
        Err(refused) => wrong.push(refused),
    }
    match recompute(flags) {
        Ok(policy) => option("--recompute", policy),
        Err(refused) => wrong.push(refused),
    }
    option("--micro-batches", micro_batches.to_string());
    option("--loss-chunks", "1".to_owned());
    match cut::read(flags, stages) {
        Ok(_) if stages == 1 => {}
        Ok(Cut { chunks, layers }) => {
            if chunks > 1 {
                option("--pipeline", "interleaved".to_owned());
                option("--train", format!("chunks={chunks}"));
            } else {
                option("--pipeline", "1f1b".to_owned());
            }
            match layers {
                Some(layers) => {
                    let layers: Vec<String> = layers.iter().map(u64::to_string).collect();
                    option("--train", format!("stage_layers={}", layers.join("+")));
                }
                None => notes.push(
                    "layers are cut into stages by their FLOPs: `--num-layers` does not say how many there are"
                        .to_owned(),
                ),
            }
        }
        Err(mut refused) => wrong.append(&mut refused),
    }
    if wrong.is_empty() { Ok((workload, options, notes)) } else { Err(wrong) }
}

/// The ZeRO stage of so many ranks with the same weights.
fn zero(flags: &mut Flags, ranks: u64) -> Result<u64, Diagnostic> {
    let distributed = flags.flag("use-distributed-optimizer");
    let fsdp = flags.flag("use-megatron-fsdp") | flags.flag("use-custom-fsdp");
    let torch = flags.flag("use-torch-fsdp2");
    let strategy = flags.word("data-parallel-sharding-strategy");
    let stage = match (fsdp, torch, strategy.as_deref()) {
        (false, true, _) | (true, _, Some("optim_grads_params")) => 3,
        (true, _, Some("optim_grads")) => 2,
        (true, _, Some("optim")) => 1,
        (true, _, Some("no_shard") | None) => u64::from(distributed),
        (true, _, Some(other)) => {
            return Err(refusal(format!(
                "`--data-parallel-sharding-strategy {other}` is not no_shard, optim, optim_grads or optim_grads_params"
            )));
        }
        (false, false, _) => u64::from(distributed),
    };
    Ok(if ranks > 1 { stage } else { 0 })
}

/// The activations that are recomputed.
fn recompute(flags: &mut Flags) -> Result<String, Diagnostic> {
    let selective = flags.flag("recompute-activations");
    let granularity = flags.word("recompute-granularity");
    let method = flags.word("recompute-method");
    let layers = flags.number("recompute-num-layers");
    let modules = flags.words("recompute-modules");
    match (granularity.as_deref(), selective) {
        (None, false) => Ok("none".to_owned()),
        (Some("selective"), _) | (None, true) => {
            if modules.iter().all(|module| module == "core_attn") {
                Ok("selective".to_owned())
            } else {
                Err(refusal(format!("`--recompute-modules {}` is not understood", modules.join(" ")))
                    .help("the module `core_attn` is understood, and `--recompute-granularity full`"))
            }
        }
        (Some("full"), _) => match (method.as_deref(), layers.unwrap_or(1)) {
            (Some("uniform") | None, 1) => Ok("full".to_owned()),
            (Some("uniform") | None, n) => Ok(format!("full(every={n})")),
            (Some(other), _) => Err(refusal(format!(
                "`--recompute-method {other}` recomputes a part of the layers, which is not understood"
            ))),
        },
        (Some(other), _) => {
            Err(refusal(format!("`--recompute-granularity {other}` is not full or selective")))
        }
    }
}
