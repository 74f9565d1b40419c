//! The state of a local rank on its device: memory, streams, events and tables, all allocated before a step.

use ithaca_device::{Coordinates, DeviceProgram, Table};
use ithaca_ir::schedule::{Stream as Queue, Streams};
use ithaca_ir::{DType, Rank};

use super::arguments::Address;
use super::device::{Device, Event, Stream};
use super::error::CudaError;
use crate::cpu::memory::SourcePlan;
use crate::error::RunError;
use crate::tensor::index;

/// The alignment of a rank's buffers in bytes.
const ALIGNMENT: u64 = 256;

/// Bytes of the word in which a kernel leaves its finding.
pub(super) const WORD: usize = 8;

/// A rank of this process, on its device.
pub(super) struct LocalRank<'a> {
    pub(super) rank: Rank,
    /// Its mesh coordinates.
    pub(super) at: Coordinates,
    pub(super) device: &'a dyn Device,
    /// The address of each table that kernels read; null for an empty table.
    pub(super) tables: Vec<Address>,
    /// The arena, the stored tensors, the tables and the word.
    pub(super) memory: Address,
    /// Memory of the host, for states that are there.
    host_memory: Option<Address>,
    /// Bytes of the arena.
    pub(super) arena: u64,
    /// Bytes of the arena and the stored tensors.
    pub(super) bytes: u64,
    /// The address of this rank's part of each stored tensor, if it has one.
    pub(super) sources: Vec<Option<Address>>,
    streams: [Stream; Queue::COUNT],
    /// The events of all frames.
    pub(super) events: Vec<Event>,
    /// The events by which streams wait for each other.
    barrier_events: [Event; Queue::COUNT],
    /// The word in which a kernel leaves its finding.
    pub(super) word: Address,
    /// The word in which a run leaves the bound that its data exceed.
    pub(super) overflow: Address,
    /// The counts of the filled rows that are sent and received in a collective.
    pub(super) counts: Address,
    /// The memory that the kernels of a task share.
    pub(super) workspace: Address,
}

/// A bound that the data of a run exceed.
pub(super) enum Exceeded {
    /// The most tokens of a group that chose an expert with fewer slots, and the expert.
    Expert([u64; 2]),
    /// The tokens of a sequence, and those that its cache may have.
    Cache { tokens: u64, capacity: u64 },
    /// A token without a page, and its sequence on the rank.
    Page { token: u64, sequence: u64 },
}

impl<'a> LocalRank<'a> {
    /// Allocates the memory, streams and events of `rank`.
    pub(super) fn new(
        device: &'a dyn Device,
        program: &DeviceProgram,
        plan: &SourcePlan<'_>,
        rank: Rank,
    ) -> Result<Self, RunError> {
        let at = Coordinates::of(&program.mesh, rank);
        let arena = arena_bytes(program, rank).next_multiple_of(ALIGNMENT);
        let (mut bytes, mut host_bytes) = (arena, 0);
        let mut offsets = Vec::with_capacity(plan.tensors().len());
        for tensor in plan.tensors() {
            offsets.push(tensor.part_of[index(rank.0)].map(|part| {
                let is_on_host = tensor.binding.host;
                let end = if is_on_host { &mut host_bytes } else { &mut bytes };
                let at = *end;
                let size = ithaca_ir::boxes::elements(&tensor.regions[part]) * tensor.ty.dtype.bytes();
                *end += size.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
                (at, is_on_host)
            }));
        }
        let mut streams = [device.stream()?; Queue::COUNT];
        for stream in &mut streams[1..] {
            *stream = device.stream()?;
        }
        let events: Vec<Event> = (0..program.n_events).map(|_| device.event()).collect::<Result<_, _>>()?;
        let mut barrier_events = [device.event()?; Queue::COUNT];
        for event in &mut barrier_events[1..] {
            *event = device.event()?;
        }
        let contents: Vec<Vec<u8>> = program.tables.values().map(|table| table_bytes(table, &at)).collect();
        let size_of_tables: u64 =
            contents.iter().map(|table| (table.len() as u64).next_multiple_of(ALIGNMENT)).sum();
        let before_workspace =
            (bytes + size_of_tables + 2 * WORD as u64 + program.counts).next_multiple_of(ALIGNMENT);
        let memory = device.allocate(before_workspace + program.workspace)?;
        let host_memory = (host_bytes > 0).then(|| device.allocate_on_host(host_bytes)).transpose()?;
        let located = |(offset, is_on_host): (u64, bool)| {
            if is_on_host {
                host_memory.map(|memory| memory.offset(offset))
            } else {
                Some(memory.offset(offset))
            }
        };
        let sources = offsets.into_iter().map(|offset| offset.and_then(located)).collect();
        let mut word = memory.offset(bytes);
        let mut tables = Vec::with_capacity(contents.len());
        for table in contents {
            tables.push(if table.is_empty() { Address::NONE } else { word });
            // SAFETY: the memory was just allocated with room for all tables.
            unsafe { device.upload(&table, word) }?;
            word = word.offset((table.len() as u64).next_multiple_of(ALIGNMENT));
        }
        let overflow = word.offset(WORD as u64);
        // SAFETY: the memory was just allocated with room for both words.
        unsafe { device.upload(&[0; WORD], overflow) }?;
        Ok(Self {
            rank,
            at,
            device,
            tables,
            memory,
            host_memory,
            arena,
            bytes,
            sources,
            streams,
            events,
            barrier_events,
            word,
            overflow,
            counts: overflow.offset(WORD as u64),
            workspace: memory.offset(before_workspace),
        })
    }

