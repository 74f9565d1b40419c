//! References between frames, tasks and buffers: `S01`, `S02`, `S04`.

use std::collections::BTreeSet;

use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::entity::{Arena, Entity};
use crate::identifier::is_identifier;
use crate::layout::At;
use crate::module::Level;
use crate::ops::context::Context;
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::table::op::Op;
use crate::ops::table::structure::Stage;
use crate::schedule::verify::partner::{in_task, with_users};
use crate::schedule::verify::report::{in_frame, in_range};
use crate::schedule::{ALIGNMENT, Buffer, Content, Frame, FrameId, Place, Schedule, Task, Work};
use crate::verify::{MAX_BYTES, check_type};

/// Checks the list of frames.
pub(super) fn check_frames(schedule: &Schedule, found: &mut Diagnostics) {
    let mut names = BTreeSet::new();
    for frame in schedule.frames.values() {
        if !is_identifier(&frame.name) || !names.insert(frame.name.as_str()) {
            found.push(in_frame(frame, OpError::new("S01", "its name is taken, or is none")));
        }
    }
    match schedule.main().map(|id| &schedule.frames[id]) {
        Some(main) if main.name == "main" => {
            if main.n_arguments != 0 {
                let message = format!("it takes {} arguments, but nothing calls it", main.n_arguments);
                found.push(in_frame(main, OpError::new("S02", message)));
            }
        }
        _ => found.push(Diagnostic::new("S01", "the last frame is not `@main`")),
    }
}

/// Checks buffers and references of one frame.
pub(super) fn check_frame(schedule: &Schedule, id: FrameId, found: &mut Diagnostics) {
    let frame = &schedule.frames[id];
    if frame.bytes > MAX_BYTES {
        found.push(in_frame(frame, OpError::new("S04", format!("it has {} bytes", frame.bytes))));
        return;
    }
    let mut names = BTreeSet::new();
    let (mut arguments, mut results) = (BTreeSet::new(), BTreeSet::new());
    for (id, buffer) in frame.buffers.iter() {
        if !is_identifier(&buffer.name) || !names.insert(buffer.name.as_str()) {
            let message = format!("the name of buffer `${}` is taken, or is none", buffer.name);
            found.push(in_frame(frame, OpError::new("S01", message)));
        }
        let fresh = match buffer.place {
            Place::Argument(i) => arguments.insert(i) && i < frame.n_arguments,
            Place::Result(i) => results.insert(i) && i < frame.outputs.len() && frame.name != "main",
            Place::Frame(_) | Place::Inside { .. } | Place::Weight(_) | Place::Input(_) | Place::State(_) => {
                true
            }
        };
        if !fresh {
            let message =
                format!("buffer `${}` is an argument or result that is not there, or is taken", buffer.name);
            found.push(in_frame(frame, OpError::new("S02", message)));
        }
        if let Err(error) = check_buffer(schedule, frame, buffer) {
            let message = with_users(frame, id, &format!("buffer `${}`: {}", buffer.name, error.message));
            found.push(in_frame(frame, OpError::new(error.code, message)));
        }
    }
    if arguments.len() != frame.n_arguments {
        let message = format!("{} of {} arguments have a buffer", arguments.len(), frame.n_arguments);
        found.push(in_frame(frame, OpError::new("S02", message)));
    }
    if let Err(error) = check_outputs(frame) {
        found.push(in_frame(frame, error));
    }
    for (i, task) in frame.tasks.iter().enumerate() {
        if let Err(error) = check_references(schedule, id, task) {
            found.push(in_task(frame, i, error));
        }
    }
}

