//! Whether memory holds the values that are read from it: `S06`, `S07`, `S08`.
//!
//! Bytes are followed in order of issue: each byte of the frame belongs to the buffer that was written last. That this
//! order is the one at run time is the other half of the check: tasks that may run at the same time touch no byte
//! together, unless both read it. Operands and results declare the memory that a task touches; a call touches the
//! frame of its callee, and the weights and states that the callee touches.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::diagnostic::{Diagnostics, MAX_DIAGNOSTICS};
use crate::ops::error::OpError;
use crate::ops::state::works_in_place;
use crate::ops::table::op::Op;
use crate::ops::table::structure::Scan;
use crate::schedule::verify::bytes::{Access, Bytes, Found};
use crate::schedule::verify::classes::Line;
use crate::schedule::verify::lasting::Lasting;
use crate::schedule::verify::order::Order;
use crate::schedule::verify::partner;
use crate::schedule::verify::partner::in_task;
use crate::schedule::verify::report::{describe, in_frame, name};
use crate::schedule::verify::work::is_sliced;
use crate::schedule::{BufferId, Content, Frame, FrameId, Place, Schedule, Work};
use crate::space::Space;

/// The memory that a task touches.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Region {
    /// Bytes of the frame.
    Bytes(Range<u64>),
    /// A part of a wire, or one in pieces of a tensor, which has these bytes of the frame; of several parts each has some of its own.
    Part {
        /// The wire, or the tensor.
        wire: BufferId,
        /// The number of the part.
        part: usize,
        /// The bytes of the wire, or of the tensor.
        of: Range<u64>,
    },
    /// Memory outside of the frame.
    Slot(Slot),
    /// Inputs, and other weights and states: never written.
    Outside,
}

/// Memory that is not in the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Slot {
    /// Argument and result of this number, which may share one place.
    Port(usize),
    /// A weight or a state that some task of the schedule writes, by number.
    Lasting(usize),
}

impl Region {
    fn overlaps(&self, other: &Region) -> bool {
        match (self, other) {
            (Region::Part { wire, part, .. }, Region::Part { wire: other, part: n, .. }) if wire == other => {
                part == n
            }
            (
                Region::Bytes(a) | Region::Part { of: a, .. },
                Region::Bytes(b) | Region::Part { of: b, .. },
            ) => a.start.max(b.start) < a.end.min(b.end),
            (Region::Slot(a), Region::Slot(b)) => a == b,
            (Region::Bytes(_) | Region::Part { .. } | Region::Slot(_) | Region::Outside, _) => false,
        }
    }
}

/// The regions that one task reads and writes.
struct Touched {
    reads: Vec<(BufferId, Region)>,
    writes: Vec<(BufferId, Region)>,
    /// The callee's writes: the place of its frame, and weights and states.
    callee: Vec<Region>,
    /// The weights and states that the callee reads.
    callee_reads: Vec<Region>,
}

impl Touched {
    /// What a pack finds in its wire stays there, so it writes the other parts; what an unpack leaves there it does not
    /// write.
    fn leave_in_wires(&mut self, work: &Work) {
        let in_wire = |wire: BufferId, (_, region): &(BufferId, Region)| match region {
            Region::Part { wire: own, part, .. } if *own == wire => Some(*part),
            Region::Bytes(_) | Region::Part { .. } | Region::Slot(_) | Region::Outside => None,
        };
        match (work, self.reads.first(), self.writes.first()) {
            (Work::Pack(transfer), _, Some((wire, Region::Bytes(of)))) => {
                let (wire, of) = (*wire, of.clone());
                let there: Vec<usize> = self.reads.iter().filter_map(|read| in_wire(wire, read)).collect();
                if !there.is_empty() {
                    let parts = (0..transfer.parcels().len()).filter(|part| !there.contains(part));
                    self.writes =
                        parts.map(|part| (wire, Region::Part { wire, part, of: of.clone() })).collect();
                }
            }
            (Work::Unpack(_), Some((wire, _)), _) => {
                let wire = *wire;
                self.writes.retain(|write| in_wire(wire, write).is_none());
            }
            _ => {}
        }
    }
}

