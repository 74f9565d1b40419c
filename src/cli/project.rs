//! Arguments of `init` and `check`.

use std::path::PathBuf;

use clap::Args;

/// The file that `init` writes and `check` reads.
pub const PROJECT: &str = "ithaca.toml";

/// Arguments of `init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Folders with config.json, or the files, that the new file names.
    pub models: Vec<PathBuf>,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The file that names models, clusters and workloads.
    #[arg(default_value = PROJECT)]
    pub file: PathBuf,
    /// Write the plans that differ or are missing.
    #[arg(long, visible_alias = "update")]
    pub bless: bool,
}
