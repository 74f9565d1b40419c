//! Issues records for one rank, with the values of addresses and integers.

use ithaca_device::{Launch, Record, Region, Transfer, Word};
use ithaca_ir::DType;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::Stream as Queue;

use super::state::{Scope, Steps};
use crate::cuda::arguments::{Address, Arguments};
use crate::cuda::collectives::End;
use crate::cuda::device::{Matrix, Product};
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
                    end = Some((transfer, self.end_of(scope, local, queue, transfer)));
                }
                Record::Launch(launch) => self.launch(scope, local, queue, launch)?,
                Record::Product(product) => {
                    self.multiply(local, queue, &self.product(scope, local, product))?
                }
                Record::Pair(pair) => {
                    let [first, second] = pair.each_ref().map(|one| self.product(scope, local, one));
                    match batch(&first, &second).or_else(|| batch(&second, &first)) {
                        Some(both) => self.multiply(local, queue, &both)?,
                        None => {
                            self.multiply(local, queue, &first)?;
                            self.multiply(local, queue, &second)?;
                        }
                    }
                }
                Record::Copy { from, to, bytes } => {
                    let state = &self.locals[local];
                    let bytes = bytes.count_at(&state.at, scope.layer);
                    let [from, to] = [from, to].map(|at| self.address(scope, local, at));
                    if bytes > 0 && from != to {
                        // SAFETY: as for a launch.
                        unsafe { state.device.copy(state.stream(queue), from, to, bytes) }?;
                    }
                }
            }
        }
        Ok(end)
    }

    /// The product of a rank.
    fn product(&self, scope: &Scope, local: usize, product: &ithaca_device::Product) -> Product {
        let state = &self.locals[local];
        product.map(|at| self.address(scope, local, at), |n| n.at(&state.at, scope.layer))
    }

    fn multiply(&self, local: usize, queue: Queue, product: &Product) -> Result<(), RunError> {
        let state = &self.locals[local];
        // SAFETY: the matrices are tensors of the schedule, in buffers as large as their types.
        Ok(unsafe { state.device.multiply(state.stream(queue), product) }?)
    }

    fn launch(&self, scope: &Scope, local: usize, queue: Queue, launch: &Launch) -> Result<(), RunError> {
        let state = &self.locals[local];
        let mut arguments = Arguments::default();
        for arg in &launch.args {
            arguments.push(&arg.bytes(|word| match word {
                Word::Int(n) => n.at(&state.at, scope.layer).cast_unsigned(),
                Word::Real(x) => x.to_bits(),
                Word::Address(at) => self.address(scope, local, at).number(),
            }));
        }
        let grid = launch.grid.map(|n| n.count_at(&state.at, scope.layer));
        // SAFETY: the arguments match the kernel's parameters. The addresses are buffers with the size of their tensors, and
        // events order other accesses. The compilation of the kernel asserts threads and shared memory.
        Ok(unsafe { state.device.launch(state.stream(queue), &launch.kernel, grid, arguments) }?)
    }

    fn end_of(&self, scope: &Scope, local: usize, queue: Queue, transfer: &Transfer) -> End {
        let state = &self.locals[local];
        let address = |at: &_| self.address(scope, local, at);
        let collective = transfer.collective.map(address, |n| n.count_at(&state.at, scope.layer));
        let members = End::members(&self.program.mesh, transfer, state.rank);
        End { rank: state.rank, stream: state.stream(queue), members, collective }
    }

    /// The address on a local rank in a run of a frame.
    pub(super) fn address(&self, scope: &Scope, local: usize, address: &ithaca_device::Address) -> Address {
        let state = &self.locals[local];
        let start = match address.region {
            Region::Null => return Address::NONE,
            Region::Frame => Some(state.memory.offset(scope.base)),
            Region::Argument(i) => scope.arguments[local].get(i).copied(),
            Region::Result(i) => scope.results[local].get(i).copied(),
            Region::Table(table) => Some(state.tables[table.index()]),
            Region::Finding => Some(state.word),
            Region::Overflow => Some(state.overflow),
            Region::Workspace => Some(state.workspace),
            Region::Counts => Some(state.counts),
            Region::Source(source) => {
                let buffer = self.program.frames[scope.frame].sources.get(&source);
                let number = buffer.and_then(|&b| self.plan.find((scope.frame, b, scope.layer, scope.at)));
                number.and_then(|number| state.sources[number])
            }
        };
        let start = start.expect("a rank has the buffers of the tasks that it runs");
        start.offset(address.offset.at(&state.at, scope.layer).cast_unsigned())
    }
}

/// Both products as a batch; `None` if the second's matrices are not all at or behind those of the first.
fn batch(first: &Product, second: &Product) -> Option<Product> {
    let both = |of: fn(&Product) -> Matrix, dtype: DType| {
        let matrix = of(first);
        let bytes = of(second).at.number().checked_sub(matrix.at.number())?;
        let step = bytes.is_multiple_of(dtype.bytes()).then_some(bytes / dtype.bytes())?;
        Some(Matrix { step: i64::try_from(step).ok()?, ..matrix })
    };
    let (a, b) = (both(|product| product.a, first.dtype)?, both(|product| product.b, first.dtype)?);
    Some(Product { batch: 2, a, b, c: both(|product| product.c, first.result)?, ..*first })
}
