//! Pack, exchange and unpack of one tensor, as documented in the runtime's contract of tasks.

use ithaca_ir::boxes::{self, Exchange, Region};
use ithaca_ir::message::Parcel;
use ithaca_ir::schedule::Content;
use ithaca_ir::{DType, Op, Rank, Space};

use super::communicator::Communicator;
use super::memory::{from_int, to_int};
use crate::error::RunError;
use crate::tensor::{extents, index, merge_block, read_block};

/// A transfer of one tensor, seen from one rank, between two buffers.
pub(super) struct LocalTransfer<'a> {
    pub(super) space: &'a Space,
    pub(super) transfer: &'a Parcel,
    pub(super) rank: Rank,
    pub(super) reads: &'a Content,
    pub(super) writes: &'a Content,
}

impl LocalTransfer<'_> {
    /// The wire: for each member the block sent to it.
    pub(super) fn pack(&self, data: &[f32]) -> Result<Vec<f32>, RunError> {
        match (&self.transfer.op, self.reads, self.writes) {
            (
                Op::AllToAll { .. } | Op::ReduceScatter { .. } | Op::Fetch { .. } | Op::FetchSum { .. },
                Content::Tensor(_),
                Content::Wire { .. },
            ) => {
                let held = self.held();
                let send = self.geometry().send;
                Ok(send.iter().flat_map(|block| read_block(&held, data, block)).collect())
            }
            _ => Err(self.refused("pack")),
        }
    }

    /// The tensor, from the wire that holds for each member the block received from it.
    pub(super) fn unpack(&self, data: &[f32]) -> Result<Vec<f32>, RunError> {
        match (&self.transfer.op, self.reads, self.writes) {
            (
                Op::AllToAll { .. } | Op::AllGather { .. } | Op::Fetch { .. },
                Content::Wire { .. },
                Content::Tensor(_),
            ) => {
                // Elements that no rank sends are NaN, so that they cannot pass for results.
                self.put_together(data, f32::NAN, |_, arrived| arrived)
            }
            (Op::FetchSum { .. }, Content::Wire { .. }, Content::Tensor(_)) => {
                self.put_together(data, self.zero(), |there, arrived| {
                    add(self.transfer.from.dtype, there, arrived)
                })
            }
            _ => Err(self.refused("unpack")),
        }
    }

    /// The data to write, and the number of elements that were sent to others.
    pub(super) fn exchange(
        &self,
        data: &[f32],
        communicator: &dyn Communicator,
    ) -> Result<(Vec<f32>, u64), RunError> {
        let is_tensor = |content: &Content| matches!(content, Content::Tensor(_));
        let geometry = self.geometry();
        match self.transfer.op {
            Op::AllToAll { .. } | Op::Fetch { .. } => {
                let blocks = self.blocks_read(data, &geometry.send)?;
                self.swap(&geometry, blocks, communicator)
            }
            Op::FetchSum { .. } if !is_tensor(self.writes) => {
                let blocks = self.blocks_read(data, &geometry.send)?;
                self.swap(&geometry, blocks, communicator)
            }
            Op::AllGather { .. } if is_tensor(self.reads) => {
                let blocks = geometry.group.iter().map(|_| data.to_vec()).collect();
                self.swap(&geometry, blocks, communicator)
            }
            Op::Permute if is_tensor(self.reads) && is_tensor(self.writes) => {
                let held = self.held();
                let blocks = geometry.send.iter().map(|block| read_block(&held, data, block)).collect();
                self.swap(&geometry, blocks, communicator)
            }
            Op::ReduceScatter { .. } if is_tensor(self.writes) => {
                let blocks = self.blocks_read(data, &geometry.send)?;
                let received =
                    communicator.exchange(self.rank, &geometry.group, blocks, &sizes(&geometry.recv))?;
                Ok((sum(self.transfer.from.dtype, received.blocks), received.elements_sent))
            }
            Op::AllReduce { .. } if is_tensor(self.reads) && is_tensor(self.writes) => {
                all_reduce(self.transfer.from.dtype, self.rank, data, &geometry.group, communicator)
            }
            _ => Err(self.refused("exchange")),
        }
    }

    /// Sends blocks and writes those received one after another.
    fn swap(
        &self,
        geometry: &Exchange,
        blocks: Vec<Vec<f32>>,
        communicator: &dyn Communicator,
    ) -> Result<(Vec<f32>, u64), RunError> {
        let holds = self.space.holds(&self.transfer.to, self.rank);
        if holds && matches!(self.writes, Content::Tensor(_)) {
            self.need_in_order(&self.wanted(), &geometry.recv, "written")?;
        }
        let received = communicator.exchange(self.rank, &geometry.group, blocks, &sizes(&geometry.recv))?;
        Ok((received.blocks.concat(), received.elements_sent))
    }

    /// The tensor from a wire, every element begun as `first`.
    fn put_together(
        &self,
        data: &[f32],
        first: f32,
        merge: impl Fn(f32, f32) -> f32,
    ) -> Result<Vec<f32>, RunError> {
        let wanted = self.wanted();
        let mut out = vec![first; extents(&wanted).iter().product()];
        let recv = self.geometry().recv;
        for (block, elements) in recv.iter().zip(self.split(data, &recv)?) {
            merge_block(&wanted, &mut out, block, &elements, &merge);
        }
        Ok(out)
    }

    fn zero(&self) -> f32 {
        match self.transfer.from.dtype {
            DType::I32 | DType::Bool => from_int(0),
            DType::F64 | DType::F32 | DType::F16 | DType::BF16 => 0.0,
        }
    }

    /// The blocks to send: a wire holds them, a tensor must.
    fn blocks_read(&self, data: &[f32], send: &[Vec<Region>]) -> Result<Vec<Vec<f32>>, RunError> {
        if matches!(self.reads, Content::Tensor(_)) {
            self.need_in_order(&self.held(), send, "read")?;
        }
        self.split(data, send)
    }

    /// Splits contiguous blocks.
    fn split(&self, data: &[f32], blocks_of: &[Vec<Region>]) -> Result<Vec<Vec<f32>>, RunError> {
        let mut rest = data;
        let mut blocks = Vec::with_capacity(blocks_of.len());
        for n in sizes(blocks_of) {
            let Some((block, after)) = rest.split_at_checked(n) else {
                return Err(RunError::invalid(format!(
                    "the blocks of `{}` do not fit in {} elements",
                    self.transfer.op.name(),
                    data.len()
                )));
            };
            blocks.push(block.to_vec());
            rest = after;
        }
        Ok(blocks)
    }

    fn need_in_order(&self, whole: &Region, blocks: &[Vec<Region>], verb: &str) -> Result<(), RunError> {
        if boxes::lie_in_order(whole, blocks.iter().flatten()) {
            return Ok(());
        }
        Err(RunError::invalid(format!(
            "the tensor {verb} by `{}` is not its blocks in order; it must be packed",
            self.transfer.op.name()
        )))
    }

    fn geometry(&self) -> Exchange {
        let Parcel { op, from, to } = self.transfer;
        boxes::exchange(self.space, op, from, to, self.rank)
    }

    fn held(&self) -> Region {
        self.space.local_box(&self.transfer.from, self.rank)
    }

    fn wanted(&self) -> Region {
        self.space.local_box(&self.transfer.to, self.rank)
    }

    fn refused(&self, step: &str) -> RunError {
        let kind = |content: &Content| match content {
            Content::Tensor(_) => "a tensor",
            Content::Wire { .. } => "a wire",
        };
        RunError::invalid(format!(
            "there is no {step} of `{}` from {} to {}",
            self.transfer.op.name(),
            kind(self.reads),
            kind(self.writes)
        ))
    }
}

