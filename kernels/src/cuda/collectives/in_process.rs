//! Collectives between ranks of one device: copies and sums on the streams of the ranks, which wait for each other by
//! events.
//!
//! A barrier before and after each collective keeps a rank from overwriting memory that another still reads. An all-reduce
//! is a reduce-scatter in chunks followed by an all-gather, so every rank has the same bits.

use ithaca_device::catalogue::c_type;
use ithaca_device::structs::{MEMBERS, MOST_MEMBERS};
use ithaca_ir::boxes::chunk;
use ithaca_ir::{DType, Rank};

use super::exchange::{Block, Collective, CollectiveFailure, Collectives, End, Even, Exchange};
use crate::cuda::arguments::{Address, Arguments};
use crate::cuda::device::{Device, Event, Grid};
use crate::cuda::error::CudaError;

/// Collectives between ranks of one device.
pub struct InProcess<'d> {
    device: &'d dyn Device,
    /// For each rank: it has arrived, it has read.
    events: Vec<[Event; 2]>,
}

impl<'d> InProcess<'d> {
    /// Collectives between `ranks` ranks of a device.
    ///
    /// # Errors
    /// The device's.
    pub fn new(device: &'d dyn Device, ranks: u64) -> Result<Self, CudaError> {
        let pair = |_| Ok([device.event()?, device.event()?]);
        Ok(Self { device, events: (0..ranks).map(pair).collect::<Result<_, CudaError>>()? })
    }

    /// Makes every end wait until the ranks that it exchanges with have arrived.
    fn barrier(&self, exchange: &Exchange, which: usize) -> Result<(), CollectiveFailure> {
        each(exchange, |end| self.device.record(end.stream, self.event(end.rank, which)?))?;
        each(exchange, |end| {
            let others = partners(end).into_iter().filter(|&member| member != end.rank);
            let mut here = others.filter(|&member| exchange.end(member).is_some());
            here.try_for_each(|member| self.device.wait(end.stream, self.event(member, which)?))
        })
    }

    fn event(&self, rank: Rank, which: usize) -> Result<Event, CudaError> {
        let events = usize::try_from(rank.0).ok().and_then(|rank| self.events.get(rank));
        events.map(|events| events[which]).ok_or_else(|| {
            CudaError::Unsupported(format!("a collective of rank {}, which is not in this process", rank.0))
        })
    }

    /// Computes the blocks of every end on its stream.
    ///
    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn compute(
        &self,
        exchange: &Exchange,
        blocks: impl Fn(&Exchange, &End) -> Result<Vec<Sum>, CudaError>,
    ) -> Result<(), CollectiveFailure> {
        each(exchange, |end| {
            for sum in blocks(exchange, end)?.iter().filter(|sum| sum.count > 0) {
                // SAFETY: the caller guarantees the memory.
                unsafe { self.sum(end, exchange.dtype, sum) }?;
            }
            Ok(())
        })
    }

    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn sum(&self, end: &End, dtype: DType, sum: &Sum) -> Result<(), CudaError> {
        let Sum { ref from, to, count } = *sum;
        if let &[from] = from.as_slice() {
            if from == to {
                return Ok(());
            }
            // SAFETY: the caller guarantees the memory.
            return unsafe { self.device.copy(end.stream, from, to, count * dtype.bytes()) };
        }
        if from.len() > MOST_MEMBERS || !dtype.is_float() {
            let sum = format!("a sum of {} over {} ranks of one device", dtype.name(), from.len());
            return Err(CudaError::Unsupported(sum));
        }
        let members = std::iter::once(from.len() as u64).chain(from.iter().map(|block| block.number()));
        let mut members: Vec<u8> = members.flat_map(u64::to_ne_bytes).collect();
        members.resize(MEMBERS.bytes(), 0);
        let mut arguments = Arguments::default();
        for argument in [&members[..], &to.number().to_ne_bytes(), &count.to_ne_bytes()] {
            arguments.push(argument);
        }
        let kernel = format!("sum_members<{}>", c_type(dtype));
        // SAFETY: the caller guarantees the memory, and these are the kernel's arguments.
        unsafe { self.device.launch(end.stream, &kernel, Grid::Threads(count), arguments) }
    }
}

/// A block of `count` elements that a rank computes: the sum of blocks, or a copy of one.
struct Sum {
    from: Vec<Address>,
    to: Address,
    count: u64,
}

