//! Lowering: a per-rank program becomes a schedule.
//!
//! Each function becomes a frame: nodes become tasks in the same order, values become buffers. A collective becomes
//! pack, exchange and unpack; packing is omitted where the blocks are contiguous already, and, as an option, where
//! kernels can write or read the wire buffer (`fold`); so are takes and joins of parts that lie in their tensor (`inside`). Then buffers get offsets from
//! their lifetimes (`arena`) and streams get events where one must wait for the other (`events`). Weights and states that
//! are assigned are written in place, if no task needs the old elements (`lasting`).

mod arena;
mod events;
mod fit;
mod fold;
mod inside;
mod lasting;
mod outputs;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ithaca_ir::boxes::Side;
use ithaca_ir::entity::Entity;
use ithaca_ir::message::{self, Parcel};
use ithaca_ir::module::{FuncId, Function, Layers, Level, Module, Node, ValueId};
use ithaca_ir::ops::{Cache, Scan, Stage, Target};
use ithaca_ir::phase::Phase;
use ithaca_ir::schedule::{
    Buffer, BufferId, Content, Frame, FrameId, Place, Schedule, Stream, Streams, Task, Transfer, Work,
    used_streams,
};
use ithaca_ir::verify::Verified;
use ithaca_ir::{Arena, Diagnostic, Diagnostics, DimId, Op, Space, TensorType};
use serde::{Deserialize, Serialize};

use arena::UNPLACED;
use lasting::{Effects, Home, Homes};
use traffic::Traffic;
pub(crate) use traffic::is_light;

/// Which kernels pack tensors into wire buffers, and unpack them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// Kernels that do nothing else.
    #[default]
    Apart,
    /// The kernels before and after the message, where they can write and read tensors in the wire buffer.
    Folded,
}

/// The schedule of a per-rank program, with kernels of their own that pack and unpack.
///
/// # Errors
/// As [`lower_with`].
pub fn lower(module: Verified<'_>) -> Result<Schedule, Diagnostics> {
    lower_with(module, Packing::Apart)
}

/// The schedule of a per-rank program.
///
/// # Errors
/// `P03` when the program still has reshards or is not laid out; a program that was laid out on one device is fine.
pub fn lower_with(module: Verified<'_>, packing: Packing) -> Result<Schedule, Diagnostics> {
    let module = module.module();
    let reshards = module.functions.values().flat_map(|f| &f.nodes).any(|n| n.op == Op::Reshard);
    if reshards || module.level == Level::Sharded {
        let message = "lowering needs a program without reshards";
        return Err(vec![Diagnostic::new("P03", message).help("run `lower-reshards` first")]);
    }
    let mut frames: Arena<FrameId, Frame> = Arena::new();
    let effects = Effects::of(module);
    let traffic = Traffic::of(module);
    for (id, _) in module.functions.iter() {
        let used = used_streams(&frames);
        let frame =
            Lowering::new(module, id, (&frames, &used), (&effects, &traffic[id.index()]), packing).frame();
        frames.push(frame);
    }
    Ok(Schedule {
        name: module.name.clone(),
        pipeline: module.pipeline.clone(),
        space: module.space.clone(),
        frames,
    })
}

/// One function on its way to a frame.
struct Lowering<'a> {
    space: &'a Space,
    function: &'a Function,
    frames: &'a Arena<FrameId, Frame>,
    /// The streams that each of them uses.
    used: &'a [Streams],
    is_main: bool,
    packing: Packing,
    frame: Frame,
    /// Names of buffers.
    names: BTreeSet<String>,
    /// The buffer of each value.
    buffers: Vec<Option<BufferId>>,
    /// For each value the phase in which it is made: that of the last call that it depends on.
    phases: Vec<Phase>,
    /// For each value the node after which it is not used any more; outputs live to the end.
    last_use: Vec<usize>,
    /// Values that live where something lasts.
    homes: Homes,
    /// The weights and states that the function reads and writes, callees included.
    effects: &'a Effects,
    /// The collectives of weights and gradients.
    traffic: &'a Traffic,
    /// The buffers of written weights and states, one for each.
    lasting: Vec<(Home, BufferId)>,
    /// Messages that are on their way.
    arrivals: Vec<Arrival>,
    /// The streams of what was sent between stages.
    sent_along: BTreeMap<ValueId, Stream>,
    /// Results that are written from the start.
    passed_on: BTreeMap<usize, BufferId>,
}

/// A message that will be unpacked.
struct Arrival {
    transfer: Transfer,
    received: BufferId,
    results: Vec<BufferId>,
}

