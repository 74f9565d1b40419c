//! What it costs one rank to exchange blocks with some others: parts that travel along axes, fetched tokens.
//!
//! A hop is carried by the innermost level that joins its two devices. A device has its own link at each level, or
//! shares it: of as many devices in a row as the level's contention says, those that cross the level at once divide one
//! link. Sending and receiving go at the same time.
//!
//! - A `permute` along axes is one step of a ring for each rank: one message out, one in, with the latency and the
//!   efficiency of a ring's step.
//! - A `fetch` is an all-to-all of blocks of different sizes: messages to the ranks of one block of the level inside
//!   travel together, levels work at the same time, latencies add up.

use ithaca_ir::boxes;
use ithaca_ir::{Op, Rank, Space, TensorType};

use super::load::{Load, Part, Way};
use super::prices::{CollectiveTime, Pattern};
use crate::cluster::Cluster;

/// The part of one rank in an exchange.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankExchange {
    /// The ranks that it sends to or receives from, itself left out, ascending; none when it takes no part.
    pub peers: Vec<Rank>,
    /// What it takes once all of them are ready.
    pub time: CollectiveTime,
}

/// A permute whose parts travel along axes, a fetch or its adjoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Between<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) space: &'a Space,
    pub(super) op: &'a Op,
    pub(super) from: &'a TensorType,
    pub(super) to: &'a TensorType,
}

