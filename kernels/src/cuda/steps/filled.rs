//! All-to-alls of filled rows: the host reads the counts that ranks have exchanged, and issues a send and a receive for each run
//! with filled rows.

use ithaca_device::Even;
use ithaca_ir::schedule::Stream as Queue;

use super::state::{Recording, Steps};
use crate::cuda::collectives::{Block, Collective, End, Exchange};
use crate::cuda::error::CudaError;
use crate::cuda::watch::Run;
use crate::error::RunError;
use crate::tensor::index;

impl Steps<'_> {
    /// Replaces an exchange of filled rows by one of blocks, after the counts have arrived; in a graph, which no host reads for, by
    /// one of all rows. Returns the elements that each local rank sends to others.
    pub(super) fn filled_rows(
        &mut self,
        exchange: &mut Exchange,
        locals: &[usize],
        (run, issue, queue): (Run, u64, Queue),
    ) -> Result<Vec<(usize, u64)>, RunError> {
        let is_filled = |end: &End| matches!(end.collective, Collective::Filled { .. });
        if !exchange.ends.iter().any(is_filled) {
            return Ok(Vec::new());
        }
        if self.recording == Recording::On {
            exchange.ends.iter_mut().for_each(|end| end.collective = all_rows(&end.collective));
            return Ok(Vec::new());
        }
        for &local in locals {
            self.enter(local, run);
            self.note(local, queue, (issue, Some(run)), None)?;
        }
        self.wait_for(queue)?;
        let mut sent = Vec::with_capacity(locals.len());
        for (&local, end) in locals.iter().zip(&mut exchange.ends) {
            self.enter(local, run);
            sent.push((local, self.read_counts(local, end, exchange.dtype.bytes())?));
        }
        Ok(sent)
    }

    /// Replaces the collective of a rank by its blocks of filled rows, and copies its own block. Returns the elements that it sends
    /// to others.
    fn read_counts(&self, local: usize, end: &mut End, bytes: u64) -> Result<u64, CudaError> {
        let Collective::Filled { from, to, outgoing, incoming, runs, rows, width } = end.collective else {
            return Ok(0);
        };
        let (local, n) = (&self.locals[local], end.members.len() as u64);
        let own = end.members.iter().position(|&member| member == end.rank).map_or(n, |i| i as u64);
        let block = runs * rows * width * bytes;
        // SAFETY: both are buffers of the schedule, with a block for each member.
        unsafe { local.device.copy(end.stream, from.offset(own * block), to.offset(own * block), block) }?;
        let blocks = |at: crate::cuda::arguments::Address, counts: &[u64]| -> Vec<Block> {
            let all = (0..n * runs).filter(|i| i / runs.max(1) != own && counts[index(*i)] > 0);
            all.map(|i| Block {
                peer: i / runs.max(1),
                at: at.offset(i * rows * width * bytes),
                count: counts[index(i)].min(rows) * width,
            })
            .collect()
        };
        let sends = blocks(from, &local.counts(outgoing, n * runs)?);
        let receives = blocks(to, &local.counts(incoming, n * runs)?);
        let sent = sends.iter().map(|block| block.count).sum();
        end.collective = Collective::SendReceive { sends, receives };
        Ok(sent)
    }
}

/// The all-to-all of all rows.
fn all_rows(collective: &Collective) -> Collective {
    match *collective {
        Collective::Filled { from, to, runs, rows, width, .. } => {
            Collective::Even { kind: Even::AllToAll, from, to, count: runs * rows * width }
        }
        _ => collective.clone(),
    }
}
