//! A schedule as JSON, for other tools: frames, tasks, buffers, events.
//!
//! Names stand where the text form has names; types are spelled as the text form spells them. The document says its
//! version; a change that would break a reader raises it, a field more does not.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::message::Parcel;
use ithaca_ir::ops::Op;
use ithaca_ir::ops::attr::Names;
use ithaca_ir::schedule::{Buffer, BufferId, Content, Frame, Place, Schedule, Task, Work};
use ithaca_ir::{Arena, Order, Space, TensorType, text, traffic};
use serde::Serialize;

/// The version of the document.
pub const VERSION: u32 = 1;

/// A schedule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Document {
    /// [`VERSION`].
    pub version: u32,
    /// The model's name.
    pub name: String,
    /// The passes that made it.
    pub pipeline: Vec<String>,
    /// Mesh axes, major to minor.
    pub mesh: Vec<Axis>,
    /// Named dimensions.
    pub dims: Vec<Dim>,
    /// Bytes of the arena on the busiest rank.
    pub arena_bytes: u64,
    /// Frames; a callee stands before its callers, `main` is the last.
    pub frames: Vec<FrameDoc>,
}

/// A mesh axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Axis {
    /// Its name.
    pub name: String,
    /// Ranks along it.
    pub size: u64,
}

/// A dimension.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dim {
    /// Its name.
    pub name: String,
    /// Elements over all ranks, padding included.
    pub size: u64,
    /// Elements without padding.
    pub valid: u64,
    /// Elements that stay together.
    pub granule: u64,
    /// The dimension whose elements it repeats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copies: Option<String>,
    /// The order of its tokens, as the text form spells it; absent where index and position are the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<String>,
    /// What ranks need of another dimension, if this dimension is that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetched: Option<Fetched>,
    /// Which part of another dimension it is, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

/// One of several equal parts of another dimension, cut in each of its runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// The dimension.
    pub of: String,
    /// Which part.
    pub index: u64,
    /// Into how many parts.
    pub count: u64,
    /// How many runs are cut.
    pub runs: u64,
}

/// The tokens that ranks need of a sequence.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fetched {
    /// The sequence.
    pub of: String,
    /// For each rank along the axes that split the sequence: ranges of its indices, the first and one past the last.
    pub parts: Vec<Vec<[u64; 2]>>,
}

/// A frame.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FrameDoc {
    /// Its name.
    pub name: String,
    /// Bytes, those of callees included.
    pub bytes: u64,
    /// Number of arguments.
    pub arguments: usize,
    /// Number of events.
    pub events: usize,
    /// What it returns.
    pub outputs: Vec<OutputDoc>,
    /// Buffers.
    pub buffers: Vec<BufferDoc>,
    /// Tasks, in order of issue.
    pub tasks: Vec<TaskDoc>,
}

/// A returned buffer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OutputDoc {
    /// Its name in `main`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The buffer.
    pub buffer: String,
}

/// A buffer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BufferDoc {
    /// Its name.
    pub name: String,
    /// The type of the tensor; absent for a wire.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub ty: Option<String>,
    /// Element type.
    pub dtype: &'static str,
    /// Bytes on the busiest rank.
    pub bytes: u64,
    /// Where it lies.
    pub place: PlaceDoc,
}

/// Where a buffer lies.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlaceDoc {
    /// Bytes from the start of the frame.
    Frame(u64),
    /// In a wire, as one of the tensors of its message.
    Wire {
        /// The wire.
        buffer: String,
        /// Which tensor of the message.
        part: usize,
    },
    /// The caller's argument.
    Argument(usize),
    /// The caller's result.
    Result(usize),
    /// A stored weight.
    Weight(String),
    /// A stored input.
    Input(String),
    /// The name of a state that lasts from step to step.
    State(String),
}