impl Between<'_> {
    /// Ranks that are looked at for the one that takes longest; beyond, nodes repeat themselves.
    const LOOKED_AT: u64 = 4096;
    /// The same for fetches, of which each looks at all of its peers.
    const FETCHES_LOOKED_AT: usize = 64;

    /// Whether each rank has a part of its own; whole groups take part alike in all other operations.
    pub(super) fn differs_by_rank(&self) -> bool {
        match self.op {
            Op::Permute => self.from.layout.split == self.to.layout.split,
            Op::Fetch { .. } | Op::FetchSum { .. } => true,
            _ => false,
        }
    }

    /// The time of the rank that takes longest.
    pub(super) fn longest(&self) -> CollectiveTime {
        let n = self.space.mesh.ranks();
        let ranks: Vec<Rank> = match self.op {
            // Parts are alike but for the levels that they cross, so one rank of each level is enough.
            Op::Permute if self.from.layout.at != self.to.layout.at => {
                let sends = |&rank: &Rank| self.space.holds(self.from, rank);
                (0..n.min(Self::LOOKED_AT)).map(Rank).filter(sends).collect()
            }
            Op::Permute => {
                let mut crossing = vec![None; self.cluster.levels.len()];
                for rank in (0..n.min(Self::LOOKED_AT)).map(Rank) {
                    if let Some(peer) = self.travels_to(rank, Way::Out) {
                        crossing[self.cluster.level_between(rank, peer)].get_or_insert(rank);
                    }
                }
                crossing.into_iter().flatten().collect()
            }
            _ => {
                let axes = boxes::axes(self.space, self.op, self.from, self.to);
                let group = self.space.mesh.group_along(Rank(0), &axes);
                let step = group.len().div_ceil(Self::FETCHES_LOOKED_AT).max(1);
                group.into_iter().step_by(step).collect()
            }
        };
        let times = ranks.into_iter().chain([Rank(n.saturating_sub(1))]).map(|rank| self.on(rank).time);
        times.max_by(|a, b| a.seconds().total_cmp(&b.seconds())).unwrap_or_default()
    }

    /// The part of `rank`, on links that its neighbours share.
    pub(super) fn on(&self, rank: Rank) -> RankExchange {
        let Part { peers, latency, loads, together: _ } = self.part(rank);
        let shared = |load: &Load| load.seconds * self.sharing(rank, load.way, load.level);
        let transfer = loads.iter().map(shared).fold(0.0, f64::max);
        RankExchange { peers, time: CollectiveTime { latency, transfer } }
    }

    /// Where a permute sends the part that `rank` has, or whence it gets the one that it will have.
    fn travels_to(&self, rank: Rank, way: Way) -> Option<Rank> {
        let mesh = &self.space.mesh;
        let (here, there) = match way {
            Way::Out => (self.from, self.to),
            Way::In => (self.to, self.from),
        };
        let owner = here.layout.owner(mesh, rank)?;
        there.layout.holder(mesh, owner).filter(|&peer| peer != rank)
    }

    /// The other ranks and the bytes that go to them, and those that come from them.
    fn messages(&self, rank: Rank) -> [Vec<(Rank, u64)>; 2] {
        let e = self.from.dtype.bytes();
        if let Op::Permute = self.op
            && self.from.layout.at == self.to.layout.at
        {
            return [(Way::Out, self.from), (Way::In, self.to)].map(|(way, ty)| {
                let bytes = || e * boxes::elements(&self.space.local_box(ty, rank));
                let message = self.travels_to(rank, way).map(|peer| (peer, bytes()));
                message.filter(|m| m.1 > 0).into_iter().collect()
            });
        }
        let boxes::Exchange { group, send, recv } =
            boxes::exchange(self.space, self.op, self.from, self.to, rank);
        [send, recv].map(|blocks| {
            let messages = group.iter().zip(&blocks);
            let messages = messages.map(|(&peer, block)| (peer, e * boxes::block_elements(block)));
            messages.filter(|&(peer, bytes)| peer != rank && bytes > 0).collect()
        })
    }

    /// What messages of a rank in one direction take at each level, where no link is shared.
    fn alone(&self, rank: Rank, messages: &[(Rank, u64)]) -> Vec<(usize, CollectiveTime)> {
        let mut levels: Vec<(usize, CollectiveTime)> = Vec::new();
        let mut inside = 1;
        for (i, level) in self.cluster.levels.iter().enumerate() {
            let over: Vec<&(Rank, u64)> =
                messages.iter().filter(|m| self.cluster.level_between(rank, m.0) == i).collect();
            if !over.is_empty() {
                let bytes: u64 = over.iter().map(|m| m.1).sum();
                let to_one = over.iter().map(|m| m.1).max().unwrap_or(0);
                let (pattern, latency) = match self.op {
                    Op::Permute => {
                        let ring = Pattern::Ring { rounds: 1 };
                        (ring, level.start(ring) + level.latency.value)
                    }
                    _ => {
                        let mut blocks: Vec<u64> = over.iter().map(|m| m.0.0 / inside).collect();
                        blocks.sort_unstable();
                        blocks.dedup();
                        let start = if levels.is_empty() { level.start(Pattern::Exchange) } else { 0.0 };
                        (Pattern::Exchange, start + blocks.len() as f64 * level.message_latency.value)
                    }
                };
                // Each other device has a link of its own, as far as there are links.
                let transfer =
                    f64::max(bytes as f64 / level.rate(pattern), to_one as f64 / level.rate_to_one(pattern));
                let time = CollectiveTime { latency, transfer };
                levels.push((i, time.times(self.cluster.core_contention(self.space.mesh.ranks()))));
            }
            inside = level.ranks();
        }
        levels
    }

    /// The part of a rank, where no link is shared.
    pub(super) fn part(&self, rank: Rank) -> Part {
        let mut part = Part::default();
        for (way, messages) in [Way::Out, Way::In].into_iter().zip(self.messages(rank)) {
            let mut latency = 0.0;
            for (level, alone) in self.alone(rank, &messages) {
                latency += alone.latency;
                let mut over = messages.iter().filter(|m| self.cluster.level_between(rank, m.0) == level);
                let far = over.next().filter(|_| over.next().is_none()).map(|m| m.0);
                part.loads.push(Load { level, way, seconds: alone.transfer, far });
            }
            part.latency = part.latency.max(latency);
            part.peers.extend(messages.iter().map(|m| m.0));
        }
        part.peers.sort_unstable();
        part.peers.dedup();
        part
    }

    /// Devices that divide one link with `rank`, itself counted.
    fn sharing(&self, rank: Rank, way: Way, level: usize) -> f64 {
        let most = self.cluster.levels[level].contention.value;
        if most <= 1.0 {
            return 1.0;
        }
        let n = most.ceil() as u64;
        let first = rank.0 / n * n;
        let neighbours = (first..(first + n).min(self.space.mesh.ranks())).map(Rank);
        let crosses = |&r: &Rank| {
            let [sent, received] = self.messages(r);
            let messages = if way == Way::Out { sent } else { received };
            r == rank || messages.iter().any(|m| self.cluster.level_between(r, m.0) == level)
        };
        (neighbours.filter(crosses).count() as f64).min(most)
    }
}

#[cfg(test)]
mod tests {
    use ithaca_ir::message::Parcel;
    use ithaca_ir::{DType, Dim, Mesh};

    use super::*;

