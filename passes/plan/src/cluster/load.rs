//! The load of a message on the links of one rank, for simulations in which simultaneous messages share links.
//!
//! A device has a link at each level, one direction to send and one to receive, or shares it with its neighbours
//! (`contention`). A load here is the time of the link without other messages.

use ithaca_ir::Rank;

/// A direction over a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Way {
    /// From the device.
    Out,
    /// To the device.
    In,
}

impl Way {
    /// Seen from the other end.
    pub fn back(self) -> Way {
        match self {
            Way::Out => Way::In,
            Way::In => Way::Out,
        }
    }
}

/// The load of a message on one direction of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// The level of the topology.
    pub level: usize,
    /// The direction.
    pub way: Way,
    /// Seconds that the link takes if it carries nothing else.
    pub seconds: f64,
    /// The rank at the other end, whose link is used as long, where there is one only.
    pub far: Option<Rank>,
}

/// The part of one rank in a message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Part {
    /// The ranks that it sends to or receives from, itself left out, ascending; none when it takes no part.
    pub peers: Vec<Rank>,
    /// Seconds before the first byte arrives.
    pub latency: f64,
    /// Its loads, one for each level and direction, ascending. Links work at the same time.
    pub loads: Vec<Load>,
    /// Whether the rank is done only when all of its peers are: a collective ends as a whole, while a message between two
    /// ranks concerns these alone.
    pub together: bool,
}

impl Part {
    /// Adds a tensor that travels with the others, with loads of its own.
    pub(super) fn add(&mut self, other: Part) {
        self.peers.extend(other.peers);
        self.latency = self.latency.max(other.latency);
        self.together |= other.together;
        self.loads.extend(other.loads);
    }

    /// Makes the loads of a direction of a level one: their sum, or, where devices have `links` to each other, that of the busiest
    /// link, as far as all of them together are not busy for longer.
    pub(super) fn settle(&mut self, links: impl Fn(usize) -> f64) {
        let mut settled: Vec<Load> = Vec::new();
        for load in &self.loads {
            let is_same = |one: &Load| (one.level, one.way) == (load.level, load.way);
            if settled.iter().any(is_same) {
                continue;
            }
            let same: Vec<&Load> = self.loads.iter().filter(|one| is_same(one)).collect();
            let to = |far: Option<Rank>| same.iter().filter(|l| l.far == far).map(|l| l.seconds).sum::<f64>();
            let busiest = same.iter().filter(|l| l.far.is_some()).map(|l| to(l.far)).fold(0.0, f64::max);
            let to_one: f64 = same.iter().filter(|l| l.far.is_some()).map(|l| l.seconds).sum();
            let seconds = to(None) + busiest.max(to_one / links(load.level));
            let far = load.far.filter(|_| same.iter().all(|l| l.far == load.far));
            settled.push(Load { seconds, far, ..*load });
        }
        settled.sort_by_key(|load| (load.level, load.way));
        self.loads = settled;
    }
}
