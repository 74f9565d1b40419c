//! A schedule as JSON, for other tools: frames, tasks, buffers, events.
//!
//! Frames, buffers and dimensions are given by name; types, orders and attributes are spelled as in the text form. A
//! field without a value is absent. The document has a version; a change that would break a reader raises it, an
//! additional field does not.
//!
//! | object | field | content |
//! |---|---|---|
//! | document | `version`, `name`, `pipeline` | [`VERSION`], the model's name, the passes that made the schedule |
//! | | `mesh` | axes, major to minor: `name`, `size` in ranks |
//! | | `dims`, `frames` | named dimensions; frames, callees before callers, `main` last |
//! | | `arena_bytes` | bytes of the arena on the busiest rank |
//! | dimension | `size`, `valid`, `granule` | elements over all ranks, without padding, and that stay together |
//! | | `copies` | the dimension whose elements it repeats |
//! | | `order` | the order of its tokens, where index and position differ |
//! | | `fetched` | the sequence (`of`) and for each rank along its axes the ranges of its indices (`parts`) |
//! | | `part` | part `index` of `count` of the dimension `of`, cut in each of `runs` |
//! | frame | `bytes`, `arguments`, `events` | bytes with those of callees; numbers of arguments and events |
//! | | `outputs` | the returned buffers, with a `name` in `main` |
//! | buffer | `type`, `dtype`, `bytes` | the tensor's type, absent for a wire; bytes on the busiest rank |
//! | | `place` | `frame` (offset in bytes), `argument`, `result` (number), `weight`, `input`, `state` (name), or `wire`: the `buffer` and the `part` of its message |
//! | task | `stream`, `work` | `compute`, `pack`, `exchange`, `unpack`, `copy` or `call` on `compute` or `comm` |
//! | | `op`, `attributes` | the operation of a computation or a collective |
//! | | `axis`, `from`, `to` | of a collective: mesh axes, joined by `+`, and the types before and after |
//! | | `coalesced` | the tensors of a message of several, in order: `attributes`, `from`, `to` |
//! | | `callee`, `layers`, `stride` | of a call: the frame, the first layer and one past the last, and how many layers further it runs for each layer of the caller |
//! | | `over`, `carried`, `layer_order` | of a call that stacks results: the dimension, the number of results that are handed on, and `ascending` or `descending` |
//! | | `stage`, `base` | of a call: the stage of a pipeline that runs it; where its frame starts, bytes from the start of this one |
//! | | `reads`, `writes`, `waits`, `records` | buffers, events waited for, and the event recorded |

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::message::Parcel;
use ithaca_ir::ops::Op;
use ithaca_ir::ops::attr::Names;
use ithaca_ir::schedule::{Buffer, BufferId, Frame, Place, Schedule, Task, Work};
use ithaca_ir::{Arena, Dim, Order, Space, TensorType, text, traffic};
use serde_json::{Value, json};

/// The version of the document.
pub const VERSION: u32 = 1;

/// The document of a schedule.
pub fn document(schedule: &Schedule) -> Value {
    let Space { mesh, dims } = &schedule.space;
    let axes: Vec<Value> =
        mesh.axes.values().map(|axis| json!({ "name": axis.name, "size": axis.size })).collect();
    let dims: Vec<Value> = dims.values().map(|dim| dimension(&schedule.space, dim)).collect();
    let frames: Vec<Value> = schedule.frames.values().map(|f| frame(schedule, f)).collect();
    json!({
        "version": VERSION,
        "name": schedule.name,
        "pipeline": schedule.pipeline,
        "mesh": axes,
        "dims": dims,
        "arena_bytes": schedule.arena_bytes(),
        "frames": frames,
    })
}

/// The document as text, ended by a line feed.
pub fn emit(schedule: &Schedule) -> String {
    format!("{:#}\n", document(schedule))
}

