//! Issues records for one rank, with the values of addresses and integers.

use ithaca_device::{Launch, Record, Region, Transfer, Word};
use ithaca_ir::schedule::Stream as Queue;

use super::state::{Scope, Steps};
use crate::cuda::arguments::{Address, Arguments};
use crate::cuda::collectives::End;
use crate::error::RunError;

impl Steps<'_> {
    /// Issues the records of a rank. Returns its end of a transfer, which the caller issues for all ranks together.
    pub(super) fn issue_all<'r>(
        &self,
        scope: &Scope,
        local: usize,
        queue: Queue,
        records: &'r [Record],
    ) -> Result<Option<(&'r Transfer, End)>, RunError> {
        let mut end = None;
        for record in records {
            match record {
                Record::Transfer(transfer) => {
                    end = Some((transfer, self.end_of(scope, local, queue, transfer)?));
                }
                Record::Launch(launch) => self.launch(scope, local, queue, launch)?,
                Record::Product(product) => {
                    let mut failed = None;
                    let state = &self.locals[local];
                    let product = product.map(
                        |at| self.address(scope, local, at).unwrap_or_else(|e| defer(&mut failed, e)),
                        |n| n.at(&state.at, scope.layer),
                    );
                    failed.map_or(Ok(()), Err)?;
                    // SAFETY: the matrices are tensors of the schedule, in buffers as large as their types.
                    unsafe { state.device.multiply(state.stream(queue), &product) }?;
                }
                Record::Copy { from, to, bytes } => {
                    let state = &self.locals[local];
                    let bytes = bytes.count_at(&state.at, scope.layer);
                    let from = self.address(scope, local, from)?;
                    let to = self.address(scope, local, to)?;
                    if bytes > 0 && from != to {
                        // SAFETY: as for a launch.
                        unsafe { state.device.copy(state.stream(queue), from, to, bytes) }?;
                    }
                }
            }
        }
        Ok(end)
    }

    fn launch(&self, scope: &Scope, local: usize, queue: Queue, launch: &Launch) -> Result<(), RunError> {
        let state = &self.locals[local];
        let mut failed = None;
        let mut arguments = Arguments::default();
        for arg in &launch.args {
            arguments.push(&arg.bytes(|word| match word {
                Word::Int(n) => n.at(&state.at, scope.layer).cast_unsigned(),
                Word::Real(x) => x.to_bits(),
                Word::Address(at) => {
                    self.address(scope, local, at).unwrap_or_else(|e| defer(&mut failed, e)).number()
                }
            }));
        }
        failed.map_or(Ok(()), Err)?;
        let grid = launch.grid.map(|n| n.count_at(&state.at, scope.layer));
        // SAFETY: the arguments match the kernel's parameters. The addresses are buffers with the size of their tensors, and
        // events order other accesses. The compilation of the kernel asserts threads and shared memory.
        Ok(unsafe { state.device.launch(state.stream(queue), &launch.kernel, grid, arguments) }?)
    }

    fn end_of(
        &self,
        scope: &Scope,
        local: usize,
        queue: Queue,
        transfer: &Transfer,
    ) -> Result<End, RunError> {
        let state = &self.locals[local];
        let mut failed = None;
        let collective = transfer.collective.map(
            |at| self.address(scope, local, at).unwrap_or_else(|e| defer(&mut failed, e)),
            |n| n.count_at(&state.at, scope.layer),
        );
        let members = End::members(&self.program.mesh, transfer, state.rank);
        match failed {
            None => Ok(End { rank: state.rank, stream: state.stream(queue), members, collective }),
            Some(error) => Err(error),
        }
    }

    /// The address on a local rank in a run of a frame.
    pub(super) fn address(
        &self,
        scope: &Scope,
        local: usize,
        address: &ithaca_device::Address,
    ) -> Result<Address, RunError> {
        let state = &self.locals[local];
        let start = match address.region {
            Region::Null => return Ok(Address::NONE),
            Region::Frame => Some(state.memory.offset(scope.base)),
            Region::Argument(i) => scope.arguments[local].get(i).copied(),
            Region::Result(i) => scope.results[local].get(i).copied(),
            Region::Table(table) => Some(state.tables.at(table)),
            Region::Finding => Some(state.word()?),
            Region::Source(source) => {
                let buffer = self.program.frames[scope.frame].sources.get(&source);
                let number = buffer.and_then(|&b| self.plan.find((scope.frame, b, scope.layer, scope.at)));
                number.and_then(|number| state.sources[number])
            }
        };
        let missing = || RunError::invalid(format!("{:?} has no address", address.region));
        let start = start.ok_or_else(missing)?;
        Ok(start.offset(address.offset.at(&state.at, scope.layer).cast_unsigned()))
    }
}

/// Stores an error for later and returns the null address.
fn defer(failed: &mut Option<RunError>, error: RunError) -> Address {
    *failed = Some(error);
    Address::NONE
}
