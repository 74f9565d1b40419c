//! Collectives between ranks of one device: copies and sums on the ranks' own streams, which wait for each other by
//! events.
//!
//! A rank reads the memory of others when all of its group have come to the collective, and goes on when all of them have
//! read: nobody overwrites what another still needs. A sum over all is taken in chunks, each by one member, and then
//! gathered; so every rank has the same bits.

use ithaca_ir::boxes::chunk;
use ithaca_ir::{DType, Rank};

use super::{Broken, Collectives, End, Exchange, Kind};
use crate::cuda::arguments::{Address, MOST_MEMBERS, Members, arguments};
use crate::cuda::device::{Device, Event, Grid};
use crate::cuda::error::CudaError;
use ithaca_device::catalogue::c_type;

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

    /// Every end waits until all of its group have come here.
    fn meet(&self, exchange: &Exchange, which: usize) -> Result<(), Broken> {
        each(exchange, |end| self.device.record(end.stream, self.event(end.rank, which)?))?;
        each(exchange, |end| {
            let others = end.group.iter().filter(|&&member| member != end.rank);
            let mut here = others.filter(|&&member| exchange.end(member).is_some());
            here.try_for_each(|&member| self.device.wait(end.stream, self.event(member, which)?))
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
        let mut members = Members { n: 0, from: [Address::NONE; MOST_MEMBERS] };
        members.from[..blocks.len()].copy_from_slice(blocks);
        members.n = i64::try_from(blocks.len()).unwrap_or(0);
        let count = i64::try_from(n).unwrap_or(i64::MAX);
        let kernel = format!("sum_members<{}>", c_type(dtype));
        // SAFETY: the caller vouches for the memory, and these are the kernel's arguments.
        unsafe { self.device.launch(end.stream, &kernel, Grid::Threads(n), arguments![members, to, count]) }
    }

    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn blocks(&self, exchange: &Exchange, end: &End) -> Result<(), CudaError> {
        let bytes = exchange.dtype.bytes();
        let mut to = end.to;
        for (&member, &n) in end.group.iter().zip(&end.recv) {
            if n > 0 {
                let from = source(exchange, end, member)?;
                // SAFETY: the caller vouches for the memory.
                unsafe { self.copy(end, from, to, n * bytes) }?;
            }
            to = to.offset(n * bytes);
        }
        Ok(())
    }

    /// # Safety
    /// As [`Collectives::exchange`].
    unsafe fn all_reduce(&self, exchange: &Exchange) -> Result<(), Broken> {
        let bytes = exchange.dtype.bytes();
        let own = |end: &End, i: usize| chunk(end.mine, end.group.len() as u64, i as u64);
        each(exchange, |end| {
            let Some(i) = end.group.iter().position(|&member| member == end.rank) else { return Ok(()) };
            let part = own(end, i);
            let blocks: Vec<Address> = end
                .group
                .iter()
                .filter_map(|&member| exchange.end(member))
                .map(|member| member.from.offset(part.start * bytes))
                .collect();
            let to = end.to.offset(part.start * bytes);
            // SAFETY: the caller vouches for the memory.
            unsafe { self.sum(end, exchange.dtype, &blocks, to, part.end - part.start) }
        })?;
        self.meet(exchange, 1)?;
        each(exchange, |end| {
            for (i, &member) in end.group.iter().enumerate().filter(|(_, member)| **member != end.rank) {
                let (Some(other), part) = (exchange.end(member), own(end, i)) else { continue };
                let [from, to] = [other.to, end.to].map(|at| at.offset(part.start * bytes));
                // SAFETY: as above.
                unsafe { self.copy(end, from, to, (part.end - part.start) * bytes) }?;
            }
            Ok(())
        })?;
        self.meet(exchange, 0)
    }
}

/// Does something for every end.
fn each(exchange: &Exchange, mut of: impl FnMut(&End) -> Result<(), CudaError>) -> Result<(), Broken> {
    exchange.ends.iter().try_for_each(|end| of(end).map_err(|error| end.broken(error)))
}

/// Where the block lies that `end` gets from `member`.
fn source(exchange: &Exchange, end: &End, member: Rank) -> Result<Address, CudaError> {
    let lacking = || CudaError::Unsupported(format!("a collective without rank {}", member.0));
    let other = exchange.end(member).ok_or_else(lacking)?;
    let i = other.group.iter().position(|&rank| rank == end.rank).ok_or_else(lacking)?;
    let start = match exchange.kind {
        Kind::Blocks | Kind::ReduceScatter => End::start(&other.send, i),
        Kind::Whole | Kind::Gather | Kind::AllReduce => 0,
    };
    Ok(other.from.offset(start * exchange.dtype.bytes()))
}

impl Collectives for InProcess<'_> {
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), Broken> {
        self.meet(exchange, 0)?;
        match exchange.kind {
            // SAFETY: the caller vouches for the memory.
            Kind::AllReduce => return unsafe { self.all_reduce(exchange) },
            Kind::Blocks | Kind::Whole | Kind::Gather => {
                // SAFETY: as above.
                each(exchange, |end| unsafe { self.blocks(exchange, end) })?;
            }
            Kind::ReduceScatter => each(exchange, |end| {
                let blocks = end.group.iter().map(|&member| source(exchange, end, member));
                let blocks: Vec<Address> = blocks.collect::<Result<_, _>>()?;
                // SAFETY: as above.
                unsafe { self.sum(end, exchange.dtype, &blocks, end.to, end.wanted) }
            })?,
        }
        self.meet(exchange, 1)
    }

    /// All that goes on is on the streams of the ranks, whose device says what fails.
    fn check(&self) -> Result<(), Broken> {
        Ok(())
    }

    /// Ranks wait for each other by events, and so for nothing but what others were given to do.
    fn abort(&self) {}
}
