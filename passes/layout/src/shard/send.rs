//! Transfers between stages of a pipeline.

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::module::{Node, ValueId};
use ithaca_ir::ops::{Op, OpError, Stage};

use super::rewriter::{Rewriter, settled};

impl Rewriter<'_, '_> {
    /// Where a source of `main` is.
    pub(super) fn at_source(&self, value: ValueId) -> Option<At> {
        self.at(self.stages.made.get(value.index()).copied().flatten())
    }

    fn at(&self, stage: Option<u64>) -> Option<At> {
        let axis = self.stages.axis?;
        stage.map(|coordinate| At { axis, coordinate })
    }

    /// The stage of a call, with the axis of the mesh.
    pub(super) fn placed(&self, stage: Option<Stage>) -> Option<Stage> {
        let axis = self.stages.axis;
        stage.filter(|_| axis.is_some()).map(|stage| Stage { along: axis, ..stage })
    }

    /// A value on the ranks of a place, sent there if it is not.
    pub(super) fn located(&mut self, value: ValueId, at: Option<At>) -> Result<ValueId, OpError> {
        let there = self.b.ty(value).layout.at;
        if there.is_none() || there == at {
            return Ok(value);
        }
        if let Some(&sent) = self.sent.get(&(value, at)) {
            return Ok(sent);
        }
        let whole = settled(self.b.ty(value));
        let from = self.reshard(value, whole.layout.clone())?;
        let sent = self.b.push_as(Op::Permute, &[from], whole.located(at))?;
        self.sent.insert((value, at), sent);
        Ok(sent)
    }

    /// Sends the pending values of a stage before its next call; returns the operands of a node where it runs.
    pub(super) fn sent(&mut self, node: &Node, operands: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        if self.stages.axis.is_none() {
            return Ok(operands.to_vec());
        }
        let stage = match node.op {
            Op::Call { stage, .. } => stage.map(|s| s.number),
            _ => node.results.first().and_then(|v| self.stages.made[v.index()]),
        };
        if let Op::Call { .. } = node.op {
            let pending = std::mem::take(&mut self.stages.pending);
            let (now, later) = pending.into_iter().partition(|(v, _)| self.stages.made[v.index()] == stage);
            self.stages.pending = later;
            let now: Vec<(ValueId, u64)> = now;
            for (old, to) in now {
                let value = self.value(old)?;
                self.located(value, self.at(Some(to)))?;
            }
        }
        let at = self.at(stage);
        operands.iter().map(|&v| self.located(v, at)).collect()
    }

    /// Adds the results of a node to the pending values.
    pub(super) fn note_readers(&mut self, node: &Node) {
        if self.stages.axis.is_some() {
            for &v in &node.results {
                let readers = self.stages.read[v.index()].clone();
                self.stages.pending.extend(readers.into_iter().map(|to| (v, to)));
            }
        }
    }
}
