//! The answer as a document: what `--json` prints, a file keeps and a report draws.

use ithaca_ir::DType;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::units::seconds;
use ithaca_passes::cluster::{Cluster, Runtime};
use ithaca_passes::plan::model_assumptions;
use ithaca_passes::serve::{Demand, Deployment, Outcome, Part};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cli::PlanArgs;

/// The answer as a document.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Document {
    /// The name of the model.
    pub(super) model: String,
    /// The request in a line.
    pub(super) request: String,
    /// The answer: the chosen deployment, its figures, and the other kind of deployment.
    pub(super) answer: [String; 3],
    /// Assumptions that no option states.
    pub(super) notes: Vec<String>,
    demand: Demand,
    chosen: Row,
    /// The commands that make plans of the steps of the chosen deployment.
    pub(super) commands: Vec<String>,
    /// Deployments of which none is better for a user on fewer GPUs, the fastest for a user first.
    pub(super) frontier: Vec<Row>,
    /// Those that are the fastest of their number of GPUs and pools, but not on the frontier.
    others: Vec<Row>,
}

#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) deployment: Deployment,
    /// The deployment in words.
    pub(super) words: String,
    pub(super) tokens_per_second_and_user: f64,
    pub(super) tokens_per_second_and_gpu: f64,
}

/// The steps that are deployed: the name of the model, its configuration, the cluster and the element type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps<'a> {
    pub(super) model: &'a str,
    pub(super) config: &'a Value,
    /// As steps of tokens run.
    pub(super) cluster: &'a Cluster,
    /// As steps of prompts run.
    pub(super) prompts: &'a Cluster,
    /// As they run where `--runtime` says nothing.
    pub(super) usual: Runtime,
    pub(super) dtype: &'a str,
    /// The element type of caches, where it is stated.
    pub(super) cache_type: Option<DType>,
    /// Whether an encoder reads prompts, as long as caches have room for.
    pub(super) encodes_prompts: bool,
}

impl Document {
    /// The document of an outcome; nothing where no deployment meets the demand.
    pub(super) fn new(steps: Steps<'_>, demand: &Demand, outcome: &Outcome, args: &PlanArgs) -> Option<Self> {
        let chosen = outcome.meets.first()?;
        let row = |deployment: &Deployment| Row {
            words: words(deployment),
            tokens_per_second_and_user: deployment.tokens_per_user(),
            tokens_per_second_and_gpu: deployment.tokens_per_gpu(demand),
            deployment: deployment.clone(),
        };
        Some(Self {
            model: steps.model.to_owned(),
            request: request(steps, demand),
            answer: answer(chosen, outcome),
            notes: model_assumptions(steps.config, steps.dtype, demand.input + demand.output),
            demand: *demand,
            chosen: row(chosen),
            commands: commands(steps, demand, chosen, args),
            frontier: outcome.frontier(demand).into_iter().map(row).collect(),
            others: outcome.others(demand).into_iter().map(row).collect(),
        })
    }

    /// The document as JSON.
    pub(super) fn to_value(&self) -> Value {
        serde_json::to_value(self).expect("a document has string keys and finite numbers")
    }
}

fn request(steps: Steps<'_>, demand: &Demand) -> String {
    let Demand { rate, input, output, first_token_seconds, token_seconds, .. } = demand;
    let Steps { model, cluster, dtype, cache_type, .. } = steps;
    let caches = cache_type.map_or_else(String::new, |dtype| format!(", caches in {dtype}"));
    let target =
        |what: &str, most: &Option<f64>| most.map(|most| format!(", {what} within {}", seconds(most)));
    let targets = [target("first token", first_token_seconds), target("each further token", token_seconds)];
    format!(
        "{model}: serve {rate} {} a second of {input} tokens, answered by {output}{}, in {dtype}{caches} on {} ({})",
        if *rate == 1.0 { "request" } else { "requests" },
        targets.into_iter().flatten().collect::<String>(),
        cluster.name,
        cluster.accelerator.name
    )
}

fn answer(chosen: &Deployment, outcome: &Outcome) -> [String; 3] {
    let in_words = |d: &Deployment| format!("{}: {}", counted(d.gpus, "GPU"), words(d));
    let is_other = |d: &&Deployment| d.prefill.is_some() != chosen.prefill.is_some();
    let [pools, misses] = match chosen.prefill {
        Some(_) => ["one pool needs", "misses"],
        None => ["two pools need", "miss"],
    };
    [
        in_words(chosen),
        format!(
            "on average the first token takes {}, each further one {}; at most {:.*} requests a second",
            seconds(chosen.first_token_seconds),
            seconds(chosen.token_seconds),
            decimals(chosen.capacity),
            chosen.capacity
        ),
        match outcome.meets.iter().find(is_other) {
            Some(other) => format!("{pools} {}", in_words(other)),
            None => format!("{pools} more GPUs or {misses} the targets"),
        },
    ]
}

