//! One namespace of `main.cu`: the space, the tables, the frames, and the `Program` that names them all.

use std::fmt::Write as _;
use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::{At, AxisList, Move};
use ithaca_ir::message::Parcel;
use ithaca_ir::ops::{Op, Optimizer};
use ithaca_ir::schedule::{Content, FrameId, Place, Schedule, Work, integers};
use ithaca_ir::{AxisId, DType, Diagnostic, Dim, DimId, Fetched, Order, Part, TensorType, boxes, text};

use super::frame;
use super::names::{self, Names};
use super::tables::{Run, SourceFile, Tables};

/// A namespace of the generated source.
pub(super) struct Namespace {
    pub(super) source: String,
    pub(super) dtypes: Vec<DType>,
}

/// What frames share while they are emitted.
pub(super) struct Context<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) dims: Vec<String>,
    pub(super) axes: Vec<String>,
    pub(super) functions: Vec<String>,
    /// The number of the first event of each frame.
    pub(super) events: Vec<usize>,
    pub(super) tables: Tables,
}

impl Context<'_> {
    pub(super) fn dim(&self, dim: DimId) -> &str {
        &self.dims[dim.index()]
    }

    fn axis(&self, axis: AxisId) -> &str {
        &self.axes[axis.index()]
    }

    /// The initializer of a place.
    pub(super) fn at(&self, at: At) -> String {
        format!("{{{}, {}}}", self.axis(at.axis), at.coordinate)
    }

    /// A type as the text form spells it, for comments.
    pub(super) fn describe(&self, ty: &TensorType) -> String {
        text::show(&self.schedule.space, ty).to_string()
    }
}

/// Emits `schedule` into `namespace`.
pub(super) fn emit(namespace: &str, schedule: &Schedule) -> Result<Namespace, Diagnostic> {
    let Some(main) = schedule.main() else {
        return Err(Diagnostic::new("S40", "the schedule has no frames"));
    };
    let space = &schedule.space;
    let mut names = Names::default();
    let runs = runs_of_frames(schedule);
    let ran: Vec<FrameId> = schedule.frames.ids().filter(|id| !runs[id.index()].is_empty()).collect();
    let mut events = vec![0];
    for (id, frame) in schedule.frames.iter() {
        let n_events = if ran.contains(&id) { frame.n_events } else { 0 };
        events.push(events[events.len() - 1] + n_events);
    }
    let mut cx = Context {
        schedule,
        dims: space.dims.values().map(|d| names.fresh("dim_", &d.name)).collect(),
        axes: space.mesh.axes.values().map(|a| names.fresh("axis_", &a.name)).collect(),
        functions: schedule.frames.values().map(|f| names.fresh("frame_", &f.name)).collect(),
        events,
        tables: Tables::default(),
    };

    let mut frames = String::new();
    for &id in &ran {
        frames.push_str(&frame::emit(&mut cx, id, &runs[id.index()])?);
        frames.push('\n');
    }
    let outputs = outputs(&mut cx, main)?;
    if let Some(ty) = cx.tables.types.iter().find(|ty| ty.dims.len() > super::MAX_DIMS) {
        let message =
            format!("a tensor has {} dimensions; emitted kernels take {}", ty.dims.len(), super::MAX_DIMS);
        return Err(Diagnostic::new("S41", message));
    }

    let mut out = format!("namespace {namespace} {{\n\nusing namespace ithaca;\n\n");
    write_space(&mut out, &cx);
    write_tables(&mut out, &cx);
    out.push_str(&frames);
    write_program(&mut out, &cx, &outputs, &ran);
    let _ = write!(out, "\n}}  // namespace {namespace}\n");
    Ok(Namespace { source: out, dtypes: cx.tables.dtypes() })
}

/// The layers that each frame runs for and the ranks that run it; those of `main` are `0..1`, everywhere. A frame that
/// nobody calls has none, and is left out.
fn runs_of_frames(schedule: &Schedule) -> Vec<Vec<Run>> {
    let mut runs = schedule.layers_by_place();
    if let Some(main) = schedule.main() {
        runs[main.index()].push((0..1, None));
    }
    runs
}