/// The object of the fields that are present.
fn object<const N: usize>(fields: [(&str, Option<Value>); N]) -> Value {
    fields.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn dimension(space: &Space, dim: &Dim) -> Value {
    let name = |of| space.dims[of].name.as_str();
    let fetched = dim.fetched.as_ref().map(|fetched| {
        let part = |ranges: &Vec<std::ops::Range<u64>>| -> Value {
            ranges.iter().map(|range| json!([range.start, range.end])).collect()
        };
        json!({ "of": name(fetched.of), "parts": fetched.parts().iter().map(part).collect::<Value>() })
    });
    let part = dim.part.map(
        |part| json!({ "of": name(part.of), "index": part.index, "count": part.count, "runs": part.runs }),
    );
    object([
        ("name", Some(json!(dim.name))),
        ("size", Some(json!(dim.size))),
        ("valid", Some(json!(dim.valid))),
        ("granule", Some(json!(dim.granule))),
        ("copies", dim.copies.map(|of| json!(name(of)))),
        ("order", (dim.order != Order::Contiguous).then(|| json!(dim.order.to_string()))),
        ("fetched", fetched),
        ("part", part),
    ])
}

fn frame(schedule: &Schedule, frame: &Frame) -> Value {
    let outputs = frame.outputs.iter().map(|output| {
        let buffer = json!(frame.buffers[output.buffer].name);
        object([("name", output.name.as_ref().map(|name| json!(name))), ("buffer", Some(buffer))])
    });
    json!({
        "name": frame.name,
        "bytes": frame.bytes,
        "arguments": frame.n_arguments,
        "events": frame.n_events,
        "outputs": outputs.collect::<Value>(),
        "buffers": frame.buffers.values().map(|b| buffer(&schedule.space, frame, b)).collect::<Value>(),
        "tasks": frame.tasks.iter().map(|t| task(schedule, frame, t)).collect::<Value>(),
    })
}

fn buffer(space: &Space, frame: &Frame, buffer: &Buffer) -> Value {
    let ty = buffer.tensor().map(|ty| show(space, ty));
    let place = match &buffer.place {
        Place::Frame(offset) => json!({ "frame": offset }),
        Place::Inside { whole, part } => {
            json!({ "inside": { "buffer": frame.buffers[*whole].name, "part": part } })
        }
        Place::Argument(i) => json!({ "argument": i }),
        Place::Result(i) => json!({ "result": i }),
        Place::Weight(binding) => json!({ "weight": binding.name }),
        Place::Input(binding) => json!({ "input": binding.name }),
        Place::State(binding) => json!({ "state": binding.name }),
    };
    object([
        ("name", Some(json!(buffer.name))),
        ("type", ty),
        ("dtype", Some(json!(buffer.dtype().name()))),
        ("bytes", Some(json!(buffer.bytes(space)))),
        ("place", Some(place)),
    ])
}

fn task(schedule: &Schedule, frame: &Frame, task: &Task) -> Value {
    let space = &schedule.space;
    let names = |ids: &[BufferId]| ids.iter().map(|&id| frame.buffers[id].name.as_str()).collect::<Value>();
    let (op, transfer) = match &task.work {
        Work::Compute(op) => (Some(op), None),
        Work::Pack(x) | Work::Exchange(x) | Work::Unpack(x) => (Some(&x.first().op), Some(x)),
        Work::Copy | Work::Call { .. } => (None, None),
    };
    let several = transfer.filter(|x| x.only().is_none());
    let only = transfer.and_then(|x| x.only());
    let coalesced = several.map(|x| {
        let parcel = |Parcel { op, from, to }: &Parcel| {
            json!({ "attributes": attributes(space, op), "from": show(space, from), "to": show(space, to) })
        };
        x.parcels().iter().map(parcel).collect()
    });
    let attributes = op.filter(|_| several.is_none()).map(|op| attributes(space, op));
    let (call, scan, stage) = match &task.work {
        Work::Call { callee, layers, stride, scan, stage, base } => {
            (Some((schedule.frames[*callee].name.as_str(), layers, *stride, *base)), *scan, *stage)
        }
        Work::Compute(_) | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => {
            (None, None, None)
        }
    };
    let work = if matches!(task.work, Work::Compute(_)) { "compute" } else { task.work.name() };
    let waits: Vec<usize> = task.waits.iter().map(|event| event.index()).collect();
    object([
        ("stream", Some(json!(task.stream.name()))),
        ("work", Some(json!(work))),
        ("op", op.map(|op| json!(op.name()))),
        ("attributes", attributes.filter(|all| !all.is_empty()).map(|all| json!(all))),
        ("axis", transfer.and_then(|x| traffic::axis(space, x.parcels())).map(Value::from)),
        ("from", only.map(|parcel| show(space, &parcel.from))),
        ("to", only.map(|parcel| show(space, &parcel.to))),
        ("coalesced", coalesced),
        ("callee", call.map(|(name, ..)| json!(name))),
        ("layers", call.map(|(_, layers, ..)| json!([layers.start, layers.end]))),
        // Null where the layers are those of the call alone, as readers of version 1 expect.
        ("stride", Some(json!(call.map(|(_, _, stride, _)| stride).filter(|&stride| stride != 0)))),
        ("over", scan.map(|scan| json!(space.dims[scan.over].name))),
        ("carried", scan.map(|scan| json!(scan.carried))),
        ("layer_order", scan.map(|scan| json!(scan.order.name()))),
        ("stage", stage.map(|stage| json!(stage.number))),
        ("base", call.map(|(.., base)| json!(base))),
        ("reads", Some(names(&task.reads))),
        ("writes", Some(names(&task.writes))),
        ("waits", (!waits.is_empty()).then(|| json!(waits))),
        ("records", task.records.map(|event| json!(event.index()))),
    ])
}

fn show(space: &Space, ty: &TensorType) -> Value {
    json!(text::show(space, ty).to_string())
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
        assert_eq!(document["dims"][0]["order"], "zigzag(2)");
        let fetched = json!({ "of": "s", "parts": [[[0, 4]], [[2, 8]]] });
        assert_eq!(document["dims"][1]["fetched"], fetched);
        let [permute, fetch] = &document["frames"][0]["tasks"].as_array().unwrap()[..] else {
            panic!("two tasks")
        };
        assert_eq!((&permute["axis"], &permute["to"]), (&json!("ring"), &json!("f32[s@ring+1]")));
        assert_eq!(fetch["attributes"]["to"], "f");
    }
}
