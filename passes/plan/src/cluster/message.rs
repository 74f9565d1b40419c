//! What a message costs: one collective of one tensor, or of several that were coalesced.
//!
//! Several pay the latency once. Tensors of one collective are priced as one larger tensor; the transfers of others add up.

use ithaca_ir::message::Parcel;
use ithaca_ir::{Op, Rank, Space, boxes};

use super::between::Between;
use super::{Cluster, CollectiveTime, Level, Load, Part, RankExchange, Way};

/// Ranks that are looked at for the one that takes longest; beyond, nodes repeat themselves.
const LOOKED_AT: u64 = 64;

impl Cluster {
    /// Seconds that a message takes on the busiest rank; none where nothing is sent.
    pub fn message_seconds(&self, space: &Space, parcels: &[Parcel]) -> f64 {
        let differs = |Parcel { op, from, to }: &Parcel| {
            matches!(op, Op::Slice { .. }) || Between { cluster: self, space, op, from, to }.differs_by_rank()
        };
        let (each, alike): (Vec<&Parcel>, Vec<&Parcel>) = parcels.iter().partition(|parcel| differs(parcel));
        let alike = self.by_level(space, alike.into_iter().map(|Parcel { op, from, to }| (op, from, to)));
        if alike.is_empty() && each.len() > 1 && self.levels.iter().any(Level::has_own_links) {
            // Tensors to different devices have links of their own.
            let on = |rank| self.message_on(space, parcels, Rank(rank)).map_or(0.0, |on| on.time.seconds());
            return (0..space.mesh.ranks().min(LOOKED_AT)).map(on).fold(0.0, f64::max);
        }
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
        let mut time = together(parts.into_iter().map(|part| part.time));
        if parcels.len() > 1 && self.levels.iter().any(Level::has_own_links) {
            let part = self.part(space, parcels, rank);
            let shared = |load: &Load| load.seconds * self.levels[load.level].contention.value;
            time.transfer = part.loads.iter().map(shared).fold(0.0, f64::max).min(time.transfer);
        }
        Some(RankExchange { peers, time })
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
        whole.settle(|level| self.levels[level].links());
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
        let op = Op::all_to_all(axis, h, s);
        let to = ithaca_ir::ops::collective::apply(&op, &space, &from).unwrap();
        let one = cluster.collective_time(&space, &op, &from, &to);
        let parcel = Parcel { op, from, to };
        let alone = cluster.message_seconds(&space, std::slice::from_ref(&parcel));
        assert_eq!(alone, one.seconds());
        let both = cluster.message_seconds(&space, &[parcel.clone(), parcel]);
        assert!((both - (2.0 * alone - one.latency)).abs() < 1e-12, "{both} {alone}");
    }
}
