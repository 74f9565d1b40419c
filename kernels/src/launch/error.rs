//! Why processes could not be connected, and the phases in which they wait for each other.

use std::fmt;

/// A phase of a run in processes after all are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Processes compare their programs before they run.
    Agreeing,
    /// Ranks exchange blocks.
    Running,
    /// Rank 0 gathers and judges results, and sends updates and the exit code.
    Collecting,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Agreeing => "agreeing on the run",
            Phase::Running => "running",
            Phase::Collecting => "collecting results",
        })
    }
}

/// Why processes could not be connected.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The environment does not name the rank of this process.
    #[error("the environment does not say which process this is: {}", .0.join("; "))]
    Environment(Vec<String>),
    /// Other machines could connect, and nothing distinguishes the processes of this job from strangers.
    #[error(
        "MASTER_ADDR is {host}, which other machines reach, and the job has no secret by which its processes know each other"
    )]
    NoSecret {
        /// The host of rank 0.
        host: String,
    },
    /// Rank 0 cannot listen at its address.
    #[error("rank 0 cannot listen on {address}: {source}")]
    Taken {
        /// The host and its ports.
        address: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Some ranks did not connect.
    #[error("after {seconds} s {} missing of {world}{rejected_connections}", ranks(.missing))]
    Absent {
        /// The missing ranks.
        missing: Vec<u64>,
        /// The number of processes of the job.
        world: u64,
        /// The time for which they were waited for.
        seconds: u64,
        /// Connections that were not of this job, as the end of the message.
        rejected_connections: String,
    },
    /// Another rank cannot be reached.
    #[error("rank {rank} cannot reach rank {other} at {address} within {seconds} s: {why}")]
    Unreached {
        /// This rank.
        rank: u64,
        /// The other rank.
        other: u64,
        /// The address of the other.
        address: String,
        /// The time for which it was tried.
        seconds: u64,
        /// The error of the last attempt.
        why: String,
    },
    /// Processes contradict each other, or one ended before all were connected.
    #[error("{0}")]
    Refused(String),
    /// A connection cannot be set up.
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
