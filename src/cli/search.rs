//! The arguments of a search, and of the table of its answers.

use clap::Args;
use ithaca_passes::frameworks::Framework;
use ithaca_passes::plan::Effort;
use serde::Serialize;

use super::values::{effort, framework, positive, whole};

/// What a search of layouts leaves out.
#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Search")]
pub struct NarrowingArgs {
    /// Try these strategies only, alone and joined.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', conflicts_with = "strategy")]
    pub only: Vec<String>,
    /// Do not try these strategies.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', conflicts_with = "strategy")]
    pub without: Vec<String>,
    /// Try tensor parallelism over at most so many ranks.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = positive, conflicts_with = "mesh")]
    pub max_tp: Option<u64>,
    /// Try only what this framework can run, and show its names of each layout: megatron, deepspeed, torchtitan, accelerate, nemo,
    /// vllm, sglang, tensorrt-llm, transformer-engine. `ithaca export` writes the plan for it.
    #[arg(long = "for", value_name = "FRAMEWORK", value_parser = framework())]
    #[serde(rename = "for")]
    pub framework: Option<Framework>,
    /// How many layouts are compiled, of many: low, normal, high [default: normal].
    #[arg(long, value_name = "EFFORT", value_parser = effort())]
    pub effort: Option<Effort>,
}

/// The table of the alternatives.
#[derive(Clone, Copy, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Output")]
pub struct TableArgs {
    /// Plans in the table, the best first [default: 10]; of `--top` and `--all` the last one counts.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = whole, overrides_with = "all")]
    pub top: Option<u64>,
    /// All plans, and each layout that does not fit or is refused.
    #[arg(long, overrides_with = "top")]
    pub all: bool,
    /// Each layout that does not fit or is refused, with the reason.
    #[arg(long)]
    pub why_not: bool,
}