    pub(super) fn stream(&self, queue: Queue) -> Stream {
        self.streams[queue as usize]
    }

    /// Makes each of some streams wait for the earlier work of the others; the compute stream is one of them.
    pub(super) fn synchronize_streams(&self, streams: Streams) -> Result<(), CudaError> {
        let event = |queue: Queue| self.barrier_events[queue as usize];
        let others = streams.iter().filter(|&queue| queue != Queue::Compute);
        for queue in others.clone() {
            self.device.record(self.stream(queue), event(queue))?;
            self.device.wait(self.stream(Queue::Compute), event(queue))?;
        }
        self.device.record(self.stream(Queue::Compute), event(Queue::Compute))?;
        for queue in others {
            self.device.wait(self.stream(queue), event(Queue::Compute))?;
        }
        Ok(())
    }

    /// The bound that the data of a run exceed. All work has ended.
    pub(super) fn overflow(&self) -> Result<Option<Exceeded>, CudaError> {
        const OF_A_CACHE: u64 = 1 << 63;
        const OF_A_PAGE: u64 = 1 << 62;
        let mut found = [0; WORD];
        // SAFETY: the word has this size, and no work runs.
        unsafe { self.device.download(self.overflow, &mut found) }?;
        let found = u64::from_ne_bytes(found);
        let of = |kind: u64| (found & !kind) >> 32;
        let low = found & u64::from(u32::MAX);
        Ok(match found {
            0 => None,
            OF_A_CACHE.. => Some(Exceeded::Cache { tokens: of(OF_A_CACHE), capacity: low }),
            OF_A_PAGE.. => Some(Exceeded::Page { token: of(OF_A_PAGE), sequence: low }),
            _ => Some(Exceeded::Expert([of(0), low])),
        })
    }

    /// Downloads counts of filled rows.
    pub(super) fn counts(&self, at: Address, n: u64) -> Result<Vec<u64>, CudaError> {
        let mut bytes = vec![0_u8; index(n * DType::I32.bytes())];
        // SAFETY: the counts of a collective have this size, and the caller has waited for them.
        unsafe { self.device.download(at, &mut bytes) }?;
        let (words, _) = bytes.as_chunks();
        Ok(words.iter().map(|word| u64::from(u32::from_ne_bytes(*word))).collect())
    }

    /// Downloads a dense tensor of `n` elements.
    pub(super) fn download(&self, at: Address, n: u64, dtype: DType) -> Result<Vec<f32>, CudaError> {
        let mut bytes = vec![0_u8; index(n * dtype.bytes())];
        // SAFETY: the caller names a buffer of this rank with `n` elements and has waited for the device.
        unsafe { self.device.download(at, &mut bytes) }?;
        Ok(super::storage::read(dtype, &bytes))
    }
}

impl Drop for LocalRank<'_> {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated here. Issued work has ended, or the device was abandoned and keeps the memory.
        unsafe { self.device.release(self.memory) };
        if let Some(memory) = self.host_memory {
            // SAFETY: likewise.
            unsafe { self.device.release_on_host(memory) };
        }
    }
}

/// The content of a rank's table, in words of eight bytes.
fn table_bytes(table: &Table, at: &Coordinates) -> Vec<u8> {
    let bytes = |words: &mut dyn Iterator<Item = u64>| words.flat_map(u64::to_ne_bytes).collect();
    match table {
        Table::Integers(list) => bytes(&mut list.at(at).iter().map(|n| n.at(at, 0).cast_unsigned())),
        Table::Reals(list) => bytes(&mut list.at(at).iter().copied()),
    }
}

/// Bytes of a rank's arena: the largest of the places of the rank.
fn arena_bytes(program: &DeviceProgram, rank: Rank) -> u64 {
    let here = program.arenas.iter().filter(|(at, _)| at.is_none_or(|at| at.has(&program.mesh, rank)));
    here.map(|&(_, bytes)| bytes).max().unwrap_or(0)
}
