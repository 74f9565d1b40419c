//! The runtime: executes a schedule with a thread for each stream of each rank, in memory.
//!
//! Each rank has one arena, and buffers lie in it where the schedule puts them, so a wrong lifetime shows as a wrong
//! result. Every float type is stored as `f32`, rounded to its own type where [`Storage::AsTyped`] asks for that; `i32`
//! is kept exactly.
//!
//! # Streams
//!
//! Both streams of a rank walk the same frames (`walk`). In a frame that communicates each runs its own tasks in order
//! of issue and waits for the other at events, and where the frame begins and ends (`meeting`); any other frame is one
//! task of its caller's stream. So a collective goes on while kernels run. Results do not depend on who is faster: one
//! task writes what another reads only where an event or a meeting orders the two.
//!
//! That is checked, for verified schedules and for others (`shared`): a task claims what it reads and writes before it
//! begins, and two tasks of which one writes what the other touches, and which nothing orders, are an error that names
//! both, whichever happened to be first. Operands are read where they lie.
//!
//! Collectives are on the stream `comm` wherever a schedule has two streams, so one thread of a rank talks to the others.
//!
//! # What tasks may expect of each other
//!
//! The *group* of a collective and the *blocks* that its members exchange are those of [`ithaca_ir::boxes::exchange`].
//! Blocks are row-major, and a wire buffer holds them one after another in order of the group's members, a rank's own
//! block included.
//!
//! | work | reads | writes |
//! |---|---|---|
//! | `Pack` of all_to_all, reduce_scatter, fetch, fetch_sum | the tensor | a wire: for each member the block sent to it |
//! | `Exchange` of all_to_all, fetch | that wire, or the tensor where its memory is those blocks in that order | a wire: for each member the block received from it, or the tensor where its memory is that |
//! | `Exchange` of all_gather | the tensor, which is the block | as for all_to_all |
//! | `Exchange` of reduce_scatter | as for all_to_all | the tensor: the sum of the blocks received, in order of the group, in `f32` |
//! | `Exchange` of all_reduce | the tensor | the tensor: each member sums its [`chunk`](ithaca_ir::boxes::chunk), then all gather |
//! | `Exchange` of permute | the tensor | the tensor |
//! | `Exchange` of fetch_sum | as for all_to_all | a wire: for each member the block received from it |
//! | `Unpack` of all_to_all, all_gather, fetch | that wire | the tensor |
//! | `Unpack` of fetch_sum | that wire | the tensor: the sum of what was received for each token, in order of the group, in `f32` |
//!
//! A message of several tensors is packed into one wire and unpacked from one, as [`ithaca_ir::message::wire`] lays it
//! out; its exchange is from wire to wire. An all_reduce of several sums the wire as one tensor.
//!
//! A block is a list of regions, one after another; a wire may be longer than the blocks in it.
//!
//! A tensor whose memory is not what the table says is an error, never a wrong result.
//!
//! # Failures
//!
//! No run hangs: sending never waits, and a rank that waits for what nobody will send is told so, by
//! [`timeout`](Options::timeout) at the latest. A task waits only for tasks issued before it, so of the streams of one rank
//! one can always go on.
//!
//! A task that fails or panics stops its own rank and the others: who waits is woken, who computes stops when its kernel
//! ends. The error of a run is that of the task that failed, with rank, frame, layer and work. Faults can be asked for
//! ([`Fault`]), and NaN can be looked for ([`LookForNan`]).

pub mod communicator;

pub mod inside;
mod job;

pub mod dense;

pub mod fault;

mod attention;
mod elementwise;
mod gemm;
mod locate;
mod meeting;
pub(crate) mod memory;
mod message;
pub(crate) mod rank;
mod shared;
mod simd;
mod task;
pub mod threads;
mod timings;
mod transfer;
mod walk;

#[cfg(test)]
mod tests;

use std::time::Duration;

use ithaca_ir::layout::At;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::timeline::Span;
use ithaca_ir::traffic::Traffic;
use ithaca_ir::{Mesh, Rank};

