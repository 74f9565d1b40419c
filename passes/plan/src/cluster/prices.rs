//! The rate of links for a collective, and its time.

use super::description::Level;

/// The time of one collective, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CollectiveTime {
    /// Paid however few bytes travel.
    pub latency: f64,
    /// Bytes over bandwidth, at the level that takes longest.
    pub transfer: f64,
}

impl CollectiveTime {
    /// Latency and transfer.
    pub fn seconds(self) -> f64 {
        self.latency + self.transfer
    }
}

/// How a collective uses links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pattern {
    /// Around a ring, this many times.
    Ring { rounds: u32 },
    /// From each rank to each other.
    Exchange,
}

/// Bytes per second of one device over a link of a level that it has to itself.
pub(super) fn link_rate(level: &Level, pattern: Pattern) -> f64 {
    let efficiency = match pattern {
        Pattern::Ring { .. } => level.ring_efficiency.value,
        Pattern::Exchange => level.exchange_efficiency.value,
    };
    level.bandwidth.value * efficiency
}
