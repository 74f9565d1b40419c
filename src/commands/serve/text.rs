//! The answer: as a document, and for a terminal.

use std::fmt::Write;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::units::seconds;
use ithaca_ir::wrap::wrapped;
use ithaca_passes::cluster::Cluster;
use ithaca_passes::planner::{Rows, View};
use ithaca_passes::serve::{Demand, Deployment, Outcome, Part};
use serde::Serialize;

use crate::cli::PlanArgs;

/// The indent of a deployment below its figures.
const INDENT: usize = 4;

/// The answer as a document.
#[derive(Debug, Serialize)]
pub(super) struct Document {
    demand: Demand,
    chosen: Row,
    /// The commands that make plans of the steps of the chosen deployment.
    commands: Vec<String>,
    /// Deployments of which none is better for a user on fewer GPUs.
    frontier: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    deployment: Deployment,
    tokens_per_second_and_user: f64,
    tokens_per_second_and_gpu: f64,
}

impl Document {
    /// The document of an outcome; nothing where no deployment meets the demand.
    pub(super) fn new(demand: &Demand, outcome: &Outcome, model: &str, args: &PlanArgs) -> Option<Self> {
        let chosen = outcome.meets.first()?;
        let row = |deployment: &Deployment| Row {
            tokens_per_second_and_user: deployment.tokens_per_user(),
            tokens_per_second_and_gpu: deployment.tokens_per_gpu(demand),
            deployment: deployment.clone(),
        };
        let commands = commands(demand, chosen, model, args);
        let frontier = outcome.frontier().into_iter().map(row).collect();
        Some(Self { demand: *demand, chosen: row(chosen), commands, frontier })
    }
}

/// The commands that make plans of the steps of a deployment.
fn commands(demand: &Demand, deployment: &Deployment, model: &str, args: &PlanArgs) -> Vec<String> {
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
pub(super) fn deployment(d: &Deployment) -> String {
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

/// The answer for a terminal.
pub(super) fn answer(
    name: &str,
    (cluster, dtype): (&Cluster, &str),
    demand: &Demand,
    (document, outcome): (&Document, &Outcome),
    view: &View,
) -> String {
    let Demand { rate, input, output, first_token_seconds, token_seconds, .. } = demand;
    let target =
        |what: &str, most: &Option<f64>| most.map(|most| format!(", {what} within {}", seconds(most)));
    let targets = [target("first token", first_token_seconds), target("each further token", token_seconds)];
    let mut out = String::new();
    let mut line = |text: &str, indent: usize| out.push_str(&(wrapped(text, view.width, indent) + "\n"));
    line(
        &format!(
            "{name}: serve {rate} requests a second of {input} tokens, answered by {output}{}, in {dtype} on {} ({})",
            targets.into_iter().flatten().collect::<String>(),
            cluster.name,
            cluster.accelerator.name
        ),
        2,
    );
    line("", 0);
    let chosen = &document.chosen.deployment;
    line(&format!("{}: {}", counted(chosen.gpus, "GPU"), deployment(chosen)), 2);
    line(
        &format!(
            "on average the first token takes {}, each further one {}; at most {:.1} requests a second",
            seconds(chosen.first_token_seconds),
            seconds(chosen.token_seconds),
            chosen.capacity
        ),
        2,
    );
    let is_other = |d: &&Deployment| d.prefill.is_some() != chosen.prefill.is_some();
    let pools = if chosen.prefill.is_some() { "one pool needs" } else { "two pools need" };
    match outcome.meets.iter().find(is_other) {
        Some(other) => line(&format!("{pools} {}: {}", counted(other.gpus, "GPU"), deployment(other)), 2),
        None => line(&format!("{pools} more GPUs or miss the targets"), 2),
    }
    line("", 0);
    out.push_str(&frontier(demand, &outcome.frontier(), view));
    out.push_str("\nplans of the steps of the first:\n");
    for command in &document.commands {
        let _ = writeln!(out, "  {command}");
    }
    out
}

/// The table of deployments, the fewest GPUs first.
fn frontier(demand: &Demand, deployments: &[&Deployment], view: &View) -> String {
    let mut out = "GPUs  tok/s/user  tok/s/GPU  first token   per token\n".to_owned();
    let shown = match view.rows {
        Rows::All => deployments.len(),
        Rows::Top(n) => n,
    };
    for d in deployments.iter().rev().take(shown) {
        let _ = writeln!(
            out,
            "{:>4}  {:>10.1}  {:>9.1}  {:>11}  {:>10}",
            d.gpus,
            d.tokens_per_user(),
            d.tokens_per_gpu(demand),
            seconds(d.first_token_seconds),
            seconds(d.token_seconds)
        );
        let text = format!("{:INDENT$}{}", "", deployment(d));
        out.push_str(&(wrapped(&text, view.width, INDENT) + "\n"));
    }
    let left = deployments.len().saturating_sub(shown);
    if left > 0 {
        let _ = writeln!(
            out,
            "{} faster for a user on more GPUs not shown (--all)",
            counted(left as u64, "deployment")
        );
    }
    out
}