    /// A tensor `[s d]` split by `ring` on a mesh, of `bytes` on each rank.
    fn ring(mesh: Mesh, bytes: u64) -> (Space, TensorType) {
        let mut space = Space { mesh, ..Space::default() };
        let axis = space.mesh.axis("ring").unwrap();
        let s = space.dims.push(Dim::new("s", bytes / 2 / 128 * space.mesh.size(axis)));
        let d = space.dims.push(Dim::new("d", 128));
        let mut ty = TensorType::new(DType::BF16, [s, d]);
        ty.layout.split[0].push(axis);
        (space, ty)
    }

    fn moved(space: &Space, ty: &TensorType, by: u64, only: Option<(u64, u64)>) -> TensorType {
        let axis = space.mesh.axis("ring").unwrap();
        ty.with_layout(ty.layout.clone().moved(axis, by, space.mesh.size(axis), only))
    }

    fn step(cluster: &Cluster, mesh: Mesh, bytes: u64) -> CollectiveTime {
        let (space, from) = ring(mesh, bytes);
        let to = moved(&space, &from, 1, None);
        cluster.collective_time(&space, &Op::Permute, &from, &to)
    }

    fn exchange_on(
        cluster: &Cluster,
        space: &Space,
        (op, from, to): (&Op, &TensorType, &TensorType),
        rank: Rank,
    ) -> RankExchange {
        let parcel = Parcel { op: op.clone(), from: from.clone(), to: to.clone() };
        cluster.message_on(space, &[parcel], rank).unwrap()
    }

    fn close(a: f64, b: f64) {
        assert!((a / b - 1.0).abs() < 1e-12, "{a} is not {b}");
    }

    #[test]
    fn a_step_of_a_ring_is_as_slow_as_its_widest_hop() {
        let cluster = Cluster::named("dgx-h100").unwrap();
        let (nvlink, fabric) = (&cluster.levels[0], &cluster.levels[1]);
        let bytes = 16 << 20;
        let inside = step(&cluster, Mesh::new([("ring", 8)]), bytes);
        let ring = Pattern::Ring { rounds: 1 };
        close(inside.latency, nvlink.start(ring) + nvlink.latency.value);
        close(inside.transfer, bytes as f64 / (450e9 * nvlink.ring_efficiency.value));
        // Of 16 in a row only ranks 7 and 15 leave their nodes, and all wait for them.
        for mesh in [vec![("ring", 16)], vec![("ring", 2), ("u", 8)], vec![("ring", 4), ("u", 8)]] {
            let across = step(&cluster, Mesh::new(mesh), bytes);
            close(across.latency, fabric.start(ring) + fabric.latency.value);
            close(across.transfer, bytes as f64 / (50e9 * fabric.ring_efficiency.value));
        }
        let strided = step(&cluster, Mesh::new([("ring", 2), ("u", 4)]), bytes);
        assert_eq!(strided, inside);
    }

    #[test]
    fn ranks_that_cross_at_once_divide_a_shared_link() {
        // The adapter of a node is shared by its 8 cards.
        let cluster = Cluster::named("l20-pcie").unwrap();
        let (pcie, fabric) = (&cluster.levels[0], cluster.levels.last().unwrap());
        assert_eq!((pcie.contention.value, fabric.contention.value), (2.0, 8.0));
        let bytes = 1 << 24;
        let [in_node, alone] =
            [pcie, fabric].map(|l| bytes as f64 / (l.bandwidth.value * l.ring_efficiency.value));
        // One card has the adapter to itself, but two share each uplink inside.
        assert!(2.0 * in_node > alone);
        close(step(&cluster, Mesh::new([("ring", 16)]), bytes).transfer, 2.0 * in_node);
        let (space, home) = ring(Mesh::new([("ring", 16)]), bytes);
        let to = moved(&space, &home, 1, None);
        let last = exchange_on(&cluster, &space, (&Op::Permute, &home, &to), Rank(7));
        // Rank 7 sends to rank 6 in its own node and receives from rank 8 of the other.
        close(last.time.transfer, f64::max(2.0 * in_node, alone));
        close(step(&cluster, Mesh::new([("ring", 2), ("u", 8)]), bytes).transfer, 8.0 * alone);
        close(step(&cluster, Mesh::new([("ring", 4), ("u", 4)]), bytes).transfer, 4.0 * alone);
    }

