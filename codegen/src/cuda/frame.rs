//! A frame as a C++ function: its buffers as pointers, its tasks as calls, in order of issue.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use ithaca_ir::boxes::Side;
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::module::Layers;
use ithaca_ir::ops::{
    AdamW, Attention, Binding, Gradient, Loss, Op, Optimizer, Pairs, Random, Scan, ScanOrder, Window,
    structure,
};
use ithaca_ir::schedule::{
    Buffer, BufferId, Content, Frame, FrameId, Place, Schedule, Stream, Task, Transfer, Work, communicates,
};
use ithaca_ir::{Diagnostic, DimId, Order, TensorType, timeline};

use super::names::{self, Names};
use super::program::Context;
use super::tables::{Run, SourceFile};
use super::{attention, experts};

/// Emits a frame that runs as `runs` says.
pub(super) fn emit(cx: &mut Context<'_>, id: FrameId, runs: &[Run]) -> Result<String, Diagnostic> {
    let schedule = cx.schedule;
    let frame = &schedule.frames[id];
    let mut names = Names::default();
    let buffers: Vec<String> = frame.buffers.values().map(|b| names.fresh("b_", &b.name)).collect();
    let mut emitter = Emitter { cx, frame, buffers, base: 0 };
    emitter.base = emitter.cx.events[id.index()];

    let mut out = format!(
        "// @{}: {} arguments, {} results, {} bytes.\n\
         static void {}(const Device& device, [[maybe_unused]] char* frame, [[maybe_unused]] const Pointers& arguments,\n    \
         [[maybe_unused]] const Pointers& results, [[maybe_unused]] int64_t layer) {{\n",
        names::comment(&frame.name),
        frame.n_arguments,
        frame.outputs.len(),
        frame.bytes,
        emitter.cx.functions[id.index()],
    );
    let used: BTreeSet<BufferId> =
        frame.tasks.iter().flat_map(|t| t.reads.iter().chain(&t.writes)).copied().collect();
    // What lies in wires is found from them.
    let (inside, alone): (Vec<BufferId>, Vec<BufferId>) =
        used.into_iter().partition(|&b| matches!(frame.buffers[b].place, Place::Wire { .. }));
    for buffer in alone {
        emitter.buffer(&mut out, buffer, &frame.buffers[buffer], runs)?;
    }
    for buffer in inside {
        emitter.inside(&mut out, buffer)?;
    }
    // Frames that only compute leave their callers' communication alone.
    let meets = meets(schedule, id);
    let _ = writeln!(out, "\n    const NamedRange range({});", names::string(&format!("@{}", frame.name)));
    if meets {
        out.push_str("    device.meet();\n");
    }
    let mut number = 0;
    for tasks in frame.tasks.chunk_by(|a, b| places(frame, a) == places(frame, b)) {
        let mut lines = String::new();
        for task in tasks {
            emitter.task(&mut lines, number, task)?;
            number += 1;
        }
        match places(frame, &tasks[0]) {
            None => out.push_str(&lines),
            Some(at) => {
                let _ = writeln!(out, "    if ({}) {{", emitter.is_at(&at));
                lines.lines().for_each(|line| out.push_str(&format!("    {line}\n")));
                out.push_str("    }\n");
            }
        }
    }
    if meets {
        out.push_str("    device.meet();\n");
    }
    out.push_str("}\n");
    Ok(out)
}

/// Whether both streams meet at the ends of a frame.
fn meets(schedule: &Schedule, id: FrameId) -> bool {
    schedule.main() == Some(id) || communicates(&schedule.frames, id)
}

/// The ranks that run a task, as places; none where all do.
fn places(frame: &Frame, task: &Task) -> Option<Vec<At>> {
    let mut places = frame.places(task).into_iter().collect::<Option<Vec<At>>>()?;
    places.sort_unstable();
    places.dedup();
    Some(places)
}

struct Emitter<'e, 's> {
    cx: &'e mut Context<'s>,
    frame: &'s Frame,
    buffers: Vec<String>,
    /// The number of the frame's first event.
    base: usize,
}

