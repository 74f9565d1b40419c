//! Whether a schedule computes its program: `S18`.
//!
//! Both are read as expressions: an operation on values, an argument, the former content of a weight. Equal expressions
//! are one value (value numbering), so the two agree where they return the same value, and leave the same value in every
//! weight and state. That a buffer still holds the value that was written to it is shown elsewhere (`S06` to `S08`), so
//! tasks may be in another order, copy, reuse memory, and pack as they like.
//!
//! Translation validation: Pnueli, Siegel and Singerman, TACAS 1998. Functions are compared one by one.

mod values;

use std::borrow::Cow;
use std::sync::Arc;

use crate::boxes::Side;
use crate::diagnostic::{Diagnostic, Diagnostics, MAX_DIAGNOSTICS, counted};
use crate::entity::Entity;
use crate::mesh::Mesh;
use crate::module::Module;
use crate::ops::error::OpError;
use crate::ops::table::op::Op;
use crate::ops::table::source::Target;
use crate::schedule::verify::homes::Home;
use crate::schedule::verify::partner;
use crate::schedule::verify::partner::in_task;
use crate::schedule::verify::report::{describe, in_frame, name};
use crate::schedule::{BufferId, Content, Frame, FrameId, Place, Schedule, Task, Transfer, Work};
use crate::space::Space;
use crate::strided;
use crate::types::TensorType;
use crate::verify::Verified;

use values::{Effects, Lasting, Summary, Symbol, Values, call, effects_of};

