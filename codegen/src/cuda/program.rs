//! A device program as C++: one namespace of `main.cu`.
//!
//! A frame is a function, a launch is a line. Constants are literals; numbers that depend on the rank are expressions in its
//! mesh coordinates, so the source grows with the kinds of ranks, and not with their number.

use std::fmt::Write as _;
use std::ops::Range;

use ithaca_device::{Communicator, DeviceProgram, Members, Output, Source, SourceFile};
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::ops::{Cache, Op, Optimizer};
use ithaca_ir::schedule::{Content, FrameId, Schedule, Work};
use ithaca_ir::{DType, Diagnostic, Dim, DimId, TensorType};

use super::context::Context;
use super::names::{self, Names};
use super::number::Numbers;
use super::{frame, lines, part};

/// The namespace of a schedule's program, which has these communicators of streams other than the communication stream.
///
/// # Errors
/// `S40` for an output with the name of a weight or state that the program writes.
pub(super) fn print(
    namespace: &str,
    (schedule, program): (&Schedule, &DeviceProgram),
    communicators: &[Communicator],
) -> Result<String, Diagnostic> {
    let Some(main) = program.main() else {
        return Err(Diagnostic::new("S40", "the schedule has no frames"));
    };
    check_names(program)?;
    let mut functions = Names::default();
    let functions = program.frames.values().map(|frame| functions.fresh("frame_", &frame.name)).collect();
    let cx = Context { schedule, program, functions, communicators };
    let numbers = Numbers::new(&program.mesh);
    let ran: Vec<FrameId> =
        program.frames.iter().filter(|(_, frame)| !frame.runs.is_empty()).map(|(id, _)| id).collect();

    let mut body = String::new();
    for &id in &ran {
        body.push_str(&frame::print(&cx, &numbers, id));
        body.push('\n');
    }
    let mut parts = Parts::default();
    let sources: Vec<String> =
        program.sources.values().map(|s| source(&cx, &numbers, &mut parts, s)).collect();
    let outputs: Vec<String> =
        program.outputs.iter().map(|output| self::output(&cx, &numbers, &mut parts, output)).collect();
    let arena = arena(&numbers, &mut parts, program);
    let (tables, parts) = (tables(&cx, &numbers), parts.out);

    let mut out = format!("namespace {namespace} {{\n\nusing namespace ithaca;\n\n");
    coordinates(&mut out, &numbers);
    let arrays = numbers.arrays();
    arrays.iter().for_each(|line| lines::push(&mut out, 0, line));
    if !arrays.is_empty() {
        out.push('\n');
    }
    out.push_str(&body);
    let _ = write!(out, "{parts}\n{tables}");
    let run = &cx.functions[main.index()];
    let _ = writeln!(
        out,
        "static void run(Device& device, Address arena) {{ {run}({{device, arena, {{}}, {{}}, 0}}); }}\n"
    );
    out.push_str("static const Program& program() {\n    static const Program program = {\n");
    let axes: Vec<String> = program
        .mesh
        .axes
        .values()
        .map(|axis| format!("{{{}, {}}}", names::string(&axis.name), axis.size))
        .collect();
    let more = cx.communicators.iter().map(|own| match own.members {
        Members::World => "{}".to_owned(),
        Members::Along(axes) => {
            let axes: Vec<String> = axes.iter().map(|axis| axis.index().to_string()).collect();
            format!("{{{}}}", axes.join(", "))
        }
    });
    let more: Vec<String> = more.collect();
    let more = if more.is_empty() { String::new() } else { format!(", {{{}}}", more.join(", ")) };
    let _ = writeln!(out, "        {{{{{}}}{more}}},  // mesh", axes.join(", "));
    let _ = writeln!(out, "        {arena},");
    let tolerances = tolerances(schedule, &ran).map(names::double);
    let _ = writeln!(
        out,
        "        {},  // events\n        {{{}}},  // tolerances",
        program.n_events,
        tolerances.join(", ")
    );
    for list in [&sources, &outputs] {
        out.push_str("        {\n");
        let numbered = list.iter().enumerate();
        numbered.for_each(|(i, item)| lines::push(&mut out, 3, &format!("{item},  // {i}")));
        out.push_str("        },\n");
    }
    let (id_bound, reach) = (id_bound(schedule, &ran), names::double(reach(schedule, &ran)));
    let bound = bound(schedule);
    let pages = pages(&cx, &ran).map_or(String::new(), |pages| format!(" {{{}}},", list(&pages)));
    let rest = match (program.counts, capacity(schedule, &ran), program.workspace) {
        (0, None, 0) => String::new(),
        (bytes, None, 0) => format!(" {bytes},"),
        (bytes, tokens, workspace) => format!(" {bytes}, {}, {workspace},{pages}", tokens.unwrap_or(0)),
    };
    let _ = writeln!(
        out,
        "        {id_bound}, {reach}, {bound}, tables, run,{rest}\n    }};\n    return program;\n}}"
    );
    let _ = writeln!(out, "\n}}  // namespace {namespace}");
    Ok(out)
}

