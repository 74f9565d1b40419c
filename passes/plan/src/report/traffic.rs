//! Who sends how much to whom, by the levels of the topology.
//!
//! The bytes of a message are those of the plan. A rank sends the blocks of an exchange to the ranks that need them; what reduces is
//! sent in equal parts to the others of its group.

use std::collections::BTreeMap;

use ithaca_ir::Rank;
use ithaca_ir::boxes::Side;
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::message::{self, Parcel};
use ithaca_ir::schedule::{Schedule, Work};
use ithaca_ir::traffic;
use serde::Serialize;

use crate::plan::{Collective, Plan};

/// Ranks whose peers are listed one by one, from the first.
const LISTED: u64 = 64;

/// What ranks send in a step.
#[derive(Clone, Debug, Serialize)]
pub struct Traffic {
    /// The levels of the topology from the inside out: name, devices that one joins, bytes a second of a device.
    pub levels: Vec<(String, u64, f64)>,
    /// Collectives by kind, axis and phase, with the bytes that the busiest rank sends at each level.
    pub flows: Vec<Flow>,
    /// Ranks that are listed, from rank 0.
    pub ranks: u64,
    /// All ranks.
    pub of: u64,
    /// From, to, bytes.
    pub pairs: Vec<(u64, u64, u64)>,
    /// For each listed rank the bytes that it sends beyond the listed ones.
    pub beyond: Vec<u64>,
}

/// Collectives of one kind along one axis in one phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flow {
    /// The operation.
    pub kind: String,
    /// The mesh axis.
    pub axis: String,
    /// `forward`, `backward` or `update`.
    pub phase: String,
    /// How many each rank takes part in.
    pub count: u64,
    /// Bytes that the busiest rank sends.
    pub bytes: u64,
    /// The same by level; they add up to it.
    pub by_level: Vec<u64>,
    /// Seconds, where the plan has them.
    pub seconds: f64,
    /// Exposed seconds of all phases.
    pub exposed: f64,
}

/// A message of a schedule, as often as it is sent.
struct Message {
    key: traffic::Key,
    parcels: Vec<Parcel>,
    /// How often ranks of each place send it.
    runs: BTreeMap<Option<At>, u64>,
}

impl Traffic {
    pub(super) fn new(plan: &Plan, schedule: &Schedule) -> Self {
        let (cluster, space) = (&plan.cluster, &schedule.space);
        let n_levels = cluster.levels.len();
        let ranks = space.mesh.ranks().min(LISTED);
        let mut pairs: BTreeMap<(u64, u64), u64> = BTreeMap::new();
        let mut beyond = vec![0; usize::try_from(ranks).unwrap_or(0)];
        let mut levels: BTreeMap<traffic::Key, BTreeMap<Rank, Vec<u64>>> = BTreeMap::new();
        // Beside the listed ranks one of each stage, which send what others do not.
        let stages = schedule.stages();
        let of_stages = stages.iter().map(|at| space.mesh.with_coordinate(Rank(0), at.axis, at.coordinate));
        let mut asked: Vec<Rank> = (0..ranks).map(Rank).chain(of_stages).collect();
        asked.sort_unstable();
        asked.dedup();
        for Message { key, parcels, runs } in messages(schedule) {
            for &rank in &asked {
                let here = |(at, n): (&Option<At>, &u64)| {
                    at.is_none_or(|at| at.has(&space.mesh, rank)).then_some(*n)
                };
                let times: u64 = runs.iter().filter_map(here).sum();
                let participates =
                    parcels.iter().any(|p| space.holds(&p.from, rank) || space.holds(&p.to, rank));
                if times == 0 || !participates {
                    continue;
                }
                for (peer, bytes) in sent_to(schedule, &parcels, rank) {
                    let bytes = bytes * times;
                    let at_level = levels.entry(key.clone()).or_default().entry(rank).or_default();
                    at_level.resize(n_levels, 0);
                    if let Some(level) = at_level.get_mut(cluster.level_between(rank, peer)) {
                        *level += bytes;
                    }
                    match beyond.get_mut(usize::try_from(rank.0).unwrap_or(usize::MAX)) {
                        Some(_) if peer.0 < ranks => *pairs.entry((rank.0, peer.0)).or_default() += bytes,
                        Some(far) => *far += bytes,
                        None => {}
                    }
                }
            }
        }
        let flow = |row: &Collective| {
            let is_row = |key: &traffic::Key| {
                (key.0, key.1.as_str(), key.2.name()) == (&row.kind, &row.axis, &row.phase)
            };
            let ranks = levels.iter().find(|(key, _)| is_row(key)).map(|(_, ranks)| ranks);
            let most = ranks.into_iter().flat_map(BTreeMap::values).max_by_key(|l| l.iter().sum::<u64>());
            let by_level =
                scaled(most.cloned().unwrap_or_else(|| vec![0; n_levels]), row.bytes_sent_per_rank);
            let time = plan.time.communication.iter().find(|t| (&t.kind, &t.axis) == (&row.kind, &row.axis));
            Flow {
                kind: row.kind.clone(),
                axis: row.axis.clone(),
                phase: row.phase.clone(),
                count: row.count,
                bytes: row.bytes_sent_per_rank,
                by_level,
                seconds: time.map_or(0.0, |t| t.seconds),
                exposed: time.map_or(0.0, |t| t.exposed_seconds),
            }
        };
        let level =
            |level: &crate::cluster::Level| (level.name.clone(), level.ranks(), level.bandwidth.value);
        Self {
            levels: cluster.levels.iter().map(level).collect(),
            flows: plan.collectives.iter().map(flow).collect(),
            ranks,
            of: space.mesh.ranks(),
            pairs: pairs.into_iter().map(|((from, to), bytes)| (from, to, bytes)).collect(),
            beyond,
        }
    }
}

