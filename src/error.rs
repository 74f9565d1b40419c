//! Failures: diagnostics together with the text that they point into.

use std::path::Path;

use ithaca_ir::{Diagnostic, Diagnostics, Source, diagnostic};
use ithaca_kernels::RunError;
use ithaca_kernels::cuda::{CudaError, Unavailable};
use ithaca_kernels::launch::LaunchError;
use ithaca_kernels::store::shards::{self, ShardError};
use ithaca_kernels::store::training::TrainingError;
use ithaca_kernels::store::{self, StoreError};

/// Why a command did not do what it was asked.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What is wrong, in order.
    pub diagnostics: Diagnostics,
    /// The text that spans point into: its name and content.
    pub source: Option<(String, String)>,
    /// What else a person should see, for example everything that was tried.
    pub context: Option<String>,
}

/// What a command returns.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A mistake on the command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Diagnostic::new("C00", message).into()
    }

    /// A file that cannot be read or written.
    pub fn io(path: &str, error: &std::io::Error) -> Self {
        Diagnostic::new("C01", format!("`{path}`: {error}")).into()
    }

    /// The failure, its spans pointing into this text.
    pub fn in_source(diagnostics: Diagnostics, name: &str, text: &str) -> Self {
        Self { diagnostics, source: Some((name.to_owned(), text.to_owned())), context: None }
    }

    /// For a terminal.
    pub fn render(&self) -> String {
        let text = diagnostic::render(&self.diagnostics, self.source());
        match &self.context {
            Some(context) => format!("{context}\n{text}"),
            None => text,
        }
    }

    /// In a line, for another process.
    pub fn summary(&self) -> String {
        let messages: Vec<&str> = self.diagnostics.iter().map(|d| d.message.as_str()).collect();
        messages.join("; ")
    }

    /// One JSON object per line, one line per diagnostic.
    pub fn to_json(&self) -> String {
        let all = diagnostic::json(&self.diagnostics, self.source());
        let list = all["diagnostics"].as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter().map(|d| format!("{d}\n")).collect()
    }

    fn source(&self) -> Option<Source<'_>> {
        self.source.as_ref().map(|(name, text)| Source { name, text })
    }
}

impl From<Diagnostic> for Failure {
    fn from(diagnostic: Diagnostic) -> Self {
        Self { diagnostics: vec![diagnostic], source: None, context: None }
    }
}

impl From<Diagnostics> for Failure {
    fn from(diagnostics: Diagnostics) -> Self {
        Self { diagnostics, source: None, context: None }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let diagnostic = Diagnostic::new("C10", error.to_string());
        let is_of_parts = |path: &Path| path.parent().is_some_and(|p| p.join(shards::INDEX).exists());
        match &error {
            StoreError::Io { path, .. } if path.ends_with(store::SINGLE) && is_of_parts(path) => {
                diagnostic.help("join the parts of that folder first with `ithaca merge-weights`").into()
            }
            StoreError::Io { path, .. } if path.ends_with(shards::INDEX) => diagnostic
                .help("it is in the folder of all parts, as `ithaca shard-weights` writes it")
                .into(),
            _ => diagnostic.into(),
        }
    }
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        let diagnostic = Diagnostic::new("C17", error.to_string());
        let diagnostic = match error {
            LaunchError::Environment(_) => diagnostic
                .help(
                    "`torchrun --nproc-per-node 4 --no-python ithaca run plan.json --launch` sets all of it; for `mpirun` and `srun` say where rank 0 is, as in `MASTER_ADDR=host0 MASTER_PORT=29500 mpirun -n 4 ithaca run plan.json --launch`",
                )
                .help(
                    "or start each rank yourself: `RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ithaca run plan.json --launch`",
                ),
            LaunchError::Taken { .. } => diagnostic
                .help("name a port of rank 0's host that is free in ITHACA_PORT, the same for all processes"),
            LaunchError::Absent { .. } | LaunchError::Unreached { .. } => diagnostic
                .help("start every rank, with the same MASTER_ADDR and MASTER_PORT; `--timeout` says how long to wait"),
            LaunchError::Refused(_) | LaunchError::Setup { .. } => diagnostic,
        };
        diagnostic.into()
    }
}