fn check_buffer(schedule: &Schedule, frame: &Frame, buffer: &Buffer) -> Result<(), OpError> {
    let Buffer { content, place, .. } = buffer;
    let bytes = match content {
        Content::Tensor(ty) => {
            check_type(&schedule.space, Level::PerRank, ty)?;
            Some(schedule.space.max_local_bytes(ty))
        }
        Content::Wire { dtype, elements } => dtype.bytes().checked_mul(*elements),
    };
    match (place, content) {
        (Place::Frame(offset), _) => {
            ensure!(offset.is_multiple_of(ALIGNMENT), "S04", "offset {offset} is no multiple of {ALIGNMENT}");
            let end = bytes.and_then(|n| n.checked_add(*offset));
            ensure!(
                end.is_some_and(|end| end <= frame.bytes),
                "S04",
                "it does not end inside the {} bytes of the frame",
                frame.bytes
            );
            Ok(())
        }
        (Place::Argument(_) | Place::Result(_), Content::Tensor(_)) => Ok(()),
        (Place::Inside { whole, .. }, Content::Tensor(_)) => match frame.buffers.get(*whole) {
            Some(Buffer { place: Place::Frame(_), .. }) => Ok(()),
            Some(Buffer {
                content: Content::Tensor(_),
                place: Place::Argument(_) | Place::Result(_) | Place::Weight(_),
                ..
            }) => Ok(()),
            Some(_) => Err(OpError::new(
                "S03",
                "what it lies in is no wire, and no tensor that it could be a part of",
            )),
            None => Err(OpError::new("S01", "the buffer that it lies in is not there")),
        },
        (Place::Weight(binding) | Place::Input(binding) | Place::State(binding), Content::Tensor(ty)) => {
            let cx = Context { space: &schedule.space, functions: &Arena::new() };
            let op = match place {
                Place::Input(_) => Op::Input(binding.clone()),
                Place::State(_) => Op::State(binding.clone()),
                _ => Op::Param(binding.clone()),
            };
            op.infer(cx, &[], std::slice::from_ref(ty)).map(|_| ())
        }
        (_, Content::Wire { .. }) => Err(OpError::new("S03", "only a place in the frame can hold blocks")),
    }
}

fn check_outputs(frame: &Frame) -> Result<(), OpError> {
    let mut names = BTreeSet::new();
    for (i, output) in frame.outputs.iter().enumerate() {
        let Some(buffer) = frame.buffers.get(output.buffer) else {
            bail!("S01", "output {i} is a buffer that is not there");
        };
        let is_tensor = matches!(buffer.content, Content::Tensor(_));
        let fits = match (&output.name, &buffer.place) {
            (Some(name), Place::Frame(_) | Place::Weight(_) | Place::Input(_) | Place::State(_)) => {
                frame.name == "main" && is_identifier(name) && names.insert(name.as_str())
            }
            (None, Place::Result(n)) => *n == i,
            (Some(_), Place::Argument(_) | Place::Result(_) | Place::Inside { .. })
            | (
                None,
                Place::Frame(_)
                | Place::Inside { .. }
                | Place::Argument(_)
                | Place::Weight(_)
                | Place::Input(_)
                | Place::State(_),
            ) => false,
        };
        if !fits || !is_tensor {
            let rule = match frame.name.as_str() {
                "main" => "must have a name of its own and lie in the frame".to_owned(),
                _ => format!("must be placed at result {i} and have no name"),
            };
            bail!("S02", "output {i}, `${}`, {rule}", buffer.name);
        }
    }
    Ok(())
}

fn check_references(schedule: &Schedule, id: FrameId, task: &Task) -> Result<(), OpError> {
    let frame = &schedule.frames[id];
    let Task { work, reads, writes, waits, records, .. } = task;
    ensure!(
        reads.iter().chain(writes).all(|&b| in_range(b, frame.buffers.len())),
        "S01",
        "it names a buffer that is not there"
    );
    if let Some(event) = waits.iter().chain(records).find(|&&e| !in_range(e, frame.n_events)) {
        bail!("S01", "there is no event e{} among {}", event.index(), frame.n_events);
    }
    let Work::Call { callee, base, stage, .. } = work else { return Ok(()) };
    if let Some(At { axis, coordinate }) = stage.and_then(Stage::at) {
        let along = schedule.space.mesh.axes.get(axis).map(|axis| axis.size);
        ensure!(
            along.is_some_and(|size| coordinate < size),
            "S01",
            "it runs on stage {coordinate}, and there are {}",
            along.unwrap_or(0)
        );
    }
    ensure!(*callee < id, "S01", "it calls a frame that does not stand before its own");
    let end = base.checked_add(schedule.frames[*callee].bytes);
    ensure!(
        base.is_multiple_of(ALIGNMENT) && end.is_some_and(|end| end <= frame.bytes),
        "S04",
        "the callee's {} bytes at {base} do not lie, aligned to {ALIGNMENT}, in the frame of {}",
        schedule.frames[*callee].bytes,
        frame.bytes
    );
    Ok(())
}
