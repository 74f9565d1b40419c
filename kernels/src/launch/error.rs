//! Why processes could not be connected.

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
    /// Another rank cannot be arena_used.
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
