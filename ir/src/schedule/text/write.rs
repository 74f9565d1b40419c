//! Prints schedules.

use std::fmt;
use std::fmt::Write;

use crate::entity::Entity;
use crate::message::Parcel;
use crate::ops::attr::{Attr, Names, NoFunctions};
use crate::ops::attribute::Attribute;
use crate::ops::table::op::Op;
use crate::phase::Phase;
use crate::schedule::{Buffer, BufferId, Content, EventId, Frame, FrameOutput, Place, Schedule, Task, Work};
use crate::space::Space;
use crate::text::grammar::{write_attrs, write_header};
use crate::text::show::show;

/// The text form.
pub fn print(schedule: &Schedule) -> String {
    let mut out = String::new();
    write_schedule(&mut out, schedule).expect("writing to a string does not fail");
    out
}

fn write_schedule(out: &mut String, schedule: &Schedule) -> fmt::Result {
    let Schedule { name, pipeline, space, frames } = schedule;
    write_header(out, "schedule", name, pipeline, space)?;
    for frame in frames.values() {
        let Frame { name, phase, n_arguments, n_events, bytes, buffers, tasks, outputs } = frame;
        write!(out, "\nframe @{name}({n_arguments})")?;
        if *phase != Phase::default() {
            write!(out, " phase {}", phase.name())?;
        }
        writeln!(out, " bytes {bytes} events {n_events} {{")?;
        for buffer in buffers.values() {
            write_buffer(out, space, frame, buffer)?;
        }
        for task in tasks {
            write_task(out, schedule, frame, task)?;
        }
        out.push_str("  return");
        for (i, FrameOutput { name, buffer }) in outputs.iter().enumerate() {
            out.push_str(if i == 0 { " " } else { ", " });
            if let Some(name) = name {
                write!(out, "{name} = ")?;
            }
            write!(out, "${}", buffers[*buffer].name)?;
        }
        out.push_str("\n}\n");
    }
    Ok(())
}

fn write_buffer(out: &mut String, space: &Space, frame: &Frame, buffer: &Buffer) -> fmt::Result {
    let Buffer { name, content, place } = buffer;
    write!(out, "  buffer ${name} : ")?;
    match content {
        Content::Tensor(ty) => write!(out, "{}", show(space, ty))?,
        Content::Wire { dtype, elements } => write!(out, "wire {dtype} {elements}")?,
    }
    let (word, source) = match place {
        Place::Frame(offset) => return writeln!(out, " at {offset}"),
        Place::Inside { whole, part } => {
            return writeln!(out, " in ${} part {part}", frame.buffers[*whole].name);
        }
        Place::Argument(i) => return writeln!(out, " argument {i}"),
        Place::Result(i) => return writeln!(out, " result {i}"),
        Place::Weight(binding) => ("weight", Op::Param(binding.clone())),
        Place::Input(binding) => ("input", Op::Input(binding.clone())),
        Place::State(binding) => ("state", Op::State(binding.clone())),
    };
    write!(out, " {word}")?;
    write_op_attrs(out, space, &source)?;
    writeln!(out)
}

fn write_task(out: &mut String, schedule: &Schedule, frame: &Frame, task: &Task) -> fmt::Result {
    let Task { stream, work, reads, writes, waits, records } = task;
    let space = &schedule.space;
    write!(out, "  {stream}: {}", work.name())?;
    write_buffers(out, frame, reads)?;
    if !writes.is_empty() {
        out.push_str(" ->");
        write_buffers(out, frame, writes)?;
    }
    match work {
        Work::Compute(op) => write_op_attrs(out, space, op)?,
        Work::Pack(transfer) | Work::Exchange(transfer) | Work::Unpack(transfer) => {
            for (i, Parcel { op, from, to }) in transfer.parcels().iter().enumerate() {
                write!(out, "{} {}", if i == 0 { "" } else { " and" }, op.name())?;
                write_op_attrs(out, space, op)?;
                write!(out, " from {} to {}", show(space, from), show(space, to))?;
            }
        }
        Work::Copy => {}
        Work::Call { callee, layers, stride, base, scan, stage } => {
            let mut attrs = vec![
                ("callee", Attr::Func(schedule.frames[*callee].name.clone())),
                ("layers", Attr::Range(layers.start, layers.end)),
                ("base", Attr::Int(*base)),
            ];
            let names = Names { space, functions: &NoFunctions };
            stride.write("stride", Some(&0), names, &mut attrs);
            scan.write("scan", None, names, &mut attrs);
            stage.write("stage", None, names, &mut attrs);
            write_attrs(out, &attrs)?;
        }
    }
    if !waits.is_empty() {
        write_events(out, " wait", waits)?;
    }
    if let Some(event) = records {
        write_events(out, " record", &[*event])?;
    }
    out.push('\n');
    Ok(())
}

fn write_op_attrs(out: &mut String, space: &Space, op: &Op) -> fmt::Result {
    write_attrs(out, &op.attrs(Names { space, functions: &NoFunctions }))
}

fn write_buffers(out: &mut String, frame: &Frame, buffers: &[BufferId]) -> fmt::Result {
    for (i, &buffer) in buffers.iter().enumerate() {
        write!(out, "{}${}", if i == 0 { " " } else { ", " }, frame.buffers[buffer].name)?;
    }
    Ok(())
}

fn write_events(out: &mut String, word: &str, events: &[EventId]) -> fmt::Result {
    let names: Vec<String> = events.iter().map(|e| format!("e{}", e.index())).collect();
    write!(out, "{word}({})", names.join(", "))
}
