//! What a message costs: one collective of one tensor, or of several that were coalesced.
//!
//! Several pay the latency once. Tensors of one collective are priced as one larger tensor; the transfers of others add up.

use ithaca_ir::message::Parcel;
use ithaca_ir::{Op, Rank, Space, boxes};

use super::between::Between;
use super::{Cluster, CollectiveTime, Load, Part, RankExchange, Way};

impl Cluster {
    /// Seconds that a message takes on the busiest rank; none where nothing is sent.
    pub fn message_seconds(&self, space: &Space, parcels: &[Parcel]) -> f64 {
        let differs = |Parcel { op, from, to }: &Parcel| {
            matches!(op, Op::Slice { .. }) || Between { cluster: self, space, op, from, to }.differs_by_rank()
        };
        let (each, alike): (Vec<&Parcel>, Vec<&Parcel>) = parcels.iter().partition(|parcel| differs(parcel));
        let alike = self.by_level(space, alike.into_iter().map(|Parcel { op, from, to }| (op, from, to)));
        let each = each.into_iter().map(|Parcel { op, from, to }| self.collective_time(space, op, from, to));
        together(each.chain([self.join(alike)])).seconds()
    }

    /// The part of `rank` in a message of permutes along axes, fetches or their adjoints; `None` for everything else,
    /// which whole groups do alike.
    pub fn message_on(&self, space: &Space, parcels: &[Parcel], rank: Rank) -> Option<RankExchange> {
        let on = |Parcel { op, from, to }: &Parcel| {
            let between = Between { cluster: self, space, op, from, to };
            between.differs_by_rank().then(|| between.on(rank))
        };
        let parts: Vec<RankExchange> = parcels.iter().map(on).collect::<Option<_>>()?;
        let mut peers: Vec<Rank> = parts.iter().flat_map(|part| part.peers.iter().copied()).collect();
        peers.sort_unstable();
        peers.dedup();
        Some(RankExchange { peers, time: together(parts.into_iter().map(|part| part.time)) })
    }

    /// The part of `rank` in a message. Alone on its links it takes the latency and its largest load; tensors that travel
    /// together pay the latency once.
    pub fn part(&self, space: &Space, parcels: &[Parcel], rank: Rank) -> Part {
        let mut whole = Part::default();
        let mut alike = Vec::new();
        for Parcel { op, from, to } in parcels {
            let between = Between { cluster: self, space, op, from, to };
            if between.differs_by_rank() {
                whole.add(between.part(rank));
            } else {
                alike.push((op, from, to));
                let mut peers = boxes::group(space, op, from, to, rank);
                peers.retain(|&peer| peer != rank);
                whole.add(Part { peers, together: true, ..Part::default() });
            }
        }
        let mut part = Part::default();
        for (level, time) in self.by_level(space, alike) {
            part.latency += time.latency;
            let load = |way| Load { level, way, seconds: time.transfer, far: None };
            part.loads.extend([Way::Out, Way::In].map(load));
        }
        whole.add(part);
        whole.peers.sort_unstable();
        whole.peers.dedup();
        whole.loads.sort_by_key(|load| (load.level, load.way));
        whole
    }
}

fn together(times: impl Iterator<Item = CollectiveTime>) -> CollectiveTime {
    times.fold(CollectiveTime::default(), CollectiveTime::with)
}

#[cfg(test)]
mod tests {
    use ithaca_ir::{DType, Dim, Mesh, TensorType};

    use super::*;

    #[test]
    fn two_that_travel_together_save_one_latency() {
        let cluster = Cluster::named("dgx-h100").unwrap();
        let mut space = Space { mesh: Mesh::new([("u", 16)]), ..Space::default() };
        let [s, h] = ["s", "h"].map(|name| space.dims.push(Dim::new(name, 4096)));
        let axis = space.mesh.axis("u").unwrap();
        let mut from = TensorType::new(DType::BF16, [s, h]);
        from.layout.split[0].push(axis);
        let op = Op::AllToAll { axis, split: h, concat: s };
        let to = ithaca_ir::ops::collective::apply(&op, &space, &from).unwrap();
        let one = cluster.collective_time(&space, &op, &from, &to);
        let parcel = Parcel { op, from, to };
        let alone = cluster.message_seconds(&space, std::slice::from_ref(&parcel));
        assert_eq!(alone, one.seconds());
        let both = cluster.message_seconds(&space, &[parcel.clone(), parcel]);
        assert!((both - (2.0 * alone - one.latency)).abs() < 1e-12, "{both} {alone}");
    }
}
