//! Ranks that do the same at the same time, so that one of them is simulated for all.
//!
//! Two ranks are alike if their kernels take as long, their messages ask as much of the same levels, their peers in each
//! message are alike, and so are the devices with which they share links. The coarsest such division is found by
//! refinement (Paige and Tarjan, SIAM J. Comput. 1987, without its bound on time): ranks begin as alike as their own work,
//! and are told apart by their peers until nothing changes. No rank can then tell itself from another of its class, so the
//! simulation of one is exact for all.

use std::collections::BTreeMap;

use ithaca_ir::schedule::{Schedule, Transfer, Work};
use ithaca_ir::{AxisId, Rank, Space, boxes};

use super::super::classes::Classes;
use super::super::steps::kernel_seconds;
use crate::cluster::{Cluster, Load, Part};
use crate::cost::OnRank;

/// Seconds of a class; one number applies to all classes.
pub(super) fn on(seconds: &[f64], class: usize) -> f64 {
    seconds[class.min(seconds.len() - 1)]
}

/// Which ranks are alike.
#[derive(Clone, Debug)]
pub(super) struct Alike {
    /// The class of each rank.
    of: Vec<usize>,
    /// The first rank of each class.
    pub(super) ranks: Vec<Rank>,
    /// The number of ranks of each class.
    pub(super) sizes: Vec<u64>,
}

/// The seconds of a frame's tasks on the first rank of each class.
pub(super) type FrameSeconds = Vec<Vec<f64>>;

impl Alike {
    /// The classes of the ranks of a schedule, which begin as alike as their own work and are told apart by
    /// [`by_peers`] or otherwise, and for each frame, task and class the seconds of kernels; nothing where
    /// more than `most` combinations of coordinates may differ.
    pub(super) fn of(
        cluster: &Cluster,
        schedule: &Schedule,
        most: usize,
        tell_apart: impl Fn(&Cluster, &Schedule, Vec<usize>) -> Vec<usize>,
    ) -> Option<(Self, Vec<FrameSeconds>)> {
        let combinations = Classes::all(schedule, most)?;
        let mut seconds = seconds_of(cluster, schedule, &combinations);
        let mesh = &schedule.space.mesh;
        let combination: Vec<usize> = mesh.iter_ranks().map(|rank| combinations.combination(rank)).collect();
        let work = numbered(combinations.ranks().iter().enumerate().map(|(c, &rank)| {
            let mut work = Vec::new();
            for (frame, seconds) in schedule.frames.values().zip(&seconds) {
                work.extend(frame.tasks.iter().zip(seconds).map(|(task, seconds)| {
                    let runs = frame.runs(&schedule.space, task, rank);
                    if runs { on(seconds, c).to_bits() } else { u64::MAX }
                }));
            }
            work
        }));
        let start: Vec<usize> = combination.iter().map(|&c| work[c]).collect();
        let classes = Self::numbered(tell_apart(cluster, schedule, start));
        for on in seconds.iter_mut().flatten().filter(|on| on.len() > 1) {
            *on = classes.ranks.iter().map(|rank| on[combination[rank.0 as usize]]).collect();
        }
        Some((classes, seconds))
    }

    fn numbered(of: Vec<usize>) -> Self {
        let n = of.iter().max().map_or(0, |most| most + 1);
        let (mut ranks, mut sizes) = (vec![None; n], vec![0; n]);
        for (rank, &class) in of.iter().enumerate() {
            ranks[class].get_or_insert(Rank(rank as u64));
            sizes[class] += 1;
        }
        Self { of, ranks: ranks.into_iter().flatten().collect(), sizes }
    }

    /// The class of a rank.
    pub(super) fn class(&self, rank: Rank) -> usize {
        self.of[rank.0 as usize]
    }
}

/// For each frame and task the seconds on each combination, or one number for all.
fn seconds_of(cluster: &Cluster, schedule: &Schedule, combinations: &Classes) -> Vec<FrameSeconds> {
    let mut on_rank = OnRank::of(cluster, schedule);
    let frames = schedule.frames.values().map(|frame| {
        let tasks = frame.tasks.iter().map(|task| {
            let ranks = combinations.ranks();
            kernel_seconds(cluster, &mut on_rank, &schedule.space, (frame, task), ranks)
        });
        tasks.collect()
    });
    frames.collect()
}

/// Devices that share a link of a level with `rank`, itself among them.
pub(super) fn sharers(cluster: &Cluster, space: &Space, level: usize, rank: Rank) -> Vec<Rank> {
    let n = cluster.levels[level].contention.value.ceil().max(1.0) as u64;
    let first = rank.0 / n * n;
    (first..(first + n).min(space.mesh.ranks())).map(Rank).collect()
}

