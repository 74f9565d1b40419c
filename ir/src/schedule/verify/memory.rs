//! Whether memory holds what is read from it: `S06`, `S07`, `S08`.
//!
//! Bytes are followed in order of issue: each byte of the frame belongs to the buffer that was written last. That this
//! order is the one at run time is the other half of the check: tasks that may run at the same time touch no byte
//! together, unless both read it.

use std::collections::BTreeMap;
use std::ops::Range;

use super::lasting::Lasting;
use super::order::Order;
use super::work::is_sliced;
use super::{MAX_DIAGNOSTICS, describe, in_frame, in_task, name};
use crate::diagnostic::Diagnostics;
use crate::ops::state::works_in_place;
use crate::ops::{Op, OpError, Scan};
use crate::schedule::{BufferId, Content, Frame, FrameId, Place, Schedule, Work};

/// What a task touches.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Region {
    /// Bytes of the frame.
    Bytes(Range<u64>),
    /// Argument and result of this number, which may lie in one place.
    Port(usize),
    /// A weight or a state that some task of the schedule writes, by number.
    Lasting(usize),
    /// Inputs, and other weights and states: never written.
    Outside,
}

impl Region {
    fn overlaps(&self, other: &Region) -> bool {
        match (self, other) {
            (Region::Bytes(a), Region::Bytes(b)) => a.start.max(b.start) < a.end.min(b.end),
            (Region::Port(a), Region::Port(b)) | (Region::Lasting(a), Region::Lasting(b)) => a == b,
            (Region::Bytes(_) | Region::Port(_) | Region::Lasting(_) | Region::Outside, _) => false,
        }
    }
}

/// The regions that one task reads and writes.
struct Touched {
    reads: Vec<Region>,
    writes: Vec<Region>,
    /// What the callee writes: where its frame lies, and what lasts.
    callee: Vec<Region>,
    /// What the callee reads of what lasts.
    callee_reads: Vec<Region>,
}

impl Touched {
    fn written(&self) -> impl Iterator<Item = &Region> {
        self.writes.iter().chain(&self.callee)
    }

    fn conflicts(&self, other: &Touched) -> bool {
        let meets = |region: &Region, other: &Touched| {
            other.reads.iter().chain(&other.callee_reads).chain(other.written()).any(|o| region.overlaps(o))
        };
        self.written().any(|r| meets(r, other)) || other.written().any(|r| meets(r, self))
    }
}

/// Adds what is wrong with the frame's use of memory.
pub(super) fn check(
    schedule: &Schedule,
    frame: &Frame,
    lasting: &Lasting<'_>,
    order: &Order,
    found: &mut Diagnostics,
) {
    let regions: Vec<Region> =
        frame.buffers.ids().map(|buffer| region(schedule, frame, lasting, buffer)).collect();
    let region = |buffer: BufferId| {
        use crate::entity::Entity;
        regions[buffer.index()].clone()
    };
    let touched: Vec<Touched> = frame
        .tasks
        .iter()
        .map(|task| {
            let (mut callee, mut callee_reads) = (Vec::new(), Vec::new());
            if let Work::Call { callee: called, base, .. } = task.work {
                let effects = lasting.effects(called);
                callee.push(Region::Bytes(base..base + schedule.frames[called].bytes));
                callee.extend(effects.writes.iter().map(|&n| Region::Lasting(n)));
                callee_reads.extend(effects.reads.iter().map(|&n| Region::Lasting(n)));
            }
            Touched {
                reads: task.reads.iter().map(|&b| region(b)).collect(),
                writes: task.writes.iter().map(|&b| region(b)).collect(),
                callee,
                callee_reads,
            }
        })
        .collect();
    let mut owners = Owners::default();
    for (i, task) in frame.tasks.iter().enumerate() {
        if found.len() >= MAX_DIAGNOSTICS {
            return;
        }
        for (&buffer, region) in task.reads.iter().zip(&touched[i].reads) {
            if let Err(error) = owners.read(frame, buffer, region) {
                found.push(in_task(frame, i, error));
            }
        }
        if let Err(error) = check_in_place(schedule, frame, i, &touched[i]) {
            found.push(in_task(frame, i, error));
        }
        for other in order.concurrent(i) {
            if touched[i].conflicts(&touched[other]) {
                let message = format!(
                    "it touches bytes that {} touches, and nothing orders the two",
                    describe(frame, other)
                );
                found.push(in_task(frame, i, OpError::new("S07", message)));
            }
        }
        for region in &touched[i].callee {
            if let Region::Bytes(range) = region {
                owners.write(range.clone(), None);
            }
        }
        for (&buffer, region) in task.writes.iter().zip(&touched[i].writes) {
            match region {
                Region::Bytes(range) => owners.write(range.clone(), Some(buffer)),
                Region::Port(n) => drop(owners.results.insert(*n, i)),
                Region::Lasting(_) | Region::Outside => {}
            }
        }
    }
    for output in &frame.outputs {
        if let Err(error) = owners.read(frame, output.buffer, &region(output.buffer)) {
            let message = format!("on return {}", error.message);
            found.push(in_frame(frame, OpError::new(error.code, message)));
        }
    }
}

