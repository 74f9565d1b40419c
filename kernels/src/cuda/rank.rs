//! What a rank has on its device: memory, streams, events, lists that kernels read. All of it is there before a step.

use std::cell::OnceCell;

use ithaca_device::{Coordinates, DeviceProgram};
use ithaca_ir::schedule::Stream as Queue;
use ithaca_ir::{DType, Rank};

use super::arguments::Address;
use super::device::{Device, Event, Stream};
use super::error::CudaError;
use super::tables::Tables;
use crate::cpu::memory::SourcePlan;
use crate::error::RunError;
use crate::tensor::index;

/// Bytes at whose multiples parts of a rank's memory start.
const ALIGNMENT: u64 = 256;

/// A rank on its device.
pub(super) struct Seat<'a> {
    pub(super) rank: Rank,
    /// Its place in the mesh.
    pub(super) at: Coordinates,
    pub(super) device: &'a dyn Device,
    pub(super) tables: Tables<'a>,
    /// The arena; what is loaded lies behind it.
    pub(super) memory: Address,
    /// Bytes of the arena.
    pub(super) arena: u64,
    /// Bytes of all.
    pub(super) bytes: u64,
    /// For each stored tensor, where this rank has its part; none where it has none.
    pub(super) sources: Vec<Option<Address>>,
    streams: [Stream; 2],
    /// The events of all frames.
    pub(super) events: Vec<Event>,
    /// For the streams to meet.
    meeting: [Event; 2],
    /// Where kernels leave what they found; made when it is first asked for.
    word: OnceCell<Address>,
}

impl<'a> Seat<'a> {
    /// Allocates what `rank` needs.
    pub(super) fn new(
        device: &'a dyn Device,
        program: &DeviceProgram,
        plan: &SourcePlan<'_>,
        rank: Rank,
    ) -> Result<Self, RunError> {
        let at = Coordinates::of(&program.mesh, rank);
        let arena = arena_bytes(program, rank).next_multiple_of(ALIGNMENT);
        let mut bytes = arena;
        let mut offsets = Vec::with_capacity(plan.tensors().len());
        for tensor in plan.tensors() {
            offsets.push(tensor.part_of[index(rank.0)].map(|part| {
                let at = bytes;
                let size = ithaca_ir::boxes::elements(&tensor.regions[part]) * tensor.ty.dtype.bytes();
                bytes += size.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
                at
            }));
        }
        let streams = [device.stream()?, device.stream()?];
        let events: Vec<Event> = (0..program.n_events).map(|_| device.event()).collect::<Result<_, _>>()?;
        let meeting = [device.event()?, device.event()?];
        let memory = device.allocate(bytes)?;
        let sources = offsets.into_iter().map(|offset| offset.map(|offset| memory.offset(offset))).collect();
        let tables = Tables::new(device, program, &at)?;
        Ok(Self {
            rank,
            at,
            device,
            tables,
            memory,
            arena,
            bytes,
            sources,
            streams,
            events,
            meeting,
            word: OnceCell::new(),
        })
    }

    pub(super) fn stream(&self, queue: Queue) -> Stream {
        match queue {
            Queue::Compute => self.streams[0],
            Queue::Comm => self.streams[1],
        }
    }

    /// Eight bytes for a kernel to leave what it found.
    pub(super) fn word(&self) -> Result<Address, CudaError> {
        if let Some(&word) = self.word.get() {
            return Ok(word);
        }
        let word = self.device.allocate(8)?;
        Ok(*self.word.get_or_init(|| word))
    }

    /// Both streams have done what was issued before either goes on.
    pub(super) fn meet(&self) -> Result<(), CudaError> {
        let pairs = self.streams.iter().zip(&self.meeting);
        pairs.clone().try_for_each(|(&stream, &event)| self.device.record(stream, event))?;
        self.device.wait(self.streams[0], self.meeting[1])?;
        self.device.wait(self.streams[1], self.meeting[0])
    }

    /// The numbers that the device has of a dense tensor.
    pub(super) fn download(&self, at: Address, n: u64, dtype: DType) -> Result<Vec<f32>, CudaError> {
        let mut bytes = vec![0_u8; index(n * dtype.bytes())];
        // SAFETY: whoever asks names a buffer of this rank with as many elements, and has waited for the device.
        unsafe { self.device.download(at, &mut bytes) }?;
        Ok(super::storage::read(dtype, &bytes))
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        // SAFETY: it was allocated here. Who issues work waits for its end, or has the device keep what it may use.
        unsafe { self.device.release(self.memory) };
        if let Some(&word) = self.word.get() {
            // SAFETY: as above.
            unsafe { self.device.release(word) };
        }
    }
}

/// Bytes of the arena of a rank: of the places that it is at, the most.
fn arena_bytes(program: &DeviceProgram, rank: Rank) -> u64 {
    let here = program.arenas.iter().filter(|(at, _)| at.is_none_or(|at| at.has(&program.mesh, rank)));
    here.map(|&(_, bytes)| bytes).max().unwrap_or(0)
}