pub use communicator::{Communicator, Mailboxes};
pub use fault::{Fault, FaultKind, NoSuchTask};
pub use job::{Job, Loaded, RanTask, RankPart};
pub use memory::Peak;
pub(crate) use memory::layers_of;
pub use timings::{Timing, Timings};
pub(crate) use walk::guarded;

use crate::Outputs;
use crate::error::RunError;
use crate::storage::Storage;
use crate::store::TensorSource;

/// Limits of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most memory for arenas, weights and inputs of all ranks that run in this process together, bytes.
    pub memory_limit: u64,
    /// How long a rank waits for one message; `None` is for ever, which still ends when it waits in vain.
    pub timeout: Option<Duration>,
    /// Whether narrow types round what is written to them.
    pub storage: Storage,
    /// Whether a task that writes NaN is a failure.
    pub look_for_nan: LookForNan,
    /// What is to go wrong.
    pub fault: Option<Fault>,
    /// Whether to write down what ran when.
    pub trace: Trace,
}

/// Where a run looks for what is not a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LookForNan {
    /// Nowhere.
    #[default]
    Nowhere,
    /// In all that tasks write; the first task that writes NaN fails. An infinity is no failure: the lse of a query that
    /// sees no key is minus infinity.
    InWhatIsWritten,
}

/// Whether a run is written down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trace {
    /// It is not.
    #[default]
    None,
    /// Each run of each task, in [`Execution::spans`].
    Spans,
}

impl Default for Options {
    /// 8 GiB, no limit of time, numbers as they were computed; nothing is looked for, goes wrong or is written down.
    fn default() -> Self {
        Self {
            memory_limit: 8 << 30,
            timeout: None,
            storage: Storage::Wide,
            look_for_nan: LookForNan::Nowhere,
            fault: None,
            trace: Trace::None,
        }
    }
}

/// What a run gave.
#[derive(Clone, Debug)]
pub struct Execution {
    /// The outputs of `main`, assembled from all ranks and cut to the valid part.
    pub outputs: Outputs<f32>,
    /// Every weight and state that the schedule writes, assembled from all ranks, under its stored name and in its
    /// stored shape, in order of names; [`Layered`](crate::store::Layered) over the weights it is what the next step
    /// reads.
    pub kept: Outputs<f32>,
    /// What was sent, counted as it was sent, in bytes of the schedule's element types.
    pub traffic: Vec<Traffic>,
    /// What each rank used, measured, in order of ranks.
    pub peaks: Vec<Peak>,
    /// How long tasks took, of all ranks together.
    pub timings: Timings,
    /// Bytes of memory that arenas, weights, states and inputs took on this machine.
    pub memory_bytes: u64,
    /// When tasks ran, seconds from when the ranks of a process began, if that was asked for: in order of ranks, the
    /// compute stream first.
    pub spans: Vec<Span>,
}

impl Execution {
    /// The most that a rank of a place used, kind by kind; of all ranks where there is no place.
    pub fn peak_at(&self, mesh: &Mesh, at: Option<At>) -> Peak {
        let here =
            mesh.iter_ranks().zip(&self.peaks).filter(|(rank, _)| at.is_none_or(|at| at.has(mesh, *rank)));
        here.fold(Peak::default(), |most, (_, peak)| most.or(peak))
    }
}

/// Executes a schedule on as many threads as its mesh has ranks.
///
/// `weights` and `inputs` answer the buffers placed at `weight` and `input`; a state is zero where `weights` has none of
/// its name.
///
/// # Errors
/// [`RunError::Memory`] before anything is loaded, [`RunError::Store`] for a source, [`RunError::Rank`] for the first
/// rank, in order of ranks, whose task failed, [`RunError::ReplicasDiffer`] when ranks disagree about an output.
pub fn execute(
    schedule: &Schedule,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    options: &Options,
) -> Result<Execution, RunError> {
    let ranks: Vec<Rank> = schedule.space.mesh.iter_ranks().collect();
    let job = Job::of(schedule)?;
    let loaded = job.load(&ranks, weights, inputs, options)?;
    let memory_bytes = loaded.memory_bytes;
    let mailboxes = Mailboxes::new(schedule.space.mesh.ranks(), options.timeout);
    let parts = loaded.run(&mailboxes)?;
    job.assemble(&parts, weights, memory_bytes)
}
