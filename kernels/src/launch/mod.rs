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
mod door;
mod frame;
mod mesh;
mod part;
mod process;
mod rendezvous;
mod seat;

pub use process::{Agreed, Process, Step, Then};
pub use rendezvous::join;
pub use seat::Seat;

/// Why processes did not come together.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The environment does not say which process this is.
    #[error("the environment does not say which process this is: {}", .0.join("; "))]
    Environment(Vec<String>),
    /// Nothing can listen where rank 0 should.
    #[error("rank 0 cannot listen on {address}: {source}")]
    Taken {
        /// The host and its ports.
        address: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Some ranks did not come.
    #[error("after {seconds} s {} missing of {world}{strays}", ranks(.missing))]
    Absent {
        /// Those that are missing.
        missing: Vec<u64>,
        /// How many there should be.
        world: u64,
        /// How long they were waited for.
        seconds: u64,
        /// What came in their place.
        strays: String,
    },
    /// Another rank cannot be reached.
    #[error("rank {rank} cannot reach rank {other} at {address} within {seconds} s: {why}")]
    Unreached {
        /// This one.
        rank: u64,
        /// The other.
        other: u64,
        /// Where it should be.
        address: String,
        /// How long it was tried.
        seconds: u64,
        /// What happened the last time.
        why: String,
    },
    /// Processes contradict each other, or one has left before all had met, in the words of the one who noticed.
    #[error("{0}")]
    Refused(String),
    /// The connection cannot be set up.
    #[error("a connection to {address} cannot be set up: {source}")]
    Setup {
        /// The other side.
        address: String,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// `rank 3 is`, or `ranks 1, 2 are`.
fn ranks(which: &[u64]) -> String {
    let list: Vec<String> = which.iter().map(u64::to_string).collect();
    match which.len() {
        1 => format!("rank {} is", list[0]),
        _ => format!("ranks {} are", list.join(", ")),
    }
}

/// FNV-1a, 64 bits, of parts that are told apart from their joined text.
fn digest<'a>(parts: impl IntoIterator<Item = &'a str>) -> u64 {
    let bytes = parts.into_iter().flat_map(|part| part.bytes().chain([0xff]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
