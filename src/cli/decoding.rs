//! Arguments of `run --mode decode`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::values::tokens;

/// Arguments of `run --mode decode`.
#[derive(Debug, Args, Serialize)]
#[command(next_help_heading = "Decoding")]
#[serde(rename_all = "kebab-case")]
pub struct DecodingArgs {
    /// Prompts to continue in decoding: token ids, sequences separated by semicolons, as in `1,5,7;2,9`; `prompt_ids` and
    /// `prompt_lengths` of `--inputs` without it.
    #[arg(long, value_name = "IDS", conflicts_with = "inputs")]
    pub prompt: Option<String>,
    /// Tokens of a prompt that are computed at once [default: all].
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = tokens)]
    pub chunk: Option<u64>,
    /// The strategy of the steps of prompts, where it is another than that of tokens, as in `--strategy megatron-tp --mesh tp=4
    /// --prompt-strategy ulysses+megatron-tp --prompt-mesh ulysses=2,tp=2`, which have the same heads of the caches.
    #[arg(long, value_name = "NAME")]
    pub prompt_strategy: Option<String>,
    /// The mesh of the steps of prompts. One of another number of ranks than that of tokens has ranks of its own.
    #[arg(long, value_name = "AXIS=N,…")]
    pub prompt_mesh: Option<String>,
    /// Compute prompts on ranks of their own, which come before those of tokens and send caches to them.
    #[arg(long)]
    pub two_pools: bool,
    /// Tokens at which a sequence is finished, as in `2,7`, or `none` [default: `eos_token_id` of the model; none with
    /// `--expect`].
    ///
    /// A finished sequence grows no more, and the run ends when all are.
    #[arg(long, value_name = "IDS")]
    pub stop: Option<String>,
    /// Write the caches after the last step to this safetensors file.
    #[arg(long, value_name = "FILE")]
    pub save_cache: Option<PathBuf>,
    /// Start from the caches in a file of `--save-cache`, under this layout or any other.
    ///
    /// Prompts are appended to its sequences, after the tokens that the caches have: the last token of a continuation is not among
    /// them. Without prompts the continuation goes on.
    #[arg(long, value_name = "FILE")]
    pub prefix: Option<PathBuf>,
}