/// Initializers of the outputs of `main`.
fn outputs(cx: &mut Context<'_>, main: FrameId) -> Result<Vec<String>, Diagnostic> {
    let schedule = cx.schedule;
    let frame = &schedule.frames[main];
    let mut out = Vec::new();
    for (i, output) in frame.outputs.iter().enumerate() {
        let buffer = &frame.buffers[output.buffer];
        let (Content::Tensor(ty), Place::Frame(offset)) = (&buffer.content, &buffer.place) else {
            let message = format!("output {i} of `main` is not a tensor in the frame");
            return Err(Diagnostic::new("S40", message));
        };
        let name = output.name.clone().unwrap_or_else(|| format!("output{i}"));
        // The program writes both to one file.
        if cx.tables.sources.iter().any(|s| s.is_written && s.keeps(&name)) {
            let message = format!("output `{name}` of `main` has the name of a weight or state that is kept");
            return Err(Diagnostic::new("S40", message));
        }
        out.push(format!("{{{}, T{}, {offset}}}", names::string(&name), cx.tables.ty(ty)));
    }
    Ok(out)
}

fn write_space(out: &mut String, cx: &Context<'_>) {
    let space = &cx.schedule.space;
    for list in [&cx.dims, &cx.axes].into_iter().filter(|l| !l.is_empty()) {
        let _ = writeln!(out, "enum : int {{ {} }};", list.join(", "));
    }
    out.push_str(
        "\n// Dimensions: name, size, granule, size without padding, the dimension that is copied.\n",
    );
    out.push_str("static const Space space = {\n    {\n");
    for dim in space.dims.values() {
        let copies = dim.copies.map_or("-1", |of| cx.dim(of));
        let _ = writeln!(
            out,
            "        {{{}, {}, {}, {}, {copies}{}}},",
            names::string(&dim.name),
            dim.size,
            dim.granule,
            dim.valid,
            order_and_parts(cx, dim)
        );
    }
    out.push_str("    },\n    {\n");
    for axis in space.mesh.axes.values() {
        let _ = writeln!(out, "        {{{}, {}}},", names::string(&axis.name), axis.size);
    }
    out.push_str("    },\n};\n\n");
}

/// The initializers behind the others, for a dimension whose tokens are not in a row, that is fetched, or that is a part.
fn order_and_parts(cx: &Context<'_>, dim: &Dim) -> String {
    let order = match &dim.order {
        Order::Contiguous => "{}".to_owned(),
        Order::Zigzag { parts } => format!("zigzag({parts})"),
        Order::Striped { parts, block } => format!("striped({parts}, {block})"),
        Order::Table(runs) => format!("table({})", ranges(runs)),
    };
    if let Some(Part { of, index, count, runs }) = dim.part {
        return format!(", {order}, {{}}, {{{}, {index}, {count}, {runs}}}", cx.dim(of));
    }
    match &dim.fetched {
        Some(Fetched { of, parts }) => {
            let parts: Vec<String> = parts.iter().map(|p| ranges(p)).collect();
            format!(", {order}, {{{}, {{{}}}}}", cx.dim(*of), parts.join(", "))
        }
        None if dim.order == Order::Contiguous => String::new(),
        None => format!(", {order}"),
    }
}

/// `Ranges{{0, 2}, {6, 8}}`.
fn ranges(ranges: &[Range<u64>]) -> String {
    let ranges: Vec<String> = ranges.iter().map(|r| format!("{{{}, {}}}", r.start, r.end)).collect();
    format!("Ranges{{{}}}", ranges.join(", "))
}

