//! The answer as a document: what `--json` prints, a file keeps and a report draws.

use ithaca_ir::diagnostic::counted;
use ithaca_ir::units::seconds;
use ithaca_passes::cluster::Cluster;
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

/// The steps that are deployed: the name of the model, the cluster and the element type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps<'a> {
    pub(super) model: &'a str,
    pub(super) cluster: &'a Cluster,
    pub(super) dtype: &'a str,
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
            demand: *demand,
            chosen: row(chosen),
            commands: commands(demand, chosen, args),
            frontier: outcome.frontier().into_iter().map(row).collect(),
            others: outcome.others().into_iter().map(row).collect(),
        })
    }

    /// The document as JSON.
    pub(super) fn to_value(&self) -> Value {
        serde_json::to_value(self).expect("a document has string keys and finite numbers")
    }
}

fn request(steps: Steps<'_>, demand: &Demand) -> String {
    let Demand { rate, input, output, first_token_seconds, token_seconds, .. } = demand;
    let Steps { model, cluster, dtype } = steps;
    let target =
        |what: &str, most: &Option<f64>| most.map(|most| format!(", {what} within {}", seconds(most)));
    let targets = [target("first token", first_token_seconds), target("each further token", token_seconds)];
    format!(
        "{model}: serve {rate} requests a second of {input} tokens, answered by {output}{}, in {dtype} on {} ({})",
        targets.into_iter().flatten().collect::<String>(),
        cluster.name,
        cluster.accelerator.name
    )
}

fn answer(chosen: &Deployment, outcome: &Outcome) -> [String; 3] {
    let in_words = |d: &Deployment| format!("{}: {}", counted(d.gpus, "GPU"), words(d));
    let is_other = |d: &&Deployment| d.prefill.is_some() != chosen.prefill.is_some();
    let pools = if chosen.prefill.is_some() { "one pool needs" } else { "two pools need" };
    [
        in_words(chosen),
        format!(
            "on average the first token takes {}, each further one {}; at most {:.1} requests a second",
            seconds(chosen.first_token_seconds),
            seconds(chosen.token_seconds),
            chosen.capacity
        ),
        match outcome.meets.iter().find(is_other) {
            Some(other) => format!("{pools} {}", in_words(other)),
            None => format!("{pools} more GPUs or miss the targets"),
        },
    ]
}

/// The commands that make plans of the steps of a deployment.
fn commands(demand: &Demand, deployment: &Deployment, args: &PlanArgs) -> Vec<String> {
    let model = args.model.as_deref().map(|path| path.display().to_string()).unwrap_or_default();
    let cluster = args.layout.cluster.as_ref().map(|name| format!(" --cluster {name}")).unwrap_or_default();
    let dtype = args.workload.dtype.as_ref().map(|name| format!(" --dtype {name}")).unwrap_or_default();
    let command = |part: &Part, step: String, file: &str| {
        let layout = match part.layout.split_once(' ') {
            Some((strategy, mesh)) => format!("--strategy {strategy} --mesh {mesh}"),
            None => format!("--strategy {} --gpus 1", part.layout),
        };
        format!("ithaca plan {model} {step}{dtype}{cluster} {layout} -o {file}")
    };
    let Demand { input, output, .. } = demand;
    let Deployment { decode, chunk, prefill, .. } = deployment;
    let prompts = prefill.as_ref().unwrap_or(decode);
    let (batch, context) = (prefill.as_ref().map_or(1, |part| part.batch), input + output);
    let runtime = args.layout.runtime.as_deref().unwrap_or("direct,filled-slots");
    vec![
        command(decode, format!("--mode decode --batch {} --context {context}", decode.batch), "decode.json"),
        command(
            prompts,
            format!("--batch {batch} --seq {chunk} --context {context} --runtime {runtime}"),
            "prompts.json",
        ),
    ]
}

/// A deployment in words.
pub(super) fn words(d: &Deployment) -> String {
    let part = |part: &Part| format!("{} x {}", part.replicas, part.layout);
    match &d.prefill {
        None => format!(
            "{}, {} at once, prompts between steps in chunks of {} tokens",
            part(&d.decode),
            counted(d.decode.batch, "sequence"),
            d.chunk
        ),
        Some(prompts) => format!(
            "{} for prompts, {} at once; {} for decoding, {} at once",
            part(prompts),
            counted(prompts.batch, "prompt"),
            part(&d.decode),
            counted(d.decode.batch, "sequence")
        ),
    }
}
