//! The runtime: executes a schedule with a thread for each stream of each rank, in memory.
//!
//! Each rank has one arena, with buffers at the offsets of the schedule, so a wrong lifetime shows as a wrong result.
//! Every float type is stored as `f32`, rounded to its own type under [`Storage::AsTyped`](crate::Storage::AsTyped);
//! `i32` is exact.
//!
//! # Streams
//!
//! Both streams of a rank run the same frames (`stream`). In a frame that communicates, each stream runs its own tasks in
//! order of issue, waits at events for the other, and meets it in a barrier where the frame starts and ends (`sync`). Any
//! other frame is one task of its caller's stream. So a collective runs while kernels run. Results do not depend on the
//! speed of the streams: a task writes the data of another only where an event or a barrier orders the two.
//!
//! The runtime checks that, for verified schedules and others (`claims`): a task claims its reads and writes before it
//! starts. Two tasks that access the same elements, one of them writing, without an order between them, are an error that
//! names both, whichever ran first. Operands are read in place.
//!
//! Collectives are on the stream `comm` wherever a schedule has two streams, so one thread of a rank communicates.
//!
//! # Contract of tasks
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
//! | `Exchange` of permute | the tensor, or each of several | the tensor, or each of several |
//! | `Exchange` of fetch_sum | as for all_to_all | a wire: for each member the block received from it |
//! | `Unpack` of all_to_all, all_gather, fetch | that wire | the tensor |
//! | `Unpack` of fetch_sum | that wire | the tensor: for each token the sum of the received rows, in order of the group, in `f32` |
//!
//! Several coalesced tensors of other kinds are packed into one wire and unpacked from one, in the layout of [`ithaca_ir::message::wire`];
//! they are exchanged from wire to wire. An all_reduce of several tensors sums the wire as one tensor.
//!
//! A block is a list of regions, one after another; a wire may be longer than its blocks.
//!
//! A tensor whose memory differs from the table is an error, never a wrong result.
//!
//! # Failures
//!
//! No run hangs: sending never blocks, and a rank that waits for a message that no rank will send gets an error, by
//! [`timeout`](Options::timeout) at the latest. A task waits only for tasks issued before it, so one stream of a rank can
//! always proceed.
//!
//! A task that fails or panics stops its own rank and the others: a waiting rank is woken, a computing rank stops when its
//! kernel ends. The error of a run is that of the failed task, with rank, frame, layer and work. Tests request faults
//! ([`Fault`]) and checks for NaN ([`LookForNan`]).

pub mod communicator;
mod execution;
pub mod fault;
mod job;
mod options;

pub mod dense;
pub mod threads;

mod attention;
mod buffers;
mod claims;
mod context;
mod describe;
mod elementwise;
mod gemm;
pub(crate) mod memory;
mod panics;
mod rank;
mod simd;
mod stream;
mod sync;
mod task;
mod timings;
mod trace;
mod transfer;
mod wire_rows;

#[cfg(test)]
mod tests;

pub use communicator::{Communicator, Mailboxes};
pub(crate) use describe::describe;
pub use execution::Execution;
pub use fault::{Fault, FaultKind, NoSuchTask};
pub use job::{Job, Loaded, execute};
pub use memory::Peak;
pub use options::{LookForNan, Options, Trace};
pub(crate) use panics::guarded;
pub use rank::RankResult;
pub use timings::{Timing, Timings};
pub use trace::TaskSpan;