/// Checks that a schedule that [`verify`](super::verify) accepts computes a program: its outputs, and the values it
/// leaves in weights and states.
///
/// # Errors
/// `S18` for every difference; at most 64.
pub fn verify_meaning(schedule: &Schedule, program: Verified<'_>) -> Result<(), Diagnostics> {
    let module = program.module();
    let mut found = Diagnostics::new();
    if let Some(message) = mismatch(schedule, module) {
        found.push(Diagnostic::new("S18", message));
        return Err(found);
    }
    let effects = effects_of(module);
    for ((id, function), frame) in module.functions.iter().zip(schedule.frames.values()) {
        if function.name != frame.name {
            let message = format!("it is the frame of function `@{}`", function.name);
            found.push(in_frame(frame, OpError::new("S18", message)));
            continue;
        }
        if function.phase != frame.phase {
            let (is, stated) = (function.phase.name(), frame.phase.name());
            let message = format!("it runs in the {is} phase, and states {stated}");
            found.push(in_frame(frame, OpError::new("S18", message)));
        }
        let mut values = Values::new(&effects);
        let summary = values.of_function(function, id);
        values.of_frame((&schedule.space, frame), &summary, &mut found);
        if found.len() >= MAX_DIAGNOSTICS {
            break;
        }
    }
    found.truncate(MAX_DIAGNOSTICS);
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// How a schedule and a program are of different ranks, dimensions or functions, if they are.
fn mismatch(schedule: &Schedule, module: &Module) -> Option<String> {
    let ranks = |mesh: &Mesh| match mesh.axes.len() {
        0 => "one device".to_owned(),
        _ => format!("mesh `{mesh}`"),
    };
    let (scheduled, stated) = (&schedule.space, &module.space);
    if scheduled.mesh != stated.mesh {
        return Some(format!(
            "the schedule is for {}, and the program for {}",
            ranks(&scheduled.mesh),
            ranks(&stated.mesh)
        ));
    }
    if schedule.frames.len() != module.functions.len() {
        return Some(format!(
            "the schedule has {}, and the program {}",
            counted(schedule.frames.len() as u64, "frame"),
            counted(module.functions.len() as u64, "function")
        ));
    }
    let other = scheduled.dims.values().zip(stated.dims.values()).find(|(a, b)| a != b);
    match other {
        _ if scheduled == stated => None,
        Some((a, b)) if a.name == b.name => {
            Some(format!("dimension `{}` is not the same in the schedule and in the program", a.name))
        }
        Some(_) | None => Some("the schedule and the program do not have the same dimensions".to_owned()),
    }
}

impl<'a> Values<'a> {
    /// The weights and states that a task reads and writes, callees included.
    fn effects_of(&self, frame: &'a Frame, index: usize) -> Effects<'a> {
        let Task { work, reads, writes, .. } = &frame.tasks[index];
        let mut effects = Effects::default();
        work.callee()
            .and_then(|f| self.effects.get(f.index()))
            .into_iter()
            .for_each(|called| effects.add(called));
        reads.iter().filter_map(|&b| home(frame, b)).for_each(|home| effects.reads.set(home, ()));
        writes.iter().filter_map(|&b| home(frame, b)).for_each(|home| effects.writes.set(home, ()));
        effects
    }

    /// The message about a task, with another that writes a weight or a state that it has to do with, where it names none:
    /// the last one before it, or the first one after it.
    fn with_rival(&self, frame: &'a Frame, index: usize, message: String) -> String {
        if message.contains("task ") {
            return message;
        }
        let own = self.effects_of(frame, index);
        let concerned = |home: Home<'a>| own.reads.has_name(home) || own.writes.has_name(home);
        let written = |i: usize| {
            let effects = self.effects_of(frame, i);
            let home = effects.writes.iter().map(|(home, ())| home).find(|&home| concerned(home))?;
            Some((i, home))
        };
        let rival = (0..index).rev().find_map(written);
        match rival.or_else(|| (index + 1..frame.tasks.len()).find_map(written)) {
            Some((i, (target, binding))) => {
                let what = format!("`{}` of {}s", binding.name, target.name());
                format!("{message}; {} writes {what} too", describe(frame, i))
            }
            None => message,
        }
    }

    fn of_frame(
        &mut self,
        (space, frame): (&'a Space, &'a Frame),
        summary: &Summary<'_>,
        found: &mut Diagnostics,
    ) {
        let n = frame.buffers.len();
        let mut reader = Reader {
            space,
            frame,
            held: vec![None; n],
            parts: vec![Vec::new(); n],
            lasting: Lasting::default(),
        };
        let mut writers: Vec<Option<usize>> = vec![None; frame.buffers.len()];
        for (i, task) in frame.tasks.iter().enumerate() {
            if let Err(message) = reader.task(self, task) {
                let message = self.with_rival(frame, i, partner::with_partner(frame, i, message));
                found.push(in_task(frame, i, OpError::new("S18", message)));
                return;
            }
            for &written in &task.writes {
                writers[written.index()] = Some(i);
            }
        }
        let mut refuse = |message: String| found.push(in_frame(frame, OpError::new("S18", message)));
        if frame.outputs.len() != summary.outputs.len() {
            return refuse(format!("it returns {} of {} values", frame.outputs.len(), summary.outputs.len()));
        }
        for (i, (output, (named, symbol))) in frame.outputs.iter().zip(&summary.outputs).enumerate() {
            let is_named = output.name.as_deref() == *named;
            let held = reader.read(self, output.buffer);
            if !is_named || held.as_ref() != Ok(symbol) {
                let shown = name(frame, output.buffer);
                let by = writers[output.buffer.index()];
                let by = by.map_or(String::new(), |i| format!(", by {}", describe(frame, i)));
                refuse(format!("output {i}, `${shown}`, is another value{by} than the program returns"));
            }
        }
        for ((target, binding), symbol) in &summary.lasting {
            if reader.lasting.get((*target, binding)) != Some(*symbol) {
                let home = |b: &BufferId| home(frame, *b).is_some_and(|h| h == (*target, *binding));
                let by = frame.tasks.iter().rposition(|task| task.writes.iter().any(home));
                let by = by.map_or(String::new(), |i| format!(", by {}", describe(frame, i)));
                let what = format!("`{}` of {}s", binding.name, target.name());
                refuse(format!("{what} holds another value{by} than the program assigns"));
            }
        }
        let n = reader.lasting.iter().count();
        if n > summary.lasting.len() {
            refuse(format!("it writes {n} weights and states, and the program {}", summary.lasting.len()));
        }
    }
}

/// The content of buffers while a frame is read.
struct Reader<'a> {
    space: &'a Space,
    frame: &'a Frame,
    held: Vec<Option<Symbol>>,
    /// The tensors that are on each wire, and the parts of each tensor, by buffer, as far as they are there; none where nothing was
    /// packed, or written by part.
    parts: Vec<Vec<Option<Symbol>>>,
    lasting: Lasting<'a>,
}

fn home(frame: &Frame, buffer: BufferId) -> Option<Home<'_>> {
    frame.buffers[frame.holder(buffer)].place.home()
}

