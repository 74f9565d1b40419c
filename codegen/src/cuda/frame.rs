//! A frame as a C++ function: its buffers as named pointers, then its tasks in order of issue.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Write as _;

use ithaca_device::program::SourceId;
use ithaca_device::{Call, Choice, Operand, Record, Region, SourceFile, Step, Wait, Work};
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::ops::ScanOrder;
use ithaca_ir::schedule::{self, Buffer, BufferId, Content, FrameId, Place, Stream, Task};
use ithaca_ir::text;

use super::context::Context;
use super::lines;
use super::names::{self, Names};
use super::number::Numbers;
use super::record::{Pointers, Writer};

/// The function of a frame.
pub(super) fn print(cx: &Context<'_>, numbers: &Numbers<'_>, id: FrameId) -> String {
    let (frame, of_schedule) = (&cx.program.frames[id], &cx.schedule.frames[id]);
    let mut names = Names::for_variables();
    let names = of_schedule.buffers.values().map(|buffer| names.fresh("", variable(buffer))).collect();
    let mut printer =
        Printer { cx, numbers, of_schedule, names, used: RefCell::default(), out: String::new() };
    for (number, step) in frame.steps.iter().enumerate() {
        // Tasks of the same ranks share a condition.
        let places = |number: usize| frame.steps.get(number).and_then(|step| step.places.as_ref());
        let is_first = number == 0 || places(number - 1) != step.places.as_ref();
        let is_last = places(number + 1) != step.places.as_ref() || number + 1 == frame.steps.len();
        let indent = if step.places.is_some() { 2 } else { 1 };
        if let (true, Some(at)) = (is_first, &step.places) {
            let condition = printer.numbers.is_at(at);
            printer.line(1, &format!("if ({condition}) {{"));
        }
        printer.step(number, step, indent);
        if is_last && step.places.is_some() {
            printer.line(1, "}");
        }
    }
    let body = printer.out.clone();
    let pointers = printer.pointers();
    let mut out = format!(
        "// @{}: {} arguments, {} results, {} bytes.\nstatic void {}(const Scope& in) {{\n",
        names::comment(&frame.name),
        frame.n_arguments,
        frame.n_results,
        frame.bytes,
        cx.functions[id.index()],
    );
    if numbers.take_uses_coordinates() {
        out.push_str("    const Coordinates c(in.device.rank);\n");
    }
    out.push_str(&pointers);
    let _ = writeln!(out, "    Frame s(in, {});", names::string(&frame.name));
    let join = match frame.joined_streams.iter().collect::<Vec<_>>().as_slice() {
        [] => String::new(),
        [Stream::Compute, Stream::Comm] => "    s.join_streams();\n".to_owned(),
        streams => {
            let queues: Vec<_> = streams.iter().copied().map(queue).collect();
            format!("    s.join_streams({{{}}});\n", queues.join(", "))
        }
    };
    let _ = writeln!(out, "{join}{body}{join}}}");
    out
}

struct Printer<'p, 'n, 'a> {
    cx: &'p Context<'a>,
    numbers: &'p Numbers<'n>,
    of_schedule: &'p schedule::Frame,
    names: Vec<String>,
    /// The buffers whose pointers are used.
    used: RefCell<BTreeSet<BufferId>>,
    out: String,
}