/// A task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskDoc {
    /// The stream.
    pub stream: &'static str,
    /// What it does: `compute`, `pack`, `exchange`, `unpack`, `copy`, `call`.
    pub work: &'static str,
    /// The operation, of a computation or a collective.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub op: Option<&'static str>,
    /// Its attributes, spelled as the text form spells them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<&'static str, String>,
    /// The mesh axis of a collective; several along which parts travel at once are joined by `+`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub axis: Option<String>,
    /// The type of what a collective is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The type of what it leaves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The tensors of a message of several, in the order in which they are packed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub coalesced: Vec<ParcelDoc>,
    /// The frame that a call runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub callee: Option<String>,
    /// The first layer of a call and one past the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<[u64; 2]>,
    /// How much further the layers of a call are for each layer of the caller, where that is not at all.
    pub stride: Option<u64>,
    /// The dimension along which the layers of a call stack what is their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over: Option<String>,
    /// How many arguments and results the layers of a call hand on, where others are stacked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub carried: Option<usize>,
    /// Which layer of such a call runs first: `ascending` or `descending`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_order: Option<&'static str>,
    /// The stage of a pipeline that runs it; all ranks when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<u64>,
    /// Where the callee's frame starts, bytes from the start of this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// Buffers read.
    pub reads: Vec<String>,
    /// Buffers written.
    pub writes: Vec<String>,
    /// Events waited for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<usize>,
    /// The event recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records: Option<usize>,
}

/// One tensor of a message of several.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParcelDoc {
    /// The attributes of its collective.
    pub attributes: BTreeMap<&'static str, String>,
    /// Its type before.
    pub from: String,
    /// Its type after.
    pub to: String,
}

/// The document of a schedule.
pub fn document(schedule: &Schedule) -> Document {
    let space = &schedule.space;
    Document {
        version: VERSION,
        name: schedule.name.clone(),
        pipeline: schedule.pipeline.clone(),
        mesh: space.mesh.axes.values().map(|a| Axis { name: a.name.clone(), size: a.size }).collect(),
        dims: space
            .dims
            .values()
            .map(|d| Dim {
                name: d.name.clone(),
                size: d.size,
                valid: d.valid,
                granule: d.granule,
                copies: d.copies.map(|of| space.dims[of].name.clone()),
                order: (d.order != Order::Contiguous).then(|| d.order.to_string()),
                fetched: d.fetched.as_ref().map(|f| fetched(space, f)),
                part: d.part.map(|p| part(space, p)),
            })
            .collect(),
        arena_bytes: schedule.arena_bytes(),
        frames: schedule.frames.values().map(|f| frame(schedule, f)).collect(),
    }
}

/// The document as text, ended by a line feed.
pub fn emit(schedule: &Schedule) -> String {
    let mut text = serde_json::to_string_pretty(&document(schedule))
        .expect("the document has string keys only, and writing to a string does not fail");
    text.push('\n');
    text
}

fn fetched(space: &Space, fetched: &ithaca_ir::Fetched) -> Fetched {
    let part = |ranges: &Vec<std::ops::Range<u64>>| ranges.iter().map(|r| [r.start, r.end]).collect();
    Fetched { of: space.dims[fetched.of].name.clone(), parts: fetched.parts.iter().map(part).collect() }
}

fn part(space: &Space, part: ithaca_ir::Part) -> Part {
    let ithaca_ir::Part { of, index, count, runs } = part;
    Part { of: space.dims[of].name.clone(), index, count, runs }
}

fn frame(schedule: &Schedule, frame: &Frame) -> FrameDoc {
    let outputs = frame
        .outputs
        .iter()
        .map(|o| OutputDoc { name: o.name.clone(), buffer: frame.buffers[o.buffer].name.clone() });
    FrameDoc {
        name: frame.name.clone(),
        bytes: frame.bytes,
        arguments: frame.n_arguments,
        events: frame.n_events,
        outputs: outputs.collect(),
        buffers: frame.buffers.values().map(|b| buffer(schedule, frame, b)).collect(),
        tasks: frame.tasks.iter().map(|t| task(schedule, frame, t)).collect(),
    }
}

fn buffer(schedule: &Schedule, frame: &Frame, buffer: &Buffer) -> BufferDoc {
    let space = &schedule.space;
    BufferDoc {
        name: buffer.name.clone(),
        ty: match &buffer.content {
            Content::Tensor(ty) => Some(text::show(space, ty).to_string()),
            Content::Wire { .. } => None,
        },
        dtype: buffer.dtype().name(),
        bytes: buffer.bytes(space),
        place: match &buffer.place {
            Place::Frame(offset) => PlaceDoc::Frame(*offset),
            Place::Wire { wire, part } => {
                PlaceDoc::Wire { buffer: frame.buffers[*wire].name.clone(), part: *part }
            }
            Place::Argument(i) => PlaceDoc::Argument(*i),
            Place::Result(i) => PlaceDoc::Result(*i),
            Place::Weight(binding) => PlaceDoc::Weight(binding.name.clone()),
            Place::Input(binding) => PlaceDoc::Input(binding.name.clone()),
            Place::State(binding) => PlaceDoc::State(binding.name.clone()),
        },
    }
}