impl<'a> Lowering<'a> {
    fn new(
        module: &'a Module,
        id: FuncId,
        (frames, used): (&'a Arena<FrameId, Frame>, &'a [Streams]),
        (effects, traffic): (&'a [Effects], &'a Traffic),
        packing: Packing,
    ) -> Self {
        let function = &module.functions[id];
        let mut last_use = vec![0; function.values.len()];
        for (i, node) in function.nodes.iter().enumerate() {
            for &v in &node.operands {
                last_use[v.index()] = i;
            }
        }
        for output in &function.outputs {
            last_use[output.value.index()] = function.nodes.len();
        }
        let frame = Frame {
            name: function.name.clone(),
            phase: function.phase,
            n_arguments: function.params.len(),
            ..Frame::default()
        };
        let buffers = vec![None; function.values.len()];
        let mut phases = vec![Phase::Forward; function.values.len()];
        for node in &function.nodes {
            let phase = match node.op {
                Op::Call { callee, .. } => module.functions[callee].phase,
                _ => node.operands.iter().map(|v| phases[v.index()]).max().unwrap_or_default(),
            };
            node.results.iter().for_each(|v| phases[v.index()] = phase);
        }
        let homes = Homes::of(function, effects, &last_use);
        Self {
            space: &module.space,
            function,
            frames,
            used,
            is_main: module.main() == Some(id),
            packing,
            frame,
            names: BTreeSet::new(),
            buffers,
            phases,
            last_use,
            homes,
            effects: &effects[id.index()],
            traffic,
            lasting: Vec::new(),
            arrivals: Vec::new(),
            sent_along: BTreeMap::new(),
            passed_on: BTreeMap::new(),
        }
    }

    fn frame(mut self) -> Frame {
        for (i, &param) in self.function.params.iter().enumerate() {
            self.value_buffer(param, Place::Argument(i));
        }
        self.pass_on();
        for (i, node) in self.function.nodes.iter().enumerate() {
            self.receive(node);
            self.node(i, node);
        }
        std::mem::take(&mut self.arrivals).into_iter().for_each(|arrival| self.unpack(arrival));
        self.outputs();
        if self.packing == Packing::Folded {
            let folded = inside::fold(&mut self.frame, self.space);
            fold::fold(&mut self.frame, self.space, folded);
        }
        arena::place(&mut self.frame, self.space, (self.frames, self.used));
        events::insert(&mut self.frame, self.space, (self.frames, self.used));
        self.frame
    }

    fn node(&mut self, index: usize, node: &Node) {
        match &node.op {
            Op::Param(binding) => self.read_lasting(node.result(), (Target::Param, binding.clone())),
            Op::State(binding) => self.read_lasting(node.result(), (Target::State, binding.clone())),
            Op::Assign { target, binding } => self.assign(node.operands[0], (*target, binding.clone())),
            Op::Input(binding) => {
                self.value_buffer(node.result(), Place::Input(binding.clone()));
            }
            Op::Call { callee, layers, stride, scan, stage } => {
                self.call(index, node, *callee, (layers, *stride), (*scan, *stage));
            }
            op if op.is_communication() => self.transfer(node),
            op => {
                let reads = self.reads(node);
                let writes = node.results.iter().map(|&v| self.result_buffer(v)).collect();
                let from_host = matches!(op, Op::Cache(Cache::Upload));
                let stream = if from_host { Stream::Host } else { Stream::Compute };
                self.task(stream, Work::Compute(op.clone()), reads, writes);
            }
        }
    }

    /// A value is read where it lasts, or copied from there before it is overwritten.
    fn read_lasting(&mut self, value: ValueId, home: Home) {
        if self.homes.copied.contains(&value) {
            let from = self.lasting_buffer(value, home);
            let copy = self.value_buffer(value, UNPLACED);
            self.task(Stream::Compute, Work::Copy, vec![from], vec![copy]);
        } else {
            let buffer = self.lasting_buffer(value, home);
            self.buffers[value.index()] = Some(buffer);
        }
    }

    /// A value that was not made in its place is copied there.
    fn assign(&mut self, value: ValueId, home: Home) {
        if self.homes.of[value.index()].as_ref() != Some(&home) {
            let stream = if home.1.host { Stream::ToHost } else { Stream::Compute };
            let to = self.lasting_buffer(value, home);
            self.task(stream, Work::Copy, vec![self.buffer(value)], vec![to]);
        }
    }

    /// The buffer of a weight or state, for a value of its type: one per frame, if the frame writes it.
    fn lasting_buffer(&mut self, value: ValueId, home: Home) -> BufferId {
        if let Some((_, buffer)) = self.lasting.iter().find(|(known, _)| *known == home) {
            return *buffer;
        }
        let is_value = self.homes.of[value.index()].as_ref() == Some(&home);
        let name = self.name(value);
        let name = self.unique(if is_value { name } else { format!("{name}.kept") });
        let content = Content::Tensor(Arc::clone(&self.function.values[value].ty));
        let place = match &home {
            (Target::Param, binding) => Place::Weight(binding.clone()),
            (Target::State, binding) => Place::State(binding.clone()),
        };
        let buffer = self.frame.buffers.push(Buffer { name, content, place });
        if self.effects.writes(&home) {
            self.lasting.push((home, buffer));
        }
        buffer
    }

