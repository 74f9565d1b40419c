//! Scores of attention in memory, where the assumed kernel stores them.
//!
//! Scores live as long as the logarithms of their sums, which the backward pass reads beside them: a row of scores for each
//! logarithm. So the tensors of logarithms tell how many scores are held, of all layers and micro-batches; scores without
//! such a tensor live as long as their attention runs. A tensor that a call passes on is counted where it is placed.

use std::collections::BTreeMap;

use ithaca_ir::layout::At;
use ithaca_ir::ops::Attention;
use ithaca_ir::schedule::{BufferId, Frame, FrameId, Place, Schedule, Task, Work};
use ithaca_ir::{Op, TensorType};

use super::lives::lives;
use crate::cluster::{Cluster, ScoreBytes};
use crate::cost::saved_bytes;

/// Bytes of the scores that the ranks of a place hold at most, none where the kernel stores none.
pub(super) fn most(cluster: &Cluster, schedule: &Schedule, at: Option<At>) -> u64 {
    let Some(scores) = &cluster.accelerator.assumed_attention().scores else { return 0 };
    let Some(main) = schedule.main() else { return 0 };
    let whole = &schedule.frames[main];
    let own = at.map(|at| whole.only(at));
    let mut account = Account { schedule, scores, frames: BTreeMap::new() };
    account.of_frame(own.as_ref().unwrap_or(whole)).peak.ceil() as u64
}

/// The scores of a frame.
#[derive(Clone, Debug, Default)]
struct SavedScores {
    /// Bytes of scores for each element of arguments and results that are logarithms.
    arguments: BTreeMap<usize, f64>,
    results: BTreeMap<usize, f64>,
    /// Bytes of scores that the frame itself holds at most.
    peak: f64,
}

struct Account<'a> {
    schedule: &'a Schedule,
    scores: &'a ScoreBytes,
    frames: BTreeMap<FrameId, SavedScores>,
}

impl Account<'_> {
    fn callee(&mut self, id: FrameId) -> SavedScores {
        if let Some(known) = self.frames.get(&id) {
            return known.clone();
        }
        let held = self.of_frame(&self.schedule.frames[id]);
        self.frames.insert(id, held.clone());
        held
    }

    fn of_frame(&mut self, frame: &Frame) -> SavedScores {
        // Bytes for each element of the buffers that are logarithms.
        let mut rows: BTreeMap<BufferId, f64> = BTreeMap::new();
        let mut during = vec![0.0; frame.tasks.len()];
        for (task, during) in frame.tasks.iter().zip(&mut during) {
            match &task.work {
                Work::Compute(op @ (Op::Attention(attention) | Op::AttendPages { attention, .. })) => {
                    let Some((q, row)) = self.row(op, frame, task) else { continue };
                    match task.writes.get(1) {
                        Some(&lse) => drop(rows.insert(frame.holder(lse), row)),
                        None => *during = row * self.queries(attention, q),
                    }
                }
                Work::Compute(op @ Op::AttentionBackward(_)) => {
                    let Some((_, row)) = self.row(op, frame, task) else { continue };
                    rows.insert(frame.holder(task.reads[4]), row);
                }
                Work::Call { callee, .. } => {
                    let held = self.callee(*callee);
                    *during = held.peak;
                    let passed =
                        |buffers: &[BufferId], found: &BTreeMap<usize, f64>| -> Vec<(BufferId, f64)> {
                            let of = |(&i, &row): (&usize, &f64)| Some((frame.holder(*buffers.get(i)?), row));
                            found.iter().filter_map(of).collect()
                        };
                    rows.extend(passed(&task.reads, &held.arguments));
                    rows.extend(passed(&task.writes, &held.results));
                }
                Work::Compute(_) | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => {}
            }
        }
        let mut held = SavedScores::default();
        for (&buffer, &row) in &rows {
            match frame.buffers[buffer].place {
                Place::Argument(i) => drop(held.arguments.insert(i, row)),
                Place::Result(i) => drop(held.results.insert(i, row)),
                Place::Frame(_)
                | Place::Inside { .. }
                | Place::Weight(_)
                | Place::Input(_)
                | Place::State(_) => {}
            }
        }
        for (buffer, tasks) in lives(frame) {
            let (Some(row), Some(ty)) = (rows.get(&buffer), frame.buffers[buffer].tensor()) else { continue };
            let bytes = row * self.schedule.space.max_local_elements(ty) as f64;
            during[tasks].iter_mut().for_each(|sum| *sum += bytes);
        }
        held.peak = during.into_iter().fold(0.0, f64::max);
        held
    }

    /// The queries of an attention, and the bytes of the scores of one of them.
    fn row<'f>(&self, op: &Op, frame: &'f Frame, task: &Task) -> Option<(&'f TensorType, f64)> {
        let (q, k) = (frame.buffers[task.reads[0]].tensor()?, frame.buffers[task.reads[1]].tensor()?);
        let (attention, axes) = op.attention_of(k)?;
        let keys = self.schedule.space.max_extent(attention.keys, axes);
        Some((q, keys as f64 * saved_bytes(self.scores, attention, q)))
    }

    /// Queries of all heads and sequences.
    fn queries(&self, attention: &Attention, q: &TensorType) -> f64 {
        let space = &self.schedule.space;
        space.max_local_elements(q) as f64 / space.size(attention.width) as f64
    }
}
