//! The runtime: executes a schedule with a thread per rank, in memory.
//!
//! Each rank has one arena, and buffers lie in it where the schedule puts them, so a wrong lifetime shows as a wrong
//! result. Every float type is stored as `f32`, rounded to its own type where [`Storage::AsTyped`] asks for that; `i32`
//! is kept exactly. Tasks run in order of issue, both streams in
//! one thread; a task that waits for an event which has not happened is an error.
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
//! No run hangs: sending never waits, a rank that fails stops the others, and a rank that waits for what nobody will
//! send is told so.

pub mod communicator;

pub mod dense;

mod attention;
mod elementwise;
mod gemm;
pub(crate) mod memory;
mod message;
pub(crate) mod rank;
mod simd;
pub mod threads;
mod timings;
mod transfer;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ithaca_ir::layout::At;
use ithaca_ir::schedule::{Content, Schedule};
use ithaca_ir::traffic::{Ledger, Traffic};
use ithaca_ir::{Mesh, Rank};

pub use communicator::{Communicator, Mailboxes};
pub use memory::Peak;
pub(crate) use memory::layers_of;
pub use timings::{Timing, Timings};

use crate::Outputs;
use crate::error::RunError;
use crate::kept::{self, Part};
use crate::storage::Storage;
use crate::store::TensorSource;
use crate::tensor::index;

/// Limits of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most memory for arenas, weights and inputs of all ranks together, bytes.
    pub memory_limit: u64,
    /// How long a rank waits for one message; `None` is for ever, which still ends when it waits in vain.
    pub timeout: Option<Duration>,
    /// Whether narrow types round what is written to them.
    pub storage: Storage,
}

impl Default for Options {
    /// 8 GiB, no limit of time, and numbers as they were computed.
    fn default() -> Self {
        Self { memory_limit: 8 << 30, timeout: None, storage: Storage::Wide }
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
    let main = schedule.main().ok_or_else(|| RunError::NoMain(schedule.name.clone()))?;
    if schedule.frames[main].n_arguments != 0 {
        return Err(RunError::invalid("`main` has arguments"));
    }
    let arena = memory::ArenaShape::of(schedule)?;
    let plan = memory::SourcePlan::of(schedule)?;
    let memory_bytes = plan.check(schedule, &arena, options.memory_limit)?;
    let written = plan.written();
    let mut peaks = plan.held(index(schedule.space.mesh.ranks()));
    let (sources, lasting) = plan.load(&schedule.space, weights, inputs, options.storage)?;

    let mailboxes = Mailboxes::new(schedule.space.mesh.ranks(), options.timeout);
    let ledger = Mutex::new(Ledger::default());
    let world = rank::World {
        schedule,
        shape: &arena,
        sources: &sources,
        communicator: &mailboxes,
        ledger: &ledger,
        storage: options.storage,
    };
    let run_rank = |rank: Rank, lasting: memory::Own| {
        let run = || rank::run(world, rank, lasting);
        let result = std::panic::catch_unwind(AssertUnwindSafe(run))
            .unwrap_or_else(|panic| Err(RunError::Panicked(panic_message(&*panic))));
        match &result {
            Ok(_) => mailboxes.finish(rank),
            Err(_) => mailboxes.stop(),
        }
        result
    };
    let results: Vec<Result<rank::Done, RunError>> = std::thread::scope(|scope| {
        let spawn = |(rank, lasting): (Rank, memory::Own)| {
            let builder = std::thread::Builder::new().name(format!("rank {}", rank.0));
            let run_rank = &run_rank;
            builder.spawn_scoped(scope, move || run_rank(rank, lasting)).map_err(|source| {
                mailboxes.stop();
                RunError::Thread { rank: rank.0, source }
            })
        };
        let threads: Vec<_> = schedule.space.mesh.iter_ranks().zip(lasting).map(spawn).collect();
        let join = |thread: Result<std::thread::ScopedJoinHandle<'_, _>, RunError>| {
            thread?.join().unwrap_or_else(|panic| Err(RunError::Panicked(panic_message(&*panic))))
        };
        threads.into_iter().map(join).collect()
    });

    let held = first_failure(results)?;
    for (peak, done) in peaks.iter_mut().zip(&held) {
        peak.arena = done.reached;
    }
    let mut timings = Timings::default();
    held.iter().for_each(|done| timings.merge(&done.timings));
    let mut outputs = Outputs::new();
    for (i, output) in schedule.frames[main].outputs.iter().enumerate() {
        let name = output.name.clone().unwrap_or_else(|| i.to_string());
        let Content::Tensor(ty) = &schedule.frames[main].buffers[output.buffer].content else {
            return Err(RunError::invalid(format!("output `{name}` is a wire buffer")));
        };
        let local = |rank: Rank| Ok(Cow::Borrowed(held[index(rank.0)].outputs[i].as_slice()));
        let tensor = crate::oracle::assemble(&schedule.space, &name, ty, local)?;
        outputs.insert(name, tensor);
    }
    let kept = kept(schedule, &written, &held, weights)?;
    let traffic = ledger.into_inner().unwrap_or_else(PoisonError::into_inner).rows();
    Ok(Execution { outputs, kept, traffic, peaks, timings, memory_bytes })
}

/// What ranks wrote, as files have it; `before` has what was there.
fn kept(
    schedule: &Schedule,
    written: &[memory::Written<'_>],
    held: &[rank::Done],
    before: &dyn TensorSource,
) -> Result<Outputs<f32>, RunError> {
    let mut parts: BTreeMap<String, Vec<Part<'_, f32>>> = BTreeMap::new();
    for (number, memory::Written { binding, ty, layer }) in written.iter().enumerate() {
        let held = held.iter().map(|done| Cow::Borrowed(done.lasting[number].as_slice())).collect();
        parts.entry(binding.stored_name(*layer)).or_default().push(Part { binding, ty, held });
    }
    let mut kept = Outputs::new();
    for (name, parts) in parts {
        kept.extend(kept::members(&name, kept::join(&schedule.space, &name, &parts, before)?));
    }
    Ok(kept)
}

/// All results, or the failure of the first rank that did not merely stop for another's.
fn first_failure<T>(results: Vec<Result<T, RunError>>) -> Result<Vec<T>, RunError> {
    let mut stopped = None;
    let mut held = Vec::with_capacity(results.len());
    for result in results {
        match result {
            Ok(x) => held.push(x),
            Err(error) if error.is_stopped() => stopped = Some(error),
            Err(error) => return Err(error),
        }
    }
    match stopped {
        Some(error) => Err(error),
        None => Ok(held),
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}
