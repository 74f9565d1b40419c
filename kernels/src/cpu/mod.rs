//! The runtime: executes a schedule with a thread for each stream of each rank, in memory.
//!
//! Each rank has one arena, and buffers lie in it where the schedule puts them, so a wrong lifetime shows as a wrong
//! result. Every float type is stored as `f32`, rounded to its own type where [`Storage::AsTyped`] asks for that; `i32`
//! is kept exactly.
//!
//! # Streams
//!
//! Both streams of a rank walk the same frames (`walk`). In a frame that communicates each runs its own tasks in order
//! of issue and waits for the other at events, and where the frame begins and ends (`sync`); any other frame is one
//! task of its caller's stream. So a collective goes on while kernels run. Results do not depend on who is faster: one
//! task writes what another reads only where an event or a sync orders the two.
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
mod execution;
pub mod fault;
mod job;
mod options;

pub mod dense;
pub mod threads;

mod attention;
mod buffers;
mod claims;
mod coalesced;
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
pub(crate) use memory::layers_of;
pub use options::{LookForNan, Options, Trace};
pub(crate) use panics::guarded;
pub use rank::RankResult;
pub use timings::{Timing, Timings};
pub use trace::TaskSpan;
