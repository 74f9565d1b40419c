//! The integers that inputs may hold: rows of tables, or labels.
//!
//! A kernel takes a row that its rank lacks as zeros, since another rank may have it. So an integer that no rank has would be
//! computed with as if it were right; a program looks at its inputs before it runs.

use std::collections::BTreeMap;

use crate::dim::DimId;
use crate::entity::Entity;
use crate::ops::table::op::Op;
use crate::ops::table::training::{Gradient, Loss};
use crate::ops::table::window::Window;
use crate::schedule::{BufferId, Frame, Place, Schedule, Work};
use crate::space::Space;

/// Integers from zero, below a bound, and perhaps one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Integers {
    /// Their upper bound: the elements of this dimension, without its padding.
    pub below: u64,
    /// Whose elements they number.
    pub dim: DimId,
    /// Their use.
    pub meaning: Meaning,
}

/// The use of integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Rows of a table.
    Rows,
    /// Labels, or this number where a token does not count.
    Labels(i64),
}

impl Integers {
    /// The label of tokens that do not count.
    pub fn ignored(self) -> Option<i64> {
        match self.meaning {
            Meaning::Rows => None,
            Meaning::Labels(ignored) => Some(ignored),
        }
    }

    /// The integers that both accept: a number that only one of them ignores is not accepted.
    fn and(self, other: Integers) -> Integers {
        let narrower = if other.below < self.below { other } else { self };
        let meaning = if self.meaning == other.meaning { self.meaning } else { Meaning::Rows };
        Integers { meaning, ..narrower }
    }
}

/// By name, the inputs whose integers mean something to a task, in whatever frame it reads them.
pub fn of_inputs(schedule: &Schedule) -> BTreeMap<String, Integers> {
    let mut inputs = BTreeMap::new();
    // A callee comes before its callers.
    let mut arguments: Vec<BTreeMap<usize, Integers>> = Vec::new();
    for frame in schedule.frames.values() {
        let of_buffers = of_buffers(&schedule.space, frame, &arguments);
        let mut of_arguments = BTreeMap::new();
        for (buffer, integers) in of_buffers {
            match &frame.buffers[buffer].place {
                Place::Input(binding) => add(&mut inputs, binding.name.clone(), integers),
                Place::Argument(i) => add(&mut of_arguments, *i, integers),
                Place::Inside { .. }
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

/// The integers that the buffers of a frame may hold, given those of the arguments of the frames before it.
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

/// The integers that the second operand of an operation may hold.
fn meaning(space: &Space, op: &Op) -> Option<Integers> {
    match op {
        Op::Embed { over, .. } => Some(integers(space, *over, Meaning::Rows)),
        Op::Loss(Loss::CrossEntropy { over, ignore } | Loss::Pick { over, ignore })
        | Op::Gradient(Gradient::CrossEntropy { over, ignore }) => {
            Some(integers(space, *over, Meaning::Labels(*ignore)))
        }
        _ => None,
    }
}

/// Whether the elements of the result are some of the first operand's.
fn keeps_elements(op: &Op) -> bool {
    matches!(op, Op::Slice { .. } | Op::Take { .. } | Op::Window(Window::Cut { .. }))
}

/// Numbers of a dimension's elements, without its padding; of a part of another, of that one's.
fn integers(space: &Space, dim: DimId, meaning: Meaning) -> Integers {
    match &space.dims[dim].part {
        Some(part) => integers(space, part.of, meaning),
        None => Integers { below: space.dims[dim].valid, dim, meaning },
    }
}