fn region(schedule: &Schedule, frame: &Frame, lasting: &Lasting<'_>, id: BufferId) -> Region {
    let buffer = &frame.buffers[id];
    match buffer.place {
        Place::Frame(offset) => Region::Bytes(offset..offset + buffer.bytes(&schedule.space)),
        Place::Argument(i) | Place::Result(i) => Region::Port(i),
        Place::Weight(_) | Place::State(_) => {
            lasting.number(frame, id).map_or(Region::Outside, Region::Lasting)
        }
        Place::Input(_) => Region::Outside,
    }
}

/// A task may write where it reads when element i of the result needs element i of the operand only; a call, when the
/// argument and the result have one number and each layer is done with what it overwrites; an all-reduce, when it is
/// given the tensor itself.
fn check_in_place(
    schedule: &Schedule,
    frame: &Frame,
    index: usize,
    touched: &Touched,
) -> Result<(), OpError> {
    let task = &frame.tasks[index];
    let refuse = |what: String| Err(OpError::new("S08", what));
    for (j, written) in touched.writes.iter().enumerate() {
        let write = task.writes[j];
        let elsewhere = touched.writes[..j].iter().chain(&touched.callee).chain(&touched.callee_reads);
        if elsewhere.into_iter().any(|other| other.overlaps(written)) {
            return refuse(format!("it writes `${}` where it writes something else", name(frame, write)));
        }
        for (i, read) in touched.reads.iter().enumerate().filter(|(_, read)| read.overlaps(written)) {
            let operand = task.reads[i];
            let same_elements = same_place(read, written) && same_elements(frame, operand, write);
            let fits = match &task.work {
                Work::Compute(op) => works_in_place(op) && same_elements,
                Work::Exchange(transfer) => {
                    matches!(transfer.first().op, Op::AllReduce { .. }) && read == written
                }
                Work::Call { callee, layers, scan, .. } => {
                    let is_own = scan.is_none_or(|scan| i < scan.carried)
                        || layers.end - layers.start == 1
                        || takes_slices(schedule, frame, *callee, scan.as_ref(), i, operand);
                    i == j && is_own && (operand == write || matches!(read, Region::Port(_)))
                }
                Work::Pack(_) | Work::Unpack(_) | Work::Copy => false,
            };
            if !fits {
                let (operand, write) = (name(frame, operand), name(frame, write));
                return refuse(format!("it writes `${write}` where it reads `${operand}`"));
            }
        }
    }
    for callee in &touched.callee {
        let Some(i) = touched.reads.iter().position(|read| read.overlaps(callee)) else { continue };
        return refuse(match callee {
            Region::Lasting(_) => format!("the callee writes `${}`, an argument", name(frame, task.reads[i])),
            Region::Bytes(_) | Region::Port(_) | Region::Outside => {
                "the callee's frame lies where an argument lies".to_owned()
            }
        });
    }
    Ok(())
}

