//! Links that the streams of a rank share, in the planner's simulation: what one stream sends over a link, another cannot
//! send at the same time.
//!
//! The message that was issued first has the link, and a later one takes the time that earlier ones leave. So a link never
//! carries more than its bandwidth, a message takes no longer than in one queue with the others, and messages over
//! different links do not delay each other. The discrete simulation divides a link evenly, with the same sum.

use std::collections::BTreeMap;

use ithaca_ir::Rank;
use ithaca_ir::schedule::Stream;

use crate::cluster::Way;

/// The load of a message on the links of a rank, without its latency.
#[derive(Clone, Debug, Default)]
pub(super) struct Loads {
    /// Seconds before the links are used.
    pub(super) latency: f64,
    /// Seconds on each link.
    pub(super) links: Vec<(Link, f64)>,
}

/// A direction of a rank's link at a level; where devices have links of their own to each other, of that to a rank.
pub(super) type Link = (usize, Way, Option<Rank>);

/// When the links of a rank are used.
#[derive(Clone, Debug, Default)]
pub(super) struct Links {
    used: BTreeMap<Link, Vec<Use>>,
}

#[derive(Clone, Copy, Debug)]
struct Use {
    stream: Stream,
    start: f64,
    end: f64,
}

impl Links {
    /// Sends a message whose ranks are all ready at `start`; returns by how much it ends later than alone. No later message of
    /// any stream starts before `past`.
    pub(super) fn send(&mut self, stream: Stream, loads: &Loads, start: f64, past: f64) -> f64 {
        let from = start + loads.latency;
        let (mut alone, mut last) = (from, from);
        for &(link, seconds) in &loads.links {
            let used = self.used.entry(link).or_default();
            used.retain(|one| one.end > past);
            used.sort_by(|a, b| a.start.total_cmp(&b.start));
            let (mut at, mut left) = (from, seconds);
            for one in used.iter().filter(|one| one.stream != stream) {
                let gap = (one.start - at).max(0.0);
                if left <= gap {
                    break;
                }
                if one.end > at {
                    left -= gap;
                    at = one.end;
                }
            }
            let end = at + left;
            used.push(Use { stream, start: from, end });
            (alone, last) = (alone.max(from + seconds), last.max(end));
        }
        last - alone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(links: &[(usize, f64)]) -> Loads {
        Loads { latency: 1.0, links: links.iter().map(|&(level, s)| ((level, Way::Out, None), s)).collect() }
    }

    #[test]
    fn a_message_takes_what_earlier_ones_leave() {
        let mut links = Links::default();
        assert_eq!(links.send(Stream::Weights, &loads(&[(0, 4.0)]), 2.0, 0.0), 0.0);
        // From 3 to 7 the link is used: one second before, two after.
        assert_eq!(links.send(Stream::Comm, &loads(&[(0, 3.0)]), 1.0, 0.0), 4.0);
        // Another link is free, and the longer of two counts.
        assert_eq!(links.send(Stream::Comm, &loads(&[(1, 5.0)]), 1.0, 0.0), 0.0);
        assert_eq!(links.send(Stream::ForwardEven, &loads(&[(0, 1.0), (1, 9.0)]), 1.0, 0.0), 5.0);
    }

    /// However messages overlap, a link is used for the sum of their seconds.
    #[test]
    fn a_link_carries_one_message_at_a_time() {
        let mut links = Links::default();
        let mut last = 0.0f64;
        for (i, stream) in Stream::ALL.into_iter().skip(1).enumerate() {
            let late = links.send(stream, &loads(&[(0, 2.0)]), 0.5 * i as f64, 0.0);
            last = last.max(0.5 * i as f64 + 3.0 + late);
        }
        assert_eq!(last, 1.0 + 2.0 * (Stream::COUNT - 1) as f64);
    }
}