/// Rejects an output with the name of a tensor that steps update: the program writes both to one file.
fn check_names(program: &DeviceProgram) -> Result<(), Diagnostic> {
    let keeps = |source: &Source, name: &str| {
        let layers = source.layers.iter().flat_map(|(layers, _)| layers.clone());
        source.is_written && layers.into_iter().any(|layer| source.binding.stored_name(layer) == name)
    };
    let is_kept = |output: &&Output| program.sources.values().any(|source| keeps(source, &output.name));
    match program.outputs.iter().find(is_kept) {
        None => Ok(()),
        Some(Output { name, .. }) => {
            let message = format!("output `{name}` of `main` has the name of a weight or state that is kept");
            Err(Diagnostic::new("S40", message))
        }
    }
}

/// The struct of a rank's mesh coordinates.
fn coordinates(out: &mut String, numbers: &Numbers<'_>) {
    let mesh = numbers.mesh;
    if mesh.axes.is_empty() {
        return;
    }
    let fields = numbers.fields.join(", ");
    let starts: Vec<String> = mesh
        .axes
        .iter()
        .zip(&numbers.fields)
        .map(|((axis, of), field)| match mesh.stride(axis) {
            1 => format!("{field}(rank % {})", of.size),
            stride => format!("{field}(rank / {stride} % {})", of.size),
        })
        .collect();
    let starts = starts.join(", ");
    let _ = writeln!(
        out,
        "struct Coordinates {{\n    int64_t {fields};\n    explicit Coordinates(int64_t rank) : {starts} {{}}\n}};\n"
    );
}

/// The distinct functions of a rank; those that return `bool` also take a layer.
#[derive(Default)]
struct Parts {
    known: Vec<String>,
    out: String,
}

impl Parts {
    /// The name of the function with this body.
    fn function(&mut self, numbers: &Numbers<'_>, kind: [&str; 2], body: &str) -> String {
        let [ty, name] = kind;
        let uses_coordinates = numbers.take_uses_coordinates();
        let key = format!("{ty} {body}");
        if let Some(i) = self.known.iter().position(|known| *known == key) {
            return format!("{name}{i}");
        }
        self.known.push(key);
        let function = format!("{name}{}", self.known.len() - 1);
        let (rank, coordinates) =
            if uses_coordinates { (" rank", "const Coordinates c(rank); ") } else { ("", "") };
        let layer = match (ty, body.contains("layer")) {
            ("bool", true) => ", int64_t layer",
            ("bool", false) => ", int64_t",
            _ => "",
        };
        let text = format!("static {ty} {function}(int64_t{rank}{layer}) {{ {coordinates}return {body}; }}");
        lines::push(&mut self.out, 0, &text);
        function
    }
}

/// The initializer of a sharded tensor.
fn tensor(
    cx: &Context<'_>,
    numbers: &Numbers<'_>,
    parts: &mut Parts,
    ty: &TensorType,
    resident: &ithaca_device::ResidentTensor,
) -> String {
    let shape: Vec<u64> = resident.dims.iter().map(|dim| dim.stored).collect();
    let used: Vec<_> = ty.layout.axes().collect();
    let copies: Vec<String> = cx
        .program
        .mesh
        .axes
        .ids()
        .filter(|axis| !used.contains(axis))
        .map(|axis| axis.index().to_string())
        .collect();
    let body = part::part(numbers, resident);
    let part = parts.function(numbers, ["Part", "part_"], &body);
    format!("{{{}, {{{}}}, {{{}}}, {part}}}", names::dtype(resident.dtype), list(&shape), copies.join(", "))
}