    /// Where a value is made: in the frame, or where it lasts.
    fn result_buffer(&mut self, value: ValueId) -> BufferId {
        match self.homes.of[value.index()].clone() {
            Some(home) => {
                let buffer = self.lasting_buffer(value, home);
                self.buffers[value.index()] = Some(buffer);
                buffer
            }
            None => self.value_buffer(value, UNPLACED),
        }
    }

    /// A loop over layers works in place on carried values: such arguments are copied first where they are needed
    /// afterwards. Stacks are buffers of their own.
    fn call(
        &mut self,
        index: usize,
        node: &Node,
        callee: FuncId,
        (layers, stride): (&Layers, u64),
        (scan, stage): (Option<Scan>, Option<Stage>),
    ) {
        let callee = FrameId::new(callee.index());
        let mut reads = self.reads(node);
        let mut writes = Vec::new();
        let n_carried = match (layers.end - layers.start, scan) {
            (1, _) => 0,
            (_, Some(scan)) => scan.carried,
            (_, None) => node.results.len(),
        };
        for (i, &result) in node.results.iter().enumerate() {
            if i >= n_carried {
                writes.push(self.value_buffer(result, UNPLACED));
                continue;
            }
            let argument = node.operands[i];
            let owned = matches!(self.frame.buffers[reads[i]].place, Place::Frame(_));
            let shared =
                node.operands.iter().filter(|&&v| self.buffers[v.index()] == Some(reads[i])).count() > 1;
            // A value of all ranks and a value of some ranks need separate buffers.
            let same = self.function.ty(argument) == self.function.ty(result);
            if !owned || shared || !same || self.last_use[argument.index()] > index {
                let copy = self.value_buffer(result, UNPLACED);
                self.task(Stream::Compute, Work::Copy, vec![reads[i]], vec![copy]);
                reads[i] = copy;
            } else {
                self.buffers[result.index()] = Some(reads[i]);
            }
            writes.push(reads[i]);
        }
        let work = Work::Call { callee, layers: layers.clone(), stride, scan, stage, base: 0 };
        self.task(Stream::Compute, work, reads, writes);
    }

    /// The stream of parts that travel along an axis.
    fn along(&self, from: &TensorType, to: &TensorType) -> Stream {
        let mesh = &self.space.mesh;
        let moved = from.layout.moved.iter().chain(&to.layout.moved).map(|m| m.axis);
        let by = |ty: &TensorType, axis| ty.layout.moved_along(axis).map_or(0, |m| m.by);
        let mut hops = moved.map(|axis| (axis, by(to, axis) + mesh.size(axis) - by(from, axis)));
        let hop = hops.find(|(axis, by)| !by.is_multiple_of(mesh.size(*axis)));
        hop.map_or(Stream::Comm, |(axis, by)| Stream::along_a_ring(by % mesh.size(axis), mesh.size(axis)))
    }

    /// A collective: pack, exchange, unpack. Several tensors travel from wire to wire, permutes from tensor to tensor.
    fn transfer(&mut self, node: &Node) {
        let sources = self.reads(node);
        let (operands, results) = (self.function.operand_types(node), self.function.result_types(node));
        let parcels = message::parcels(&node.op, &operands, &results);
        let transfer = Transfer::of(parcels).expect("a verified collective has an operand and a result");
        let stream = if self.traffic.has(node) { Stream::Weights } else { Stream::Comm };
        if transfer.is_direct() {
            let results = node.results.iter().map(|&result| self.result_buffer(result)).collect();
            let Parcel { from, to, .. } = transfer.first();
            let stream = match from.layout.at {
                Some(sender) if from.layout.at != to.layout.at => {
                    let phase = self.phases[node.operands[0].index()];
                    Stream::between_stages(phase, sender, to.layout.at)
                }
                Some(_) | None if stream == Stream::Comm => self.along(from, to),
                Some(_) | None => stream,
            };
            if stream.is_between_stages() {
                self.sent_along.insert(node.result(), stream);
            }
            return self.task(stream, Work::Exchange(transfer), sources, results);
        }
        // Parts of what a stage sent are gathered behind the transfer that brings them, not between other collectives.
        let stream = self.sent_along.get(&node.operands[0]).copied().unwrap_or(stream);
        let ends = Ends::of(self.space, &transfer);
        let name = self.name(node.result());
        let mut sent = sources[0];
        if ends.pack {
            sent = self.wire(format!("{name}.send"), &transfer, Side::Sent);
            self.task(Stream::Compute, Work::Pack(transfer.clone()), sources, vec![sent]);
        }
        if ends.unpack {
            let received = self.wire(format!("{name}.recv"), &transfer, Side::Received);
            self.task(stream, Work::Exchange(transfer.clone()), vec![sent], vec![received]);
            let results = node.results.iter().map(|&result| self.result_buffer(result)).collect();
            // A message travels until one of its tensors is needed.
            self.arrivals.push(Arrival { transfer, received, results });
        } else {
            let result = self.result_buffer(node.result());
            self.task(stream, Work::Exchange(transfer), vec![sent], vec![result]);
        }
    }