impl Printer<'_, '_, '_> {
    fn line(&mut self, indent: usize, text: &str) {
        lines::push(&mut self.out, indent, text);
    }

    /// The declarations of pointers.
    fn pointers(&self) -> String {
        let mut out = String::new();
        for &id in self.used.borrow().iter() {
            let buffer = &self.of_schedule.buffers[id];
            let content = match &buffer.content {
                Content::Tensor(ty) => text::show(&self.cx.schedule.space, ty).to_string(),
                Content::Wire { dtype, elements } => format!("wire of {elements} {dtype}"),
            };
            let place = match &buffer.place {
                Place::Frame(0) => "in.frame".to_owned(),
                Place::Frame(offset) => format!("in.frame + {offset}"),
                Place::Argument(i) => format!("in.arguments[{i}]"),
                Place::Result(i) => format!("in.results[{i}]"),
                Place::Weight(_) | Place::State(_) | Place::Input(_) => {
                    self.source(id).map_or_else(String::new, |source| self.source_address(source))
                }
                Place::Inside { .. } => continue,
            };
            let name = &self.names[id.index()];
            let _ = writeln!(out, "    const Address {name} = {place};  // {}", names::comment(&content));
        }
        out
    }

    /// The source of a buffer.
    fn source(&self, id: BufferId) -> Option<SourceId> {
        let buffer = &self.of_schedule.buffers[id];
        let (file, binding) = match &buffer.place {
            Place::Weight(binding) => (SourceFile::Weights, binding),
            Place::State(binding) => (SourceFile::States, binding),
            Place::Input(binding) => (SourceFile::Inputs, binding),
            Place::Frame(_) | Place::Argument(_) | Place::Result(_) | Place::Inside { .. } => return None,
        };
        let Content::Tensor(ty) = &buffer.content else { return None };
        let ty = ty.located(None);
        let is_this = |source: &ithaca_device::Source| {
            source.file == file && source.binding == *binding && source.ty == ty
        };
        self.cx.program.sources.iter().find(|(_, source)| is_this(source)).map(|(source, _)| source)
    }

    /// The expression for the address of a source.
    fn source_address(&self, source: SourceId) -> String {
        let found = &self.cx.program.sources[source];
        let (binding, further) = found.binding.of_own_layer();
        let is_own = |other: &ithaca_device::Source| {
            other.file == found.file && other.binding == *binding && other.ty == found.ty
        };
        let own =
            self.cx.program.sources.iter().find(|(_, other)| is_own(other)).map_or(source, |(own, _)| own);
        let layer = match (binding.is_per_layer(), further) {
            (false, _) => "0".to_owned(),
            (true, 0) => "in.layer".to_owned(),
            (true, further) => format!("in.layer + {further}"),
        };
        format!("in.device.source({}, {layer})", own.index())
    }

    /// The base pointer of an address in a task, and its offset from the region's start.
    fn pointer(&self, task: &Task, region: Region, offset: i64) -> (String, i64) {
        let buffers = || {
            let accessed = task.reads.iter().chain(&task.writes);
            accessed.flat_map(|&id| [id, self.of_schedule.holder(id)])
        };
        let named = |id: BufferId, start: i64| {
            self.used.borrow_mut().insert(id);
            (self.names[id.index()].clone(), start)
        };
        let place = |id: BufferId| &self.of_schedule.buffers[id].place;
        let found = match region {
            Region::Frame => {
                let start = |id: BufferId| match place(id) {
                    Place::Frame(start) => i64::try_from(*start).ok().filter(|&start| start <= offset),
                    _ => None,
                };
                let nearest =
                    buffers().filter_map(|id| Some((start(id)?, id))).max_by_key(|&(start, id)| (start, id));
                nearest.map(|(start, id)| named(id, start))
            }
            Region::Argument(i) => {
                buffers().find(|&id| *place(id) == Place::Argument(i)).map(|id| named(id, 0))
            }
            Region::Result(i) => buffers().find(|&id| *place(id) == Place::Result(i)).map(|id| named(id, 0)),
            Region::Source(source) => {
                buffers().find(|&id| self.source(id) == Some(source)).map(|id| named(id, 0))
            }
            Region::Null
            | Region::Table(_)
            | Region::Finding
            | Region::Overflow
            | Region::Counts
            | Region::Workspace => None,
        };
        found.unwrap_or_else(|| {
            let pointer = match region {
                Region::Null | Region::Finding => "Address{}".to_owned(),
                Region::Overflow => "in.device.overflow()".to_owned(),
                Region::Workspace => "in.device.workspace()".to_owned(),
                Region::Counts => "in.device.counts()".to_owned(),
                Region::Frame => "in.frame".to_owned(),
                Region::Argument(i) => format!("in.arguments[{i}]"),
                Region::Result(i) => format!("in.results[{i}]"),
                Region::Source(source) => self.source_address(source),
                Region::Table(table) => format!("in.device.table({})", table.index()),
            };
            (pointer, 0)
        })
    }

    fn step(&mut self, number: usize, step: &Step, indent: usize) {
        let queue = queue(step.stream);
        for wait in &step.waits {
            let guard = self.guard(wait, step);
            self.line(indent, &format!("{guard}s.wait({queue}, {});", wait.event));
        }
        match &step.work {
            Work::Call(call) => self.call(number, call, indent),
            Work::Records(choice) => {
                let [title, kind] = [step.title.as_str(), step.kind].map(names::string);
                self.line(indent, &format!("s.task({queue}, {number}, {title}, {kind});"));
                self.choice(number, choice, indent);
            }
        }
        if let Some(event) = step.records {
            self.line(indent, &format!("s.record({queue}, {event});"));
        }
    }

    /// The condition under which a rank of a step waits: that it runs the step that records the event.
    fn guard(&self, wait: &Wait, step: &Step) -> String {
        match (&wait.places, &step.places) {
            (None, _) => String::new(),
            (Some(there), Some(here)) if here.iter().all(|at: &At| there.contains(at)) => String::new(),
            (Some(there), _) => format!("if ({}) ", self.numbers.is_at(there)),
        }
    }

    /// The records of a task, by rank.
    fn choice(&mut self, number: usize, choice: &Choice<Vec<Record>>, indent: usize) {
        let alternatives: Vec<Vec<String>> =
            choice.alternatives.iter().map(|records| self.records(number, records)).collect();
        if let [only] = alternatives.as_slice() {
            return only.iter().for_each(|line| self.line(indent, line));
        }
        if let ([first, second], Some(condition)) =
            (alternatives.as_slice(), self.numbers.second_is_chosen(choice))
        {
            self.line(indent, &format!("if ({condition}) {{"));
            second.iter().for_each(|line| self.line(indent + 1, line));
            if !first.is_empty() {
                self.line(indent, "} else {");
                first.iter().for_each(|line| self.line(indent + 1, line));
            }
            return self.line(indent, "}");
        }
        let chosen = self.numbers.chosen(choice);
        self.line(indent, &format!("switch ({chosen}) {{"));
        for (i, lines) in alternatives.iter().enumerate().filter(|(_, lines)| !lines.is_empty()) {
            self.line(indent + 1, &format!("case {i}:"));
            lines.iter().for_each(|line| self.line(indent + 2, line));
            self.line(indent + 2, "break;");
        }
        self.line(indent, "}");
    }

    fn records(&self, number: usize, records: &[Record]) -> Vec<String> {
        let task = &self.of_schedule.tasks[number];
        let pointers: &Pointers<'_> = &|region, offset| self.pointer(task, region, offset);
        Writer { numbers: self.numbers, pointers, communicators: self.cx.communicators }.records(records)
    }

    /// The address of an operand of a call, and the bytes of a slice; empty if layers share the operand.
    fn operand(&self, number: usize, operand: &Operand) -> (String, String) {
        let task = &self.of_schedule.tasks[number];
        let pointers: &Pointers<'_> = &|region, offset| self.pointer(task, region, offset);
        let address = Writer { numbers: self.numbers, pointers, communicators: self.cx.communicators }
            .address(&operand.address);
        let slice = match operand.slice.constant() {
            Some(0) => String::new(),
            Some(bytes) => bytes.to_string(),
            None => format!("({})", self.numbers.int(&operand.slice)),
        };
        (address, slice)
    }

    /// A loop over layers. Each layer has its slices, and from the second layer on the results that the layer before carries.
    fn call(&mut self, number: usize, call: &Call, indent: usize) {
        let (start, end) = (call.layers.start, call.layers.end);
        let is_loop = end - start != 1;
        let first = match call.order {
            ScanOrder::Ascending => start,
            ScanOrder::Descending => end.saturating_sub(1),
        };
        let layer = if is_loop { "i".to_owned() } else { start.to_string() };
        let place = |operand: &Operand| -> String {
            let (address, slice) = self.operand(number, operand);
            match (slice.is_empty(), start) {
                (true, _) => address,
                (false, _) if !is_loop => address,
                (false, 0) => format!("{address} + i * {slice}"),
                (false, start) => format!("{address} + (i - {start}) * {slice}"),
            }
        };
        let mut arguments: Vec<String> = call.arguments.iter().map(&place).collect();
        let results: Vec<String> = call.results.iter().map(&place).collect();
        if is_loop {
            // A carried result has no slices.
            for (argument, result) in arguments.iter_mut().zip(&results).take(call.carried) {
                if argument != result {
                    *argument = format!("i == {first} ? {argument} : {result}");
                }
            }
            let head = match call.order {
                ScanOrder::Ascending => format!("int64_t i = {start}; i < {end}; ++i"),
                ScanOrder::Descending => format!("int64_t i = {end}; i-- > {start};"),
            };
            self.line(indent, &format!("for ({head})"));
        }
        let layer = match call.stride {
            0 => layer,
            stride => format!("{layer} + in.layer * {stride}"),
        };
        let base = match call.base {
            0 => "in.frame".to_owned(),
            base => format!("in.frame + {base}"),
        };
        let function = &self.cx.functions[call.frame.index()];
        let [arguments, results] = [arguments, results].map(|list| list.join(", "));
        let statement = format!("s.call({function}, {base}, {{{arguments}}}, {{{results}}}, {layer});");
        self.line(indent + usize::from(is_loop), &statement);
    }
}