/// The blocks that a rank computes from the operands of its members; of an all-reduce its own chunk.
fn from_operands(exchange: &Exchange, end: &End) -> Result<Vec<Sum>, CudaError> {
    let (bytes, number) = (exchange.dtype.bytes(), end.number());
    let all = |kind: Even, start: u64| -> Result<Vec<Address>, CudaError> {
        end.members.iter().map(|&member| Ok(operand(exchange, member, kind)?.offset(start * bytes))).collect()
    };
    match &end.collective {
        Collective::SendReceive { receives, .. } => (0..receives.len())
            .map(|i| {
                let Block { peer, at: to, count } = receives[i];
                // Blocks between two ranks arrive in the order in which they are sent.
                let earlier = receives[..i].iter().filter(|other| other.peer == peer).count();
                let from = sent(exchange, member(end, peer)?, number, earlier)?.at;
                Ok(Sum { from: vec![from], to, count })
            })
            .collect(),
        &Collective::Even { kind: kind @ (Even::AllToAll | Even::AllGather), to, count, .. } => {
            let start = if kind == Even::AllToAll { number * count } else { 0 };
            let blocks = (0..).zip(all(kind, start)?);
            Ok(blocks
                .map(|(i, from)| Sum { from: vec![from], to: to.offset(i * count * bytes), count })
                .collect())
        }
        &Collective::Even { kind: kind @ Even::ReduceScatter, to, count, .. } => {
            Ok(vec![Sum { from: all(kind, number * count)?, to, count }])
        }
        &Collective::Even { kind: kind @ Even::AllReduce, to, count, .. } => {
            let part = chunk(count, end.members.len() as u64, number);
            let to = to.offset(part.start * bytes);
            Ok(vec![Sum { from: all(kind, part.start)?, to, count: part.end - part.start }])
        }
        Collective::Filled { .. } => {
            Err(CudaError::Unsupported("filled rows without their counts".to_owned()))
        }
        Collective::Reduce { blocks, to } => {
            let Some(own) = blocks.iter().find(|block| block.peer == number && block.count > 0) else {
                return Ok(Vec::new());
            };
            let blocks = end.members.iter().map(|&member| Ok(sent(exchange, member, number, 0)?.at));
            Ok(vec![Sum { from: blocks.collect::<Result<_, CudaError>>()?, to: *to, count: own.count }])
        }
    }
}

/// The chunks of an all-reduce that the other members have summed.
fn from_results(exchange: &Exchange, end: &End) -> Result<Vec<Sum>, CudaError> {
    let Collective::Even { kind: Even::AllReduce, to, count, .. } = end.collective else {
        return Ok(Vec::new());
    };
    let chunk_of = |(i, &member): (u64, &Rank)| {
        let Collective::Even { to: there, .. } = exchange.end(member)?.collective else { return None };
        let part = chunk(count, end.members.len() as u64, i);
        let [from, to] = [there, to].map(|at| at.offset(part.start * exchange.dtype.bytes()));
        Some(Sum { from: vec![from], to, count: part.end - part.start })
    };
    Ok((0..).zip(&end.members).filter_map(chunk_of).collect())
}

/// The ranks that a rank sends to or receives from.
fn partners(end: &End) -> Vec<Rank> {
    match &end.collective {
        Collective::SendReceive { sends, receives } => {
            sends.iter().chain(receives).filter_map(|block| member(end, block.peer).ok()).collect()
        }
        _ => end.members.clone(),
    }
}

/// The member of an end's communicator with a number.
fn member(end: &End, number: u64) -> Result<Rank, CudaError> {
    let found = usize::try_from(number).ok().and_then(|number| end.members.get(number));
    found.copied().ok_or_else(|| CudaError::Unsupported(format!("a collective with a member {number}")))
}

/// The block that rank `from` sends to member `number` after `earlier` others.
fn sent(exchange: &Exchange, from: Rank, number: u64, earlier: usize) -> Result<Block, CudaError> {
    let blocks = match exchange.end(from).map(|other| &other.collective) {
        Some(Collective::SendReceive { sends, .. }) => sends,
        Some(Collective::Reduce { blocks, .. }) => blocks,
        _ => return Err(missing_rank(from)),
    };
    blocks.iter().filter(|block| block.peer == number).nth(earlier).copied().ok_or_else(|| missing_rank(from))
}

/// The operand of a rank in an even collective.
fn operand(exchange: &Exchange, rank: Rank, of: Even) -> Result<Address, CudaError> {
    match exchange.end(rank).map(|other| &other.collective) {
        Some(Collective::Even { kind, from, .. }) if *kind == of => Ok(*from),
        _ => Err(missing_rank(rank)),
    }
}

fn missing_rank(rank: Rank) -> CudaError {
    CudaError::Unsupported(format!("a collective without rank {}", rank.0))
}

/// Calls `of` for every end.
fn each(
    exchange: &Exchange,
    mut of: impl FnMut(&End) -> Result<(), CudaError>,
) -> Result<(), CollectiveFailure> {
    exchange.ends.iter().try_for_each(|end| of(end).map_err(|error| end.failure(error)))
}

impl Collectives for InProcess<'_> {
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), CollectiveFailure> {
        self.barrier(exchange, 0)?;
        // SAFETY: the caller guarantees the memory.
        unsafe { self.compute(exchange, from_operands) }?;
        self.barrier(exchange, 1)?;
        let all_reduces =
            |end: &End| matches!(end.collective, Collective::Even { kind: Even::AllReduce, .. });
        if !exchange.ends.iter().any(all_reduces) {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { self.compute(exchange, from_results) }?;
        self.barrier(exchange, 0)
    }

    /// Runs on the streams of the ranks alone, whose device reports failures.
    fn check(&self) -> Result<(), CollectiveFailure> {
        Ok(())
    }

    /// Ranks wait for each other by events, which complete once held streams resume.
    fn abort(&self) {}
}
