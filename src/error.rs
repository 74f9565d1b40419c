//! Failures: diagnostics together with the text that they point into.

use std::path::Path;

use ithaca_ir::{Diagnostic, Diagnostics, Source, diagnostic};
use ithaca_kernels::RunError;
use ithaca_kernels::cuda::{CudaError, Unavailable};
use ithaca_kernels::launch::LaunchError;
use ithaca_kernels::store::shards::{self, ShardError};
use ithaca_kernels::store::training::TrainingError;
use ithaca_kernels::store::{self, StoreError};

/// The failure of a command.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The diagnostics, in order.
    pub diagnostics: Diagnostics,
    /// The text that spans point into: its name and content.
    pub source: Option<(String, String)>,
    /// Further output for a person, such as the table of alternatives.
    pub context: Option<String>,
}

/// The refusal of arguments, without the words about the command line.
pub(crate) fn of_arguments(code: &'static str, error: &clap::Error) -> Diagnostic {
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut lines = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more "));
    let message = lines.next().unwrap_or_default();
    let refusal = Diagnostic::new(code, message.strip_prefix("error: ").unwrap_or(message));
    lines.fold(refusal, |refusal, line| {
        refusal.help(line.strip_prefix("tip: ").unwrap_or(line).trim_matches(['[', ']']))
    })
}

/// The result of a command.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// An error on the command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Diagnostic::new("C00", message).into()
    }

    /// A file that cannot be read or written.
    pub fn io(path: &str, error: &std::io::Error) -> Self {
        Diagnostic::new("C01", format!("`{path}`: {error}")).into()
    }

    /// For a person.
    pub fn render(&self) -> String {
        self.in_context(diagnostic::render(&self.diagnostics, self.source()))
    }

    /// For a terminal of so many columns, to which lines of the source are cut.
    pub fn render_within(&self, columns: usize) -> String {
        self.in_context(diagnostic::render_within(&self.diagnostics, self.source(), columns))
    }

    fn in_context(&self, text: String) -> String {
        match &self.context {
            Some(context) => format!("{context}\n{text}"),
            None => text,
        }
    }

    /// One line, for another process.
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
        let has_shards = |path: &Path| path.parent().is_some_and(|p| p.join(shards::INDEX).exists());
        match &error {
            StoreError::Io { path, .. } if path.ends_with(store::SINGLE) && has_shards(path) => {
                diagnostic.help("join the shards of the folder first with `ithaca merge-weights`").into()
            }
            StoreError::Io { path, .. } if path.ends_with(shards::INDEX) => diagnostic
                .help("name the folder that `ithaca shard-weights` wrote; the index is in it")
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
                    "`torchrun --nproc-per-node 4 --no-python ithaca run plan.json --launch` sets all variables; for `mpirun` and `srun` add the address of rank 0, as in `MASTER_ADDR=host0 MASTER_PORT=29500 mpirun -n 4 ithaca run plan.json --launch`",
                )
                .help(
                    "or start each rank yourself: `RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ithaca run plan.json --launch`",
                ),
            LaunchError::NoSecret { .. } => diagnostic
                .help("give all processes one secret: `export ITHACA_JOB_SECRET=$(openssl rand -hex 32)`; `mpirun` passes it on with `-x ITHACA_JOB_SECRET`, `srun` by itself")
                .help("or run all processes on one machine, with `MASTER_ADDR=127.0.0.1`"),
            LaunchError::Taken { .. } => diagnostic
                .help("set ITHACA_PORT to a free port of the host of rank 0, the same for all processes"),
            LaunchError::Absent { .. } | LaunchError::Unreached { .. } => diagnostic
                .help("start every rank, with the same MASTER_ADDR and MASTER_PORT; `--timeout` sets the time to wait"),
            LaunchError::Refused(_) | LaunchError::Setup { .. } => diagnostic,
        };
        diagnostic.into()
    }
}

/// The code of a failed run.
fn code(error: &RunError) -> &'static str {
    match error {
        RunError::Store(_) => "C10",
        RunError::NoSuchTask(_) => "C00",
        RunError::Memory { .. } => "C11",
        RunError::TokenOutOfRange { .. } | RunError::LabelOutOfRange { .. } => "C12",
        RunError::Experts(_) => "C18",
        RunError::CacheFull { .. } | RunError::NoPage { .. } => "C19",
        RunError::Cuda(CudaError::Unavailable(_)) => "C20",
        // Invalid data keeps its code, whichever rank finds it.
        RunError::Rank { cause, .. } => match code(cause) {
            code @ ("C12" | "C18" | "C19") => code,
            _ => "C13",
        },
        RunError::NoMain(_)
        | RunError::Level { .. }
        | RunError::Unsupported(_)
        | RunError::ReplicasDiffer { .. }
        | RunError::Invalid(_)
        | RunError::Stopped
        | RunError::Deadlock { .. }
        | RunError::TimedOut { .. }
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
            RunError::NoSuchTask(_) => diagnostic
                .help("`--trace FILE` without `--fault` lists every task with its frame and layer")
                .into(),
            RunError::TimedOut { .. } => diagnostic
                .help("where the rank is only slow, `--timeout` sets the time to wait for it, in seconds")
                .into(),
            RunError::Cuda(CudaError::Unavailable(missing)) => diagnostic.help(missing.part.help()).into(),
            _ => diagnostic.into(),
        }
    }
}

/// A diagnostic for each missing part of CUDA.
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
            ShardError::Invalid { .. } => {
                refuse("C15", "split a whole checkpoint with `ithaca shard-weights`")
            }
            ShardError::OtherPlan { .. } => refuse(
                "C15",
                "join the shards of one plan; each run of `ithaca shard-weights` writes them to one folder",
            ),
            ShardError::Conflict { .. } => refuse(
                "C15",
                "use the files as `ithaca shard-weights` wrote them: copies of an element are equal there",
            ),
            ShardError::Missing { .. } => refuse(
                "C15",
                "keep the files of all ranks in the folder, as `ithaca shard-weights` wrote them",
            ),
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
            TrainingError::NoTraining => {
                refuse("C16", "add `--mode train`, or pass weights alone as `--weights`")
            }
            TrainingError::Model(_) => refuse("C01", "name a file, or another folder"),
            TrainingError::Version { .. } => {
                refuse("C16", "read it with the version of Ithaca that wrote it")
            }
            TrainingError::Unknown { .. } => {
                refuse("C16", "continue with the same model and the same training options")
            }
            TrainingError::Lacks { .. } => {
                refuse("C16", "to start a new training from weights, pass them as `--weights`")
            }
        }
    }
}
