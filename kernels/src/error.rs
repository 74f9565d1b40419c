//! Why a run failed.

use crate::cpu::fault::NoSuchTask;
use crate::cuda::error::CudaError;
use crate::launch::error::LaunchError;
use crate::store::error::StoreError;
use ithaca_ir::diagnostic::counted;

/// Why a module or a schedule could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A weight or an input could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no `main`.
    #[error("`{0}` has no function `main`")]
    NoMain(String),
    /// The module is at another level than the interpreter runs.
    #[error("a module of level {found} was given where {expected} is run")]
    Level {
        /// The level that is run.
        expected: &'static str,
        /// The module's level.
        found: &'static str,
    },
    /// A table was asked for a row that it does not have.
    #[error("token {value} does not lie in a table of {rows} rows (`{dim}`)")]
    TokenOutOfRange {
        /// The index.
        value: i32,
        /// Rows of the table.
        rows: u64,
        /// The dimension that is looked up.
        dim: String,
    },
    /// A label is neither the ignored one nor in the vocabulary.
    #[error("label {value} of the token at {at:?} does not lie in a vocabulary of {labels} (`{dim}`)")]
    LabelOutOfRange {
        /// The label.
        value: i32,
        /// Labels that there are.
        labels: u64,
        /// The dimension of the vocabulary.
        dim: String,
        /// Where the token stands, by position.
        at: Vec<u64>,
    },
    /// Something that the program may say but that is not computed.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// Ranks that hold the same elements disagree.
    #[error(
        "output `{output}`: rank {rank} holds {found} at {at:?}, where a rank before it holds {expected}"
    )]
    ReplicasDiffer {
        /// The output.
        output: String,
        /// The later rank.
        rank: u64,
        /// The global index.
        at: Vec<u64>,
        /// What the later rank holds.
        found: f64,
        /// What was there.
        expected: f64,
    },
    /// The program or schedule contradicts itself; a verified one does not.
    #[error("{0}")]
    Invalid(String),
    /// More memory is needed than was allowed.
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
        /// What the task does.
        work: String,
        /// Why.
        cause: Box<RunError>,
    },
    /// A rank stopped because another one failed.
    #[error("stopped, as another rank failed")]
    Stopped,
    /// A rank waited for a message that nobody will send.
    #[error("rank {rank} waits for rank {from}, {why}")]
    Deadlock {
        /// The rank that waits.
        rank: u64,
        /// The rank it waits for.
        from: u64,
        /// Why it waits in vain.
        why: &'static str,
    },
    /// Tasks of two streams touch the same memory, one of them writes it, and no event says which is first.
    #[error("it touches `${buffer}`, which {other} touches too, and nothing orders the two")]
    Unordered {
        /// The buffer, as the task has it that was about to begin.
        buffer: String,
        /// The other task.
        other: String,
    },
    /// A task wrote what is not a number, and that was looked for.
    #[error("it writes NaN to `${buffer}` at {at:?}")]
    NotANumber {
        /// The buffer.
        buffer: String,
        /// The first such element: its index in the whole tensor, or its place on a wire.
        at: Vec<u64>,
    },
    /// A fault that was asked for.
    #[error("a fault was asked for here")]
    Injected,
    /// The fault that was asked for has no place.
    #[error(transparent)]
    NoSuchTask(#[from] NoSuchTask),
    /// The process of another rank is gone.
    #[error("rank {rank} ({address}) {why}{meanwhile}")]
    Lost {
        /// The other rank.
        rank: u64,
        /// Its host and port.
        address: String,
        /// What happened to the connection.
        why: String,
        /// What this rank waited for, if it did.
        meanwhile: String,
    },
    /// A rank in another process failed, in its own words.
    #[error("{rank} ended the run: {words}")]
    Told {
        /// The rank and its address.
        rank: String,
        /// Why.
        words: String,
    },
    /// Processes did not come together, or contradict each other.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A device lacks something, or failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A task panicked: a bug of the runtime.
    #[error("panicked: {0}")]
    Panicked(String),
    /// The operating system gave no thread.
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

    /// Whether this says more about a failure than `other` does: who stopped or waited in vain did so for a failure
    /// elsewhere.
    pub(crate) fn outranks(&self, other: &RunError) -> bool {
        self.distance() < other.distance()
    }

    /// How far the error is from what failed first.
    fn distance(&self) -> u8 {
        match self {
            RunError::Stopped => 2,
            RunError::Deadlock { .. } => 1,
            RunError::Rank { cause, .. } => cause.distance(),
            _ => 0,
        }
    }

    /// Whether the rank stopped for another's failure only.
    pub(crate) fn is_stopped(&self) -> bool {
        match self {
            RunError::Stopped => true,
            RunError::Rank { cause, .. } => cause.is_stopped(),
            _ => false,
        }
    }
}