/// Equal items get equal numbers, in order of first appearance.
fn numbered(of: impl Iterator<Item = Vec<u64>>) -> Vec<usize> {
    let mut known: BTreeMap<Vec<u64>, usize> = BTreeMap::new();
    let number = |one| {
        let next = known.len();
        *known.entry(one).or_insert(next)
    };
    of.map(number).collect()
}

/// Tells ranks apart by their peers and neighbours until nothing changes.
pub(super) fn by_peers(cluster: &Cluster, schedule: &Schedule, start: Vec<usize>) -> Vec<usize> {
    let space = &schedule.space;
    let Peers { groups, mut messages } = Peers::of(cluster, schedule);
    messages.iter_mut().for_each(|parts| parts.retain(|_, part| *part != Part::default()));
    let groups: Vec<Vec<(usize, Vec<Rank>)>> = groups.iter().map(|axes| members(space, axes)).collect();
    let shared = |&level: &usize| cluster.levels[level].contention.value > 1.0;
    let shared: Vec<usize> = (0..cluster.levels.len()).filter(shared).collect();
    let own = |(rank, &colour): (usize, &usize)| {
        let mut one = vec![colour as u64];
        for parts in &messages {
            one.extend(parts.get(&Rank(rank as u64)).map_or(vec![u64::MAX], fingerprint));
        }
        one
    };
    let mut colours = numbered(start.iter().enumerate().map(own));
    loop {
        let of = |ranks: &[Rank]| {
            let mut of: Vec<u64> = ranks.iter().map(|r| colours[r.0 as usize] as u64).collect();
            of.sort_unstable();
            of
        };
        // One number for each group, whoever looks at it.
        let mut seen: Vec<Vec<u64>> = colours.iter().map(|&colour| vec![colour as u64]).collect();
        for groups in &groups {
            let numbers = numbered(groups.iter().map(|(_, members)| of(members)));
            for ((_, members), number) in groups.iter().zip(numbers) {
                members.iter().for_each(|r| seen[r.0 as usize].push(number as u64));
            }
        }
        for parts in &messages {
            for (rank, part) in parts {
                let seen = &mut seen[rank.0 as usize];
                seen.extend(of(&part.peers));
                seen.extend(
                    part.loads.iter().filter_map(|load| load.far).map(|far| colours[far.0 as usize] as u64),
                );
            }
        }
        for (rank, seen) in seen.iter_mut().enumerate() {
            for &level in &shared {
                seen.extend(of(&sharers(cluster, space, level, Rank(rank as u64))));
            }
        }
        let before = colours.iter().max().copied();
        colours = numbered(seen.into_iter());
        if colours.iter().max().copied() == before {
            return colours;
        }
    }
}

/// A part without its peers.
fn fingerprint(part: &Part) -> Vec<u64> {
    let mut one = vec![part.latency.to_bits(), part.peers.len() as u64];
    for Load { level, way, seconds, far } in &part.loads {
        one.extend([*level as u64, *way as u64, seconds.to_bits(), u64::from(far.is_some())]);
    }
    one
}

/// Every group of ranks along `axes`, with a number.
fn members(space: &Space, axes: &[AxisId]) -> Vec<(usize, Vec<Rank>)> {
    let heads = space.mesh.iter_ranks().filter(|&r| space.mesh.coordinate_along(r, axes) == 0);
    heads.map(|r| space.mesh.group_along(r, axes)).enumerate().collect()
}

/// The peers of each rank in a schedule.
struct Peers {
    /// Axes along which whole groups meet.
    groups: Vec<Vec<AxisId>>,
    /// Messages in which each rank has a part of its own.
    messages: Vec<BTreeMap<Rank, Part>>,
}

impl Peers {
    fn of(cluster: &Cluster, schedule: &Schedule) -> Self {
        let space = &schedule.space;
        let mut transfers: Vec<&Transfer> = Vec::new();
        for task in schedule.frames.values().flat_map(|frame| &frame.tasks) {
            if let Work::Exchange(transfer) = &task.work
                && !transfers.contains(&transfer)
            {
                transfers.push(transfer);
            }
        }
        let mut found = Self { groups: Vec::new(), messages: Vec::new() };
        for transfer in transfers {
            let first = transfer.first();
            let axes = boxes::axes(space, &first.op, &first.from, &first.to);
            // One rank of the group shows whether all do alike.
            if cluster.part(space, transfer.parcels(), Rank(0)).together {
                if !found.groups.iter().any(|known| **known == *axes) {
                    found.groups.push(axes.to_vec());
                }
            } else {
                let participates = |&rank: &Rank| {
                    transfer.parcels().iter().any(|p| space.holds(&p.from, rank) || space.holds(&p.to, rank))
                };
                let ranks = space.mesh.iter_ranks().filter(participates);
                let part = |rank| (rank, cluster.part(space, transfer.parcels(), rank));
                found.messages.push(ranks.map(part).collect());
            }
        }
        found
    }
}
