//! Blocks on their way: packed, exchanged and unpacked for one collective, in wires that are large enough; `S14`.
//!
//! The content of a wire is named by the transfer that filled it: that of a pack or an exchange, or of the exchange in whose wire
//! tensors are written. Whoever reads it must mean the same transfer, for the order of blocks in a wire follows from the
//! transfer alone: of several tensors, for each peer the blocks of one after another.

use std::collections::BTreeMap;

use crate::boxes::{self, Side};
use crate::diagnostic::Diagnostics;
use crate::message::{self, Parcel};
use crate::ops::error::{OpError, ensure};
use crate::ops::table::op::Op;
use crate::schedule::verify::blocks::{Checked, Volumes};
use crate::schedule::verify::partner::in_task;
use crate::schedule::verify::report::{describe, name};
use crate::schedule::{BufferId, Content, Frame, Place, Task, Transfer, Work};
use crate::space::Space;

/// Adds the mistakes in the collectives of a frame whose tasks fit their buffers.
pub(super) fn check(space: &Space, frame: &Frame, checked: &mut Checked, found: &mut Diagnostics) {
    let mut wires: BTreeMap<BufferId, (usize, Side, &Transfer)> = BTreeMap::new();
    let sent = sent(frame);
    for (i, task) in frame.tasks.iter().enumerate() {
        for &written in &task.writes {
            if let Place::Inside { whole: wire, .. } = frame.buffers[written].place
                && matches!(frame.buffers[wire].content, Content::Wire { .. })
                && let Some(&transfer) = sent.get(&wire)
            {
                // The name that a pack gave the wire stays.
                wires.entry(wire).or_insert((i, Side::Sent, transfer));
            }
        }
        let (transfer, from, to) = match &task.work {
            Work::Pack(transfer) => (transfer, None, Some(Side::Sent)),
            Work::Exchange(transfer) => (transfer, Some(Side::Sent), Some(Side::Received)),
            Work::Unpack(transfer) => (transfer, Some(Side::Received), None),
            Work::Copy => {
                // A copy of a wire is the same blocks.
                if let (Some(read), Some(&written)) = (task.reads.first(), task.writes.first())
                    && let Some(&held) = wires.get(read)
                {
                    wires.insert(written, held);
                }
                continue;
            }
            Work::Compute(_) | Work::Call { .. } => continue,
        };
        let blocks = Blocks { space, frame, task, transfer };
        let volumes = checked.volumes(space, transfer).and_then(|volumes| {
            blocks.fit(volumes)?;
            blocks.check_contiguity()
        });
        if let Err(error) = volumes {
            found.push(in_task(frame, i, error));
        }
        if let (Some(side), Some(&read)) = (from, task.reads.first())
            && let Some(&(by, filled, meant)) = wires.get(&read)
            && (filled != side || meant != transfer)
        {
            let what = if filled == side { "another collective" } else { "another end of it" };
            let (read, by) = (name(frame, read), describe(frame, by));
            let message = format!("`${read}` holds blocks that {by} put there for {what}");
            found.push(in_task(frame, i, OpError::new("S14", message)));
        }
        if let (Some(side), Some(&written)) = (to, task.writes.first())
            && matches!(frame.buffers[written].content, Content::Wire { .. })
        {
            wires.insert(written, (i, side, transfer));
        }
    }
}

/// For each wire that is sent the exchange that does, which tells what a tensor that is written in it is written for.
fn sent(frame: &Frame) -> BTreeMap<BufferId, &Transfer> {
    let mut sent = BTreeMap::new();
    for task in &frame.tasks {
        if let (Work::Exchange(transfer), Some(&wire)) = (&task.work, task.reads.first()) {
            sent.entry(wire).or_insert(transfer);
        }
    }
    sent
}

/// The blocks that a task has to do with.
struct Blocks<'s> {
    space: &'s Space,
    frame: &'s Frame,
    task: &'s Task,
    transfer: &'s Transfer,
}

impl Blocks<'_> {
    /// Whether wires are as long as all blocks of any rank, own blocks included unless they are read elsewhere.
    fn fit(&self, volumes: Volumes) -> Result<(), OpError> {
        let Task { work, reads, writes, .. } = self.task;
        let (of_reads, of_writes) = match work {
            Work::Pack(_) => (None, Some(volumes.sent)),
            Work::Exchange(_) => (Some(volumes.sent), Some(volumes.received)),
            Work::Unpack(_) if reads.len() == 1 => (Some(volumes.received), None),
            Work::Unpack(_) | Work::Compute(_) | Work::Copy | Work::Call { .. } => (None, None),
        };
        for (buffers, needed) in [(reads, of_reads), (writes, of_writes)] {
            let (Some(&buffer), Some(needed)) = (buffers.first(), needed) else { continue };
            if let Content::Wire { elements, .. } = &self.frame.buffers[buffer].content
                && *elements < needed
            {
                let shown = name(self.frame, buffer);
                let message = format!(
                    "blocks of {needed} elements on some rank do not fit in `${shown}` of {elements}"
                );
                return Err(OpError::new("S14", message));
            }
        }
        Ok(())
    }

    /// Whether a tensor that is exchanged without packing is its blocks, one after another.
    fn check_contiguity(&self) -> Result<(), OpError> {
        // Several tensors are always packed.
        let Some(Parcel { op, from, to }) = self.transfer.only() else { return Ok(()) };
        let blocks_read = matches!(op, Op::AllToAll { .. } | Op::ReduceScatter { .. });
        let blocks_written = matches!(op, Op::AllToAll { .. } | Op::AllGather { .. });
        let is_tensor = |buffers: &[BufferId]| {
            buffers.first().is_some_and(|&b| matches!(self.frame.buffers[b].content, Content::Tensor(_)))
        };
        let reads = blocks_read && is_tensor(&self.task.reads);
        let writes = blocks_written && is_tensor(&self.task.writes);
        if !matches!(self.task.work, Work::Exchange(_)) || !(reads || writes) {
            return Ok(());
        }
        // Blocks of all ranks are cut along the same dimensions.
        let rank = crate::mesh::Rank(0);
        let exchange = boxes::exchange(self.space, op, from, to, rank);
        for (is_there, side, ty, blocks, what) in [
            (reads, Side::Sent, from, &exchange.send, "read"),
            (writes, Side::Received, to, &exchange.recv, "written"),
        ] {
            let whole = self.space.local_box(ty, rank);
            ensure!(
                !is_there
                    || message::runs_lie_in_tensor(self.space, self.transfer.parcels(), side)
                    || boxes::is_contiguous_concatenation(&whole, blocks.iter().flatten()),
                "S14",
                "the tensor that is {what} is not its blocks one after another; it must be packed"
            );
        }
        Ok(())
    }
}