impl<'s> Emitter<'_, 's> {
    fn buffer(
        &mut self,
        out: &mut String,
        id: BufferId,
        buffer: &Buffer,
        runs: &[Run],
    ) -> Result<(), Diagnostic> {
        let place = match &buffer.place {
            Place::Wire { .. } => return self.inside(out, id),
            Place::Frame(offset) => format!("frame + {offset}"),
            Place::Argument(i) => format!("arguments[{i}]"),
            Place::Result(i) => format!("results[{i}]"),
            Place::Weight(binding) => self.source(id, SourceFile::Weights, binding, runs)?,
            Place::State(binding) => self.source(id, SourceFile::States, binding, runs)?,
            Place::Input(binding) => self.source(id, SourceFile::Inputs, binding, runs)?,
        };
        let content = match &buffer.content {
            Content::Tensor(ty) => self.cx.describe(ty),
            Content::Wire { dtype, elements } => format!("wire of {elements} {dtype}"),
        };
        let name = &self.buffers[id.index()];
        let _ = writeln!(out, "    char* const {name} = {place};  // {}", names::comment(&content));
        Ok(())
    }

    /// A tensor that lies in a wire: how, and where it begins.
    fn inside(&mut self, out: &mut String, id: BufferId) -> Result<(), Diagnostic> {
        let ty = self.tensor(id)?;
        let Place::Wire { wire, part } = self.frame.buffers[id].place else {
            return Err(unsupported("a tensor that lies in no wire as one that does"));
        };
        let Some((transfer, side)) = self.frame.carried(wire) else {
            return Err(unsupported("a tensor that lies in a wire that nobody exchanges"));
        };
        let tables = &mut self.cx.tables;
        let numbers: Vec<String> =
            transfer.parcels().iter().map(|parcel| tables.parcel(parcel).to_string()).collect();
        let direction = match side {
            Side::Sent => "ToWire",
            Side::Received => "FromWire",
        };
        let (described, number) = (self.cx.describe(ty), self.cx.tables.ty(ty));
        let (name, wire) = (&self.buffers[id.index()], &self.buffers[wire.index()]);
        let _ = writeln!(
            out,
            "    const Strided {name}_strides = strided(device, {{{}}}, {part}, Direction::{direction});\n    \
             [[maybe_unused]] char* const {name} = {wire} + {name}_strides.start * bytes_of(T{number}.dtype);  // {}",
            numbers.join(", "),
            names::comment(&described)
        );
        Ok(())
    }

    /// What lies outside the arena, as the device finds it for a layer.
    fn source(
        &mut self,
        id: BufferId,
        file: SourceFile,
        binding: &Binding,
        runs: &[Run],
    ) -> Result<String, Diagnostic> {
        let ty = self.tensor(id)?;
        let source = self.cx.tables.source(file, binding, ty, runs);
        let is_written = self.frame.tasks.iter().any(|task| task.writes.contains(&id));
        self.cx.tables.sources[source].is_written |= is_written;
        Ok(format!("device.source({source}, layer)"))
    }

    fn task(&mut self, out: &mut String, number: usize, task: &Task) -> Result<(), Diagnostic> {
        let queue = match task.stream {
            Stream::Compute => "kCompute",
            Stream::Comm => "kComm",
        };
        for event in &task.waits {
            // Of ranks that run this task some may not run the one that is waited for.
            let recorded = self.frame.tasks.iter().find(|t| t.records == Some(*event));
            let guard = match (recorded.and_then(|t| places(self.frame, t)), places(self.frame, task)) {
                (None, _) => String::new(),
                (Some(there), Some(here)) if here.iter().all(|at| there.contains(at)) => String::new(),
                (Some(there), _) => format!("if ({}) ", self.is_at(&there)),
            };
            let _ = writeln!(out, "    {guard}device.wait({queue}, {});", self.base + event.index());
        }
        let call = match &task.work {
            Work::Call { callee, layers, stride, scan, stage: _, base } => {
                self.call(out, task, (*callee, *base), (layers, *stride), scan.as_ref());
                None
            }
            Work::Compute(op) => Some(self.compute(queue, op, task)?),
            Work::Pack(transfer) => Some(self.movement("pack", queue, transfer, task)?),
            Work::Exchange(transfer) => Some(self.movement("exchange", queue, transfer, task)?),
            Work::Unpack(transfer) => Some(self.movement("unpack", queue, transfer, task)?),
            Work::Copy => Some(self.copy(queue, task)?),
        };
        if let Some(call) = call {
            let (title, kind) = timeline::title(self.frame, number);
            let [frame, title, kind] = [&self.frame.name, &title, kind].map(names::string);
            let of = format!("{{{frame}, {number}, {title}, {kind}}}");
            let _ = writeln!(out, "    {{ const Task task(device, {queue}, {of}, layer); {call}; }}");
        }
        if let Some(event) = task.records {
            let _ = writeln!(out, "    device.record({queue}, {});", self.base + event.index());
        }
        Ok(())
    }

    /// A copy of a tensor or a wire.
    fn copy(&mut self, queue: &str, task: &Task) -> Result<String, Diagnostic> {
        let (from, to) = (self.operand(&task.reads, 0)?, self.operand(&task.writes, 0)?);
        let bytes = match &self.frame.buffers[from].content {
            Content::Tensor(ty) => {
                let ty = self.cx.tables.ty(ty);
                format!("Local(device, T{ty}).size * bytes_of(T{ty}.dtype)")
            }
            Content::Wire { dtype, elements } => (dtype.bytes() * elements).to_string(),
        };
        let (from, to) = (&self.buffers[from.index()], &self.buffers[to.index()]);
        Ok(format!("copy(device, {queue}, {bytes}, {from}, {to})"))
    }

    /// Whether the rank is one of these.
    fn is_at(&self, places: &[At]) -> String {
        let one = |&at: &At| format!("device.is_at({})", self.cx.at(at));
        places.iter().map(one).collect::<Vec<_>>().join(" || ")
    }

    /// A loop over layers; of stacks each layer gets the place of its slice.
    fn call(
        &mut self,
        out: &mut String,
        task: &Task,
        (callee, base): (FrameId, u64),
        (layers, stride): (&Layers, u64),
        scan: Option<&Scan>,
    ) {
        let schedule = self.cx.schedule;
        let (mut arguments, mut results) = (self.pointers(&task.reads), self.pointers(&task.writes));
        for buffer in schedule.frames[callee].buffers.values() {
            let Content::Tensor(ty) = &buffer.content else { continue };
            let sliced = match (buffer.place.clone(), scan) {
                (Place::Argument(i), Some(_)) => task.reads.get(i).and_then(|&b| {
                    let here = self.tensor(b).ok()?;
                    structure::is_sliced(scan, i, here, ty).then_some(&mut arguments[i])
                }),
                (Place::Result(i), Some(scan)) if i >= scan.carried => results.get_mut(i),
                _ => None,
            };
            if let Some(pointer) = sliced {
                let ty = self.cx.tables.ty(ty);
                let k = match layers.start {
                    0 => "i".to_owned(),
                    start => format!("(i - {start})"),
                };
                pointer.push_str(&format!(" + {k} * Local(device, T{ty}).size * bytes_of(T{ty}.dtype)"));
            }
        }
        let function = &self.cx.functions[callee.index()];
        let (arguments, results) = (arguments.join(", "), results.join(", "));
        let call = |layer: &str| {
            let layer = match stride {
                0 => layer.to_owned(),
                _ => format!("{layer} + {stride} * layer"),
            };
            format!("{function}(device, frame + {base}, {{{arguments}}}, {{{results}}}, {layer});\n")
        };
        let Layers { start, end } = layers;
        let head = match (end - start, scan.map(|scan| scan.order)) {
            (1, None) => {
                let _ = write!(out, "    {}", call(&start.to_string()));
                return;
            }
            (_, None | Some(ScanOrder::Ascending)) => format!("int64_t i = {start}; i < {end}; ++i"),
            (_, Some(ScanOrder::Descending)) => format!("int64_t i = {end}; i-- > {start};"),
        };
        let _ = write!(out, "    for ({head})\n        {}", call("i"));
    }

    fn pointers(&self, buffers: &[BufferId]) -> Vec<String> {
        buffers.iter().map(|b| self.buffers[b.index()].clone()).collect()
    }

    /// Packing, communication, unpacking: all name the transfer, and the buffers on both sides.
    fn movement(
        &mut self,
        function: &str,
        queue: &str,
        transfer: &Transfer,
        task: &Task,
    ) -> Result<String, Diagnostic> {
        let kind = transfer.first().op.name();
        if !transfer.parcels().iter().all(|parcel| parcel.op.is_communication()) {
            return Err(unsupported(&format!("{function} of `{kind}`")));
        }
        let tables = &mut self.cx.tables;
        let numbers: Vec<String> =
            transfer.parcels().iter().map(|parcel| tables.parcel(parcel).to_string()).collect();
        if transfer.only().is_none() {
            let numbers = numbers.join(", ");
            let wire = match task.work {
                Work::Pack(_) => task.writes.first(),
                _ => task.reads.first(),
            };
            let pointer = |b: &BufferId| match Some(b) != wire && Some(&self.frame.holder(*b)) == wire {
                true => "nullptr".to_owned(),
                false => self.buffers[b.index()].clone(),
            };
            let ends = [&task.reads, &task.writes].map(|buffers| {
                let pointers: Vec<String> = buffers.iter().map(pointer).collect();
                match pointers.as_slice() {
                    [one] => one.clone(),
                    several => format!("{{{}}}", several.join(", ")),
                }
            });
            let [from, to] = ends;
            return Ok(format!("{function}(device, {queue}, {{{numbers}}}, {from}, {to})"));
        }
        if task.reads.len() > 1 {
            return Err(unsupported(&format!("{function} that takes the own block from a tensor")));
        }
        let (from, to) = (self.operand(&task.reads, 0)?, self.operand(&task.writes, 0)?);
        let (from, to) = (&self.buffers[from.index()], &self.buffers[to.index()]);
        Ok(format!("{function}(device, {queue}, {}, {from}, {to})", numbers.concat()))
    }

    fn compute(&mut self, queue: &str, op: &Op, task: &Task) -> Result<String, Diagnostic> {
        if !op.info().operands.contains(&task.reads.len()) || task.writes.len() != op.n_results() {
            let (n, m) = (task.reads.len(), task.writes.len());
            return Err(unsupported(&format!("`{}` that reads {n} buffers and writes {m}", op.name())));
        }
        let (reads, writes) = (self.views(&task.reads)?, self.views(&task.writes)?);
        let views: String = reads.iter().chain(&writes).map(|view| format!(", {view}")).collect();
        let lists = format!(", Views{{{}}}, Views{{{}}}", reads.join(", "), writes.join(", "));
        let dim = |d| self.cx.dim(d).to_owned();
        let call = |function: &str, attributes: &[String]| {
            let attributes: String = attributes.iter().map(|a| format!(", {a}")).collect();
            format!("{function}(device, {queue}{attributes}{views})")
        };
        Ok(match op {
            Op::Positions => {
                let ty = self.tensor(task.writes[0])?;
                let Some(&over) = ty.dims.first() else {
                    return Err(unsupported("positions without a dimension"));
                };
                let sequence = attention::sequence(self.cx, ty, over)?;
                format!("positions(device, {queue}, {sequence}{views})")
            }
            Op::Einsum => call("einsum", &[]),
            Op::Embed { .. } => call("embed", &[]),
            Op::Unary(f) => call("unary", &[format!("Unary::{f:?}")]),
            Op::Binary(f) => call("binary", &[format!("Binary::{f:?}")]),
            Op::Scale { factor } => call("scale", &[names::double(*factor)]),
            Op::Cast { .. } => call("cast", &[]),
            Op::RmsNorm { over, eps, offset } => {
                call("rms_norm", &[dim(*over), names::double(*eps), names::double(*offset)])
            }
            Op::RmsScale { over, eps } => {
                let count: f64 = over.iter().map(|&d| self.cx.schedule.space.size(d) as f64).product();
                call("rms_scale", &[names::double(count), names::double(*eps)])
            }
            Op::LayerNorm { over, eps } => call("layer_norm", &[dim(*over), names::double(*eps)]),
            Op::Softmax { over } | Op::Gradient(Gradient::Softmax { over }) => call(op.name(), &[dim(*over)]),
            Op::Random(random) => self.random(queue, random, task, &views)?,
            Op::Rotary(rotary) => {
                let attributes = [
                    dim(rotary.over),
                    rotary.width.to_string(),
                    names::double(rotary.amplitude()),
                    format!("device.table({})", self.cx.tables.frequencies(rotary)),
                ];
                let function = match rotary.pairs {
                    Pairs::Halves => "rotary",
                    Pairs::Neighbours => "rotary_neighbours",
                };
                call(function, &attributes)
            }
            Op::Attention(a) | Op::AttentionBackward(a) => {
                let (rows, columns) = (self.tensor(task.reads[0])?, self.tensor(task.reads[1])?);
                let widths = attention::widths(self.cx, rows, self.tensor(self.operand(&task.reads, 2)?)?);
                let described = attention::describe(self.cx, a, rows, columns)?;
                format!("{}<{widths}>(device, {queue}, {described}{lists})", op.name())
            }
            Op::Scores { attention: a, .. } => {
                let (rows, columns) = (self.tensor(task.reads[0])?, self.tensor(task.reads[1])?);
                plain_rows(op, a)?;
                let described = attention::describe(self.cx, a, rows, columns)?;
                format!("scores(device, {queue}, {described}{views})")
            }
            Op::Weigh { attention: a, .. } => {
                let (rows, columns) = (self.tensor(task.reads[0])?, self.tensor(task.reads[2])?);
                plain_rows(op, a)?;
                let described = attention::describe(self.cx, a, rows, columns)?;
                format!("weigh(device, {queue}, {described}{views})")
            }
            Op::Merge => call("merge", &[]),
            Op::MergeParts { .. } => call("merge_parts", &[]),
            Op::Accumulate => call("accumulate", &[]),
            Op::Sink => call("sink", &[]),
            Op::RowLse { over, parts: _ } => {
                self.contiguous(*over)?;
                call("row_lse", &[dim(*over)])
            }
            Op::Fill { value } => call("fill", &[names::double(*value)]),
            Op::Sum => call("sum", &[]),
            Op::Expand => call("expand", &[]),
            Op::Gradient(Gradient::Unary(f)) => call(op.name(), &[format!("Unary::{f:?}")]),
            Op::Gradient(Gradient::Embed { over: _, padding }) => {
                let row = padding.map_or("-1".to_owned(), |row| row.to_string());
                call(op.name(), &[row])
            }
            Op::Gradient(Gradient::Sink) => call(op.name(), &[]),
            Op::Gradient(Gradient::RmsNorm { over, eps, offset }) => {
                call(op.name(), &[dim(*over), names::double(*eps), names::double(*offset)])
            }
            Op::Gradient(Gradient::RmsScale { over, eps }) => {
                let count: f64 = over.iter().map(|&d| self.cx.schedule.space.size(d) as f64).product();
                call(op.name(), &[names::double(count), names::double(*eps)])
            }
            Op::Gradient(Gradient::LayerNorm { over, eps }) => {
                call(op.name(), &[dim(*over), names::double(*eps)])
            }
            Op::Gradient(Gradient::CrossEntropy { over, ignore })
            | Op::Loss(Loss::CrossEntropy { over, ignore } | Loss::Pick { over, ignore }) => {
                self.contiguous(*over)?;
                let padded = self.padded(task.reads[1])?;
                let function = op.name();
                format!("{function}(device, {queue}, {}, {ignore}, {padded}{views})", self.cx.dim(*over))
            }
            Op::Loss(Loss::Valid { ignore }) => {
                let padded = self.padded(task.reads[0])?;
                format!("valid(device, {queue}, {ignore}, {padded}{views})")
            }
            Op::Optimizer(Optimizer::AdamW(AdamW { lr, beta1, beta2, eps, weight_decay })) => {
                let constants = [lr, beta1, beta2, eps, weight_decay].map(|x| names::double(*x)).join(", ");
                call("adamw", &[format!("AdamW{{{constants}}}")])
            }
            Op::Optimizer(Optimizer::ClipFactor { max_norm }) => {
                call("clip_factor", &[names::double(*max_norm)])
            }
            Op::Repeat { from, to } => call("repeat", &[dim(*from), dim(*to)]),
            Op::SumCopies { from, to } => call("sum_copies", &[dim(*from), dim(*to)]),
            Op::Take { to } => call("take", &[dim(*to)]),
            Op::Join { to } => format!("join(device, {queue}, {}{lists})", dim(*to)),
            Op::Slice { .. } => call("slice", &[]),
            Op::Experts(e) => {
                let described = experts::describe(&self.cx.schedule.space, e)?;
                format!("{}(device, {queue}, {described}{lists})", op.name())
            }
            Op::Window(Window::Concat { .. }) => call("concat", &[]),
            Op::Window(Window::Cut { start, .. }) => call("cut", &[start.to_string()]),
            Op::Param(_)
            | Op::Input(_)
            | Op::State(_)
            | Op::Assign { .. }
            | Op::Call { .. }
            | Op::Reshard
            | Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::Permute
            | Op::Fetch { .. }
            | Op::FetchSum { .. }
            | Op::Coalesced(_) => return Err(unsupported(&format!("`{}` as a computation", op.name()))),
        })
    }

    /// What is drawn at random; of a mask the positions that the rank holds along each dimension.
    fn random(
        &mut self,
        queue: &str,
        random: &Random,
        task: &Task,
        views: &str,
    ) -> Result<String, Diagnostic> {
        let name = random.name();
        Ok(match random {
            Random::Key { seed } => format!("key(device, {queue}, {seed}u{views})"),
            Random::FoldIn => format!("fold_in(device, {queue}{views})"),
            Random::LayerKey => format!("layer_key(device, {queue}, layer{views})"),
            Random::DropoutMask { rate, seed } => {
                let ty = self.tensor(task.writes[0])?;
                let mut positions = Vec::with_capacity(ty.dims.len());
                for &dim in &ty.dims {
                    if self.cx.schedule.space.dims[dim].part.is_some() {
                        return Err(unsupported(&format!("`{name}` over parts of a dimension")));
                    }
                    positions.push(attention::sequence(self.cx, ty, dim)?);
                }
                let positions = positions.join(", ");
                let rate = names::double(*rate);
                format!("dropout_mask(device, {queue}, {seed}u, {rate}, {{{positions}}}{views})")
            }
            Random::Dropout { rate } => {
                format!("dropout(device, {queue}, {}{views})", names::double(*rate))
            }
        })
    }

    /// Refuses a vocabulary whose padding is not at its end.
    fn contiguous(&self, dim: DimId) -> Result<(), Diagnostic> {
        let found = &self.cx.schedule.space.dims[dim];
        let plain = found.order == Order::Contiguous && found.fetched.is_none();
        match plain || found.valid == found.size {
            true => Ok(()),
            false => {
                Err(unsupported(&format!("a sum over `{}`, which has an order and padding,", found.name)))
            }
        }
    }

    /// The dimensions of labels that have padding, with the positions that this rank holds.
    fn padded(&mut self, labels: BufferId) -> Result<String, Diagnostic> {
        const MOST: usize = 2;
        let ty = self.tensor(labels)?;
        let space = &self.cx.schedule.space;
        let with_padding = |d: &DimId| {
            let sequence = &space.dims[space.sequence(*d)];
            sequence.valid < sequence.size
        };
        let dims: Vec<DimId> = ty.dims.iter().copied().filter(with_padding).collect();
        if dims.len() > MOST {
            return Err(unsupported(&format!("labels with padding in more than {MOST} dimensions")));
        }
        let mut padded = Vec::new();
        for dim in dims {
            let sequence = attention::sequence(self.cx, ty, dim)?;
            padded.push(format!("{{{}, {sequence}}}", self.cx.dim(dim)));
        }
        Ok(format!("{{{}}}", padded.join(", ")))
    }

    /// Buffers with the numbers of their types, as the runtime takes them.
    fn views(&mut self, buffers: &[BufferId]) -> Result<Vec<String>, Diagnostic> {
        let mut views = Vec::with_capacity(buffers.len());
        for &buffer in buffers {
            let ty = self.tensor(buffer)?;
            let ty = self.cx.tables.ty(ty);
            let name = &self.buffers[buffer.index()];
            let strides = match self.frame.buffers[buffer].place {
                Place::Wire { .. } => format!(", &{name}_strides"),
                _ => String::new(),
            };
            views.push(format!("{{T{ty}, {name}{strides}}}"));
        }
        Ok(views)
    }

    fn operand(&self, buffers: &[BufferId], i: usize) -> Result<BufferId, Diagnostic> {
        buffers.get(i).copied().ok_or_else(|| unsupported("a task that lacks a buffer"))
    }

    fn tensor(&self, buffer: BufferId) -> Result<&'s TensorType, Diagnostic> {
        let frame: &'s Frame = self.frame;
        match &frame.buffers[buffer].content {
            Content::Tensor(ty) => Ok(ty),
            Content::Wire { .. } => {
                Err(unsupported(&format!("wire `${}` as a tensor", frame.buffers[buffer].name)))
            }
        }
    }
}

/// Explicit rows of scores have neither a bias nor dropout.
fn plain_rows(op: &Op, a: &Attention) -> Result<(), Diagnostic> {
    match (a.bias.is_some(), a.dropout.is_some()) {
        (false, false) => Ok(()),
        (true, _) => Err(unsupported(&format!("`{}` with a bias", op.name()))),
        (false, true) => Err(unsupported(&format!("`{}` with dropout", op.name()))),
    }
}

fn unsupported(what: &str) -> Diagnostic {
    Diagnostic::new("S40", format!("the schedule has {what}, which has no emitted form"))
}
