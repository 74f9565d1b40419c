//! Looking for NaN after each step, where that was asked for.
//!
//! Each step is waited for, then a kernel reads all that it wrote: of a wire as much as was sent or received, for a wire may
//! be longer, and no task wrote the rest.

use ithaca_device::{Check, Step};
use ithaca_ir::schedule::{Content, Stream as Queue};

use super::state::{Recording, Scope, Steps};
use crate::cpu::LookForNan;
use crate::cuda::watch::Run;
use crate::error::RunError;
use crate::tensor::place_in;

impl Steps<'_> {
    /// Looks at what a step wrote on each of its seats.
    ///
    /// # Errors
    /// [`RunError::NotANumber`] for the first such element, placed at its rank and task.
    pub(super) fn look_for_nan(
        &mut self,
        scope: &Scope,
        run: Run,
        step: &Step,
        seats: &[usize],
    ) -> Result<(), RunError> {
        match (self.look_for_nan, self.recording) {
            (LookForNan::Writes, Recording::Off) => {}
            (LookForNan::Off, _) | (_, Recording::On) => return Ok(()),
        }
        self.wait()?;
        for &seat in seats {
            for check in &step.checks {
                self.enter(seat, run);
                self.look_at(scope, (run, step.stream), seat, check)?;
            }
        }
        Ok(())
    }

    fn look_at(
        &mut self,
        scope: &Scope,
        (run, queue): (Run, Queue),
        seat: usize,
        check: &Check,
    ) -> Result<(), RunError> {
        let (rank, of) = (self.rank(seat), &self.seats[seat]);
        let word = of.word()?;
        // SAFETY: the word is as long, and nothing runs.
        unsafe { of.device.upload(&[0; WORD], word) }?;
        self.issue_all(scope, seat, queue, check.records.at(&of.at))?;
        let issue = self.watch.next();
        self.note(seat, queue, (issue, Some(run)), None)?;
        self.wait()?;
        self.enter(seat, run);
        let mut found = [0; WORD];
        let of = &self.seats[seat];
        // SAFETY: the word is as long, and nothing runs.
        unsafe { of.device.download(word, &mut found) }?;
        let left = u64::from_ne_bytes(found);
        let i = match check.n.count_at(&of.at, scope.layer).checked_sub(left) {
            Some(i) if left > 0 => i,
            Some(_) | None => return Ok(()),
        };
        let buffer = &self.schedule.frames[scope.frame].buffers[check.buffer];
        let at = match &buffer.content {
            Content::Tensor(ty) => place_in(&self.schedule.space.local_box(ty, rank), i),
            Content::Wire { .. } => vec![i],
        };
        Err(RunError::NotANumber { buffer: buffer.name.clone(), at })
    }
}

/// Bytes of the word that a kernel leaves its finding in.
const WORD: usize = 8;