fn write_tables(out: &mut String, cx: &Context<'_>) {
    for (i, ty) in cx.tables.types.iter().enumerate() {
        let dims: Vec<&str> = ty.dims.iter().map(|&d| cx.dim(d)).collect();
        let axes = |list: &AxisList| {
            format!("{{{}}}", list.iter().map(|&a| cx.axis(a)).collect::<Vec<_>>().join(", "))
        };
        let split: Vec<String> = ty.layout.split.iter().map(axes).collect();
        let _ = writeln!(
            out,
            "static const Type T{i} = {{{}, {{{}}}, {{{}}}, {}{}}};  // {}",
            names::dtype(ty.dtype),
            dims.join(", "),
            split.join(", "),
            axes(&ty.layout.partial),
            moves(cx, ty),
            names::comment(&cx.describe(ty)),
        );
    }
    out.push('\n');
    for (i, transfer) in cx.tables.transfers.iter().enumerate() {
        let (kind, fetched) = kind_of(cx, transfer);
        let Parcel { op, from, to } = transfer;
        let axes: AxisList = boxes::axes(&cx.schedule.space, op, from, to).unwrap_or_default();
        let axes: Vec<&str> = axes.iter().map(|&a| cx.axis(a)).collect();
        let ty = |ty: &TensorType| {
            cx.tables.types.iter().position(|t| t == ty).expect("a transfer's types are in the table")
        };
        let _ = writeln!(
            out,
            "static const Transfer X{i} = {{Collective::{kind}, {{{}}}, T{}, T{}{fetched}}};",
            axes.join(", "),
            ty(from),
            ty(to)
        );
    }
    let integers = integers::of_inputs(cx.schedule);
    for (i, source) in cx.tables.sources.iter().enumerate() {
        let allowed = integers.get(&source.binding.name).filter(|_| source.file == SourceFile::Inputs);
        let sizes = |list: &[u64]| list.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let ranges = |list: &[Range<u64>]| {
            list.iter().map(|r| format!("{{{}, {}}}", r.start, r.end)).collect::<Vec<_>>().join(", ")
        };
        let run = |(layers, at): &Run| {
            let at = at.map_or_else(String::new, |at| format!(", {}", cx.at(at)));
            format!("{{{}, {}{at}}}", layers.start, layers.end)
        };
        let runs: Vec<String> = source.layers.iter().map(run).collect();
        let _ = writeln!(
            out,
            "static const Source S{i} = {{{}, T{}, {{{}}}, {{{}}}, {{{}}}, {{{}}}, {}{}}};",
            names::string(&source.binding.name),
            source.ty,
            sizes(&source.binding.stored),
            sizes(&source.binding.view),
            ranges(&source.binding.window),
            runs.join(", "),
            match source.file {
                SourceFile::Weights => "File::Weights",
                SourceFile::Inputs => "File::Inputs",
                SourceFile::States => "File::States",
            },
            match (source.is_written, source.binding.ahead, source.binding.fill, allowed) {
                (false, 0, 0, None) => String::new(),
                (true, 0, 0, None) => ", true".to_owned(),
                (is_written, ahead, fill, None) => format!(", {is_written}, {ahead}, {fill}"),
                (is_written, ahead, fill, Some(integers)) => {
                    let ignored = integers.ignored().map_or(String::new(), |ignored| format!(", {ignored}"));
                    format!(", {is_written}, {ahead}, {fill}, {}{ignored}", integers.below)
                }
            }
        );
    }
    out.push('\n');
}

/// Parts of a type that have travelled, and the ranks that hold it, behind the other initializers; nothing where all are
/// at home and everywhere.
fn moves(cx: &Context<'_>, ty: &TensorType) -> String {
    let one = |m: &Move| {
        let (first, last) = m.only.unwrap_or((0, cx.schedule.space.mesh.size(m.axis)));
        format!("{{{}, {}, {first}, {last}}}", cx.axis(m.axis), m.by)
    };
    let moves: Vec<String> = ty.layout.moved.iter().map(one).collect();
    match ty.layout.at {
        Some(at) => format!(", {{{}}}, {}", moves.join(", "), cx.at(at)),
        None if moves.is_empty() => String::new(),
        None => format!(", {{{}}}", moves.join(", ")),
    }
}

