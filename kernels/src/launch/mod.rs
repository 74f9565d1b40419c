//! Ranks in processes of their own, joined over TCP.
//!
//! A launcher (`torchrun`, `mpirun`, `srun`) starts one process for each rank and says in the environment which one it is
//! ([`Seat`]). [`join`] finds the others and gives a [`Process`]: a connection to each of them, over which blocks travel
//! while a schedule runs, and afterwards what each rank has, which rank 0 puts together.
//!
//! # Finding each other
//!
//! Rank 0 listens where the [`Seat`] says; the others connect to it, again and again until a deadline. On every
//! connection the side that listens speaks first: a magic word and the number of the job. One who connects and reads
//! anything else leaves without a word, and one who sends anything else is dropped, so neither a service of somebody
//! else's nor another job is mistaken for a part of this one. When all have come, rank 0 sends each the addresses of
//! all, and every pair without rank 0 is connected, the higher rank to the lower. Each tells rank 0 that it has met all
//! the others, and when all have, rank 0 tells them; nothing else is sent until then. One that goes meanwhile is noticed
//! by whoever is connected with it, rank 0 above all, and the news goes over all connections that there are.
//!
//! # Frames
//!
//! All else travels in frames: a byte that says what it is, its length as a `u64`, and as many bytes; numbers in little
//! endian. Lengths are checked against what the schedule can send, and memory is taken as bytes arrive.
//!
//! # Failures
//!
//! Sending never waits: each connection has a thread that writes what is queued and one that reads what comes. A process
//! that fails says so, with its task, to all the others, which end with its words. One that is killed says nothing: its
//! connections close, and whoever sees that ends with its rank and address, and tells the rest. Who is neither heard nor
//! closed, as when a machine loses its power, is waited for as long as was allowed for one message.

mod bytes;
mod digest;
mod door;
pub(crate) mod error;
mod frame;
mod mesh;
mod part;
mod process;
mod rendezvous;
mod seat;

pub use error::LaunchError;
pub use process::{Agreed, Process, Step, Then};
pub use rendezvous::join;
pub use seat::Seat;