fn source(cx: &Context<'_>, numbers: &Numbers<'_>, parts: &mut Parts, source: &Source) -> String {
    let Source { file, binding, ty, layers, is_written, stored, integers, resident } = source;
    let tensor = tensor(cx, numbers, parts, ty, resident);
    let stored = if stored.iter().eq(resident.dims.iter().map(|dim| &dim.stored)) {
        String::new()
    } else {
        list(stored)
    };
    let view = match (&binding.window, &binding.view) {
        (window, _) if window.is_empty() => String::new(),
        (_, view) if view.is_empty() => list(&source.stored),
        (_, view) => list(view),
    };
    let start = layers.iter().map(|(layers, _)| layers.start).min().unwrap_or(0);
    let end = layers.iter().map(|(layers, _)| layers.end).max().unwrap_or(0);
    let is_held = parts.function(numbers, ["bool", "is_held_"], &is_held(numbers, layers));
    let file = match file {
        SourceFile::Weights => "File::Weights",
        SourceFile::Inputs => "File::Inputs",
        SourceFile::States => "File::States",
    };
    let rest = match (is_written, binding.ahead, binding.fill, integers) {
        (is_written, ahead, fill, None) if binding.host => {
            format!(", {is_written}, {ahead}, {fill}, -1, 0, true")
        }
        (false, 0, 0, None) => String::new(),
        (true, 0, 0, None) => ", true".to_owned(),
        (is_written, ahead, fill, None) => format!(", {is_written}, {ahead}, {fill}"),
        (is_written, ahead, fill, Some(integers)) => {
            let ignored = integers.ignored().map_or(String::new(), |ignored| format!(", {ignored}"));
            format!(", {is_written}, {ahead}, {fill}, {}{ignored}", integers.below)
        }
    };
    format!(
        "{{{}, {tensor}, {{{stored}}}, {{{view}}}, {{{}}}, {start}, {end}, {is_held}, {file}{rest}}}",
        names::string(&binding.name),
        ranges(&binding.window),
    )
}

/// The condition that the rank has the source of a layer.
fn is_held(numbers: &Numbers<'_>, layers: &[(Range<u64>, Option<At>)]) -> String {
    let is_at = |at: &Option<At>| at.map_or_else(|| "true".to_owned(), |at| numbers.is_at(&[at]));
    match layers {
        [] => return "false".to_owned(),
        [(_, at)] => return is_at(at),
        [_, _, ..] => {}
    }
    let run = |(layers, at): &(Range<u64>, Option<At>)| {
        format!("({} <= layer && layer < {} && {})", layers.start, layers.end, is_at(at))
    };
    layers.iter().map(run).collect::<Vec<_>>().join(" || ")
}

/// The function that returns the bytes of a rank's arena.
fn arena(numbers: &Numbers<'_>, parts: &mut Parts, program: &DeviceProgram) -> String {
    let bytes = |(at, bytes): &(Option<At>, u64)| match at {
        Some(at) => format!("{} ? {bytes} : 0", numbers.is_at(&[*at])),
        None => bytes.to_string(),
    };
    let bytes: Vec<String> = program.arenas.iter().map(bytes).collect();
    parts.function(numbers, ["int64_t", "arena_"], &format!("std::max<int64_t>({{{}}})", bytes.join(", ")))
}

fn output(cx: &Context<'_>, numbers: &Numbers<'_>, parts: &mut Parts, output: &Output) -> String {
    let tensor = tensor(cx, numbers, parts, &output.ty, &output.resident);
    let offset = numbers.int(&output.address.offset);
    let offset = match output.resident.at {
        Some(at) => format!("{} ? {offset} : -1", numbers.is_at(&[at])),
        None => offset,
    };
    let offset = parts.function(numbers, ["int64_t", "offset_"], &offset);
    format!("{{{}, {tensor}, {offset}}}", names::string(&output.name))
}

/// The function that adds the tables of a rank.
fn tables(cx: &Context<'_>, numbers: &Numbers<'_>) -> String {
    let statements: Vec<String> =
        cx.program.tables.values().map(|table| part::table(numbers, table)).collect();
    let uses_coordinates = numbers.take_uses_coordinates();
    let rank = if uses_coordinates { "int64_t rank" } else { "int64_t" };
    let tables = if statements.is_empty() { "Tables&" } else { "Tables& tables" };
    let mut out = format!("static void tables({rank}, {tables}) {{\n");
    if uses_coordinates {
        out.push_str("    const Coordinates c(rank);\n");
    }
    let numbered = statements.iter().enumerate();
    numbered.for_each(|(i, statement)| lines::push(&mut out, 1, &format!("{statement}  // {i}")));
    out.push_str("}\n\n");
    out
}

