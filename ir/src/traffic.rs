//! The traffic of a per-rank program: collectives by kind and axis, over one run of the whole model.
//!
//! The plan promises these figures and the runtime counts them; they must be equal, exactly.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::boxes;
use crate::entity::Entity;
use crate::handles::ValueId;
use crate::mesh::Rank;
use crate::message::{self, Parcel, Sent};
use crate::module::{Function, Module, Node};
use crate::ops::table::op::Op;
use crate::schedule::{BufferId, Frame, Schedule, Task, Work};
use crate::space::Space;

pub use crate::phase::Phase;

/// The key of a row: the kind of collective, the mesh axis (`mesh` for a permute), the phase.
pub type Key = (&'static str, String, Phase);

/// One row: all collectives of a kind along an axis.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// The operation's name, for example `all_to_all`.
    pub kind: String,
    /// The mesh axis.
    pub axis: String,
    /// When they run.
    pub phase: Phase,
    /// How many each rank takes part in.
    pub count: u64,
    /// Bytes that the busiest rank sends to others in all of them; where some have slots of experts, with all slots filled.
    pub bytes_sent_per_rank: u64,
    /// Where some have slots of experts, the same with the filled slots only: expected in a program, counted in a run.
    pub filled_bytes_per_rank: Option<u64>,
}

/// Whether a run sent the messages of a program: their bytes exactly, and of slots no more than there are.
pub fn agree(promised: &[Traffic], counted: &[Traffic]) -> bool {
    let agree = |(promised, counted): (&Traffic, &Traffic)| {
        let filled_bytes_per_rank = promised.filled_bytes_per_rank;
        let is_bounded =
            counted.filled_bytes_per_rank.is_none_or(|filled| filled <= counted.bytes_sent_per_rank);
        is_bounded
            && counted.filled_bytes_per_rank.is_some() == filled_bytes_per_rank.is_some()
            && *promised == Traffic { filled_bytes_per_rank, ..counted.clone() }
    };
    promised.len() == counted.len() && promised.iter().zip(counted).all(agree)
}

/// Sums of one rank.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    count: u64,
    sent: u64,
    /// With the filled rows only.
    filled: u64,
    has_slots: bool,
}

/// Sums per rank, to become rows.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    rows: BTreeMap<Key, BTreeMap<Rank, Sums>>,
}

impl Ledger {
    /// Adds `count` collectives, in each of which `rank` sent `bytes`.
    pub fn record(&mut self, key: Key, rank: Rank, count: u64, bytes: Sent) {
        let sums = self.rows.entry(key).or_default().entry(rank).or_default();
        sums.count += count;
        sums.sent += count * bytes.bound;
        sums.filled += count * bytes.filled.unwrap_or(bytes.bound);
        sums.has_slots |= bytes.filled.is_some();
    }

    /// The rows, ordered by kind, axis and phase.
    pub fn rows(&self) -> Vec<Traffic> {
        self.rows
            .iter()
            .map(|((kind, axis, phase), ranks)| Traffic {
                kind: (*kind).to_owned(),
                axis: axis.clone(),
                phase: *phase,
                count: ranks.values().map(|sums| sums.count).max().unwrap_or(0),
                bytes_sent_per_rank: ranks.values().map(|sums| sums.sent).max().unwrap_or(0),
                filled_bytes_per_rank: ranks
                    .values()
                    .any(|sums| sums.has_slots)
                    .then(|| ranks.values().map(|sums| sums.filled).max().unwrap_or(0)),
            })
            .collect()
    }
}

/// The row that a message of a phase belongs to; `None` when nothing is sent.
///
/// The axis is the one along which parts move, several joined by `+`; `mesh` where a permute is along none.
pub fn key(space: &Space, phase: Phase, parcels: &[Parcel]) -> Option<Key> {
    let first = parcels.first()?;
    axis(space, parcels).map(|axis| (first.op.name(), axis, phase))
}

fn moves_between_stages(function: &Function, node: &Node) -> bool {
    let at = |v: Option<&ValueId>| v.map(|&v| function.ty(v).layout.at);
    !node.results.is_empty()
        && !node.operands.is_empty()
        && at(node.operands.first()) != at(node.results.first())
}

/// When the collectives of a function run: in its phase; what passes between stages of a pipeline in that of the calls that made
/// it.
#[derive(Clone, Debug)]
pub struct Phases<'a> {
    function: &'a Function,
    /// By value, the last phase of the calls that it is made of.
    made: Vec<Option<Phase>>,
}

