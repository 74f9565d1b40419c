//! Records, issued for one rank: addresses and integers get their values.

use ithaca_device::{Launch, Record, Region, Transfer, Word};
use ithaca_ir::schedule::Stream as Queue;

use super::state::{Scope, Steps};
use crate::cuda::arguments::{Address, Arguments};
use crate::cuda::collectives::End;
use crate::error::RunError;

impl Steps<'_> {
    /// Issues the records of a rank; gives its end of the transfer among them, which is for all ranks together.
    pub(super) fn issue_all<'r>(
        &self,
        scope: &Scope,
        seat: usize,
        queue: Queue,
        records: &'r [Record],
    ) -> Result<Option<(&'r Transfer, End)>, RunError> {
        let mut end = None;
        for record in records {
            match record {
                Record::Transfer(transfer) => {
                    end = Some((transfer, self.end_of(scope, seat, queue, transfer)?));
                }
                Record::Launch(launch) => self.launch(scope, seat, queue, launch)?,
                Record::Product(product) => {
                    let mut failed = None;
                    let own = &self.seats[seat];
                    let product = product.map(
                        |at| self.address(scope, seat, at).unwrap_or_else(|e| missing(&mut failed, e)),
                        |n| n.at(&own.at, scope.layer),
                    );
                    failed.map_or(Ok(()), Err)?;
                    // SAFETY: the matrices are tensors of the schedule, in buffers as large as their types.
                    unsafe { own.device.multiply(own.stream(queue), &product) }?;
                }
                Record::Copy { from, to, bytes } => {
                    let own = &self.seats[seat];
                    let bytes = bytes.count_at(&own.at, scope.layer);
                    let from = self.address(scope, seat, from)?;
                    let to = self.address(scope, seat, to)?;
                    if bytes > 0 && from != to {
                        // SAFETY: as for a launch.
                        unsafe { own.device.copy(own.stream(queue), from, to, bytes) }?;
                    }
                }
            }
        }
        Ok(end)
    }

    fn launch(&self, scope: &Scope, seat: usize, queue: Queue, launch: &Launch) -> Result<(), RunError> {
        let own = &self.seats[seat];
        let mut failed = None;
        let mut arguments = Arguments::default();
        for arg in &launch.args {
            arguments.push(&arg.bytes(|word| match word {
                Word::Int(n) => n.at(&own.at, scope.layer).cast_unsigned(),
                Word::Real(x) => x.to_bits(),
                Word::Address(at) => {
                    self.address(scope, seat, at).unwrap_or_else(|e| missing(&mut failed, e)).number()
                }
            }));
        }
        failed.map_or(Ok(()), Err)?;
        let grid = launch.grid.map(|n| n.count_at(&own.at, scope.layer));
        // SAFETY: a device program gives a kernel what its parameters say, and the addresses are those of buffers as large as
        // the types of their tensors, which the schedule keeps from others until events allow it. Threads and shared memory
        // are those that the kernel is compiled for, which its compilation asserts.
        Ok(unsafe { own.device.launch(own.stream(queue), &launch.kernel, grid, arguments) }?)
    }

    fn end_of(&self, scope: &Scope, seat: usize, queue: Queue, transfer: &Transfer) -> Result<End, RunError> {
        let own = &self.seats[seat];
        let mut failed = None;
        let collective = transfer.collective.map(
            |at| self.address(scope, seat, at).unwrap_or_else(|e| missing(&mut failed, e)),
            |n| n.count_at(&own.at, scope.layer),
        );
        let members = End::members(&self.program.mesh, transfer, own.rank);
        match failed {
            None => Ok(End { rank: own.rank, stream: own.stream(queue), members, collective }),
            Some(error) => Err(error),
        }
    }

    /// The address that a seat has in a run of a frame.
    pub(super) fn address(
        &self,
        scope: &Scope,
        seat: usize,
        address: &ithaca_device::Address,
    ) -> Result<Address, RunError> {
        let own = &self.seats[seat];
        let start = match address.region {
            Region::Null => return Ok(Address::NONE),
            Region::Frame => Some(own.memory.offset(scope.base)),
            Region::Argument(i) => scope.arguments[seat].get(i).copied(),
            Region::Result(i) => scope.results[seat].get(i).copied(),
            Region::Table(table) => Some(own.tables.at(table)),
            Region::Finding => Some(own.word()?),
            Region::Source(source) => {
                let buffer = self.program.frames[scope.frame].sources.get(&source);
                let number = buffer.and_then(|&b| self.plan.find((scope.frame, b, scope.layer, scope.at)));
                number.and_then(|number| own.sources[number])
            }
        };
        let missing = || RunError::invalid(format!("{:?} is nowhere", address.region));
        let start = start.ok_or_else(missing)?;
        Ok(start.offset(address.offset.at(&own.at, scope.layer).cast_unsigned()))
    }
}

/// Keeps an error for later.
fn missing(failed: &mut Option<RunError>, error: RunError) -> Address {
    *failed = Some(error);
    Address::NONE
}
