//! Ranks in processes of their own, connected over TCP.
//!
//! A launcher (`torchrun`, `mpirun`, `srun`) starts one process for each rank and sets its rank in the environment
//! ([`LaunchEnv`]). [`join`] connects the processes and returns a [`Process`]: a connection to every other rank, over
//! which blocks travel while a schedule runs, and afterwards the results of each rank, which rank 0 assembles.
//!
//! # Rendezvous
//!
//! Rank 0 listens at the address of its [`LaunchEnv`] and no other; the others connect to it and retry until a deadline. On every
//! connection both sides first prove that they know the secret of the job (`handshake.rs`), and a peer that does not is dropped,
//! so that neither another service, nor another job, nor a stranger is taken for a process of this one. Without a secret
//! processes connect on the loopback interface only. When all have connected, rank 0 sends
//! each the addresses of all, and the other pairs connect, the higher rank to the lower. Each process reports to rank 0
//! when it is connected to all others, and rank 0 tells all when the last has reported; no other data is sent until then.
//! The peers of a process that ends meanwhile notice its closed connection, and send the error over all connections.
//!
//! # Frames
//!
//! All other data travels in frames: a byte for the kind, the length as a `u64`, and the body: the elements of a
//! block, little endian, or data in the format of [`postcard`]. Lengths are checked against the most that the schedule can send, and memory is allocated as bytes arrive.
//!
//! # Failures
//!
//! Sending never blocks: each connection has a thread that writes queued frames and one that reads. A process that fails
//! sends its error, with its task, to all others, which end with that error. A process that is killed closes its
//! connections; the peer that notices ends with its rank and address, and tells the others. A peer that keeps its connection
//! open and does not send what is waited for, because it is stopped, slow or without power, is waited for up to the timeout, in
//! every phase. Each process sends an empty frame now and then, so the error names the rank that is silent beside the one that
//! was waited for.

mod connections;
mod environment;
pub(crate) mod error;
mod frame;
mod handshake;
mod listener;
mod peers;
mod process;
mod rendezvous;
mod traffic;
mod untrusted;

pub use environment::LaunchEnv;
pub use error::{LaunchError, Phase};
pub use handshake::JobKey;
pub use process::{Agreement, NextStep, Process, Step};
pub use rendezvous::join;
pub use untrusted::{example_frames, read_frames};