/// Adds the mistakes in the use of memory by the ranks that run a line of a frame.
pub(super) fn check(
    schedule: &Schedule,
    line: &Line<'_>,
    lasting: &Lasting<'_>,
    order: &Order,
    found: &mut Diagnostics,
) {
    let frame = line.frame;
    let regions: Vec<Region> =
        frame.buffers.ids().map(|buffer| region(schedule, frame, lasting, buffer)).collect();
    let region = |buffer: BufferId| {
        use crate::entity::Entity;
        regions[buffer.index()].clone()
    };
    let mut memory = Memory {
        space: &schedule.space,
        line,
        order,
        bytes: Bytes::default(),
        parts: BTreeMap::new(),
        slots: BTreeMap::new(),
    };
    for &i in &line.tasks {
        if found.len() >= MAX_DIAGNOSTICS {
            return;
        }
        let task = &frame.tasks[i];
        let held = |buffers: &[BufferId]| -> Vec<(BufferId, Region)> {
            buffers.iter().filter(|&&b| line.holds(b)).map(|&b| (b, region(b))).collect()
        };
        let mut touched = Touched {
            reads: held(&task.reads),
            writes: held(&task.writes),
            callee: vec![],
            callee_reads: vec![],
        };
        touched.leave_in_wires(&task.work);
        if let Work::Call { callee: called, base, .. } = task.work {
            let effects = lasting.effects(called);
            touched.callee.push(Region::Bytes(base..base + schedule.frames[called].bytes));
            touched.callee.extend(effects.writes.iter().map(|&n| Region::Slot(Slot::Lasting(n))));
            touched.callee_reads.extend(effects.reads.iter().map(|&n| Region::Slot(Slot::Lasting(n))));
        }
        for (buffer, region) in &touched.reads {
            if let Err(error) = memory.find(*buffer, region) {
                found.push(in_task(frame, i, with_writer(frame, *buffer, i, error)));
            }
        }
        if let Err(error) = check_in_place(schedule, frame, i, &touched) {
            found.push(in_task(frame, i, error));
        }
        for other in memory.touch(i, &touched) {
            let other = describe(frame, other);
            let message = format!("it touches bytes that {other} touches, and nothing orders the two");
            found.push(in_task(frame, i, OpError::new("S07", message)));
        }
    }
    for output in frame.outputs.iter().filter(|output| line.holds(output.buffer)) {
        if let Err(error) = memory.find(output.buffer, &region(output.buffer)) {
            let message = format!("on return {}", error.message);
            found.push(in_frame(frame, OpError::new(error.code, message)));
        }
    }
}

/// The error, with the task that writes the missing value, if another does.
fn with_writer(frame: &Frame, buffer: BufferId, index: usize, error: OpError) -> OpError {
    match partner::writer(frame, buffer, index) {
        Some(other) if !error.message.contains("task ") => {
            OpError::new(error.code, format!("{}; {} writes it", error.message, describe(frame, other)))
        }
        _ => error,
    }
}

fn region(schedule: &Schedule, frame: &Frame, lasting: &Lasting<'_>, id: BufferId) -> Region {
    let buffer = &frame.buffers[id];
    match buffer.place {
        Place::Frame(offset) => Region::Bytes(offset..offset + buffer.bytes(&schedule.space)),
        Place::Inside { whole, part } => match region(schedule, frame, lasting, whole) {
            Region::Bytes(of) => match frame.piece(&schedule.space, id) {
                Some(piece) => Region::Bytes(of.start + piece.start..of.start + piece.end),
                None => Region::Part { wire: whole, part, of },
            },
            other => other,
        },
        Place::Argument(i) | Place::Result(i) => Region::Slot(Slot::Port(i)),
        Place::Weight(_) | Place::State(_) => {
            lasting.number(frame, id).map_or(Region::Outside, |n| Region::Slot(Slot::Lasting(n)))
        }
        Place::Input(_) => Region::Outside,
    }
}

