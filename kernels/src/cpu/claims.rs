//! The memory of one rank, which its streams share: the arena, and its copies of written weights and states.
//!
//! A task declares its reads and writes before it starts, and holds them until it ends: its [`Claim`]. A claim is refused
//! when one of two tasks writes elements of the other and no event or barrier orders the two. The check is on the order,
//! not on time: a missing event is found at any speed of the streams. A claim on elements of a running task is always
//! refused, so no schedule, verified or not, has a data race.
//!
//! Tasks are numbered along each stream; an order is stated as the numbers up to which tasks of each stream are known to
//! have ended.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ithaca_ir::schedule::{FrameId, Stream};

/// Elements of one part of the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemoryRange {
    /// [`ARENA`], or a number from [`written`].
    pub(super) part: usize,
    /// The elements.
    pub(super) range: Range<usize>,
}

/// The part that is the arena.
pub(super) const ARENA: usize = 0;

/// The part that is the weight or state of this number.
pub(super) fn written(number: usize) -> usize {
    number + 1
}

impl MemoryRange {
    fn overlaps(&self, other: &MemoryRange) -> bool {
        let (a, b) = (&self.range, &other.range);
        self.part == other.part && a.start.max(b.start) < a.end.min(b.end)
    }

    fn contains(&self, other: &MemoryRange) -> bool {
        self.part == other.part && self.range.start <= other.range.start && other.range.end <= self.range.end
    }
}

/// A run of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TaskRun {
    pub(super) frame: FrameId,
    pub(super) layer: u64,
    pub(super) task: usize,
}

/// Why a claim was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Conflict {
    /// The elements of the refused task.
    pub(super) extent: MemoryRange,
    /// The task of another stream that accesses them too.
    pub(super) other: TaskRun,
}

/// For each stream the number up to which its tasks are known to have ended.
pub(super) type Clock = [u64; Stream::COUNT];

/// The elements, and the claims on them.
pub(super) struct Memory {
    parts: Vec<Box<[UnsafeCell<f32>]>>,
    streams: Mutex<[StreamAccesses; Stream::COUNT]>,
}

// SAFETY: elements are reached through claims only. Of two live claims neither writes elements of the other, so no other
// thread accesses an element while one thread writes it. The mutex orders the end of a claim before the start of the next
// claim on the same elements.
unsafe impl Sync for Memory {}

/// The accesses of a stream that are not known to precede the next task of every other stream.
#[derive(Default)]
struct StreamAccesses {
    /// Tasks so far.
    count: u64,
    /// In order of numbers.
    tasks: VecDeque<TaskAccess>,
    /// Whether the stream has no more tasks.
    has_ended: bool,
    /// The tasks that its last task was known to come after.
    seen: Clock,
}

struct TaskAccess {
    number: u64,
    run: TaskRun,
    reads: Vec<MemoryRange>,
    writes: Vec<MemoryRange>,
    is_running: bool,
}

impl TaskAccess {
    /// The first of `reads` and `writes` that needs an order with this task.
    fn conflict<'e>(&self, reads: &'e [MemoryRange], writes: &'e [MemoryRange]) -> Option<&'e MemoryRange> {
        let touches = |e: &&MemoryRange| self.reads.iter().chain(&self.writes).any(|own| own.overlaps(e));
        let is_written = |e: &&MemoryRange| self.writes.iter().any(|own| own.overlaps(e));
        writes.iter().find(touches).or_else(|| reads.iter().find(is_written))
    }
}

impl Memory {
    /// The memory with this arena, and `written` by number.
    pub(super) fn new(arena: Vec<f32>, written: Vec<Vec<f32>>) -> Self {
        let cells = |part: Vec<f32>| part.into_iter().map(UnsafeCell::new).collect();
        let parts = std::iter::once(arena).chain(written).map(cells).collect();
        Self { parts, streams: Mutex::default() }
    }

    /// The arena, and the written tensors by number.
    pub(super) fn into_parts(self) -> (Vec<f32>, Vec<Vec<f32>>) {
        let data = |part: Box<[UnsafeCell<f32>]>| part.into_iter().map(UnsafeCell::into_inner).collect();
        let mut parts = self.parts.into_iter().map(data);
        (parts.next().unwrap_or_default(), parts.collect())
    }