/// The name of a buffer; a loaded value without a name has the name of its tensor.
fn variable(buffer: &Buffer) -> &str {
    let (Place::Weight(binding) | Place::State(binding) | Place::Input(binding)) = &buffer.place else {
        return &buffer.name;
    };
    let number = buffer.name.strip_prefix('v').unwrap_or(&buffer.name);
    if number.is_empty() || !number.chars().all(|c| c.is_ascii_digit()) {
        return &buffer.name;
    }
    let name = binding.name.strip_suffix(".weight").unwrap_or(&binding.name);
    let start = name.rfind('.').map_or(0, |dot| dot + 1);
    if name.ends_with("bias") {
        name[..start].trim_end_matches('.').rfind('.').map_or(name, |dot| &name[dot + 1..])
    } else {
        &name[start..]
    }
}

fn queue(stream: Stream) -> String {
    format!("k{stream:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_of_the_header_are_the_streams() {
        let header = include_str!("runtime/check.hpp");
        let listed = |before: &str| -> Vec<&str> {
            let list = header.split_once(before).unwrap().1.split('}').next().unwrap();
            list.split(',').map(str::trim).collect()
        };
        let mut queues = listed("enum Queue {");
        assert_eq!(queues.pop(), Some("kQueues"));
        assert_eq!(queues, Stream::ALL.map(queue));
        assert_eq!(
            listed("kQueueNames[kQueues] = {"),
            Stream::ALL.map(|stream| format!("\"{}\"", stream.name()))
        );
    }
}