    #[test]
    fn a_rank_without_a_part_takes_no_part() {
        let cluster = Cluster::named("dgx-h100").unwrap();
        let (space, home) = ring(Mesh::new([("ring", 8)]), 1 << 20);
        // Helpers 5 to 7 get the parts of ranks 0 to 2.
        let to = moved(&space, &home, 3, Some((5, 8)));
        let on = |rank| exchange_on(&cluster, &space, (&Op::Permute, &home, &to), Rank(rank));
        assert_eq!(on(0).peers, [Rank(5)]);
        assert_eq!(on(6).peers, [Rank(1)]);
        assert_eq!(on(4), RankExchange::default());
        assert!(on(0).time.seconds() > 0.0);
    }

    #[test]
    fn a_fetch_takes_the_bytes_of_the_busiest_rank_by_level() {
        let mut cluster = Cluster::named("dgx-h100").unwrap();
        cluster.levels[0].devices.value = 2;
        let (mut space, from) = ring(Mesh::new([("ring", 4)]), 1 << 20);
        let s = from.dims[0];
        let each = space.size(s) / 4;
        // Each needs its own tokens; rank 1 half of rank 0's, rank 3 all of rank 0's and of rank 2's.
        let parts = vec![
            vec![0..each],
            vec![each / 2..2 * each],
            vec![2 * each..3 * each],
            vec![0..each, 2 * each..4 * each],
        ];
        let mut dim = Dim::new("f", 0);
        let fetched = ithaca_ir::dim::Fetched::new(s, parts);
        dim.size = fetched.total();
        dim.valid = dim.size;
        dim.fetched = Some(fetched);
        let f = space.dims.push(dim);
        let op = Op::Fetch { to: f };
        let to = ithaca_ir::ops::collective::apply(&op, &space, &from).unwrap();
        let (inner, outer) = (&cluster.levels[0], &cluster.levels[1]);
        let on = |rank| exchange_on(&cluster, &space, (&op, &from, &to), Rank(rank));
        assert_eq!(on(0).peers, [Rank(1), Rank(3)]);
        assert_eq!(on(1).peers, [Rank(0)]);
        assert_eq!(on(3).peers, [Rank(0), Rank(2)]);
        let bytes = f64::from(1 << 20);
        let far = bytes / (outer.bandwidth.value * outer.exchange_efficiency.value);
        close(on(3).time.transfer, far);
        let messages = inner.message_latency.value + outer.message_latency.value;
        close(on(3).time.latency, inner.start(Pattern::Exchange) + messages);
        close(on(1).time.transfer, bytes / 2.0 / (inner.bandwidth.value * inner.exchange_efficiency.value));
        assert_eq!(cluster.collective_time(&space, &op, &from, &to), on(3).time);
        let back = Op::FetchSum { from: f };
        assert_eq!(cluster.collective_time(&space, &back, &to, &from), on(3).time);
    }
    /// Devices with a link to each other one: a step of a ring has one of seven, and steps both ways have one each.
    #[test]
    fn steps_both_ways_take_as_long_as_one_where_devices_have_links_of_their_own() {
        let bytes = 1 << 24;
        let times = ["mi300x", "dgx-h100"].map(|name| {
            let cluster = Cluster::named(name).unwrap();
            let (space, from) = ring(Mesh::new([("ring", 8)]), bytes);
            let parcel =
                |by| Parcel { op: Op::Permute, from: from.clone(), to: moved(&space, &from, by, None) };
            let seconds = |parcels: &[Parcel]| cluster.message_seconds(&space, parcels);
            let ring = Pattern::Ring { rounds: 1 };
            let latency = cluster.levels[0].start(ring) + cluster.levels[0].latency.value;
            let alone = seconds(&[parcel(1)]) - latency;
            let full = bytes as f64 / cluster.levels[0].rate(ring);
            let both = seconds(&[parcel(1), parcel(7)]) - latency;
            let twice = seconds(&[parcel(1), parcel(1)]) - latency;
            [alone / full, both / alone, twice / alone]
        });
        // Nodes whose devices share an adapter.
        let mut shared = Cluster::named("mi300x").unwrap();
        shared.levels[1].contention.value = 8.0;
        let (space, from) = ring(Mesh::new([("ring", 2), ("u", 8)]), bytes);
        let parcel = Parcel { op: Op::Permute, from: from.clone(), to: moved(&space, &from, 1, None) };
        let seconds = |n| shared.message_seconds(&space, &vec![parcel.clone(); n]);
        let latency = shared.levels[1].start(Pattern::Ring { rounds: 1 }) + shared.levels[1].latency.value;
        close((seconds(2) - latency) / (seconds(1) - latency), 2.0);
        for (found, expected) in times.as_flattened().iter().zip([7.0, 1.0, 2.0, 1.0, 2.0, 2.0]) {
            close(*found, expected);
        }
    }
}
