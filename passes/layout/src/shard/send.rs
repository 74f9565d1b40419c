//! Transfers between stages of a pipeline.

use ithaca_ir::TensorType;
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::{At, AxisList, Layout};
use ithaca_ir::mesh::AxisId;
use ithaca_ir::module::{Node, ValueId};
use ithaca_ir::ops::{Op, OpError, Stage};
use ithaca_ir::text::show;
use ithaca_pass::choices::{Choice, Topic, impossible};

use super::rewriter::{Rewriter, settled};

const PARTS: &str = "parts";
const WHOLE: &str = "whole";

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
        let parts = self.parts_sent(&whole, at)?;
        let from = self.reshard(value, parts.unwrap_or_else(|| whole.layout.clone()))?;
        let arriving = self.b.ty(from).located(at);
        let arrived = self.b.push_as(Op::Permute, &[from], arriving)?;
        let sent = self.reshard(arrived, whole.layout)?;
        self.sent.insert((value, at), sent);
        Ok(sent)
    }

    /// The layout in which ranks that hold the same send parts of a value of type `whole`, which are gathered where they
    /// arrive; nothing where that takes longer than to send the whole from each to each.
    fn parts_sent(&mut self, whole: &TensorType, at: Option<At>) -> Result<Option<Layout>, OpError> {
        let plain = whole.located(None);
        if let Some(known) = self.parts_sent.get(&plain) {
            return Ok(known.clone());
        }
        let holders = self.holders(whole);
        let parts = if holders.is_empty() { None } else { self.choose_parts(whole, at, &holders)? };
        self.parts_sent.insert(plain, parts.clone());
        Ok(parts)
    }

    /// The same, asked for once for each type; ranks along `holders` hold the same.
    fn choose_parts(
        &mut self,
        whole: &TensorType,
        at: Option<At>,
        holders: &[AxisId],
    ) -> Result<Option<Layout>, OpError> {
        let parts = self.parts(whole, holders);
        let key = show(self.b.space(), &whole.located(None)).to_string();
        match (self.cx.choose(Topic::Sends, key.as_str())?, parts) {
            (Choice::ByPrice(prices), Some(parts)) => {
                let part = whole.with_layout(parts.clone());
                let seconds = |ty: &TensorType| {
                    prices.collective_seconds(self.b.space(), &Op::Permute, ty, &ty.located(at))
                };
                let gathered = self.conversion_seconds(&part.located(at), &whole.located(at), prices);
                let is_faster = seconds(&part) + gathered < seconds(whole);
                self.cx.record(if is_faster { PARTS } else { WHOLE });
                Ok(is_faster.then_some(parts))
            }
            (Choice::ByPrice(_), None) => {
                self.cx.record(WHOLE);
                Ok(None)
            }
            (Choice::Recorded(WHOLE), _) => Ok(None),
            (Choice::Recorded(PARTS), Some(parts)) => Ok(Some(parts)),
            (Choice::Recorded(PARTS), None) => {
                let why = "no dimension divides by the ranks that hold the same";
                Err(impossible(Topic::Sends, &key, PARTS, why))
            }
            (Choice::Recorded(other), _) => {
                let why = "a value is sent `whole` or as `parts`";
                Err(impossible(Topic::Sends, &key, other, why))
            }
        }
    }

    /// The axes that split weights along which ranks hold the same of a value.
    fn holders(&self, ty: &TensorType) -> AxisList {
        let used: Vec<AxisId> = ty.layout.axes().collect();
        let axes = self.placement.weights.iter().copied();
        axes.filter(|axis| !used.contains(axis) && self.b.space().mesh.size(*axis) > 1).collect()
    }

    /// The layout of a value of which every rank along `holders` has a part.
    fn parts(&self, whole: &TensorType, holders: &[AxisId]) -> Option<Layout> {
        let space = self.b.space();
        (0..whole.dims.len()).find_map(|i| {
            let mut layout = whole.layout.clone();
            layout.split[i].extend(holders.iter().copied());
            let dim = &space.dims[whole.dims[i]];
            let is_plain = !dim.uneven && dim.ragged.is_none();
            (is_plain && space.can_split(whole.dims[i], &layout.split[i])).then_some(layout)
        })
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