    /// Unpacks the messages with tensors that `node` reads. Around a call that communicates streams meet, so all are unpacked
    /// before.
    fn receive(&mut self, node: &Node) {
        let reads: Vec<BufferId> = self.reads(node);
        let meets = match node.op {
            Op::Call { callee, .. } => self.used[callee.index()].communicates(),
            _ => false,
        };
        let needed = |arrival: &Arrival| meets || arrival.results.iter().any(|b| reads.contains(b));
        let (now, later) = std::mem::take(&mut self.arrivals).into_iter().partition(needed);
        self.arrivals = later;
        let now: Vec<Arrival> = now;
        now.into_iter().for_each(|arrival| self.unpack(arrival));
    }

    fn unpack(&mut self, Arrival { transfer, received, results }: Arrival) {
        self.task(Stream::Compute, Work::Unpack(transfer), vec![received], results);
    }

    fn reads(&self, node: &Node) -> Vec<BufferId> {
        node.operands.iter().map(|&v| self.buffer(v)).collect()
    }

    fn buffer(&self, value: ValueId) -> BufferId {
        self.buffers[value.index()].expect("operands are defined before they are used")
    }

    fn name(&self, value: ValueId) -> String {
        match &self.function.values[value].name {
            Some(name) => name.to_string(),
            None => format!("v{}", value.index()),
        }
    }

    fn value_buffer(&mut self, value: ValueId, place: Place) -> BufferId {
        let name = self.unique(self.name(value));
        let content = Content::Tensor(Arc::clone(&self.function.values[value].ty));
        let buffer = self.frame.buffers.push(Buffer { name, content, place });
        self.buffers[value.index()] = Some(buffer);
        buffer
    }

    fn wire(&mut self, name: String, transfer: &Transfer, side: Side) -> BufferId {
        let elements = message::wire_elements(self.space, transfer.parcels(), side);
        let content = Content::Wire { dtype: transfer.first().from.dtype, elements };
        let name = self.unique(name);
        self.frame.buffers.push(Buffer { name, content, place: UNPLACED })
    }

    /// A value may have the name of a numbered one.
    fn unique(&mut self, name: String) -> String {
        if self.names.insert(name.clone()) { name } else { self.unique(format!("{name}_")) }
    }

    fn task(&mut self, stream: Stream, work: Work, reads: Vec<BufferId>, writes: Vec<BufferId>) {
        self.frame.tasks.push(task(stream, work, reads, writes));
    }
}

/// A task that no event orders yet.
fn task(stream: Stream, work: Work, reads: Vec<BufferId>, writes: Vec<BufferId>) -> Task {
    Task { stream, work, reads, writes, waits: Vec::new(), records: None }
}

/// On which ends of a collective blocks must be gathered or dealt out.
struct Ends {
    pack: bool,
    unpack: bool,
}

impl Ends {
    fn of(space: &Space, transfer: &Transfer) -> Ends {
        let Some(Parcel { op, from, to }) = transfer.only() else { return Ends { pack: true, unpack: true } };
        // Runs of filled rows are sent one by one, wherever they are.
        let runs_lie = |side| message::runs_lie_in_tensor(space, transfer.parcels(), side);
        if message::sends_counts(space, transfer.parcels()) {
            return Ends { pack: !runs_lie(Side::Sent), unpack: !runs_lie(Side::Received) };
        }
        match *op {
            Op::AllToAll { split, concat, .. } => {
                Ends { pack: !leads(space, from, split), unpack: !leads(space, to, concat) }
            }
            Op::AllGather { dim, .. } => Ends { pack: false, unpack: !leads(space, to, dim) },
            Op::ReduceScatter { dim, .. } => Ends { pack: !leads(space, from, dim), unpack: false },
            // Blocks are lists of regions, and a token may be in the blocks of several peers.
            Op::Fetch { .. } | Op::FetchSum { .. } => Ends { pack: true, unpack: true },
            _ => Ends { pack: false, unpack: false },
        }
    }
}

/// Whether parts of `dim` are contiguous: every dimension in front of it has one element on a rank.
fn leads(space: &Space, ty: &TensorType, dim: DimId) -> bool {
    let shape = space.max_local_shape(ty);
    ty.dims.iter().zip(shape).take_while(|&(&d, _)| d != dim).all(|(_, n)| n == 1)
}
