//! Looking for what is not a number behind each task, where that was asked for.
//!
//! Each task is waited for, then a kernel reads all that it wrote: of a wire as much as was sent or received, for a wire may
//! be longer, and behind its end is what no task wrote.

use ithaca_ir::boxes::{self, Side};
use ithaca_ir::message;
use ithaca_ir::ops::Op;
use ithaca_ir::schedule::{BufferId, Content, Task, Transfer, Work};
use ithaca_ir::{Rank, Space};

use super::{Recording, Scope, Steps};
use crate::cpu::LookForNan;
use crate::cuda::watch::Run;
use crate::error::RunError;
use crate::tensor::place_in;

impl Steps<'_> {
    /// Looks at what a task wrote on each of its seats.
    ///
    /// # Errors
    /// [`RunError::NotANumber`] for the first such element, placed at its rank and task.
    pub(super) fn look_for_nan(&mut self, scope: &Scope, run: Run, seats: &[usize]) -> Result<(), RunError> {
        match (self.look_for_nan, self.recording) {
            (LookForNan::Writes, Recording::Off) => {}
            (LookForNan::Off, _) | (_, Recording::On) => return Ok(()),
        }
        self.wait()?;
        let task = &self.schedule.frames[scope.frame].tasks[run.task];
        for &seat in seats {
            for &buffer in &task.writes {
                self.enter(seat, run);
                self.look_at(scope, (run, task), seat, buffer)?;
            }
        }
        Ok(())
    }

    fn look_at(
        &mut self,
        scope: &Scope,
        (run, task): (Run, &Task),
        seat: usize,
        id: BufferId,
    ) -> Result<(), RunError> {
        let buffer = &self.schedule.frames[scope.frame].buffers[id];
        let (rank, of) = (self.rank(seat), &self.seats[seat]);
        let is_looked_at = buffer.dtype().is_float()
            && match &buffer.content {
                Content::Tensor(ty) => self.space().holds(ty, rank),
                Content::Wire { .. } => true,
            };
        if !is_looked_at {
            return Ok(());
        }
        let word = of.word()?;
        // SAFETY: the word is as long, and nothing runs.
        unsafe { of.device.upload(&[0; WORD], word) }?;
        let cx = self.cx(scope, task, seat);
        let n = match &buffer.content {
            Content::Tensor(_) => match self.views(scope, seat, &[id])?.as_slice() {
                [view] => cx.find_nan(*view, word)?,
                _ => 0,
            },
            Content::Wire { dtype, .. } => {
                let n = on_wire(self.space(), rank, &task.work);
                cx.find_nan_in_wire((self.locate(scope, seat, id)?, *dtype), n, word)?
            }
        };
        let issue = self.watch.next();
        self.note(seat, task.stream, (issue, Some(run)), None)?;
        self.wait()?;
        self.enter(seat, run);
        let mut found = [0; WORD];
        // SAFETY: the word is as long, and nothing runs.
        unsafe { self.seats[seat].device.download(word, &mut found) }?;
        let left = u64::from_ne_bytes(found);
        let i = match u64::try_from(n).unwrap_or(0).checked_sub(left) {
            Some(i) if left > 0 => i,
            Some(_) | None => return Ok(()),
        };
        let at = match &buffer.content {
            Content::Tensor(ty) => place_in(&self.space().local_box(ty, rank), i),
            Content::Wire { .. } => vec![i],
        };
        Err(RunError::NotANumber { buffer: buffer.name.clone(), at })
    }
}

/// Bytes of the word that a kernel leaves what it found in.
const WORD: usize = 8;

/// Elements that a task writes to the wire of a message.
fn on_wire(space: &Space, rank: Rank, work: &Work) -> u64 {
    let length = |transfer: &Transfer, side: Side| {
        let wire = message::wire(space, transfer.parcels(), side, rank);
        wire.blocks.iter().flatten().map(|piece| boxes::elements(&piece.region)).sum()
    };
    match work {
        Work::Pack(transfer) => length(transfer, Side::Sent),
        Work::Exchange(transfer) => match transfer.first().op {
            // It is summed where it lies.
            Op::AllReduce { .. } => length(transfer, Side::Sent),
            _ => length(transfer, Side::Received),
        },
        // What is copied has been looked at.
        Work::Copy | Work::Compute(_) | Work::Unpack(_) | Work::Call { .. } => 0,
    }
}
