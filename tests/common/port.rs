//! Ports of the rendezvous of tests.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where Linux takes no ports for outgoing connections (`ip_local_port_range`): one of those may be taken by the time that a
/// test listens on it.
const PORTS: std::ops::Range<u32> = 16_384..32_768;

/// Ports that a process asks for before it comes to those of the process after it.
const PER_PROCESS: u32 = 97;

/// A port that nobody listens on, another one each time.
pub(crate) fn free_port() -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    loop {
        let turn =
            std::process::id().wrapping_mul(PER_PROCESS).wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed));
        let port = u16::try_from(PORTS.start + turn % (PORTS.end - PORTS.start)).expect("all are below 2¹⁶");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