/// Sums over the group: a reduce-scatter of chunks, then an all-gather of them. Gives the sums, and how many elements
/// were sent to others.
pub(super) fn all_reduce(
    dtype: DType,
    rank: Rank,
    data: &[f32],
    group: &[Rank],
    communicator: &dyn Communicator,
) -> Result<(Vec<f32>, u64), RunError> {
    let chunk = |i: usize| {
        let chunk = boxes::chunk(data.len() as u64, group.len() as u64, i as u64);
        index(chunk.start)..index(chunk.end)
    };
    let me = group
        .iter()
        .position(|&r| r == rank)
        .ok_or_else(|| RunError::invalid("a rank is outside its group"))?;
    let blocks = (0..group.len()).map(|i| data[chunk(i)].to_vec()).collect();
    let own = vec![chunk(me).len(); group.len()];
    let scattered = communicator.exchange(rank, group, blocks, &own)?;
    let sum = sum(dtype, scattered.blocks);
    let sizes: Vec<usize> = (0..group.len()).map(|i| chunk(i).len()).collect();
    let blocks = group.iter().map(|_| sum.clone()).collect();
    let gathered = communicator.exchange(rank, group, blocks, &sizes)?;
    Ok((gathered.blocks.concat(), scattered.elements_sent + gathered.elements_sent))
}

/// The sum of equal blocks, in their order.
pub(super) fn sum(dtype: DType, blocks: Vec<Vec<f32>>) -> Vec<f32> {
    let mut blocks = blocks.into_iter();
    let first = blocks.next().unwrap_or_default();
    blocks.fold(first, |mut sum, block| {
        sum.iter_mut().zip(block).for_each(|(x, y)| *x = add(dtype, *x, y));
        sum
    })
}

fn add(dtype: DType, x: f32, y: f32) -> f32 {
    match dtype {
        DType::I32 | DType::Bool => from_int(to_int(x).wrapping_add(to_int(y))),
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 => x + y,
    }
}

fn sizes(blocks: &[Vec<Region>]) -> Vec<usize> {
    blocks.iter().map(|block| index(boxes::block_elements(block))).collect()
}
