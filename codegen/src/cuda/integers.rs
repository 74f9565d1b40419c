//! What the integers of inputs may be: rows of tables, or labels.
//!
//! A kernel takes a row that its rank lacks as zeros, since another rank may have it. So an integer that no rank has would be
//! computed with as if it were right; a program looks at its inputs before it runs.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::ops::{Gradient, Loss, Op, Window};
use ithaca_ir::schedule::{BufferId, Frame, Place, Schedule, Work};
use ithaca_ir::{DimId, Space};

/// Integers from zero, below a bound, and perhaps one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Integers {
    pub(super) below: u64,
    /// The label of tokens that do not count.
    pub(super) ignored: Option<i64>,
}

impl Integers {
    /// What both take.
    fn and(self, other: Integers) -> Integers {
        let ignored = if self.ignored == other.ignored { self.ignored } else { None };
        Integers { below: self.below.min(other.below), ignored }
    }
}

/// By name, the inputs whose integers mean something to a task, in whatever frame it reads them.
pub(super) fn of_inputs(schedule: &Schedule) -> BTreeMap<String, Integers> {
    let mut inputs = BTreeMap::new();
    // A callee stands before its callers.
    let mut arguments: Vec<BTreeMap<usize, Integers>> = Vec::new();
    for frame in schedule.frames.values() {
        let of_buffers = of_buffers(&schedule.space, frame, &arguments);
        let mut of_arguments = BTreeMap::new();
        for (buffer, integers) in of_buffers {
            match &frame.buffers[buffer].place {
                Place::Input(binding) => add(&mut inputs, binding.name.clone(), integers),
                Place::Argument(i) => add(&mut of_arguments, *i, integers),
                Place::Wire { .. }
                | Place::Frame(_)
                | Place::Result(_)
                | Place::Weight(_)
                | Place::State(_) => {}
            }
        }
        arguments.push(of_arguments);
    }
    inputs
}

/// What the buffers of a frame may hold, given what the arguments of those before it may.
fn of_buffers(
    space: &Space,
    frame: &Frame,
    arguments: &[BTreeMap<usize, Integers>],
) -> BTreeMap<BufferId, Integers> {
    let mut known = BTreeMap::new();
    for task in frame.tasks.iter().rev() {
        let found: Vec<(usize, Integers)> = match &task.work {
            Work::Call { callee, .. } => arguments
                .get(callee.index())
                .into_iter()
                .flatten()
                .map(|(&i, &integers)| (i, integers))
                .collect(),
            Work::Compute(op) => match meaning(space, op) {
                Some(integers) => vec![(1, integers)],
                None if keeps_elements(op) => of_result(&known, &task.writes),
                None => Vec::new(),
            },
            Work::Copy => of_result(&known, &task.writes),
            Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) => Vec::new(),
        };
        for (operand, integers) in found {
            if let Some(&buffer) = task.reads.get(operand) {
                add(&mut known, buffer, integers);
            }
        }
    }
    known
}

/// The first operand, where the result is known.
fn of_result(known: &BTreeMap<BufferId, Integers>, writes: &[BufferId]) -> Vec<(usize, Integers)> {
    writes.first().and_then(|b| known.get(b)).map(|&integers| (0, integers)).into_iter().collect()
}

fn add<K: Ord>(all: &mut BTreeMap<K, Integers>, key: K, integers: Integers) {
    all.entry(key).and_modify(|known| *known = known.and(integers)).or_insert(integers);
}

/// What the second operand of an operation may hold.
fn meaning(space: &Space, op: &Op) -> Option<Integers> {
    match op {
        Op::Embed { over, .. } => Some(Integers { below: size(space, *over), ignored: None }),
        Op::Loss(Loss::CrossEntropy { over, ignore } | Loss::Pick { over, ignore })
        | Op::Gradient(Gradient::CrossEntropy { over, ignore }) => {
            Some(Integers { below: size(space, *over), ignored: Some(*ignore) })
        }
        _ => None,
    }
}

/// Whether the elements of the result are some of the first operand's.
fn keeps_elements(op: &Op) -> bool {
    matches!(op, Op::Slice { .. } | Op::Take { .. } | Op::Window(Window::Cut { .. }))
}

/// Elements of a dimension without padding; of a part of another, that one's.
fn size(space: &Space, dim: DimId) -> u64 {
    let dim = &space.dims[dim];
    dim.part.as_ref().map_or(dim.valid, |part| size(space, part.of))
}
