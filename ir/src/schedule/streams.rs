//! The streams of a rank.
//!
//! Weights and gradients have a stream of their own, so collectives of activations, which kernels wait for, are not queued
//! behind them. Copies from host memory and copies to it have one each, so that they are made beside kernels and beside each other.
//!
//! Transfers between the stages of a pipeline have streams of their own: a receive may wait there for long, and neither
//! kernels nor collectives wait behind it. Each direction has three: two by the parity of the stage that sends, and one for
//! transfers between stages of equal parity, from the end of an odd ring of stages to its start. So the transfers that a
//! stage sends to its neighbours and those that it receives from them are on different streams.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::layout::At;
use crate::phase::Phase;

/// A queue of tasks that run in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Stream {
    /// Kernels.
    Compute,
    /// Collectives of activations, and all others that no stream below has.
    Comm,
    /// Parts that travel round a ring the other way: to ranks of higher numbers.
    Down,
    /// Gathers of weights and reductions of gradients.
    Weights,
    /// Copies from host memory.
    Host,
    /// Copies to host memory.
    ToHost,
    /// What even stages send in the forward pass.
    ForwardEven,
    /// What odd stages send in the forward pass.
    ForwardOdd,
    /// What even stages send in the backward pass and after it.
    BackwardEven,
    /// What odd stages send in the backward pass and after it.
    BackwardOdd,
    /// What stages send to stages of equal parity in the forward pass.
    ForwardWrap,
    /// What stages send to stages of equal parity in the backward pass and after it.
    BackwardWrap,
}

crate::spellings! {
    Stream {
        Compute = "compute",
        Comm = "comm",
        Down = "down",
        Weights = "weights",
        Host = "host",
        ToHost = "to_host",
        ForwardEven = "forward_even",
        ForwardOdd = "forward_odd",
        BackwardEven = "backward_even",
        BackwardOdd = "backward_odd",
        ForwardWrap = "forward_wrap",
        BackwardWrap = "backward_wrap",
    }
}

impl Stream {
    /// The number of streams.
    pub const COUNT: usize = Stream::ALL.len();

    /// The stream of what a stage sends to another in a phase of the step.
    pub fn between_stages(phase: Phase, sender: At, receiver: Option<At>) -> Self {
        let is_even = |at: At| at.coordinate.is_multiple_of(2);
        let is_wrap = receiver.is_some_and(|receiver| is_even(receiver) == is_even(sender));
        match (phase, is_wrap, is_even(sender)) {
            (Phase::Forward, true, _) => Stream::ForwardWrap,
            (Phase::Forward, false, true) => Stream::ForwardEven,
            (Phase::Forward, false, false) => Stream::ForwardOdd,
            (Phase::Backward | Phase::Update, true, _) => Stream::BackwardWrap,
            (Phase::Backward | Phase::Update, false, true) => Stream::BackwardEven,
            (Phase::Backward | Phase::Update, false, false) => Stream::BackwardOdd,
        }
    }

    /// The stream of parts that travel along an axis of `n` ranks by so many: the shorter way round, and of two equal ways that of a
    /// ring's steps.
    pub fn along_a_ring(by: u64, n: u64) -> Self {
        if by > 0 && 2 * by < n { Stream::Down } else { Stream::Comm }
    }

    /// Whether it has transfers between stages of a pipeline.
    pub fn is_between_stages(self) -> bool {
        !matches!(
            self,
            Stream::Compute | Stream::Comm | Stream::Down | Stream::Weights | Stream::Host | Stream::ToHost
        )
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Streams(u16);

impl Streams {
    /// One stream.
    pub fn only(stream: Stream) -> Self {
        Streams(1 << stream as u8)
    }

    /// The streams of either set.
    pub fn and(self, other: Streams) -> Self {
        Streams(self.0 | other.0)
    }

    /// Whether a stream is in it.
    pub fn has(self, stream: Stream) -> bool {
        self.0 & 1 << stream as u8 != 0
    }

    /// Those that have no transfers between stages.
    pub fn without_stages(self) -> Self {
        let own = self.iter().filter(|stream| !stream.is_between_stages());
        own.fold(Streams::default(), |all, stream| all.and(Streams::only(stream)))
    }

    /// Whether there are streams besides the compute stream.
    pub fn communicates(self) -> bool {
        Stream::ALL.into_iter().any(|stream| stream != Stream::Compute && self.has(stream))
    }

    /// Its streams, in order.
    pub fn iter(self) -> impl Iterator<Item = Stream> + Clone {
        Stream::ALL.into_iter().filter(move |&stream| self.has(stream))
    }
}