impl<'a> Reader<'a> {
    fn read(&self, values: &mut Values<'a>, buffer: BufferId) -> Result<Symbol, String> {
        let frame = self.frame;
        let Content::Tensor(ty) = &frame.buffers[buffer].content else {
            return Err(format!("`${}` holds blocks, not a tensor", name(frame, buffer)));
        };
        match &frame.buffers[buffer].place {
            Place::Argument(i) => Ok(values.argument(*i)),
            Place::Input(binding) => Ok(values.given(None, binding, ty)),
            Place::Weight(binding) => Ok(values.content(&self.lasting, (Target::Param, binding), ty)),
            Place::State(binding) => Ok(values.content(&self.lasting, (Target::State, binding), ty)),
            Place::Frame(_) | Place::Result(_) => {
                let held = self.held[buffer.index()].or_else(|| self.joined(values, buffer, ty));
                held.ok_or_else(|| format!("`${}` holds nothing", name(frame, buffer)))
            }
            Place::Inside { whole, part } if !is_wire(frame, *whole) => {
                match self.parts[whole.index()].get(*part).copied().flatten() {
                    Some(written) => Ok(written),
                    None => {
                        let of = self.read(values, *whole)?;
                        let whole = frame.buffers[*whole].tensor();
                        let place = whole.and_then(|whole| strided::part_of(self.space, whole, ty));
                        let (place, _) = place.ok_or_else(|| "it is no part of a tensor".to_owned())?;
                        let op = Cow::Owned(Op::Take { to: ty.dims[place] });
                        Ok(values.make(op, vec![of], vec![Arc::clone(ty)], 0).0[0])
                    }
                }
            }
            Place::Inside { whole: wire, part } => {
                let on_wire = self.parts[wire.index()].get(*part).copied().flatten();
                let on_wire = on_wire.ok_or_else(|| format!("`${}` holds nothing", name(frame, buffer)))?;
                match frame.carried(*wire) {
                    Some((transfer, Side::Received)) => {
                        let parcel = transfer.parcels().get(*part);
                        let parcel =
                            parcel.map(|parcel| (&parcel.op, Arc::new(parcel.to.clone()))).into_iter();
                        let arrived = values.each(parcel, &[on_wire]);
                        arrived.first().copied().ok_or_else(|| "it is no part of a message".to_owned())
                    }
                    Some((_, Side::Sent)) | None => Ok(on_wire),
                }
            }
        }
    }

    /// The tensor of which all parts were written.
    fn joined(&self, values: &mut Values<'a>, buffer: BufferId, ty: &Arc<TensorType>) -> Option<Symbol> {
        let n = self.frame.n_parts(self.space, buffer);
        let parts: Vec<Symbol> = self.parts[buffer.index()].iter().copied().collect::<Option<_>>()?;
        let one = self.frame.buffers.ids().find(|&b| b != buffer && self.frame.holder(b) == buffer)?;
        let (place, _) = strided::part_of(self.space, ty, self.frame.buffers[one].tensor()?)?;
        let op = Cow::Owned(Op::Join { to: ty.dims[place] });
        (parts.len() == n).then(|| values.make(op, parts, vec![Arc::clone(ty)], 0).0[0])
    }

