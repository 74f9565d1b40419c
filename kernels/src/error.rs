//! Errors of runs.

use crate::cpu::fault::NoSuchTask;
use crate::cuda::error::CudaError;
use crate::launch::error::{LaunchError, Phase};
use crate::store::error::StoreError;
use ithaca_ir::diagnostic::counted;

/// Why a module or a schedule could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A weight or an input could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A program without `main`.
    #[error("`{0}` has no function `main`")]
    NoMain(String),
    /// The module is of another level than the function runs.
    #[error("a module of level {found} was passed, but level {expected} is required")]
    Level {
        /// The level that is run.
        expected: &'static str,
        /// The module's level.
        found: &'static str,
    },
    /// A token outside its table.
    #[error("token {value} is outside a table of {rows} rows (`{dim}`)")]
    TokenOutOfRange {
        /// The index.
        value: i32,
        /// Rows of the table.
        rows: u64,
        /// The dimension that is looked up.
        dim: String,
    },
    /// A label is neither the ignored one nor in the vocabulary.
    #[error("label {value} of the token at {at:?} is outside a vocabulary of {labels} (`{dim}`)")]
    LabelOutOfRange {
        /// The label.
        value: i32,
        /// The size of the vocabulary.
        labels: u64,
        /// The dimension of the vocabulary.
        dim: String,
        /// The position of the token.
        at: Vec<u64>,
    },
    /// A valid program that is not implemented.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// An expert has fewer slots than tokens that chose it.
    #[error("{0}")]
    Experts(String),
    /// A sequence has more tokens than its cache.
    #[error("a sequence of {tokens} tokens in a cache of {capacity}")]
    CacheFull {
        /// The tokens of the sequence.
        tokens: u64,
        /// The tokens that the cache may have.
        capacity: u64,
    },
    /// A new token of a sequence is to be written into a page that the table does not name, or that is no page of the rank.
    #[error("token {token} of sequence {sequence} has no page in the table that the rank has")]
    NoPage {
        /// The number of the token.
        token: u64,
        /// The number of the sequence on its rank.
        sequence: u64,
    },
    /// Ranks that hold the same elements disagree.
    #[error("output `{output}`: rank {rank} has {found} at {at:?}, but an earlier rank has {expected}")]
    ReplicasDiffer {
        /// The output.
        output: String,
        /// The later rank.
        rank: u64,
        /// The global index.
        at: Vec<u64>,
        /// The number on the later rank.
        found: f64,
        /// The number on the earlier rank.
        expected: f64,
    },
    /// A program or schedule that contradicts itself; verification finds it.
    #[error("{0}")]
    Invalid(String),
    /// The run needs more memory than the limit.
    #[error(
        "the run needs {needed} bytes ({} with arenas of {arena} bytes, {weights} bytes of weights and inputs), more than the limit of {limit}",
        counted(*ranks, "rank")
    )]
    Memory {
        /// Bytes needed.
        needed: u128,
        /// Number of ranks.
        ranks: u64,
        /// Bytes of one rank's arena.
        arena: u128,
        /// Bytes of weights and inputs over all ranks.
        weights: u128,
        /// Bytes allowed.
        limit: u64,
    },
    /// A rank failed; the others were stopped.
    #[error("rank {rank} failed at task {task} of `{frame}` at layer {layer} ({work}): {cause}")]
    Rank {
        /// The rank.
        rank: u64,
        /// The frame it was in.
        frame: String,
        /// The layer that the frame ran for; 0 in `main`.
        layer: u64,
        /// The task's number in the frame.
        task: usize,
        /// The kind of work.
        work: String,
        /// Why.
        cause: Box<RunError>,
    },
    /// A rank stopped because another one failed.
    #[error("stopped, as another rank failed")]
    Stopped,
    /// A rank waited for a message that no rank will send.
    #[error("rank {rank} waits for rank {from}, {why}")]
    Deadlock {
        /// The rank that waits.
        rank: u64,
        /// The rank it waits for.
        from: u64,
        /// Why the message will not come.
        why: &'static str,
    },
    /// A rank of another process let this one wait for as long as `--timeout` allows.
    #[error("rank {rank} waited {seconds} s for {from} while {phase}{silent}")]
    TimedOut {
        /// The rank that waited.
        rank: u64,
        /// The rank it waited for, with its address.
        from: String,
        /// The phase of the run.
        phase: Phase,
        /// How long it waited.
        seconds: u64,
        /// The rank that has been silent for longest, as the end of the message.
        silent: String,
    },
    /// Tasks of two streams access the same memory, one of them writes it, and no event orders them.
    #[error("it accesses `${buffer}`, which {other} accesses too, and nothing orders the two")]
    Unordered {
        /// The buffer of the later task.
        buffer: String,
        /// The other task.
        other: String,
    },
    /// A task wrote NaN, and the check was requested.
    #[error("it writes NaN to `${buffer}` at {at:?}")]
    NotANumber {
        /// The buffer.
        buffer: String,
        /// The first such element: its index in the whole tensor, or in the wire buffer.
        at: Vec<u64>,
    },
    /// A fault that was requested.
    #[error("a fault was requested here")]
    Injected,
    /// The schedule does not have the task of the requested fault.
    #[error(transparent)]
    NoSuchTask(#[from] NoSuchTask),
    /// The connection to the process of another rank broke.
    #[error("rank {rank} ({address}) {why}{meanwhile}")]
    Lost {
        /// The other rank.
        rank: u64,
        /// Its host and port.
        address: String,
        /// The error of the connection.
        why: String,
        /// The rank that this one waited for, as the end of the message.
        meanwhile: String,
    },
    /// A rank in another process failed.
    #[error("{rank} ended the run: {message}")]
    RemoteFailure {
        /// The rank and its address.
        rank: String,
        /// Its error.
        message: String,
    },
    /// Processes could not be connected, or contradict each other.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A device failed, or is not available.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A task panicked: a bug of the runtime.
    #[error("panicked: {0}")]
    Panicked(String),
    /// The operating system could not start a thread.
    #[error("cannot start a thread for rank {rank}: {source}")]
    Thread {
        /// The rank.
        rank: u64,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl RunError {
    /// An [`Invalid`](Self::Invalid).
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(message.into())
    }

    /// Whether this error is closer to the first failure than `other`: a rank that stopped or waited did so for a
    /// failure elsewhere.
    pub(crate) fn outranks(&self, other: &RunError) -> bool {
        self.distance() < other.distance()
    }

    /// The distance of the error from the first failure.
    fn distance(&self) -> u8 {
        match self {
            RunError::Stopped => 2,
            RunError::Deadlock { .. } | RunError::TimedOut { .. } => 1,
            RunError::Rank { cause, .. } => cause.distance(),
            _ => 0,
        }
    }

    /// Whether the rank stopped only because another failed.
    pub(crate) fn is_stopped(&self) -> bool {
        self.distance() == RunError::Stopped.distance()
    }
}

/// All results, or the failure of the first rank or stream that did not merely stop or wait because of another.
pub(crate) fn first_failure<T>(results: Vec<Result<T, RunError>>) -> Result<Vec<T>, RunError> {
    let mut failure: Option<RunError> = None;
    let mut held = Vec::with_capacity(results.len());
    for result in results {
        match result {
            Ok(x) => held.push(x),
            Err(error) if failure.as_ref().is_none_or(|first| error.outranks(first)) => failure = Some(error),
            Err(_) => {}
        }
    }
    failure.map_or(Ok(held), Err)
}
