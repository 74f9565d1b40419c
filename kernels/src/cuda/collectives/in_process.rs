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

    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn copy(&self, end: &End, from: Address, to: Address, bytes: u64) -> Result<(), CudaError> {
        if bytes == 0 || from == to {
            return Ok(());
        }
        // SAFETY: the caller guarantees the memory.
        unsafe { self.device.copy(end.stream, from, to, bytes) }
    }

    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn sum(
        &self,
        end: &End,
        dtype: DType,
        blocks: &[Address],
        to: Address,
        n: u64,
    ) -> Result<(), CudaError> {
        if n == 0 {
            return Ok(());
        }
        if blocks.len() > MOST_MEMBERS || !dtype.is_float() {
            let what = format!("a sum of {} over {} ranks of one device", dtype.name(), blocks.len());
            return Err(CudaError::Unsupported(what));
        }
        let mut members = vec![blocks.len() as u64];
        members.extend(blocks.iter().map(|block| block.number()));
        let mut members: Vec<u8> = members.into_iter().flat_map(u64::to_ne_bytes).collect();
        members.resize(MEMBERS.bytes(), 0);
        let mut arguments = Arguments::default();
        [&members[..], &to.number().to_ne_bytes(), &n.to_ne_bytes()].iter().for_each(|of| arguments.push(of));
        let kernel = format!("sum_members<{}>", c_type(dtype));
        // SAFETY: the caller guarantees the memory, and these are the kernel's arguments.
        unsafe { self.device.launch(end.stream, &kernel, Grid::Threads(n), arguments) }
    }

    /// Copies the blocks of others to a rank.
    ///
    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn gather(&self, exchange: &Exchange, end: &End) -> Result<(), CudaError> {
        let bytes = exchange.dtype.bytes();
        let number = end.number();
        let copy = |from: Address, to: Address, n: u64| {
            // SAFETY: the caller guarantees the memory.
            unsafe { self.copy(end, from, to, n * bytes) }
        };
        match &end.collective {
            Collective::SendReceive { receives, .. } => (0..receives.len()).try_for_each(|i| {
                let to = receives[i];
                // Blocks between two ranks arrive in the order in which they are sent.
                let earlier = receives[..i].iter().filter(|other| other.peer == to.peer).count();
                let from = sent(exchange, member(end, to.peer)?, number, earlier)?;
                copy(from.at, to.at, to.count)
            }),
            &Collective::Even { kind: kind @ (Even::AllToAll | Even::AllGather), to, count, .. } => {
                let start = if kind == Even::AllToAll { number * count * bytes } else { 0 };
                (0..).zip(&end.members).try_for_each(|(i, &member)| {
                    let from = operand(exchange, member, kind)?.offset(start);
                    copy(from, to.offset(i * count * bytes), count)
                })
            }
            Collective::Even { .. } | Collective::Reduce { .. } => Ok(()),
        }
    }

    /// Sums the blocks of all members for a rank.
    ///
    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn reduce(&self, exchange: &Exchange, end: &End) -> Result<(), CudaError> {
        let (bytes, number) = (exchange.dtype.bytes(), end.number());
        let (to, n) = match &end.collective {
            &Collective::Even { kind: Even::ReduceScatter, to, count, .. } => (to, count),
            Collective::Reduce { blocks, to } => {
                (*to, blocks.iter().find(|block| block.peer == number).map_or(0, |block| block.count))
            }
            _ => return Ok(()),
        };
        if n == 0 {
            return Ok(());
        }
        let block = |&member: &Rank| match end.collective {
            Collective::Even { kind, count, .. } => {
                operand(exchange, member, kind).map(|from| from.offset(number * count * bytes))
            }
            _ => sent(exchange, member, number, 0).map(|block| block.at),
        };
        let blocks: Vec<Address> = end.members.iter().map(block).collect::<Result<_, _>>()?;
        // SAFETY: the caller guarantees the memory.
        unsafe { self.sum(end, exchange.dtype, &blocks, to, n) }
    }

    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn all_reduce(&self, exchange: &Exchange) -> Result<(), CollectiveFailure> {
        let bytes = exchange.dtype.bytes();
        let chunk_of = |end: &End, i: u64, n: u64| chunk(n, end.members.len() as u64, i);
        each(exchange, |end| {
            let Collective::Even { kind: kind @ Even::AllReduce, to, count, .. } = end.collective else {
                return Ok(());
            };
            let part = chunk_of(end, end.number(), count);
            let block =
                |&member: &Rank| operand(exchange, member, kind).map(|from| from.offset(part.start * bytes));
            let blocks: Vec<Address> = end.members.iter().map(block).collect::<Result<_, _>>()?;
            let to = to.offset(part.start * bytes);
            // SAFETY: the caller guarantees the memory.
            unsafe { self.sum(end, exchange.dtype, &blocks, to, part.end - part.start) }
        })?;
        self.barrier(exchange, 1)?;
        each(exchange, |end| {
            let Collective::Even { kind: Even::AllReduce, to, count, .. } = end.collective else {
                return Ok(());
            };
            for (i, &member) in (0..).zip(&end.members).filter(|(_, member)| **member != end.rank) {
                let part = chunk_of(end, i, count);
                let Some(Collective::Even { to: there, .. }) =
                    exchange.end(member).map(|other| &other.collective)
                else {
                    continue;
                };
                let [from, to] = [*there, to].map(|at| at.offset(part.start * bytes));
                // SAFETY: as above.
                unsafe { self.copy(end, from, to, (part.end - part.start) * bytes) }?;
            }
            Ok(())
        })?;
        self.barrier(exchange, 0)
    }
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
        let all_reduces =
            |end: &End| matches!(end.collective, Collective::Even { kind: Even::AllReduce, .. });
        if exchange.ends.iter().any(all_reduces) {
            // SAFETY: the caller guarantees the memory.
            return unsafe { self.all_reduce(exchange) };
        }
        // SAFETY: as above.
        each(exchange, |end| unsafe {
            self.gather(exchange, end)?;
            self.reduce(exchange, end)
        })?;
        self.barrier(exchange, 1)
    }

    /// Runs on the streams of the ranks alone, whose device reports failures.
    fn check(&self) -> Result<(), CollectiveFailure> {
        Ok(())
    }

    /// Ranks wait for each other by events, which complete once held streams resume.
    fn abort(&self) {}
}