/// Decimals that show three digits, or one.
fn decimals(x: f64) -> usize {
    (2.0 - x.log10().floor()).clamp(1.0, 6.0) as usize
}

/// The commands that make plans of the steps of a deployment.
fn commands(steps: Steps<'_>, demand: &Demand, deployment: &Deployment, args: &PlanArgs) -> Vec<String> {
    let model = args.model.as_deref().map(|path| path.display().to_string()).unwrap_or_default();
    let given = [
        ("dtype", args.workload.dtype.clone()),
        ("cache-type", args.workload.cache_type.clone()),
        ("expert-bound", args.workload.expert_bound.clone()),
        ("cluster", args.layout.cluster.clone()),
        ("attention-kernel", args.layout.attention_kernel.clone()),
    ];
    let flag = |(name, value): (&str, Option<String>)| value.map(|value| format!(" --{name} {value}"));
    let given: String = given.into_iter().filter_map(flag).collect();
    // A command states the runtime where it is not that which the mode has.
    let runtime = |of: &Cluster, usual: Runtime| match of.runtime.changes_from(usual) {
        changes if changes.is_empty() => String::new(),
        changes => format!(" --runtime {changes}"),
    };
    let Steps { cluster, prompts: of_prompts, usual, .. } = steps;
    let of_tokens = runtime(cluster, cluster.decoding_runtime());
    let of_prompts = runtime(of_prompts, usual);
    let command = |layout: &str, micro_batches: u64, step: String, runtime: &str, file: &str| {
        let micro_batches = match micro_batches {
            1 => String::new(),
            n => format!(" --micro-batches {n}"),
        };
        let layout = match layout.split_once(' ') {
            Some((strategy, mesh)) => format!("--strategy {strategy} --mesh {mesh}"),
            None => format!("--strategy {layout} --gpus 1"),
        };
        format!("ithaca plan {model} {step}{given}{runtime} {layout}{micro_batches} -o {file}")
    };
    let Demand { input, output, .. } = demand;
    let Deployment { decode, chunk, chunk_batch, chunk_micro_batches, prefill, .. } = deployment;
    let layout = &prefill.as_ref().unwrap_or(decode).layout;
    let context = input + output;
    let of_decoding = format!("--mode decode --batch {} --context {context}", decode.batch);
    let tokens = if steps.encodes_prompts { context } else { *chunk };
    let of_chunk = format!("--batch {chunk_batch} --seq {tokens} --context {context}");
    let mut commands = vec![
        command(&decode.layout, decode.micro_batches, of_decoding, &of_tokens, "decode.json"),
        command(layout, *chunk_micro_batches, of_chunk, &of_prompts, "prompts.json"),
    ];
    if steps.cache_type == Some(DType::F8E4M3) {
        // The PyTorch target refuses them. vLLM may lack the layout of a plan, and has the nearest.
        let export = |plan: &str| format!("ithaca export {plan} --to vllm --nearest");
        commands.extend(prefill.as_ref().map(|_| export("prompts.json")));
        commands.push(export("decode.json"));
    } else {
        let two_pools = if prefill.is_some() { " --two-pools" } else { "" };
        commands.push(format!(
            "ithaca emit decode.json --prompts prompts.json{two_pools} --target torch -o serve.py"
        ));
    }
    commands
}

/// A deployment in words.
pub(super) fn words(d: &Deployment) -> String {
    let parts = |n: u64| if n == 1 { String::new() } else { format!(" in {n} micro-batches") };
    let part = |part: &Part| format!("{} x {}", part.replicas, part.layout);
    match &d.prefill {
        None => format!(
            "{}, {} at once{}, prompts between steps in chunks of {}{}",
            part(&d.decode),
            counted(d.decode.batch, "sequence"),
            parts(d.decode.micro_batches),
            counted(d.chunk, "token"),
            match d.chunk_batch {
                1 => String::new(),
                n => format!(" of {n} prompts{}", parts(d.chunk_micro_batches)),
            }
        ),
        Some(prompts) => format!(
            "{} for prompts, {} at once{}; {} for decoding, {} at once{}",
            part(prompts),
            counted(prompts.batch, "prompt"),
            parts(prompts.micro_batches),
            part(&d.decode),
            counted(d.decode.batch, "sequence"),
            parts(d.decode.micro_batches)
        ),
    }
}
