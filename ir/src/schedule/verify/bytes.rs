//! Regions of memory with their content and the tasks that touched them last.
//!
//! Of each region the last writer is kept, and of each stream the last reader since. A task that is ordered after these
//! is ordered after all before them, so each task is compared with few others, however many there are.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::schedule::BufferId;
use crate::schedule::verify::order::{Order, STREAMS};

/// The tasks that touched a region last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Access {
    /// The task that wrote it last.
    pub(super) writer: Option<usize>,
    /// For each stream the task that has read it last since.
    readers: [Option<usize>; STREAMS],
}

impl Access {
    /// The task that wrote it and may still run when `task` reads it.
    pub(super) fn read(&mut self, order: &Order, task: usize, stream: usize) -> Option<usize> {
        self.readers[stream] = Some(task);
        self.writer.filter(|&writer| writer != task && !order.before(writer, task))
    }

    /// The tasks that touched it and may still run when `task` writes it.
    fn written(&self, order: &Order, task: usize) -> impl Iterator<Item = usize> {
        let running = move |&other: &usize| other != task && !order.before(other, task);
        self.writer.into_iter().chain(self.readers.into_iter().flatten()).filter(running)
    }

    /// Lets `task` write it; gives the tasks that touched it and may still run then.
    pub(super) fn write(&mut self, order: &Order, task: usize) -> Vec<usize> {
        let running = self.written(order, task).collect();
        *self = Self::by(task);
        running
    }

    /// Written by `task`, and read by nobody since.
    fn by(task: usize) -> Self {
        Self { writer: Some(task), readers: [None; STREAMS] }
    }
}

/// Bytes that were written, from the first of them.
#[derive(Clone, Copy, Debug)]
struct WrittenBytes {
    /// One past the last byte.
    end: u64,
    /// The buffer whose bytes they are; none for bytes that a callee wrote.
    owner: Option<BufferId>,
    access: Access,
}

/// The bytes of a frame.
#[derive(Debug, Default)]
pub(super) struct Bytes {
    held: BTreeMap<u64, WrittenBytes>,
}

/// The content found where a buffer is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The buffer.
    Whole,
    /// Something that this task wrote.
    Other(usize),
    /// Nothing, at some bytes.
    Nothing,
}

impl Bytes {
    /// The content of `range`, which is not empty, where `buffer` is expected.
    pub(super) fn find(&self, range: &Range<u64>, buffer: BufferId) -> Found {
        match self.held.get(&range.start) {
            Some(held) if held.owner == Some(buffer) && held.end == range.end => return Found::Whole,
            _ => {}
        }
        // It may have been written, or read, piece by piece.
        let mut end = range.start;
        for (start, held) in self.overlapping(range) {
            if held.owner != Some(buffer) {
                return held.access.writer.map_or(Found::Nothing, Found::Other);
            }
            if start <= end {
                end = held.end;
            }
        }
        if end >= range.end { Found::Whole } else { Found::Nothing }
    }

    /// Lets `task` read `range`; adds tasks that may still write it.
    pub(super) fn read(
        &mut self,
        range: &Range<u64>,
        order: &Order,
        (task, stream): (usize, usize),
        running: &mut Vec<usize>,
    ) {
        if range.is_empty() {
            return;
        }
        self.split(range.start);
        self.split(range.end);
        for (_, held) in self.held.range_mut(range.clone()) {
            running.extend(held.access.read(order, task, stream));
        }
    }

    /// Lets `task` write `range`, which is `owner`'s then; adds tasks that may still touch it.
    pub(super) fn write(
        &mut self,
        range: &Range<u64>,
        owner: Option<BufferId>,
        order: &Order,
        task: usize,
        running: &mut Vec<usize>,
    ) {
        if range.is_empty() {
            return;
        }
        for (_, held) in self.overlapping(range) {
            running.extend(held.access.written(order, task));
        }
        self.split(range.start);
        self.split(range.end);
        while let Some((&start, _)) = self.held.range(range.clone()).next() {
            self.held.remove(&start);
        }
        self.held.insert(range.start, WrittenBytes { end: range.end, owner, access: Access::by(task) });
    }

    /// Makes two regions of one that reaches beyond `at`.
    fn split(&mut self, at: u64) {
        if let Some((&start, &held)) = self.held.range(..at).next_back()
            && held.end > at
        {
            self.held.insert(start, WrittenBytes { end: at, ..held });
            self.held.insert(at, held);
        }
    }

    fn first_of(&self, range: &Range<u64>) -> u64 {
        let before = self.held.range(..=range.start).next_back();
        before.filter(|(_, held)| held.end > range.start).map_or(range.start, |(&start, _)| start)
    }

    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, WrittenBytes)> + '_ {
        self.held.range(self.first_of(range)..range.end).map(|(&start, &held)| (start, held))
    }
}