/// The code of why a run failed.
fn code(error: &RunError) -> &'static str {
    match error {
        RunError::Store(_) => "C10",
        RunError::NoSuchTask(_) => "C00",
        RunError::Memory { .. } => "C11",
        RunError::TokenOutOfRange { .. } | RunError::LabelOutOfRange { .. } => "C12",
        RunError::Cuda(CudaError::Unavailable(_)) => "C20",
        // What is wrong with the user's data is that, whichever rank comes upon it.
        RunError::Rank { cause, .. } => match code(cause) {
            "C12" => "C12",
            _ => "C13",
        },
        RunError::NoMain(_)
        | RunError::Level { .. }
        | RunError::Unsupported(_)
        | RunError::ReplicasDiffer { .. }
        | RunError::Invalid(_)
        | RunError::Stopped
        | RunError::Deadlock { .. }
        | RunError::Unordered { .. }
        | RunError::NotANumber { .. }
        | RunError::Injected
        | RunError::Lost { .. }
        | RunError::RemoteFailure { .. }
        | RunError::Launch(_)
        | RunError::Panicked(_)
        | RunError::Cuda(_)
        | RunError::Thread { .. } => "C13",
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        let error = match error {
            RunError::Launch(error) => return error.into(),
            other => other,
        };
        let code = code(&error);
        let diagnostic = Diagnostic::new(code, error.to_string());
        match error {
            RunError::Memory { .. } => {
                diagnostic.help("run a small model of the same structure with `--shrink`").into()
            }
            RunError::NoSuchTask(_) => diagnostic
                .help("`--trace FILE` without a fault lists every task with its frame and layer")
                .into(),
            RunError::Cuda(CudaError::Unavailable(missing)) => diagnostic.help(missing.part.help()).into(),
            _ => diagnostic.into(),
        }
    }
}

/// Parts of CUDA that are missing, a diagnostic each.
pub fn unavailable(missing: &[Unavailable]) -> Diagnostics {
    missing.iter().map(|m| Diagnostic::new("C20", m.to_string()).help(m.part.help())).collect()
}

impl From<ShardError> for Failure {
    fn from(error: ShardError) -> Self {
        let refuse = |code, help: &str| Diagnostic::new(code, error.to_string()).help(help).into();
        match error {
            ShardError::Store(error) => error.into(),
            ShardError::Schedule(error) => error.into(),
            ShardError::Occupied(_) => refuse("C01", "name a folder that is new or empty"),
            ShardError::Invalid { .. } => refuse("C15", "cut a whole checkpoint with `ithaca shard-weights`"),
            ShardError::OtherPlan { .. } => {
                refuse("C15", "join parts of one plan only; each folder of `ithaca shard-weights` has them")
            }
            ShardError::Conflict { .. } => {
                refuse("C15", "copies of one element are equal in what `ithaca shard-weights` cuts")
            }
            ShardError::Missing { .. } => {
                refuse("C15", "the files of all ranks are needed, as `ithaca shard-weights` wrote them")
            }
        }
    }
}

impl From<TrainingError> for Failure {
    fn from(error: TrainingError) -> Self {
        let refuse = |code, help: &str| Diagnostic::new(code, error.to_string()).help(help).into();
        match error {
            TrainingError::Store(error @ StoreError::Shape { .. }) => {
                Diagnostic::new("C16", error.to_string()).into()
            }
            TrainingError::Store(error) => error.into(),
            TrainingError::Schedule(error) => error.into(),
            TrainingError::NoTraining => refuse(
                "C16",
                "run steps of training with `--mode train`; for weights alone there is `--weights`",
            ),
            TrainingError::Model(_) => refuse("C01", "name the file to write, or another folder"),
            TrainingError::Version { .. } => refuse("C16", "read it with the version that wrote it"),
            TrainingError::Unknown { .. } => {
                refuse("C16", "continue with the same model and the same options of training")
            }
            TrainingError::Lacks { .. } => {
                refuse("C16", "to begin a new training from weights, give them as `--weights`")
            }
        }
    }
}
