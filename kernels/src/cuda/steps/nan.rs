//! The search for NaN after each step.
//!
//! After each step has ended, a kernel reads the buffers that it wrote. Of a wire buffer it reads the elements that were sent
//! or received, because no task writes the rest.

use ithaca_device::{Check, Step};
use ithaca_ir::schedule::{Content, Stream as Queue};

use super::state::{Recording, Scope, Steps};
use crate::cpu::LookForNan;
use crate::cuda::rank::WORD;
use crate::cuda::watch::Run;
use crate::error::RunError;
use crate::tensor::place_in;

impl Steps<'_> {
    /// Searches the buffers that a step wrote on each of its local ranks.
    ///
    /// # Errors
    /// [`RunError::NotANumber`] for the first such element, placed at its rank and task.
    pub(super) fn look_for_nan(
        &mut self,
        scope: &Scope,
        run: Run,
        step: &Step,
        locals: &[usize],
    ) -> Result<(), RunError> {
        match (self.look_for_nan, self.recording) {
            (LookForNan::Writes, Recording::Off) => {}
            (LookForNan::Off, _) | (_, Recording::On) => return Ok(()),
        }
        self.wait()?;
        for &local in locals {
            for check in &step.checks {
                self.enter(local, run);
                self.look_at(scope, (run, step.stream), local, check)?;
            }
        }
        Ok(())
    }

    fn look_at(
        &mut self,
        scope: &Scope,
        (run, queue): (Run, Queue),
        local: usize,
        check: &Check,
    ) -> Result<(), RunError> {
        let (rank, of) = (self.rank(local), &self.locals[local]);
        let word = of.word;
        // SAFETY: the word has this size, and no work runs.
        unsafe { of.device.upload(&[0; WORD], word) }?;
        self.issue_all(scope, local, queue, check.records.at(&of.at))?;
        let issue = self.watch.next();
        self.note(local, queue, (issue, Some(run)), None)?;
        self.wait()?;
        self.enter(local, run);
        let mut found = [0; WORD];
        let of = &self.locals[local];
        // SAFETY: the word has this size, and no work runs.
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
