//! Collectives between ranks of one device: copies and sums on the ranks' own streams, which wait for each other by
//! events.
//!
//! A rank reads the memory of others when all of its group have come to the collective, and goes on when all of them have
//! read: nobody overwrites what another still needs. A sum over all is taken in chunks, each by one member, and then
//! gathered; so every rank has the same bits.

use ithaca_device::catalogue::c_type;
use ithaca_device::structs::{MEMBERS, MOST_MEMBERS};
use ithaca_ir::boxes::chunk;
use ithaca_ir::{DType, Rank};

use super::exchange::{Block, Broken, Collective, Collectives, End, Even, Exchange};
use crate::cuda::arguments::{Address, Arguments};
use crate::cuda::device::{Device, Event, Grid};
use crate::cuda::error::CudaError;

/// Collectives between ranks of one device.
pub struct InProcess<'d> {
    device: &'d dyn Device,
    /// For each rank: it has come, it has read.
    events: Vec<[Event; 2]>,
}

impl<'d> InProcess<'d> {
    /// Between `ranks` ranks of a device.
    ///
    /// # Errors
    /// The device's.
    pub fn new(device: &'d dyn Device, ranks: u64) -> Result<Self, CudaError> {
        let pair = |_| Ok([device.event()?, device.event()?]);
        Ok(Self { device, events: (0..ranks).map(pair).collect::<Result<_, CudaError>>()? })
    }

    /// Every end waits until the ranks that it exchanges with have come here.
    fn meet(&self, exchange: &Exchange, which: usize) -> Result<(), Broken> {
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
            CudaError::Unsupported(format!("a collective of rank {}, which is not here", rank.0))
        })
    }

    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn copy(&self, end: &End, from: Address, to: Address, bytes: u64) -> Result<(), CudaError> {
        if bytes == 0 || from == to {
            return Ok(());
        }
        // SAFETY: the caller vouches for the memory.
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
        // SAFETY: the caller vouches for the memory, and these are the kernel's arguments.
        unsafe { self.device.launch(end.stream, &kernel, Grid::Threads(n), arguments) }
    }

    /// Brings a rank the blocks of others.
    ///
    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn gather(&self, exchange: &Exchange, end: &End) -> Result<(), CudaError> {
        let bytes = exchange.dtype.bytes();
        let (own, number) = (&end.collective, end.number());
        let copy = |from: Address, to: Address, n: u64| {
            // SAFETY: the caller vouches for the memory.
            unsafe { self.copy(end, from, to, n * bytes) }
        };
        match own {
            Collective::SendReceive { receives, .. } => receives.iter().try_for_each(|to| {
                let from = sent(exchange, member(end, to.peer)?, number)?;
                copy(from.at, to.at, to.count)
            }),
            &Collective::Even { kind: kind @ (Even::AllToAll | Even::AllGather), to, count, .. } => {
                let own = if kind == Even::AllToAll { number * count * bytes } else { 0 };
                (0..).zip(&end.members).try_for_each(|(i, &member)| {
                    let from = operand(exchange, member, kind)?.offset(own);
                    copy(from, to.offset(i * count * bytes), count)
                })
            }
            Collective::Even { .. } | Collective::Reduce { .. } => Ok(()),
        }
    }

    /// Sums to a rank the blocks that all have for it.
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
            _ => sent(exchange, member, number).map(|block| block.at),
        };
        let blocks: Vec<Address> = end.members.iter().map(block).collect::<Result<_, _>>()?;
        // SAFETY: the caller vouches for the memory.
        unsafe { self.sum(end, exchange.dtype, &blocks, to, n) }
    }

    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn all_reduce(&self, exchange: &Exchange) -> Result<(), Broken> {
        let bytes = exchange.dtype.bytes();
        let own = |end: &End, i: u64, n: u64| chunk(n, end.members.len() as u64, i);
        each(exchange, |end| {
            let Collective::Even { kind: kind @ Even::AllReduce, to, count, .. } = end.collective else {
                return Ok(());
            };
            let part = own(end, end.number(), count);
            let block =
                |&member: &Rank| operand(exchange, member, kind).map(|from| from.offset(part.start * bytes));
            let blocks: Vec<Address> = end.members.iter().map(block).collect::<Result<_, _>>()?;
            let to = to.offset(part.start * bytes);
            // SAFETY: the caller vouches for the memory.
            unsafe { self.sum(end, exchange.dtype, &blocks, to, part.end - part.start) }
        })?;
        self.meet(exchange, 1)?;
        each(exchange, |end| {
            let Collective::Even { kind: Even::AllReduce, to, count, .. } = end.collective else {
                return Ok(());
            };
            for (i, &member) in (0..).zip(&end.members).filter(|(_, member)| **member != end.rank) {
                let part = own(end, i, count);
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
        self.meet(exchange, 0)
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

/// The block that a rank has for the member with a number.
fn sent(exchange: &Exchange, from: Rank, number: u64) -> Result<Block, CudaError> {
    let blocks = match exchange.end(from).map(|other| &other.collective) {
        Some(Collective::SendReceive { sends, .. }) => sends,
        Some(Collective::Reduce { blocks, .. }) => blocks,
        _ => return Err(lacking(from)),
    };
    blocks.iter().find(|block| block.peer == number).copied().ok_or_else(|| lacking(from))
}

/// The elements that a rank brings to an even collective.
fn operand(exchange: &Exchange, rank: Rank, of: Even) -> Result<Address, CudaError> {
    match exchange.end(rank).map(|other| &other.collective) {
        Some(Collective::Even { kind, from, .. }) if *kind == of => Ok(*from),
        _ => Err(lacking(rank)),
    }
}

fn lacking(rank: Rank) -> CudaError {
    CudaError::Unsupported(format!("a collective without rank {}", rank.0))
}

/// Does something for every end.
fn each(exchange: &Exchange, mut of: impl FnMut(&End) -> Result<(), CudaError>) -> Result<(), Broken> {
    exchange.ends.iter().try_for_each(|end| of(end).map_err(|error| end.broken(error)))
}

impl Collectives for InProcess<'_> {
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), Broken> {
        self.meet(exchange, 0)?;
        let all_reduces =
            |end: &End| matches!(end.collective, Collective::Even { kind: Even::AllReduce, .. });
        if exchange.ends.iter().any(all_reduces) {
            // SAFETY: the caller vouches for the memory.
            return unsafe { self.all_reduce(exchange) };
        }
        // SAFETY: as above.
        each(exchange, |end| unsafe {
            self.gather(exchange, end)?;
            self.reduce(exchange, end)
        })?;
        self.meet(exchange, 1)
    }

    /// All that goes on is on the streams of the ranks, whose device says what fails.
    fn check(&self) -> Result<(), Broken> {
        Ok(())
    }

    /// Ranks wait for each other by events, and so for nothing but what others were given to do.
    fn abort(&self) {}
}
