//! The arguments of exports to other frameworks and of imports from them.

use std::path::PathBuf;

use clap::Args;
use ithaca_passes::frameworks::Framework;

use super::search::TableArgs;
use super::values::{framework, importable, positive};

/// Arguments of `export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// A plan.
    pub plan: PathBuf,
    /// The framework.
    #[arg(long, value_name = "FRAMEWORK", value_parser = framework())]
    pub to: Framework,
    /// Write the nearest layout that the framework can run, and name each difference.
    #[arg(long)]
    pub nearest: bool,
    /// The name of the model in comments [default: its type and size].
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The file to write [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `import`.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// The arguments, after all options: in one word, or behind `--`; or a file of them.
    #[arg(required = true, value_name = "ARGS", allow_hyphen_values = true)]
    pub arguments: Vec<String>,
    /// The framework: megatron.
    #[arg(long, value_name = "FRAMEWORK", value_parser = importable())]
    pub from: Framework,
    /// Number of GPUs of the run.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = positive)]
    pub gpus: u64,
    /// The model, a folder with config.json [default: that which the arguments describe].
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// A profile (`ithaca list clusters`) or the path of a cluster file [default: dgx-h100].
    #[arg(long, value_name = "CLUSTER")]
    pub cluster: Option<String>,
    /// A flag of the arguments that changes neither time nor memory of a step; repeatable.
    #[arg(long = "ignore-flag", value_name = "FLAG")]
    pub ignore_flags: Vec<String>,
    /// Write the best plan to this file.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The table.
    #[command(flatten)]
    pub table: TableArgs,
}