/// The messages of a schedule; those that are equal once.
fn messages(schedule: &Schedule) -> Vec<Message> {
    let runs = schedule.runs_by_place();
    let mut found: Vec<Message> = Vec::new();
    for (id, frame) in schedule.frames.iter() {
        let times = &runs[id.index()];
        let from = found.len();
        for (i, task) in frame.tasks.iter().enumerate() {
            let Work::Exchange(transfer) = &task.work else { continue };
            let phase = traffic::phase_of_task(schedule, frame, i);
            let Some(key) = traffic::key(&schedule.space, phase, transfer.parcels()) else { continue };
            let parcels = transfer.parcels();
            // Micro-batches of a pipeline send the same.
            let recent = found[from..].iter_mut().rev().take(64);
            let mut same = recent.filter(|m| m.key == key && m.parcels == parcels);
            match same.next() {
                Some(message) => times.iter().for_each(|(at, n)| *message.runs.entry(*at).or_default() += n),
                None => found.push(Message { key, parcels: parcels.to_vec(), runs: times.clone() }),
            }
        }
    }
    found
}

/// The bytes of a message that a rank sends to each other rank.
fn sent_to(schedule: &Schedule, parcels: &[Parcel], rank: Rank) -> Vec<(Rank, u64)> {
    let space = &schedule.space;
    let total = message::sent(space, parcels, rank).bound;
    if total == 0 {
        return Vec::new();
    }
    let wire = message::wire(space, parcels, Side::Sent, rank);
    let others = wire.group.iter().copied().zip(wire.elements).filter(|(peer, _)| *peer != rank);
    let others: Vec<(Rank, u64)> = others.collect();
    let shares: Vec<u64> = match others.iter().map(|(_, n)| n).sum::<u64>() {
        0 => vec![1; others.len()],
        _ => others.iter().map(|(_, n)| *n).collect(),
    };
    let parts = scaled(shares, total);
    others.into_iter().zip(parts).map(|((peer, _), bytes)| (peer, bytes)).filter(|(_, n)| *n > 0).collect()
}

/// Parts in these proportions that add up to `total`; the rest of a division goes to the first.
fn scaled(mut parts: Vec<u64>, total: u64) -> Vec<u64> {
    let sum: u128 = parts.iter().map(|&part| u128::from(part)).sum();
    if sum == 0 {
        if let Some(first) = parts.first_mut() {
            *first = total;
        }
        return parts;
    }
    let part = |part: u64| u64::try_from(u128::from(part) * u128::from(total) / sum).unwrap_or(0);
    parts.iter_mut().for_each(|one| *one = part(*one));
    let rest = total - parts.iter().sum::<u64>();
    if let Some(first) = parts.iter_mut().find(|part| **part > 0) {
        *first += rest;
    }
    parts
}
