//! Arguments of `plan --mode serve`.

use clap::Args;
use serde::Serialize;

use super::values::{positive_number, tokens};

/// Arguments of `plan --mode serve`.
#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Serving")]
pub struct ServingArgs {
    /// Requests a second that `--mode serve` must answer.
    #[arg(long, value_name = "REQUESTS", allow_hyphen_values = true, value_parser = positive_number)]
    pub rate: Option<f64>,
    /// Tokens of a prompt, on average.
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = tokens)]
    pub input: Option<u64>,
    /// Tokens of an answer, on average; `--output 256` is the same where no file is written.
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, value_parser = tokens)]
    pub output_tokens: Option<u64>,
    /// The longest average time to the first token, milliseconds.
    #[arg(long, value_name = "MS", allow_hyphen_values = true, value_parser = positive_number)]
    pub ttft: Option<f64>,
    /// The longest average time per further token, milliseconds.
    #[arg(long, value_name = "MS", allow_hyphen_values = true, value_parser = positive_number)]
    pub tpot: Option<f64>,
}
