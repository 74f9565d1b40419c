//! The memory of one rank, which its two streams share: the arena, and what it has of weights and states that are
//! written.
//!
//! A task says before it starts which elements it reads and which it writes, and has them until it ends: its [`Claim`].
//! A claim is refused when one of two tasks writes what the other touches and nothing says that one ended before the
//! other began, neither an event that was waited for nor a place where both streams met. Order is asked for, not time:
//! an event that is missing is found however fast the streams happen to be. What runs at that moment is refused whatever
//! order is stated, so that no schedule, verified or not, has a data race.
//!
//! Tasks are numbered along each stream; an order is stated as the number up to which tasks of the other stream are
//! known to have ended.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ithaca_ir::schedule::{FrameId, Stream};

/// Elements of one part of the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Extent {
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

impl Extent {
    fn overlaps(&self, other: &Extent) -> bool {
        let (a, b) = (&self.range, &other.range);
        self.part == other.part && a.start.max(b.start) < a.end.min(b.end)
    }

    fn contains(&self, other: &Extent) -> bool {
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
    /// What the refused task touches.
    pub(super) extent: Extent,
    /// The task of the other stream that touches it too.
    pub(super) other: TaskRun,
}

/// The elements, and who touches them.
pub(super) struct Memory {
    parts: Vec<Box<[UnsafeCell<f32>]>>,
    streams: Mutex<[StreamAccesses; Stream::ALL.len()]>,
}

// SAFETY: elements are arena_used through claims only. Of two claims that are there at a time neither writes what the other
// touches, so an element that one thread writes is read and written by no other thread meanwhile. The mutex orders the
// end of a claim before the beginning of the next one of the same elements.
unsafe impl Sync for Memory {}

/// What the tasks of a stream touched that the other stream is not known to come after.
#[derive(Default)]
struct StreamAccesses {
    /// Tasks so far.
    count: u64,
    /// In order of numbers.
    tasks: VecDeque<TaskAccess>,
    /// Whether the stream has no more tasks.
    has_ended: bool,
}

struct TaskAccess {
    number: u64,
    run: TaskRun,
    reads: Vec<Extent>,
    writes: Vec<Extent>,
    is_running: bool,
}

impl TaskAccess {
    /// What of `reads` and `writes` keeps two tasks from running in any order.
    fn conflict<'e>(&self, reads: &'e [Extent], writes: &'e [Extent]) -> Option<&'e Extent> {
        let touches = |e: &&Extent| self.reads.iter().chain(&self.writes).any(|own| own.overlaps(e));
        let is_written = |e: &&Extent| self.writes.iter().any(|own| own.overlaps(e));
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

    /// The arena, and what lasts by number.
    pub(super) fn into_parts(self) -> (Vec<f32>, Vec<Vec<f32>>) {
        let data = |part: Box<[UnsafeCell<f32>]>| part.into_iter().map(UnsafeCell::into_inner).collect();
        let mut parts = self.parts.into_iter().map(data);
        (parts.next().unwrap_or_default(), parts.collect())
    }

    /// Whether there are such elements.
    pub(super) fn has(&self, extent: &Extent) -> bool {
        self.parts
            .get(extent.part)
            .is_some_and(|part| extent.range.start <= extent.range.end && extent.range.end <= part.len())
    }

    /// Lets the next task of a stream read and write; it comes after the first `seen` tasks of the other stream.
    pub(super) fn claim(
        &self,
        (stream, run): (Stream, TaskRun),
        seen: u64,
        reads: Vec<Extent>,
        writes: Vec<Extent>,
    ) -> Result<Claim<'_>, Conflict> {
        let mut streams = self.streams();
        for (of, touched) in Stream::ALL.into_iter().zip(streams.iter_mut()) {
            if of != stream {
                touched.tasks.retain(|task| task.number > seen || task.is_running);
            }
            let open = touched.tasks.iter().filter(|task| of != stream || task.is_running);
            for task in open {
                if let Some(extent) = task.conflict(&reads, &writes) {
                    return Err(Conflict { extent: extent.clone(), other: task.run });
                }
            }
        }
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

    /// Says that a stream has no more tasks, so that nothing is kept for it.
    pub(super) fn leave(&self, stream: Stream) {
        let mut streams = self.streams();
        streams[stream as usize].has_ended = true;
        for (of, touched) in Stream::ALL.into_iter().zip(streams.iter_mut()) {
            if of != stream {
                touched.tasks.retain(|task| task.is_running);
            }
        }
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

    /// Who panics with the lock in hand has changed nothing, or all that it wanted to.
    fn streams(&self) -> MutexGuard<'_, [StreamAccesses; Stream::ALL.len()]> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first of some elements, if there are so many.
    fn pointer(&self, extent: &Extent) -> Option<*const UnsafeCell<f32>> {
        let part = self.parts.get(extent.part)?;
        Some(part.get(extent.range.clone())?.as_ptr())
    }
}

/// What a task may touch, until it is dropped.
pub(super) struct Claim<'a> {
    memory: &'a Memory,
    stream: Stream,
    number: u64,
    reads: Vec<Extent>,
    writes: Vec<Extent>,
}

impl Claim<'_> {
    /// The number of the task along its stream.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Elements that the task reads or writes; none where it did not say so.
    pub(super) fn read(&self, extent: &Extent) -> Option<&[f32]> {
        let is_claimed = self.reads.iter().chain(&self.writes).any(|own| own.contains(extent));
        let first = self.memory.pointer(extent).filter(|_| is_claimed)?;
        // SAFETY: the elements lie in one allocation and live as long as the memory, which this claim borrows.
        // `UnsafeCell<f32>` has the layout of `f32`. No other claim writes them while this one is there, and this one
        // writes by `&mut self` only.
        Some(unsafe { std::slice::from_raw_parts(first.cast::<f32>(), extent.range.len()) })
    }

