//! Pack, exchange and unpack of the tensors that one collective carries, as documented in the runtime's contract of tasks.

use std::borrow::Cow;

use ithaca_ir::boxes::{self, Region, Side};
use ithaca_ir::message::{self, Parcel, Runs, Sent, Wire};
use ithaca_ir::schedule::{Content, Stream};
use ithaca_ir::{DType, Op, Rank, Space};

use super::communicator::Communicator;
use super::memory::{from_int, to_int};
use crate::error::RunError;
use crate::tensor::{extents, index, merge_block, read_block, read_part};

/// The transfer of one tensor or of coalesced ones, seen from one rank.
pub(super) struct LocalTransfer<'a> {
    pub(super) space: &'a Space,
    pub(super) parcels: &'a [Parcel],
    pub(super) rank: Rank,
    /// The stream that exchanges.
    pub(super) stream: Stream,
}

impl LocalTransfer<'_> {
    /// The wire, of the tensors that the rank holds.
    pub(super) fn pack<T: AsRef<[f32]>>(&self, tensors: &[T]) -> Result<Vec<f32>, RunError> {
        if tensors.len() != self.parcels.len() {
            let (n, m) = (self.parcels.len(), tensors.len());
            return Err(RunError::invalid(format!("{n} tensors are packed from {m} buffers")));
        }
        self.check_copy(Side::Sent, "pack")?;
        let mut wire = Vec::new();
        for piece in self.wire(Side::Sent).blocks.iter().flatten() {
            let held = self.space.local_box(&self.parcels[piece.parcel].from, self.rank);
            wire.extend(read_part(&held, tensors[piece.parcel].as_ref(), &piece.region));
        }
        Ok(wire)
    }

    /// The tensors of a received wire. Elements that no rank sends are NaN, so that they cannot pass for results; rows that are
    /// fetched as sums begin as zero.
    pub(super) fn unpack(&self, data: &[f32]) -> Result<Vec<Vec<f32>>, RunError> {
        self.check_copy(Side::Received, "unpack")?;
        let is_sum = |parcel: &Parcel| matches!(parcel.op, Op::FetchSum { .. });
        let boxes: Vec<Region> =
            self.parcels.iter().map(|parcel| self.space.local_box(&parcel.to, self.rank)).collect();
        let begin = |(parcel, region): (&Parcel, &Region)| {
            vec![if is_sum(parcel) { 0.0 } else { f32::NAN }; extents(region).iter().product()]
        };
        let mut tensors: Vec<Vec<f32>> = self.parcels.iter().zip(&boxes).map(begin).collect();
        let mut rest = data;
        for piece in self.wire(Side::Received).blocks.iter().flatten() {
            let parcel = &self.parcels[piece.parcel];
            let (here, after) = self.cut(rest, index(boxes::elements(&piece.region)))?;
            let merge = |there: f32, arrived: f32| {
                if is_sum(parcel) { add(parcel.from.dtype, there, arrived) } else { arrived }
            };
            let region = std::slice::from_ref(&piece.region);
            merge_block(&boxes[piece.parcel], &mut tensors[piece.parcel], region, here, merge);
            rest = after;
        }
        Ok(tensors)
    }

    /// The data to write, and the bytes that were sent to others. Coalesced tensors go from wire to wire; one
    /// tensor may be read and written in place of its wire.
    pub(super) fn exchange(
        &self,
        data: &[f32],
        ends: (&Content, &Content),
        communicator: &dyn Communicator,
    ) -> Result<(Vec<f32>, Sent), RunError> {
        let Some(Parcel { op, from, to }) = self.parcels.first() else {
            return Err(RunError::invalid("a collective without tensors"));
        };
        self.check(op, ends)?;
        let is_tensor = |content: &Content| matches!(content, Content::Tensor(_));
        let (sent, received) = (self.wire(Side::Sent), self.wire(Side::Received));
        let mut blocks: Vec<Vec<f32>> = Vec::with_capacity(sent.group.len());
        if message::is_shared(op, Side::Sent) {
            let pieces = sent.blocks.iter().flatten();
            let n = pieces.map(|piece| boxes::elements(&piece.region)).sum();
            let (whole, _) = self.cut(data, index(n))?;
            match (op, self.parcels) {
                (Op::AllReduce { .. }, _) => {
                    let ends = (self.stream, self.rank);
                    let (sums, n) = all_reduce(from.dtype, ends, whole, &sent.group, communicator)?;
                    return Ok((sums, Sent::all(n * from.dtype.bytes())));
                }
                // A permute of one tensor may send each rank another part of it.
                (Op::Permute, [_]) => {
                    let held = self.space.local_box(from, self.rank);
                    let send = boxes::exchange(self.space, op, from, to, self.rank).send;
                    blocks.extend(send.iter().map(|block| read_block(&held, whole, block)));
                }
                _ => blocks
                    .extend(sent.elements.iter().map(|&n| if n == 0 { Vec::new() } else { whole.to_vec() })),
            }
        } else {
            let gathered = match ends.0 {
                Content::Tensor(_) => self.in_order(data, &sent)?,
                Content::Wire { .. } => Cow::Borrowed(data),
            };
            let mut rest = &*gathered;
            for &n in &sent.elements {
                let (block, after) = self.cut(rest, index(n))?;
                blocks.push(block.to_vec());
                rest = after;
            }
        }
        let sums = matches!(op, Op::ReduceScatter { .. });
        let lies_apart = is_tensor(ends.1) && self.lie_in_tensor(Side::Received);
        if !sums && is_tensor(ends.1) && !lies_apart && self.space.holds(to, self.rank) {
            self.need_in_order(&self.space.local_box(to, self.rank), &received, "written")?;
        }
        if let Some(runs) = message::runs(self.space, self.parcels, self.rank) {
            let (blocks, bytes) = self.exchange_filled(runs, &sent.group, blocks, communicator)?;
            let wire = blocks.concat();
            return Ok((if lies_apart { self.unpack(&wire)?.concat() } else { wire }, bytes));
        }
        let expected: Vec<usize> = received.elements.iter().map(|&n| index(n)).collect();
        let arrived = communicator.exchange((self.stream, self.rank), &sent.group, blocks, &expected)?;
        let written = if sums { sum(from.dtype, arrived.blocks) } else { arrived.blocks.concat() };
        Ok((written, Sent::all(arrived.elements_sent * from.dtype.bytes())))
    }

    /// Exchanges blocks of ragged dimensions: first the number of filled rows of each run, then these rows. Returns whole blocks,
    /// zero after the filled rows, and the bytes that were sent to others.
    fn exchange_filled(
        &self,
        runs: Runs,
        group: &[Rank],
        mut blocks: Vec<Vec<f32>>,
        communicator: &dyn Communicator,
    ) -> Result<(Vec<Vec<f32>>, Sent), RunError> {
        let [n, rows, width] = [runs.n, runs.rows, runs.width].map(index);
        let (ends, run) = ((self.stream, self.rank), rows * width);
        let others = |i: usize| group[i] != self.rank;
        let filled = |block: &Vec<f32>| -> Vec<usize> {
            (0..n).map(|i| filled_rows(&block[i * run..(i + 1) * run], width)).collect()
        };
        let counts: Vec<Vec<usize>> = blocks.iter().map(filled).collect();
        let as_data = |counts: &Vec<usize>| -> Vec<f32> {
            counts.iter().map(|&n| from_int(i32::try_from(n).unwrap_or(i32::MAX))).collect()
        };
        let message = counts.iter().map(as_data).collect();
        let arrived = communicator.exchange(ends, group, message, &vec![n; group.len()])?;
        let n_counts = arrived.elements_sent;
        let count = |&count: &f32| {
            let n = usize::try_from(to_int(count)).ok().filter(|&n| n <= rows);
            n.ok_or_else(|| RunError::invalid(format!("a count of filled rows is beyond {rows}")))
        };
        let incoming = arrived.blocks.iter().map(|counts| counts.iter().map(count).collect());
        let incoming: Vec<Vec<usize>> = incoming.collect::<Result<_, RunError>>()?;
        let bytes = self.parcels.first().map_or(0, |parcel| parcel.from.dtype.bytes());
        let all = (0..group.len()).filter(|&i| others(i)).map(|i| blocks[i].len() as u64 * bytes).sum();
        // A rank's own block stays as it is.
        for i in (0..group.len()).filter(|&i| others(i)) {
            let part = |(at, &n): (usize, &usize)| &blocks[i][at * run..at * run + n * width];
            blocks[i] = counts[i].iter().enumerate().map(part).collect::<Vec<_>>().concat();
        }
        let expected = |i: usize| if others(i) { incoming[i].iter().sum::<usize>() * width } else { n * run };
        let expected: Vec<usize> = (0..group.len()).map(expected).collect();
        let mut arrived = communicator.exchange(ends, group, blocks, &expected)?;
        for i in (0..group.len()).filter(|&i| others(i)) {
            let (mut block, mut start) = (vec![0.0; n * run], 0);
            for (at, n) in incoming[i].iter().enumerate() {
                block[at * run..at * run + n * width]
                    .copy_from_slice(&arrived.blocks[i][start..start + n * width]);
                start += n * width;
            }
            arrived.blocks[i] = block;
        }
        Ok((arrived.blocks, Sent::with_counts(n_counts, all, arrived.elements_sent * bytes)))
    }

    /// Refuses an exchange of one tensor from or to a buffer that the contract of tasks does not name.
    fn check(&self, op: &Op, (reads, writes): (&Content, &Content)) -> Result<(), RunError> {
        let wire = |content: &Content| matches!(content, Content::Wire { .. });
        let refused = match op {
            Op::AllGather { .. } => wire(reads),
            Op::ReduceScatter { .. } => wire(writes),
            Op::FetchSum { .. } => !wire(writes),
            Op::Permute | Op::AllReduce { .. } => wire(reads) || wire(writes),
            _ => false,
        };
        if !refused || self.parcels.len() > 1 {
            return Ok(());
        }
        let kind = |content: &Content| if wire(content) { "a wire" } else { "a tensor" };
        let (name, reads, writes) = (op.name(), kind(reads), kind(writes));
        Err(RunError::invalid(format!("there is no exchange of `{name}` from {reads} to {writes}")))
    }

    /// Refuses to pack or unpack one tensor that needs no wire: whole tensors are sent and sums received in place.
    fn check_copy(&self, side: Side, step: &str) -> Result<(), RunError> {
        let [Parcel { op, .. }] = self.parcels else { return Ok(()) };
        if message::is_shared(op, side) || matches!((op, side), (Op::Permute, Side::Received)) {
            return Err(RunError::invalid(format!("there is no {step} of `{}`", op.name())));
        }
        Ok(())
    }

    /// Refuses a tensor whose memory is not its blocks in order.
    fn need_in_order(&self, whole: &Region, wire: &Wire, verb: &str) -> Result<(), RunError> {
        if boxes::is_contiguous_concatenation(whole, wire.blocks.iter().flatten().map(|piece| &piece.region))
        {
            return Ok(());
        }
        Err(RunError::invalid(format!(
            "the tensor {verb} by `{}` is not its blocks in order; it must be packed",
            self.parcels[0].op.name()
        )))
    }

    /// The blocks of the tensor that is sent, one after another.
    fn in_order<'d>(&self, data: &'d [f32], sent: &Wire) -> Result<Cow<'d, [f32]>, RunError> {
        if self.lie_in_tensor(Side::Sent) {
            return Ok(Cow::Owned(self.pack(&[data])?));
        }
        self.need_in_order(&self.space.local_box(&self.parcels[0].from, self.rank), sent, "read")?;
        Ok(Cow::Borrowed(data))
    }

    /// Whether runs of rows are sent and received wherever they are in the tensor.
    fn lie_in_tensor(&self, side: Side) -> bool {
        message::runs_lie_in_tensor(self.space, self.parcels, side)
    }

    fn wire(&self, side: Side) -> Wire {
        message::wire(self.space, self.parcels, side, self.rank)
    }

    fn cut<'d>(&self, data: &'d [f32], n: usize) -> Result<(&'d [f32], &'d [f32]), RunError> {
        data.split_at_checked(n).ok_or_else(|| {
            let op = self.parcels[0].op.name();
            RunError::invalid(format!("the blocks of `{op}` do not fit in {} elements", data.len()))
        })
    }
}

/// Sums over the group: a reduce-scatter of chunks, then an all-gather of them. Gives the sums, and how many elements
/// were sent to others.
fn all_reduce(
    dtype: DType,
    (stream, rank): (Stream, Rank),
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
    let scattered = communicator.exchange((stream, rank), group, blocks, &own)?;
    let sum = sum(dtype, scattered.blocks);
    let sizes: Vec<usize> = (0..group.len()).map(|i| chunk(i).len()).collect();
    let blocks = group.iter().map(|_| sum.clone()).collect();
    let gathered = communicator.exchange((stream, rank), group, blocks, &sizes)?;
    Ok((gathered.blocks.concat(), scattered.elements_sent + gathered.elements_sent))
}

/// The rows up to the last one with an element that is not zero.
fn filled_rows(run: &[f32], width: usize) -> usize {
    run.iter().rposition(|&x| x != 0.0).map_or(0, |last| last / width.max(1) + 1)
}

/// The sum of equal blocks, in their order.
fn sum(dtype: DType, blocks: Vec<Vec<f32>>) -> Vec<f32> {
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
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => x + y,
    }
}