fn list(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

fn ranges(ranges: &[Range<u64>]) -> String {
    ranges.iter().map(|r| format!("{{{}, {}}}", r.start, r.end)).collect::<Vec<_>>().join(", ")
}

/// The tolerances of the self-check for f64, f32, f16 and bf16. The narrowest type of the program bounds the rounding of every
/// result.
fn tolerances(schedule: &Schedule, ran: &[FrameId]) -> [f64; 4] {
    let buffers = || ran.iter().flat_map(|&id| schedule.frames[id].buffers.values());
    let has =
        |dtype: DType| buffers().any(|b| matches!(&b.content, Content::Tensor(ty) if ty.dtype == dtype));
    let halves = if has(DType::BF16) {
        5e-2
    } else if has(DType::F16) {
        1e-2
    } else {
        0.0
    };
    // Parts of attention and their lse are in single precision for every operand type.
    let double: f64 = if has(DType::F32) { 1e-5 } else { 1e-10 };
    [double.max(halves), 1e-4_f64.max(halves), halves, halves]
}

/// The computations of the frames that run.
fn computed<'s>(schedule: &'s Schedule, ran: &[FrameId]) -> impl Iterator<Item = &'s Op> {
    let tasks = ran.iter().flat_map(|&id| &schedule.frames[id].tasks);
    tasks.filter_map(|task| match &task.work {
        Work::Compute(op) => Some(op),
        Work::Call { .. } | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => None,
    })
}

/// The bound below which token ids have a row in every embedding table.
fn id_bound(schedule: &Schedule, ran: &[FrameId]) -> u64 {
    let tables = computed(schedule, ran).filter_map(|op| match op {
        Op::Embed { over, .. } => Some(schedule.space.dims[*over].valid),
        _ => None,
    });
    tables.min().unwrap_or(1).max(1)
}

/// The bound of experts: tokens of a group, slots of an expert for it, and the expert's even share.
fn bound(schedule: &Schedule) -> String {
    schedule.bounded_deal().map_or_else(
        || "{}".to_owned(),
        |deal| {
            let (tokens, share) = deal.share(&schedule.space);
            format!("{{{tokens}, {}, {}}}", schedule.space.size(deal.shared.slots), names::double(share))
        },
    )
}

/// The tokens that the least cache has room for.
fn capacity(schedule: &Schedule, ran: &[FrameId]) -> Option<u64> {
    let tokens = |dim: DimId| schedule.space.dims[dim].valid;
    let caches = computed(schedule, ran).filter_map(|op| match (op, op.appended().map(|of| of.by)) {
        // A ring has room for any number.
        (_, Some(Cache::Append { wraps: true, .. })) => Some(Dim::MAX_SIZE),
        (_, Some(Cache::Append { over, .. })) => Some(tokens(over)),
        (Op::Cache(Cache::GatherPages { over, .. }), _) => Some(tokens(*over)),
        (Op::AttendPages { attention, .. }, _) => Some(tokens(attention.keys)),
        _ => None,
    });
    caches.min()
}

/// The pages of caches: tokens of a page, pages of all ranks, the groups of sequences that have pages of their own, and the pages
/// in host memory, which are numbered after the others.
fn pages(cx: &Context<'_>, ran: &[FrameId]) -> Option<[u64; 4]> {
    let (pages, slots, host) = computed(cx.schedule, ran).find_map(|op| match op.appended()?.by {
        Cache::AppendPages { pages, slots, beyond, after: None, .. } => Some((pages, slots, beyond)),
        _ => None,
    })?;
    let axes = |source: &Source| Some(source.ty.layout.split[source.ty.position(pages)?].clone());
    let groups = cx.program.sources.values().find_map(axes).map_or(1, |axes| cx.program.mesh.degree(&axes));
    let space = &cx.schedule.space;
    Some([space.size(slots), space.size(pages), groups, host.map_or(0, |host| space.size(host))])
}

/// The largest change of a weight's element by one optimizer step; zero without an optimizer.
fn reach(schedule: &Schedule, ran: &[FrameId]) -> f64 {
    let farthest = computed(schedule, ran).filter_map(|op| match op {
        Op::Optimizer(Optimizer::AdamW(adamw)) => Some(adamw.reach()),
        _ => None,
    });
    farthest.fold(0.0, f64::max)
}