impl<'a> Phases<'a> {
    /// Those of a function.
    pub fn of(module: &Module, function: &'a Function) -> Self {
        let mut made = vec![None; function.values.len()];
        for node in &function.nodes {
            let phase = match node.op {
                Op::Call { callee, .. } => Some(module.functions[callee].phase),
                _ => node.operands.iter().filter_map(|v| made[v.index()]).max(),
            };
            node.results.iter().for_each(|v| made[v.index()] = phase);
        }
        Self { function, made }
    }

    /// That of one of its nodes.
    pub fn of_node(&self, node: &Node) -> Phase {
        let made = node.operands.first().and_then(|x| self.made[x.index()]);
        made.filter(|_| moves_between_stages(self.function, node)).unwrap_or(self.function.phase)
    }
}

/// The same of the task of a frame with this number, which communicates.
pub fn phase_of_task(schedule: &Schedule, frame: &Frame, task: usize) -> Phase {
    let own = frame.phase;
    let Some(Task { work, reads, .. }) = frame.tasks.get(task) else { return own };
    match (work, reads.first()) {
        (Work::Exchange(transfer), Some(&sent)) if moves(transfer.first()) => {
            written_in(schedule, frame, task, sent).unwrap_or(own)
        }
        _ => own,
    }
}

/// Whether a parcel goes from one place to another.
fn moves(parcel: &Parcel) -> bool {
    parcel.from.layout.at != parcel.to.layout.at
}

/// The last phase of the calls that a buffer is made of, as it is before a task.
fn written_in(schedule: &Schedule, frame: &Frame, before: usize, buffer: BufferId) -> Option<Phase> {
    let at = frame.tasks[..before].iter().rposition(|task| task.writes.contains(&buffer))?;
    match frame.tasks[at].work {
        Work::Call { callee, .. } => Some(schedule.frames[callee].phase),
        _ => frame.tasks[at].reads.iter().filter_map(|&b| written_in(schedule, frame, at, b)).max(),
    }
}

/// The axis of that row; `None` when nothing is sent.
pub fn axis(space: &Space, parcels: &[Parcel]) -> Option<String> {
    let Parcel { op, from, to } = parcels.first()?;
    let axes = boxes::axes(space, op, from, to);
    let names: Vec<&str> = axes.iter().map(|&a| space.mesh.axes[a].name.as_str()).collect();
    Some(if names.is_empty() { "mesh".to_owned() } else { names.join("+") })
}

/// The traffic of one run of a per-rank module.
pub fn of_module(module: &Module) -> Vec<Traffic> {
    let space = &module.space;
    let mut messages: BTreeMap<Key, Vec<(Vec<Parcel>, u64)>> = BTreeMap::new();
    let runs = module.runs_by_place();
    for (id, function) in module.functions.iter() {
        let phases = Phases::of(module, function);
        for node in &function.nodes {
            let parcels =
                message::parcels(&node.op, &function.operand_types(node), &function.result_types(node));
            let phase = phases.of_node(node);
            let Some(key) = key(space, phase, &parcels) else { continue };
            for (&at, &runs) in &runs[id.index()] {
                let mut parcels = parcels.clone();
                // A value on some ranks only says which ranks.
                if at.is_some() {
                    for parcel in &mut parcels {
                        (parcel.from, parcel.to) = (parcel.from.located(at), parcel.to.located(at));
                    }
                }
                messages.entry(key.clone()).or_default().push((parcels, runs));
            }
        }
    }
    let mut ledger = Ledger::default();
    for (key, messages) in messages {
        let all: Vec<&[Parcel]> = messages.iter().map(|(parcels, _)| &parcels[..]).collect();
        let ranks = message::standing_for_all(space, &all);
        for (parcels, runs) in &messages {
            let ranks: Vec<Rank> =
                ranks.iter().copied().filter(|&rank| message::participates(space, parcels, rank)).collect();
            // Ranks that send alike are asked once.
            let asked = if message::is_ragged(space, parcels) { ranks.len() } else { ranks.len().min(1) };
            let bytes = message::sent_by(space, parcels, &ranks[..asked]);
            for (i, &rank) in ranks.iter().enumerate() {
                ledger.record(key.clone(), rank, *runs, bytes[i.min(bytes.len() - 1)]);
            }
        }
    }
    ledger.rows()
}
