//! A device program: frames of steps, and the memory that they use.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Arena;
use ithaca_ir::layout::At;
use ithaca_ir::module::Layers;
use ithaca_ir::ops::{Binding, ScanOrder};
use ithaca_ir::schedule::integers::Integers;
use ithaca_ir::schedule::{BufferId, FrameId, Stream, Streams};
use ithaca_ir::{DType, Mesh, TensorType};

use crate::address::Address;
use crate::record::Record;
use crate::value::{Choice, Int};

pub use crate::address::{SourceId, TableId};

/// A schedule as records, for all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProgram {
    /// The model's name.
    pub name: String,
    /// The mesh.
    pub mesh: Mesh,
    /// Frames, with the numbers of the schedule's; a callee is before its callers, `main` is the last.
    pub frames: Arena<FrameId, Frame>,
    /// Bytes of the arena; on a mesh with stages, the bytes for the ranks of each place. A rank of several places needs the
    /// most of them.
    pub arenas: Vec<(Option<At>, u64)>,
    /// Bytes of the counts of filled rows that a rank sends and receives in one collective.
    pub counts: u64,
    /// Bytes of the workspace of kernels: the most that a task of any rank uses.
    pub workspace: u64,
    /// Events of all frames.
    pub n_events: usize,
    /// Weights, states and inputs.
    pub sources: Arena<SourceId, Source>,
    /// Lists of numbers that kernels read; each rank uploads its own.
    pub tables: Arena<TableId, Table>,
    /// The results of `main`.
    pub outputs: Vec<Output>,
}

impl DeviceProgram {
    /// The frame that runs first.
    pub fn main(&self) -> Option<FrameId> {
        self.frames.ids().next_back()
    }

    /// All records, of all ranks.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        let steps = self.frames.values().flat_map(|frame| &frame.steps);
        steps.flat_map(|step| {
            let work = match &step.work {
                Work::Records(records) => records.alternatives.as_slice(),
                Work::Call(_) => &[],
            };
            let checks = step.checks.iter().flat_map(|check| &check.records.alternatives);
            work.iter().chain(checks).flatten()
        })
    }

    /// The names of the kernels that are launched, on any rank.
    pub fn kernels(&self) -> BTreeSet<String> {
        let launched = self.records().filter_map(|record| match record {
            Record::Launch(launch) => Some(launch.kernel.clone()),
            Record::Product(_) | Record::Pair(_) | Record::Copy { .. } | Record::Transfer(_) => None,
        });
        launched.collect()
    }
}

/// A frame of the schedule as steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// The function's name, without its `@`.
    pub name: String,
    /// The number of arguments.
    pub n_arguments: usize,
    /// The number of results.
    pub n_results: usize,
    /// Bytes of the frame, those of callees included.
    pub bytes: u64,
    /// The layers that it runs for and the ranks that run it. Empty for a frame that is never called, which has no steps.
    pub runs: Vec<(Layers, Option<At>)>,
    /// The streams that wait for each other at its start and its end.
    pub joined_streams: Streams,
    /// The stored tensors that it uses, by the number of the buffer in the schedule's frame.
    pub sources: BTreeMap<SourceId, BufferId>,
    /// The steps, in order of issue: one for each task of the schedule's frame.
    pub steps: Vec<Step>,
}

/// A task of the schedule as records.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// A title for people.
    pub title: String,
    /// The kind of work, as profiles group it.
    pub kind: &'static str,
    /// The stream.
    pub stream: Stream,
    /// The ranks that run it: those of any of these places. All ranks where there is no list.
    pub places: Option<Vec<At>>,
    /// Events that the stream waits for before it.
    pub waits: Vec<Wait>,
    /// The work.
    pub work: Work,
    /// The event that the stream records after it, by number in the program.
    pub records: Option<usize>,
    /// Searches for NaN in the buffers that it wrote, where requested.
    pub checks: Vec<Check>,
}

/// A wait for an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The event, by number in the program.
    pub event: usize,
    /// The ranks that record it, as in [`Step::places`]; others do not wait.
    pub places: Option<Vec<At>>,
}

