//! Collectives: their names, how they use links, and their time.

use ithaca_ir::{Axes, Op};

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

    /// As many times as long.
    pub(super) fn times(self, factor: f64) -> Self {
        Self { latency: factor * self.latency, transfer: factor * self.transfer }
    }

    /// That of two that travel as one message, which pay the latency once.
    pub(super) fn with(self, other: Self) -> Self {
        Self { latency: self.latency.max(other.latency), transfer: self.transfer + other.transfer }
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

/// A collective in which all ranks along an axis take part alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank gets the parts of all.
    AllGather,
    /// Every rank gets a part of the sum.
    ReduceScatter,
    /// Every rank gets the sum.
    AllReduce,
    /// Every rank gets a part of every rank.
    AllToAll,
}

ithaca_ir::spellings! {
    Collective {
        AllGather = "all_gather",
        ReduceScatter = "reduce_scatter",
        AllReduce = "all_reduce",
        AllToAll = "all_to_all",
    }
}

impl Collective {
    /// The collective of an operation, and its axes.
    pub(crate) fn of(op: &Op) -> Option<(Self, Axes)> {
        match *op {
            Op::AllGather { axis, .. } => Some((Self::AllGather, axis)),
            Op::ReduceScatter { axis, .. } => Some((Self::ReduceScatter, axis)),
            Op::AllReduce { axis } => Some((Self::AllReduce, axis)),
            Op::AllToAll { axis, .. } => Some((Self::AllToAll, axis.into())),
            // The others concern no axis, or give each rank a part of its own.
            _ => None,
        }
    }

    /// How it uses links.
    pub(super) fn pattern(self) -> Pattern {
        match self {
            Self::AllGather | Self::ReduceScatter => Pattern::Ring { rounds: 1 },
            Self::AllReduce => Pattern::Ring { rounds: 2 },
            Self::AllToAll => Pattern::Exchange,
        }
    }

    /// The bytes by which measurements are named: the input of a rank, of an all-gather its output.
    pub(crate) fn whole_bytes(self, ranks: u64, sent: f64) -> f64 {
        let rounds = if self == Self::AllReduce { 2.0 } else { 1.0 };
        sent / rounds * ranks as f64 / (ranks - 1) as f64
    }

    /// The bytes that a rank sends, of those by which measurements are named.
    pub(super) fn sent_bytes(self, ranks: u64, whole: f64) -> f64 {
        whole / self.whole_bytes(ranks, 1.0)
    }
}