/// Whether each layer of a call gets its slice of argument `index`.
fn takes_slices(
    schedule: &Schedule,
    frame: &Frame,
    callee: FrameId,
    scan: Option<&Scan>,
    index: usize,
    argument: BufferId,
) -> bool {
    let mut buffers = schedule.frames[callee].buffers.values();
    let parameter = buffers.find(|b| b.place == Place::Argument(index));
    parameter
        .is_some_and(|parameter| is_sliced(scan, index, &frame.buffers[argument].content, &parameter.content))
}

fn same_place(a: &Region, b: &Region) -> bool {
    match (a, b) {
        (Region::Bytes(a), Region::Bytes(b)) => a.start == b.start && a.end == b.end,
        (Region::Port(a), Region::Port(b)) | (Region::Lasting(a), Region::Lasting(b)) => a == b,
        (Region::Bytes(_) | Region::Port(_) | Region::Lasting(_) | Region::Outside, _) => false,
    }
}

/// Whether element i of one buffer lies where element i of the other does.
fn same_elements(frame: &Frame, a: BufferId, b: BufferId) -> bool {
    match (&frame.buffers[a].content, &frame.buffers[b].content) {
        (Content::Tensor(a), Content::Tensor(b)) => {
            a.dims == b.dims && a.layout.split == b.layout.split && a.dtype.bytes() == b.dtype.bytes()
        }
        (Content::Tensor(_) | Content::Wire { .. }, _) => false,
    }
}

/// Who wrote each byte of the frame last.
#[derive(Default)]
struct Owners {
    /// By first byte: one past the last byte, and the buffer; none for what a callee left behind.
    bytes: BTreeMap<u64, (u64, Option<BufferId>)>,
    /// Results that are written, by number, and by which task.
    results: BTreeMap<usize, usize>,
}

impl Owners {
    fn write(&mut self, range: Range<u64>, owner: Option<BufferId>) {
        if range.is_empty() {
            return;
        }
        // What reaches in from before is cut; what starts inside goes, and leaves its tail.
        if let Some((&start, &(end, before))) = self.bytes.range(..range.start).next_back()
            && end > range.start
        {
            self.bytes.insert(start, (range.start, before));
            if end > range.end {
                self.bytes.insert(range.end, (end, before));
            }
        }
        while let Some((&start, &(end, inside))) = self.bytes.range(range.clone()).next() {
            self.bytes.remove(&start);
            if end > range.end {
                self.bytes.insert(range.end, (end, inside));
            }
        }
        self.bytes.insert(range.start, (range.end, owner));
    }

    fn read(&self, frame: &Frame, buffer: BufferId, region: &Region) -> Result<(), OpError> {
        let shown = name(frame, buffer);
        let refuse = |what: &str| Err(OpError::new("S06", format!("`${shown}` {what}")));
        match (region, &frame.buffers[buffer].place) {
            (Region::Bytes(range), _) if !range.is_empty() => {
                let held = self.bytes.get(&range.start);
                match held {
                    Some(&(end, Some(owner))) if owner == buffer && end == range.end => Ok(()),
                    Some(_) => refuse("is read after something else was written in its place"),
                    None => refuse("is read before it is written"),
                }
            }
            (Region::Port(n), Place::Argument(_)) => match self.results.get(n) {
                Some(&task) => refuse(&format!(
                    "is read after {} wrote the result that may lie in its place",
                    describe(frame, task)
                )),
                None => Ok(()),
            },
            (Region::Port(n), Place::Result(_)) => match self.results.contains_key(n) {
                true => Ok(()),
                false => refuse("is read before it is written"),
            },
            (Region::Bytes(_) | Region::Port(_) | Region::Lasting(_) | Region::Outside, _) => Ok(()),
        }
    }
}