/// The enumerator of a transfer, and the dimension that is fetched behind the other initializers.
fn kind_of(cx: &Context<'_>, transfer: &Parcel) -> (&'static str, String) {
    let fetched = |dim: DimId| format!(", {}", cx.dim(dim));
    match &transfer.op {
        Op::AllToAll { .. } => ("AllToAll", String::new()),
        Op::AllGather { .. } => ("AllGather", String::new()),
        Op::ReduceScatter { .. } => ("ReduceScatter", String::new()),
        Op::AllReduce { .. } => ("AllReduce", String::new()),
        Op::Permute if transfer.from.layout.at != transfer.to.layout.at => ("Relocate", String::new()),
        Op::Permute if transfer.from.layout.split == transfer.to.layout.split => ("Travel", String::new()),
        Op::Fetch { to } => ("Fetch", fetched(*to)),
        Op::FetchSum { from } => ("FetchSum", fetched(*from)),
        // Frames refuse transfers of operations that do not communicate before they reach the table.
        _ => ("Permute", String::new()),
    }
}

fn write_program(out: &mut String, cx: &Context<'_>, outputs: &[String], ran: &[FrameId]) {
    let schedule = cx.schedule;
    let list =
        |prefix: &str, n: usize| (0..n).map(|i| format!("&{prefix}{i}")).collect::<Vec<_>>().join(", ");
    let main = cx.functions.last().expect("there is a frame");
    let _ = writeln!(
        out,
        "static void run(const Device& device, char* frame) {{ {main}(device, frame, {{}}, {{}}, 0); }}\n"
    );
    out.push_str("static const Program& program() {\n    static const Program program = {\n");
    let _ =
        writeln!(out, "        space, {{{}}}, {},", arenas(cx).join(", "), cx.events[cx.events.len() - 1]);
    let _ = writeln!(out, "        {{{}}},", list("S", cx.tables.sources.len()));
    out.push_str("        {\n");
    for table in &cx.tables.constants {
        let values: Vec<String> = table.iter().map(|&f| names::double(f)).collect();
        let _ = writeln!(out, "            {{{}}},", values.join(", "));
    }
    out.push_str("        },\n");
    let sequence = |&(ty, dim): &(usize, usize)| format!("{{T{ty}, {dim}}}");
    let sequences: Vec<String> = cx.tables.sequences.iter().map(sequence).collect();
    let _ = writeln!(out, "        {{{}}},", sequences.join(", "));
    let _ = writeln!(out, "        {{{}}},", list("X", cx.tables.transfers.len()));
    let _ = writeln!(out, "        {{{}}},", outputs.join(", "));
    let _ =
        writeln!(out, "        {}, {}, run,", id_bound(schedule, ran), names::double(reach(schedule, ran)));
    out.push_str("    };\n    return program;\n}\n");
}

/// Bytes of the arena, and the ranks for which that is enough.
fn arenas(cx: &Context<'_>) -> Vec<String> {
    let schedule = cx.schedule;
    match schedule.stages().as_slice() {
        [] => vec![format!("{{{}}}", schedule.arena_bytes())],
        stages => {
            let one = |&at: &At| format!("{{{}, {}}}", schedule.arena_bytes_at(at), cx.at(at));
            stages.iter().map(one).collect()
        }
    }
}

/// What the frames that run compute.
fn computed<'s>(schedule: &'s Schedule, ran: &[FrameId]) -> impl Iterator<Item = &'s Op> {
    let tasks = ran.iter().flat_map(|&id| &schedule.frames[id].tasks);
    tasks.filter_map(|task| match &task.work {
        Work::Compute(op) => Some(op),
        Work::Call { .. } | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => None,
    })
}

/// Token ids below it have a row in every table that is looked up.
fn id_bound(schedule: &Schedule, ran: &[FrameId]) -> u64 {
    let tables = computed(schedule, ran).filter_map(|op| match op {
        Op::Embed { over, .. } => Some(schedule.space.dims[*over].valid),
        _ => None,
    });
    tables.min().unwrap_or(1).max(1)
}

/// How far a step of an optimizer may move an element of a weight; zero without one.
fn reach(schedule: &Schedule, ran: &[FrameId]) -> f64 {
    let farthest = computed(schedule, ran).filter_map(|op| match op {
        Op::Optimizer(Optimizer::AdamW(adamw)) => Some(adamw.reach()),
        _ => None,
    });
    farthest.fold(0.0, f64::max)
}