fn task(schedule: &Schedule, frame: &Frame, task: &Task) -> TaskDoc {
    let names = |ids: &[BufferId]| ids.iter().map(|&id| frame.buffers[id].name.clone()).collect();
    let mut doc = TaskDoc {
        stream: task.stream.name(),
        work: "",
        op: None,
        attributes: BTreeMap::new(),
        axis: None,
        from: None,
        to: None,
        coalesced: Vec::new(),
        callee: None,
        layers: None,
        stride: None,
        over: None,
        carried: None,
        layer_order: None,
        stage: None,
        base: None,
        reads: names(&task.reads),
        writes: names(&task.writes),
        waits: task.waits.iter().map(|e| e.index()).collect(),
        records: task.records.map(Entity::index),
    };
    match &task.work {
        Work::Compute(op) => {
            (doc.work, doc.op) = ("compute", Some(op.name()));
            doc.attributes = attributes(&schedule.space, op);
        }
        Work::Pack(x) | Work::Exchange(x) | Work::Unpack(x) => {
            doc.work = match &task.work {
                Work::Pack(_) => "pack",
                Work::Unpack(_) => "unpack",
                Work::Exchange(_) | Work::Compute(_) | Work::Copy | Work::Call { .. } => "exchange",
            };
            let show = |ty: &TensorType| text::show(&schedule.space, ty).to_string();
            doc.op = Some(x.first().op.name());
            doc.axis = traffic::axis(&schedule.space, x.parcels());
            match x.only() {
                Some(Parcel { op, from, to }) => {
                    doc.attributes = attributes(&schedule.space, op);
                    (doc.from, doc.to) = (Some(show(from)), Some(show(to)));
                }
                None => {
                    let parcel = |Parcel { op, from, to }: &Parcel| ParcelDoc {
                        attributes: attributes(&schedule.space, op),
                        from: show(from),
                        to: show(to),
                    };
                    doc.coalesced = x.parcels().iter().map(parcel).collect();
                }
            }
        }
        Work::Copy => doc.work = "copy",
        Work::Call { callee, layers, stride, scan, stage, base } => {
            doc.work = "call";
            doc.callee = Some(schedule.frames[*callee].name.clone());
            doc.layers = Some([layers.start, layers.end]);
            doc.stride = (*stride != 0).then_some(*stride);
            if let Some(scan) = scan {
                doc.over = Some(schedule.space.dims[scan.over].name.clone());
                doc.carried = Some(scan.carried);
                doc.layer_order = Some(scan.order.name());
            }
            doc.stage = stage.map(|stage| stage.number);
            doc.base = Some(*base);
        }
    }
    doc
}

fn attributes(space: &Space, op: &Op) -> BTreeMap<&'static str, String> {
    // Tasks name no functions.
    let functions = Arena::new();
    let attrs = op.attrs(Names { space, functions: &functions });
    attrs.into_iter().map(|(key, value)| (key, value.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use ithaca_ir::schedule;

    use super::*;

    #[test]
    fn orders_parts_that_travel_and_attributes_are_told() {
        let schedule = schedule::parse(
            "ithaca 1 schedule\nmodel \"ring\"\nmesh ring=2\ndim s = 8 order zigzag(2)\n\
             dim f = 10 fetches s [[0..4], [2..8]]\n\nframe @main(0) bytes 768 events 1 {\n  \
             buffer $x : f32[s@ring] input {name=\"x\"}\n  buffer $y : f32[s@ring+1] at 0\n  \
             buffer $w : wire f32 10 at 256\n  \
             comm: exchange $x -> $y permute from f32[s@ring] to f32[s@ring+1]\n  \
             compute: pack $x -> $w fetch {to=f} from f32[s@ring] to f32[f@ring]\n  return y = $y\n}\n",
        )
        .unwrap();
        let document = document(&schedule);
        assert_eq!(document.dims[0].order.as_deref(), Some("zigzag(2)"));
        let fetched = Fetched { of: "s".into(), parts: vec![vec![[0, 4]], vec![[2, 8]]] };
        assert_eq!(document.dims[1].fetched, Some(fetched));
        let [permute, fetch] = document.frames[0].tasks.as_slice() else { panic!("two tasks") };
        assert_eq!((permute.axis.as_deref(), permute.to.as_deref()), (Some("ring"), Some("f32[s@ring+1]")));
        assert_eq!(fetch.attributes["to"], "f");
    }
}