    /// The tensor of a buffer, or those that are on a wire.
    fn read_all(&self, values: &mut Values<'a>, buffer: BufferId) -> Result<Vec<Symbol>, String> {
        match &self.frame.buffers[buffer].content {
            Content::Tensor(_) => Ok(vec![self.read(values, buffer)?]),
            Content::Wire { .. } => match &self.parts[buffer.index()] {
                wire if wire.is_empty() => Err(format!("`${}` holds nothing", name(self.frame, buffer))),
                wire => {
                    let missing = || format!("part of `${}` holds nothing", name(self.frame, buffer));
                    wire.iter().map(|symbol| symbol.ok_or_else(missing)).collect()
                }
            },
        }
    }

    fn write(&mut self, values: &Values<'a>, buffer: BufferId, symbol: Symbol) {
        if let Place::Inside { whole, part } = self.frame.buffers[buffer].place {
            let n = self.frame.n_parts(self.space, whole);
            let parts = &mut self.parts[whole.index()];
            parts.resize(n.max(part + 1), None);
            parts[part] = Some(symbol);
            return;
        }
        match home(self.frame, buffer) {
            Some(home) => values.assign(&mut self.lasting, home, symbol),
            None => self.held[buffer.index()] = Some(symbol),
        }
    }

    fn task(&mut self, values: &mut Values<'a>, task: &'a Task) -> Result<(), String> {
        let frame = self.frame;
        let types: Vec<Arc<TensorType>> = task
            .writes
            .iter()
            .filter_map(|&b| match &frame.buffers[b].content {
                Content::Tensor(ty) => Some(ty.clone()),
                Content::Wire { .. } => None,
            })
            .collect();
        let all = task.reads.iter().map(|&b| self.read_all(values, b)).collect::<Result<Vec<_>, _>>()?;
        let reads = all.concat();
        let wire = task.writes.iter().copied().find(|&b| is_wire(frame, b));
        let results = match &task.work {
            Work::Compute(op) => values.make(Cow::Borrowed(op), reads, types, 0).0,
            Work::Copy => reads,
            // A wire represents the tensors that are in it: that they are there whole, for this transfer, is shown
            // elsewhere.
            Work::Pack(_) => reads,
            Work::Exchange(t) => match wire {
                Some(_) => reads,
                None => arrive(values, t, &reads)?,
            },
            Work::Unpack(t) => {
                // Of a single tensor the own block may be read where it was sent from.
                let (sent, own) = reads.split_at(all.first().map_or(0, Vec::len));
                if own.iter().any(|symbol| sent != [*symbol]) {
                    return Err("its own block is not of the tensor that was sent".to_owned());
                }
                arrive(values, t, sent)?
            }
            Work::Call { callee, layers, stride, scan, stage, base: _ } => {
                let callee = FrameId::index(*callee);
                let op = call(callee, layers, *stride, *scan, *stage);
                let known = values.n;
                let results = values.call(op, callee, reads, types, &mut self.lasting);
                // Even where its results are unused, a call that the program does not make may have effects.
                if values.n != known {
                    return Err("it is a call that the program does not make".to_owned());
                }
                results
            }
        };
        if let Some(wire) = wire {
            self.parts[wire.index()] = results.into_iter().map(Some).collect();
            return Ok(());
        }
        for (&buffer, symbol) in task.writes.iter().zip(results) {
            // Elements received in a wire stay as they arrived.
            let arrived = matches!(task.work, Work::Unpack(_))
                && matches!(frame.buffers[buffer].place, Place::Inside { .. });
            if !arrived {
                self.write(values, buffer, symbol);
            }
        }
        Ok(())
    }
}

fn is_wire(frame: &Frame, buffer: BufferId) -> bool {
    matches!(frame.buffers[buffer].content, Content::Wire { .. })
}

/// The values that a collective makes of others, one of each.
fn arrive<'a>(
    values: &mut Values<'a>,
    transfer: &'a Transfer,
    sent: &[Symbol],
) -> Result<Vec<Symbol>, String> {
    let parcels = transfer.parcels();
    if parcels.len() != sent.len() {
        return Err(format!("{} tensors arrive of {} that were sent", parcels.len(), sent.len()));
    }
    Ok(values.each(parcels.iter().map(|parcel| (&parcel.op, Arc::new(parcel.to.clone()))), sent))
}
