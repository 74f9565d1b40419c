//! The part of one rank in a message.

use ithaca_ir::message::Parcel;
use ithaca_ir::{Rank, Space, boxes};

use super::between::Between;
use super::description::Cluster;
use super::load::{Load, Part, Way};

impl Cluster {
    /// The part of `rank` in a message. Alone on its links it takes the latency and its largest load; tensors that travel
    /// together pay the latency once.
    pub fn part(&self, space: &Space, parcels: &[Parcel], rank: Rank) -> Part {
        let mut whole = Part::default();
        for Parcel { op, from, to } in parcels {
            let between = Between { cluster: self, space, op, from, to };
            let part = match between.is_such() {
                true => between.part(rank),
                false => {
                    let mut part = Part { together: true, ..Part::default() };
                    part.peers = boxes::group(space, op, from, to, rank);
                    part.peers.retain(|&peer| peer != rank);
                    for (level, time) in self.by_level(space, op, from, to) {
                        part.latency += time.latency;
                        let load = |way| Load { level, way, seconds: time.transfer, far: None };
                        part.loads.extend([Way::Out, Way::In].map(load));
                    }
                    part
                }
            };
            whole.add(part);
        }
        whole.peers.sort_unstable();
        whole.peers.dedup();
        whole.loads.sort_by_key(|load| (load.level, load.way));
        whole
    }
}