/// A task may write where it reads when element i of the result needs element i of the operand only; a call, when the
/// argument and the result have one number and each layer is done with what it overwrites; an all-reduce, of one tensor
/// or of a message, when both its ends are the same bytes: sums lie as their terms do on either end, since the types before
/// and after differ in `partial` alone, and NCCL takes one address for both. Of other collectives NCCL allows a
/// reduce-scatter and an all-gather with one end inside of the other, as far in as the rank says; a frame has one address for
/// all ranks, so these are never in place. Ends that overlap otherwise are promised nothing.
fn check_in_place(
    schedule: &Schedule,
    frame: &Frame,
    index: usize,
    touched: &Touched,
) -> Result<(), OpError> {
    let task = &frame.tasks[index];
    let refuse = |what: String| Err(OpError::new("S08", what));
    for (j, (write, written)) in touched.writes.iter().enumerate() {
        let write = *write;
        let before = touched.writes[..j].iter().map(|(_, region)| region);
        let elsewhere = before.chain(&touched.callee).chain(&touched.callee_reads);
        if elsewhere.into_iter().any(|other| other.overlaps(written)) {
            return refuse(format!("it writes `${}` where it writes something else", name(frame, write)));
        }
        let reads = touched.reads.iter().enumerate();
        for (i, (operand, read)) in reads.filter(|(_, (_, read))| read.overlaps(written)) {
            let operand = *operand;
            let same_elements = same_place(read, written) && same_elements(frame, operand, write);
            let fits = match &task.work {
                Work::Compute(op) => works_in_place(op, i) && same_elements,
                Work::Exchange(transfer) => {
                    matches!(transfer.first().op, Op::AllReduce { .. }) && read == written
                }
                Work::Call { callee, layers, scan, .. } => {
                    let is_own = scan.is_none_or(|scan| i < scan.carried)
                        || layers.end - layers.start == 1
                        || takes_slices(schedule, frame, *callee, scan.as_ref(), i, operand);
                    i == j && is_own && (operand == write || matches!(read, Region::Slot(Slot::Port(_))))
                }
                Work::Pack(_) | Work::Unpack(_) | Work::Copy => false,
            };
            if !fits {
                let said = partner::writer(frame, operand, index);
                let said = said.map_or(String::new(), |i| format!(", which {} writes", describe(frame, i)));
                let (operand, write) = (name(frame, operand), name(frame, write));
                return refuse(format!("it writes `${write}` where it reads `${operand}`{said}"));
            }
        }
    }
    for callee in &touched.callee {
        let Some((operand, _)) = touched.reads.iter().find(|(_, read)| read.overlaps(callee)) else {
            continue;
        };
        return refuse(match callee {
            Region::Slot(_) => format!("the callee writes `${}`, an argument", name(frame, *operand)),
            Region::Bytes(_) | Region::Part { .. } | Region::Outside => {
                "the callee's frame is where an argument is".to_owned()
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
    a == b && matches!(a, Region::Bytes(_) | Region::Slot(_))
}

/// Whether element i of both buffers has one address.
fn same_elements(frame: &Frame, a: BufferId, b: BufferId) -> bool {
    match (&frame.buffers[a].content, &frame.buffers[b].content) {
        (Content::Tensor(a), Content::Tensor(b)) => {
            a.dims == b.dims && a.layout.split == b.layout.split && a.dtype.bytes() == b.dtype.bytes()
        }
        (Content::Tensor(_) | Content::Wire { .. }, _) => false,
    }
}

/// The content of memory, and the tasks that touched it last.
struct Memory<'l> {
    space: &'l Space,
    line: &'l Line<'l>,
    order: &'l Order,
    bytes: Bytes,
    /// The writers of the parts of a wire or of a tensor that is filled part by part; none for one that was written whole.
    parts: BTreeMap<BufferId, BTreeMap<usize, Access>>,
    slots: BTreeMap<Slot, Access>,
}

impl Memory<'_> {
    /// Runs a task; returns the tasks that may touch the same memory at the same time, ascending.
    fn touch(&mut self, task: usize, touched: &Touched) -> Vec<usize> {
        let order = self.order;
        let stream = self.line.frame.tasks[task].stream as usize;
        let mut running = Vec::new();
        for region in touched.reads.iter().map(|(_, region)| region).chain(&touched.callee_reads) {
            match region {
                Region::Bytes(range) => self.bytes.read(range, order, (task, stream), &mut running),
                Region::Part { wire, part, of } => {
                    self.bytes.read(of, order, (task, stream), &mut running);
                    let access = self.parts.get_mut(wire).and_then(|parts| parts.get_mut(part));
                    running.extend(access.and_then(|access| access.read(order, task, stream)));
                }
                Region::Slot(slot) => {
                    running.extend(self.slots.entry(*slot).or_default().read(order, task, stream));
                }
                Region::Outside => {}
            }
        }
        // Whoever reads the whole reads all its parts.
        for (wire, _) in &touched.reads {
            for access in self.parts.get_mut(wire).into_iter().flat_map(BTreeMap::values_mut) {
                running.extend(access.read(order, task, stream));
            }
        }
        let callee = touched.callee.iter().map(|region| (None, region));
        let holder = |buffer| self.line.frame.holder(buffer);
        let writes = touched.writes.iter().map(|(buffer, region)| (Some(holder(*buffer)), region));
        for (owner, region) in callee.chain(writes) {
            match region {
                Region::Bytes(range) => {
                    self.bytes.write(range, owner, order, task, &mut running);
                    owner.map(|wire| self.parts.remove(&wire));
                }
                Region::Part { wire, part, of } => match self.bytes.find(of, *wire) {
                    // Another part is there: the wire keeps it, and is touched by both.
                    Found::Whole => {
                        self.bytes.read(of, order, (task, stream), &mut running);
                        let access = self.parts.entry(*wire).or_default().entry(*part).or_default();
                        running.extend(access.write(order, task));
                    }
                    Found::Other(_) | Found::Nothing => {
                        self.bytes.write(of, Some(*wire), order, task, &mut running);
                        let mut access = Access::default();
                        access.write(order, task);
                        self.parts.insert(*wire, BTreeMap::from([(*part, access)]));
                    }
                },
                Region::Slot(slot) => running.extend(self.slots.entry(*slot).or_default().write(order, task)),
                Region::Outside => {}
            }
        }
        running.sort_unstable();
        running.dedup();
        running
    }

    /// Whether `buffer` is where it is read.
    fn find(&self, buffer: BufferId, region: &Region) -> Result<(), OpError> {
        let frame = self.line.frame;
        let shown = name(frame, buffer);
        let refuse = |what: &str| Err(OpError::new("S06", format!("`${shown}` {what}")));
        let whole = match region {
            Region::Part { wire, part, .. } => {
                self.parts.get(wire).is_none_or(|parts| parts.contains_key(part))
            }
            Region::Bytes(_) => self.parts.get(&buffer).is_none_or(|parts| {
                (0..frame.n_parts(self.space, buffer)).all(|part| parts.contains_key(&part))
            }),
            Region::Slot(_) | Region::Outside => true,
        };
        match (region, &frame.buffers[frame.holder(buffer)].place) {
            (Region::Bytes(range) | Region::Part { of: range, .. }, _) if !range.is_empty() => {
                match self.bytes.find(range, frame.holder(buffer)) {
                    Found::Whole if whole => Ok(()),
                    Found::Whole => refuse("is read before all of it is written"),
                    Found::Other(task) => refuse(&format!(
                        "is read after something else was written in its place, by {}",
                        describe(frame, task)
                    )),
                    Found::Nothing => refuse("is read before it is written"),
                }
            }
            (Region::Slot(slot @ Slot::Port(_)), place) => {
                let writer = self.slots.get(slot).and_then(|access| access.writer);
                match (place, writer) {
                    (Place::Argument(_), Some(task)) => refuse(&format!(
                        "is read after {} wrote the result that may be in its place",
                        describe(frame, task)
                    )),
                    (Place::Result(_), None) => refuse("is read before it is written"),
                    _ => Ok(()),
                }
            }
            (Region::Bytes(_) | Region::Part { .. } | Region::Slot(_) | Region::Outside, _) => Ok(()),
        }
    }
}