    /// Whether there are such elements.
    pub(super) fn has(&self, extent: &MemoryRange) -> bool {
        self.parts
            .get(extent.part)
            .is_some_and(|part| extent.range.start <= extent.range.end && extent.range.end <= part.len())
    }

    /// Lets the next task of a stream read and write; it comes after the tasks of other streams that it has `seen`.
    pub(super) fn claim(
        &self,
        (stream, run): (Stream, TaskRun),
        seen: Clock,
        reads: Vec<MemoryRange>,
        writes: Vec<MemoryRange>,
    ) -> Result<Claim<'_>, Conflict> {
        let mut streams = self.streams();
        streams[stream as usize].seen = seen;
        for (of, touched) in Stream::ALL.into_iter().zip(streams.iter()) {
            let is_open =
                |task: &&TaskAccess| task.is_running || of != stream && task.number > seen[of as usize];
            for task in touched.tasks.iter().filter(is_open) {
                if let Some(extent) = task.conflict(&reads, &writes) {
                    return Err(Conflict { extent: extent.clone(), other: task.run });
                }
            }
        }
        forget(&mut streams);
        let own = &mut streams[stream as usize];
        own.count += 1;
        let number = own.count;
        own.tasks.push_back(TaskAccess {
            number,
            run,
            reads: reads.clone(),
            writes: writes.clone(),
            is_running: true,
        });
        drop(streams);
        Ok(Claim { memory: self, stream, number, reads, writes })
    }

    /// Marks a stream as ended, so that no accesses are recorded for it.
    pub(super) fn leave(&self, stream: Stream) {
        let mut streams = self.streams();
        streams[stream as usize].has_ended = true;
        forget(&mut streams);
    }

    fn release(&self, stream: Stream, number: u64) {
        let mut streams = self.streams();
        let is_kept = Stream::ALL.into_iter().zip(streams.iter()).any(|(of, s)| of != stream && !s.has_ended);
        let tasks = &mut streams[stream as usize].tasks;
        if let Some(i) = tasks.iter().rposition(|task| task.number == number) {
            tasks[i].is_running = false;
            if !is_kept {
                tasks.remove(i);
            }
        }
    }

    /// A panic while the lock is held leaves no change half done.
    fn streams(&self) -> MutexGuard<'_, [StreamAccesses; Stream::COUNT]> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first of some elements, if there are so many.
    fn pointer(&self, extent: &MemoryRange) -> Option<*const UnsafeCell<f32>> {
        let part = self.parts.get(extent.part)?;
        Some(part.get(extent.range.clone())?.as_ptr())
    }
}

/// Removes the tasks that every other stream with more tasks has seen.
fn forget(streams: &mut [StreamAccesses; Stream::COUNT]) {
    for of in 0..Stream::COUNT {
        let others = (0..Stream::COUNT).filter(|&other| other != of && !streams[other].has_ended);
        let seen = others.map(|other| streams[other].seen[of]).min().unwrap_or(u64::MAX);
        let tasks = &mut streams[of].tasks;
        if tasks.front().is_some_and(|task| task.number <= seen) {
            tasks.retain(|task| task.number > seen || task.is_running);
        }
    }
}

/// The elements that a task may access, until the claim is dropped.
pub(super) struct Claim<'a> {
    memory: &'a Memory,
    stream: Stream,
    number: u64,
    reads: Vec<MemoryRange>,
    writes: Vec<MemoryRange>,
}