/// The work of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Records, in order of issue.
    Records(Choice<Vec<Record>>),
    /// A frame, once for each layer.
    Call(Call),
}

/// A call of a frame over layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The frame.
    pub frame: FrameId,
    /// The layers, when the caller runs for layer 0.
    pub layers: Layers,
    /// The shift of the layers for each layer of the caller.
    pub stride: u64,
    /// The order of layers.
    pub order: ScanOrder,
    /// Where the callee's frame starts, bytes from the start of the caller's.
    pub base: u64,
    /// The ranks that run the callee, and for which its sources are; those of the caller where absent.
    pub at: Option<At>,
    /// The callee's arguments.
    pub arguments: Vec<Operand>,
    /// The callee's results.
    pub results: Vec<Operand>,
    /// Argument `i` below this number is result `i` of the layer before, from the second layer on.
    pub carried: usize,
}

/// An argument or a result of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// The operand of the first of the layers.
    pub address: Address,
    /// The stride between layers in bytes.
    pub slice: Int,
    /// The ranks that have it; other ranks pass a null pointer.
    pub at: Option<At>,
}

/// A search for the first NaN in a buffer that a step wrote.
///
/// The word at [`Region::Finding`](crate::Region::Finding) is zero before. Afterwards it is zero where there is no
/// NaN, and otherwise `n - i` for the first, element `i` of `n`.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// The number of the buffer in the schedule's frame.
    pub buffer: BufferId,
    /// Elements.
    pub n: Int,
    /// The search.
    pub records: Choice<Vec<Record>>,
}

/// The file that a stored tensor is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFile {
    /// The weights.
    Weights,
    /// The inputs.
    Inputs,
    /// The weights where they have it, else the value that the state begins with.
    States,
}

/// A weight, a state or an input, for all frames that use it.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// The file.
    pub file: SourceFile,
    /// The name and the shape in the file.
    pub binding: Binding,
    /// Its type, without a place.
    pub ty: TensorType,
    /// The layers it is loaded for and the ranks that have them; those of one place are ascending and do not touch. One
    /// layer `0..1` where the name has no `{layer}`.
    pub layers: Vec<(Layers, Option<At>)>,
    /// Whether a step writes it for later ones, so that it is kept from run to run.
    pub is_written: bool,
    /// The shape of the stored tensor.
    pub stored: Vec<u64>,
    /// The range of integers of an input that has one.
    pub integers: Option<Integers>,
    /// The part of a rank.
    pub resident: ResidentTensor,
}

/// An output of the program.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
    /// The address of a rank's part.
    pub address: Address,
    /// The part of a rank.
    pub resident: ResidentTensor,
}

/// A rank's part of a stored tensor: dense, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct ResidentTensor {
    /// Element type.
    pub dtype: DType,
    /// The ranks that have a part; all where absent.
    pub at: Option<At>,
    /// Its dimensions.
    pub dims: Vec<ResidentDim>,
}

/// A dimension of a rank's part.
///
/// Index `i` of `start..end` has index `i / copies` in the sequence, and `runs` maps it to a position, the index in the stored
/// tensor. A position of at least `stored` is padding.
#[derive(Clone, Debug, PartialEq)]
pub struct ResidentDim {
    /// The dimension's name.
    pub name: String,
    /// Elements of the whole dimension, padding and copies included.
    pub size: u64,
    /// Elements of the dimension in the stored tensor.
    pub stored: u64,
    /// The repetitions of each stored element.
    pub copies: u64,
    /// The first index of this rank.
    pub start: Int,
    /// The end of the indices of this rank.
    pub end: Int,
    /// Three numbers for each run of the indices `start / copies` to `(end - 1) / copies`: index, position, length. Empty
    /// where index and position are the same.
    pub runs: Choice<Vec<Int>>,
}

/// An array of eight-byte numbers that kernels read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Table {
    /// Signed integers.
    Integers(Choice<Vec<Int>>),
    /// Bits of doubles.
    Reals(Choice<Vec<u64>>),
}
