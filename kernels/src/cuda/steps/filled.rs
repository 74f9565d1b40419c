//! All-to-alls of filled rows: the host reads the counts that ranks have exchanged, and issues a send and a receive for each run
//! with filled rows.

use ithaca_ir::message::RunPlaces;
use ithaca_ir::schedule::Stream as Queue;
use num_integer::gcd;

use super::state::{Recording, Steps};
use crate::cuda::arguments::Address;
use crate::cuda::collectives::{Block, Collective, End, Exchange};
use crate::cuda::error::CudaError;
use crate::cuda::watch::Run;
use crate::error::RunError;
use crate::tensor::index;

impl Steps<'_> {
    /// Replaces an exchange of filled rows by one of blocks, after the counts have arrived; in a graph, which no host reads for, by
    /// one of all rows. Returns the elements that each local rank sends to others, where filled rows are sent.
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
        let bytes = exchange.dtype.bytes();
        let all_rows = self.recording == Recording::On;
        if !all_rows {
            for &local in locals {
                self.enter(local, run);
                self.note(local, queue, (issue, Some(run)), None)?;
            }
            self.wait_for(queue)?;
        }
        let mut sent = Vec::with_capacity(locals.len());
        for (&local, end) in locals.iter().zip(&mut exchange.ends) {
            self.enter(local, run);
            sent.push((local, self.replace_by_blocks(local, end, bytes, all_rows)?));
        }
        Ok(if all_rows { Vec::new() } else { sent })
    }

    /// Replaces the collective of a rank by its blocks of filled or of all rows, and copies its own block. Returns the elements that
    /// it sends to others.
    fn replace_by_blocks(
        &self,
        local: usize,
        end: &mut End,
        bytes: u64,
        all_rows: bool,
    ) -> Result<u64, CudaError> {
        let Collective::Filled { from, to, outgoing, incoming, runs, sent, received } = end.collective else {
            return Ok(0);
        };
        let (local, n) = (&self.locals[local], end.members.len() as u64);
        let own = end.members.iter().position(|&member| member == end.rank).map_or(n, |i| i as u64);
        let run = runs.rows * runs.width * bytes;
        // As many runs of a block are side by side at both ends.
        let together = gcd(sent.adjacent, received.adjacent).max(1);
        for i in (0..runs.n).step_by(index(together)) {
            let at = |start: Address, places: RunPlaces| start.offset(places.of(own, i) * run);
            // SAFETY: both are buffers of the schedule, with a block for each member.
            unsafe { local.device.copy(end.stream, at(from, sent), at(to, received), together * run) }?;
        }
        let blocks = |at: Address, places: RunPlaces, counts: Address| -> Result<Vec<Block>, CudaError> {
            let (step, counts) = if all_rows {
                (together, vec![together * runs.rows; index(n * runs.n)])
            } else {
                let counts = local.counts(counts, n * runs.n)?;
                (1, counts.into_iter().map(|count| count.min(runs.rows)).collect())
            };
            let block = |i: u64| Block {
                peer: i / runs.n,
                at: at.offset(places.of(i / runs.n, i % runs.n) * run),
                count: counts[index(i)] * runs.width,
            };
            let all = (0..n * runs.n).step_by(index(step)).map(block);
            Ok(all.filter(|block| block.peer != own && block.count > 0).collect())
        };
        let sends = blocks(from, sent, outgoing)?;
        let receives = blocks(to, received, incoming)?;
        let sent = sends.iter().map(|block| block.count).sum();
        end.collective = Collective::SendReceive { sends, receives };
        Ok(sent)
    }
}