impl Claim<'_> {
    /// The number of the task along its stream.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Elements that the task reads or writes; `None` where it did not claim them.
    pub(super) fn read(&self, extent: &MemoryRange) -> Option<&[f32]> {
        let is_claimed = self.reads.iter().chain(&self.writes).any(|own| own.contains(extent));
        let first = self.memory.pointer(extent).filter(|_| is_claimed)?;
        // SAFETY: the elements are in one allocation and live as long as the memory, which this claim borrows.
        // `UnsafeCell<f32>` has the layout of `f32`. No other claim writes them while this one is there, and this one
        // writes by `&mut self` only.
        Some(unsafe { std::slice::from_raw_parts(first.cast::<f32>(), extent.range.len()) })
    }

    /// Elements that the task writes; `None` where it did not claim them.
    pub(super) fn write(&mut self, extent: &MemoryRange) -> Option<&mut [f32]> {
        let is_claimed = self.writes.iter().any(|own| own.contains(extent));
        let first = self.memory.pointer(extent).filter(|_| is_claimed)?;
        // SAFETY: as for `read`; and no other claim has these elements, and `&mut self` lets this one give them once. The
        // pointer comes from a slice of cells, so writing through it is allowed.
        Some(unsafe { std::slice::from_raw_parts_mut(UnsafeCell::raw_get(first), extent.range.len()) })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.memory.release(self.stream, self.number);
    }
}

#[cfg(test)]
mod tests {
    use ithaca_ir::entity::Entity;

    use super::*;

    fn run(task: usize) -> TaskRun {
        TaskRun { frame: FrameId::new(0), layer: 0, task }
    }

    fn seen(n: u64) -> Clock {
        [n; Stream::COUNT]
    }

    fn arena(range: Range<usize>) -> Vec<MemoryRange> {
        vec![MemoryRange { part: ARENA, range }]
    }

    #[test]
    fn elements_of_a_running_writer_cannot_be_claimed() {
        let memory = Memory::new(vec![0.0; 8], vec![vec![0.0; 4]]);
        let compute =
            |task, reads, writes| memory.claim((Stream::Compute, run(task)), seen(0), reads, writes);
        let comm = |n, task, reads, writes| memory.claim((Stream::Comm, run(task)), seen(n), reads, writes);
        let mut first = compute(0, vec![], arena(2..4)).unwrap();
        first.write(&arena(2..4)[0]).unwrap().fill(1.0);
        assert!(first.write(&arena(3..5)[0]).is_none() && first.read(&arena(0..1)[0]).is_none());
        // Whatever order is stated: it runs.
        let refused = comm(7, 1, arena(3..5), vec![]).err().unwrap();
        assert_eq!((refused.other, refused.extent), (run(0), arena(3..5)[0].clone()));
        assert!(comm(0, 1, vec![], arena(0..3)).is_err());
        drop(comm(0, 1, arena(4..8), vec![MemoryRange { part: written(0), range: 2..4 }]).unwrap());
        drop(first);
        let (arena, kept) = memory.into_parts();
        assert_eq!((&arena[..5], kept[0].len()), (&[0.0, 0.0, 1.0, 1.0, 0.0][..], 4));
    }

    #[test]
    fn the_order_counts_and_not_the_time() {
        let memory = Memory::new(vec![0.0; 8], vec![]);
        let first = memory.claim((Stream::Compute, run(0)), seen(0), vec![], arena(0..4)).unwrap();
        let number = first.number();
        drop(first);
        // It has ended, but nothing says so.
        assert!(memory.claim((Stream::Comm, run(1)), seen(0), arena(0..4), vec![]).is_err());
        let read = memory.claim((Stream::Comm, run(1)), seen(number), arena(0..4), vec![]).unwrap();
        // Both may read.
        drop(memory.claim((Stream::Compute, run(2)), seen(0), arena(0..4), vec![]).unwrap());
        drop(read);
        assert!(memory.claim((Stream::Compute, run(3)), seen(0), vec![], arena(3..4)).is_err());
        memory.leave(Stream::Compute);
        assert!(memory.claim((Stream::Compute, run(3)), seen(1), vec![], arena(3..4)).is_ok());
    }

    #[test]
    fn a_stream_that_has_ended_keeps_nothing() {
        let memory = Memory::new(vec![0.0; 8], vec![]);
        Stream::ALL[1..].iter().for_each(|&stream| memory.leave(stream));
        for task in 0..3 {
            drop(memory.claim((Stream::Compute, run(task)), seen(0), vec![], arena(0..4)).unwrap());
        }
        assert!(memory.streams().iter().all(|s| s.tasks.is_empty()));
    }
}
