//! Ports of the rendezvous of tests.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where Linux takes no ports for outgoing connections (`ip_local_port_range`): one of those may be taken by the time that a
/// test listens on it.
const PORTS: std::ops::Range<u32> = 16_384..32_764;

/// Ports of a run: behind `MASTER_PORT` rank 0 listens on one of the next eight.
const PER_RUN: u32 = 9;

/// Runs that a process asks for before it comes to those of the process after it.
const RUNS: u32 = 97;

/// A port that nobody listens on, like those after it, and others each time.
pub(crate) fn free_port() -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    loop {
        let run = std::process::id().wrapping_mul(RUNS).wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed));
        let first = PORTS.start + run % ((PORTS.end - PORTS.start) / PER_RUN) * PER_RUN;
        let mut ports = (first..first + PER_RUN).map(|port| u16::try_from(port).expect("all are below 2¹⁶"));
        if ports.all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return u16::try_from(first).expect("all are below 2¹⁶");
        }
    }
}