    /// Elements that the task writes; none where it did not say so.
    pub(super) fn write(&mut self, extent: &Extent) -> Option<&mut [f32]> {
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

    fn arena(range: Range<usize>) -> Vec<Extent> {
        vec![Extent { part: ARENA, range }]
    }

    #[test]
    fn what_one_task_writes_no_other_touches_meanwhile() {
        let memory = Memory::new(vec![0.0; 8], vec![vec![0.0; 4]]);
        let compute = |task, reads, writes| memory.claim((Stream::Compute, run(task)), 0, reads, writes);
        let comm = |seen, task, reads, writes| memory.claim((Stream::Comm, run(task)), seen, reads, writes);
        let mut first = compute(0, vec![], arena(2..4)).unwrap();
        first.write(&arena(2..4)[0]).unwrap().fill(1.0);
        assert!(first.write(&arena(3..5)[0]).is_none() && first.read(&arena(0..1)[0]).is_none());
        // Whatever order is stated: it runs.
        let refused = comm(7, 1, arena(3..5), vec![]).err().unwrap();
        assert_eq!((refused.other, refused.extent), (run(0), arena(3..5)[0].clone()));
        assert!(comm(0, 1, vec![], arena(0..3)).is_err());
        drop(comm(0, 1, arena(4..8), vec![Extent { part: written(0), range: 2..4 }]).unwrap());
        drop(first);
        let (arena, kept) = memory.into_parts();
        assert_eq!((&arena[..5], kept[0].len()), (&[0.0, 0.0, 1.0, 1.0, 0.0][..], 4));
    }

    #[test]
    fn order_is_asked_for_and_not_time() {
        let memory = Memory::new(vec![0.0; 8], vec![]);
        let first = memory.claim((Stream::Compute, run(0)), 0, vec![], arena(0..4)).unwrap();
        let number = first.number();
        drop(first);
        // It has ended, but nothing says so.
        assert!(memory.claim((Stream::Comm, run(1)), 0, arena(0..4), vec![]).is_err());
        let read = memory.claim((Stream::Comm, run(1)), number, arena(0..4), vec![]).unwrap();
        // Both may read.
        drop(memory.claim((Stream::Compute, run(2)), 0, arena(0..4), vec![]).unwrap());
        drop(read);
        assert!(memory.claim((Stream::Compute, run(3)), 0, vec![], arena(3..4)).is_err());
        memory.leave(Stream::Compute);
        assert!(memory.claim((Stream::Compute, run(3)), 1, vec![], arena(3..4)).is_ok());
    }

    #[test]
    fn a_stream_that_has_ended_keeps_nothing() {
        let memory = Memory::new(vec![0.0; 8], vec![]);
        memory.leave(Stream::Comm);
        for task in 0..3 {
            drop(memory.claim((Stream::Compute, run(task)), 0, vec![], arena(0..4)).unwrap());
        }
        assert!(memory.streams().iter().all(|s| s.tasks.is_empty()));
    }
}
