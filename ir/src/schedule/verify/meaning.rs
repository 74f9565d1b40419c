//! Whether a schedule computes what its program says: `S18`.
//!
//! The program and the schedule are both read as what their values are made of: an operation on values, an argument, what
//! a weight held before. Things made alike are one value, so the two agree where they return one value, and
//! leave one in every weight and state. That a buffer still holds what was written to it is shown elsewhere (`S06` to
//! `S08`), so tasks may stand in another order, copy, reuse memory, and pack as they like.
//!
//! Translation validation: Pnueli, Siegel and Singerman, TACAS 1998. Functions are compared one by one.

use std::collections::BTreeMap;

use crate::boxes::Side;
use crate::diagnostic::{Diagnostic, Diagnostics, MAX_DIAGNOSTICS, counted};
use crate::entity::Entity;
use crate::handles::{FuncId, Layers};
use crate::layout::At;
use crate::mesh::Mesh;
use crate::module::{Function, Module};
use crate::ops::error::OpError;
use crate::ops::table::op::Op;
use crate::ops::table::source::{Binding, Target};
use crate::ops::table::structure::{Scan, Stage};
use crate::schedule::verify::partner;
use crate::schedule::verify::partner::in_task;
use crate::schedule::verify::report::{describe, in_frame, name};
use crate::schedule::{BufferId, Content, Frame, FrameId, Place, Schedule, Task, Transfer, Work};
use crate::types::TensorType;
use crate::verify::Verified;

/// A value, by number.
type Symbol = usize;

/// A weight or state: its target, its name, and how it is bound.
type Home<'a> = (Target, &'a Binding);

/// Checks that a schedule that [`verify`](super::verify) accepts computes what a program says: its outputs, and what it
/// leaves in weights and states.
///
/// # Errors
/// `S18` for what is computed otherwise; at most 64.
pub fn verify_meaning(schedule: &Schedule, program: Verified<'_>) -> Result<(), Diagnostics> {
    let module = program.module();
    let mut found = Diagnostics::new();
    if let Some(message) = otherness(schedule, module) {
        found.push(Diagnostic::new("S18", message));
        return Err(found);
    }
    let effects = effects_of(module);
    for ((id, function), frame) in module.functions.iter().zip(schedule.frames.values()) {
        if function.name != frame.name {
            let message = format!("it stands for function `@{}`", function.name);
            found.push(in_frame(frame, OpError::new("S18", message)));
            continue;
        }
        if function.phase != frame.phase {
            let (is, stated) = (function.phase.name(), frame.phase.name());
            let message = format!("it runs in the {is} phase, and states {stated}");
            found.push(in_frame(frame, OpError::new("S18", message)));
        }
        let mut values = Values::new(&effects);
        let said = values.of_function(function, id);
        values.of_frame(frame, &said, &mut found);
        if found.len() >= MAX_DIAGNOSTICS {
            break;
        }
    }
    found.truncate(MAX_DIAGNOSTICS);
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// How a schedule and a program are of different ranks, dimensions or functions, if they are.
fn otherness(schedule: &Schedule, module: &Module) -> Option<String> {
    let ranks = |mesh: &Mesh| match mesh.axes.len() {
        0 => "one device".to_owned(),
        _ => format!("mesh `{mesh}`"),
    };
    let (scheduled, said) = (&schedule.space, &module.space);
    if scheduled.mesh != said.mesh {
        return Some(format!(
            "the schedule is for {}, and the program for {}",
            ranks(&scheduled.mesh),
            ranks(&said.mesh)
        ));
    }
    if schedule.frames.len() != module.functions.len() {
        return Some(format!(
            "the schedule has {}, and the program {}",
            counted(schedule.frames.len() as u64, "frame"),
            counted(module.functions.len() as u64, "function")
        ));
    }
    let other = scheduled.dims.values().zip(said.dims.values()).find(|(a, b)| a != b);
    match other {
        _ if scheduled == said => None,
        Some((a, b)) if a.name == b.name => {
            Some(format!("dimension `{}` is not the same in the schedule and in the program", a.name))
        }
        Some(_) | None => Some("the schedule and the program do not have the same dimensions".to_owned()),
    }
}

/// What lasts that a function reads and writes, callees included.
#[derive(Clone, Debug, Default)]
struct Effects<'a> {
    reads: BTreeMap<(Target, &'a str), Vec<&'a Binding>>,
    writes: BTreeMap<(Target, &'a str), Vec<&'a Binding>>,
}

fn insert<'a>(homes: &mut BTreeMap<(Target, &'a str), Vec<&'a Binding>>, (target, binding): Home<'a>) {
    let named = homes.entry((target, binding.name.as_str())).or_default();
    if !named.contains(&binding) {
        named.push(binding);
    }
}

fn listed<'a>(homes: &BTreeMap<(Target, &'a str), Vec<&'a Binding>>) -> impl Iterator<Item = Home<'a>> {
    homes.iter().flat_map(|((target, _), bindings)| bindings.iter().map(|&binding| (*target, binding)))
}

fn effects_of(module: &Module) -> Vec<Effects<'_>> {
    let mut all: Vec<Effects<'_>> = Vec::with_capacity(module.functions.len());
    for function in module.functions.values() {
        let mut effects = Effects::default();
        for node in &function.nodes {
            match &node.op {
                Op::Param(binding) => insert(&mut effects.reads, (Target::Param, binding)),
                Op::State(binding) => insert(&mut effects.reads, (Target::State, binding)),
                Op::Assign { target, binding } => insert(&mut effects.writes, (*target, binding)),
                Op::Call { callee, layers: _, stride: _, scan: _, stage: _ } => {
                    if let Some(called) = all.get(callee.index()) {
                        listed(&called.reads).for_each(|home| insert(&mut effects.reads, home));
                        listed(&called.writes).for_each(|home| insert(&mut effects.writes, home));
                    }
                }
                _ => {}
            }
        }
        all.push(effects);
    }
    all
}

/// How a value was made.
#[derive(Clone, Copy, Debug)]
enum Maker<'a> {
    /// By an operation.
    Op(&'a Op),
    /// By a call.
    Call { callee: usize, layers: &'a Layers, stride: u64, scan: Option<Scan>, at: Option<At> },
}

impl Maker<'_> {
    fn word(&self) -> &'static str {
        match self {
            Maker::Op(op) => op.name(),
            Maker::Call { .. } => "call",
        }
    }

    fn is(&self, other: &Maker<'_>) -> bool {
        match (self, other) {
            (Maker::Op(a), Maker::Op(b)) => a == b,
            (
                Maker::Call { callee, layers, stride, scan, at },
                Maker::Call { callee: c, layers: l, stride: by, scan: s, at: there },
            ) => callee == c && layers == l && stride == by && scan == s && at == there,
            (Maker::Op(_) | Maker::Call { .. }, _) => false,
        }
    }
}

/// Something made, with its results.
struct Made<'a> {
    maker: Maker<'a>,
    /// The types of the results; of a call, those at its caller.
    types: Vec<TensorType>,
    results: Vec<Symbol>,
    /// What is left in each weight and state that it writes, in order.
    left: Vec<Symbol>,
}

/// What a function gives.
struct Said<'a> {
    outputs: Vec<(Option<&'a str>, Symbol)>,
    /// What is in weights and states at the end, of those written.
    lasting: Vec<(Home<'a>, Symbol)>,
}

/// What is given from outside, as a type, and its symbol.
type Given<'a> = (&'a Binding, TensorType, Symbol);

/// Values of one function, however they are made.
struct Values<'a> {
    effects: &'a [Effects<'a>],
    n: usize,
    /// Values that were made, by operation and operands.
    made: BTreeMap<(&'static str, Vec<Symbol>), Vec<Made<'a>>>,
    arguments: BTreeMap<usize, Symbol>,
    /// What is given from outside: inputs, and weights and states before anything is written, by name.
    given: BTreeMap<(Option<Target>, &'a str), Vec<Given<'a>>>,
}

/// What weights and states hold at some point of a function or of a frame.
#[derive(Default)]
struct Lasting<'a> {
    now: BTreeMap<(Target, &'a str), Vec<(&'a Binding, Symbol)>>,
}

impl<'a> Lasting<'a> {
    fn get(&self, (target, binding): Home<'_>) -> Option<Symbol> {
        let named = self.now.get(&(target, binding.name.as_str()))?;
        named.iter().find(|(known, _)| *known == binding).map(|(_, symbol)| *symbol)
    }

    fn unset(&mut self, (target, binding): Home<'a>) {
        if let Some(named) = self.now.get_mut(&(target, binding.name.as_str())) {
            named.retain(|(known, _)| *known != binding);
        }
    }

    fn set(&mut self, (target, binding): Home<'a>, symbol: Symbol) {
        let named = self.now.entry((target, binding.name.as_str())).or_default();
        match named.iter_mut().find(|(known, _)| *known == binding) {
            Some((_, now)) => *now = symbol,
            None => named.push((binding, symbol)),
        }
    }
}

impl<'a> Values<'a> {
    fn new(effects: &'a [Effects<'a>]) -> Self {
        Self { effects, n: 0, made: BTreeMap::new(), arguments: BTreeMap::new(), given: BTreeMap::new() }
    }

    fn fresh(&mut self) -> Symbol {
        self.n += 1;
        self.n - 1
    }

    fn argument(&mut self, i: usize) -> Symbol {
        if let Some(&symbol) = self.arguments.get(&i) {
            return symbol;
        }
        let symbol = self.fresh();
        self.arguments.insert(i, symbol);
        symbol
    }

    /// What is given under a name: an input, or a weight or state before anything is written there.
    fn given(&mut self, target: Option<Target>, binding: &'a Binding, ty: &TensorType) -> Symbol {
        let symbol = self.n;
        let named = self.given.entry((target, binding.name.as_str())).or_default();
        // A state that is assigned has one type, and its type is no part of what a call reads.
        let same = named.iter().find(|(known, of, _)| *known == binding && of == ty);
        if let Some((_, _, symbol)) = same {
            return *symbol;
        }
        named.push((binding, ty.clone(), symbol));
        self.fresh()
    }

    /// Puts a value where something lasts; what was there before is not written.
    fn assign(&self, lasting: &mut Lasting<'a>, home: Home<'a>, symbol: Symbol) {
        let named = self.given.get(&(Some(home.0), home.1.name.as_str()));
        let is_there =
            |(known, _, given): &(&Binding, TensorType, Symbol)| *known == home.1 && *given == symbol;
        match named.is_some_and(|named| named.iter().any(is_there)) {
            true => lasting.unset(home),
            false => lasting.set(home, symbol),
        }
    }

    /// The results of something made of these values, and what it leaves in weights and states.
    fn make(
        &mut self,
        maker: Maker<'a>,
        operands: Vec<Symbol>,
        types: Vec<TensorType>,
        n_left: usize,
    ) -> (Vec<Symbol>, Vec<Symbol>) {
        let first = self.n;
        let alike = self.made.entry((maker.word(), operands)).or_default();
        if let Some(made) = alike.iter().find(|made| made.maker.is(&maker) && made.types == types) {
            return (made.results.clone(), made.left.clone());
        }
        let results: Vec<Symbol> = (first..first + types.len()).collect();
        let left: Vec<Symbol> = (first + types.len()..first + types.len() + n_left).collect();
        self.n = first + types.len() + n_left;
        alike.push(Made { maker, types, results: results.clone(), left: left.clone() });
        (results, left)
    }

    /// What collectives make, each of one operand, whether or not they travel together.
    fn each(
        &mut self,
        collectives: impl Iterator<Item = (&'a Op, TensorType)>,
        operands: &[Symbol],
    ) -> Vec<Symbol> {
        let ends = collectives.zip(operands);
        ends.flat_map(|((op, ty), &operand)| self.make(Maker::Op(op), vec![operand], vec![ty], 0).0).collect()
    }

    /// What a call gives; `lasting` is what it finds, and afterwards what it leaves.
    fn call(
        &mut self,
        maker: Maker<'a>,
        callee: usize,
        mut operands: Vec<Symbol>,
        types: Vec<TensorType>,
        lasting: &mut Lasting<'a>,
    ) -> Vec<Symbol> {
        let effects = self.effects;
        let Some(called) = effects.get(callee) else { return Vec::new() };
        // What nobody here has written is as it was; that is said by a number of its own.
        let before = |home: Home<'a>| lasting.get(home).map_or(0, |symbol| symbol + 1);
        operands.extend(listed(&called.reads).map(before));
        operands.extend(listed(&called.writes).map(before));
        let (results, left) = self.make(maker, operands, types, listed(&called.writes).count());
        for (home, symbol) in listed(&called.writes).zip(left) {
            lasting.set(home, symbol);
        }
        results
    }

    fn of_function(&mut self, function: &'a Function, id: FuncId) -> Said<'a> {
        let mut symbols: Vec<Symbol> = vec![0; function.values.len()];
        let mut lasting = Lasting::default();
        for (i, param) in function.params.iter().enumerate() {
            symbols[param.index()] = self.argument(i);
        }
        for node in &function.nodes {
            let operands: Vec<Symbol> = node.operands.iter().map(|v| symbols[v.index()]).collect();
            let types: Vec<TensorType> = node.results.iter().map(|&v| function.ty(v).clone()).collect();
            let home = match &node.op {
                Op::Param(binding) => Some((Target::Param, binding)),
                Op::State(binding) => Some((Target::State, binding)),
                _ => None,
            };
            let results = match (&node.op, home) {
                (_, Some(home)) => vec![match lasting.get(home) {
                    Some(symbol) => symbol,
                    None => self.given(Some(home.0), home.1, &types[0]),
                }],
                (Op::Input(binding), _) => vec![self.given(None, binding, &types[0])],
                (Op::Assign { target, binding }, _) => {
                    self.assign(&mut lasting, (*target, binding), operands[0]);
                    Vec::new()
                }
                (Op::Call { callee, layers, stride, scan, stage }, _) => {
                    let callee = callee.index();
                    let at = stage.and_then(Stage::at);
                    let maker = Maker::Call { callee, layers, stride: *stride, scan: *scan, at };
                    self.call(maker, callee, operands, types, &mut lasting)
                }
                (Op::Coalesced(members), _) => self.each(members.iter().zip(types), &operands),
                (op, _) => self.make(Maker::Op(op), operands, types, 0).0,
            };
            for (value, symbol) in node.results.iter().zip(results) {
                symbols[value.index()] = symbol;
            }
        }
        let outputs =
            function.outputs.iter().map(|o| (o.name.as_deref(), symbols[o.value.index()])).collect();
        let written: Vec<Home<'a>> =
            self.effects.get(id.index()).map_or_else(Vec::new, |effects| listed(&effects.writes).collect());
        let lasting = written.into_iter().filter_map(|home| Some((home, lasting.get(home)?))).collect();
        Said { outputs, lasting }
    }

    /// What a task finds in weights and states and leaves there, callees included.
    fn lasting_of(&self, frame: &'a Frame, index: usize) -> Effects<'a> {
        let Task { work, reads, writes, .. } = &frame.tasks[index];
        let mut effects = match work {
            Work::Call { callee, .. } => self.effects.get(callee.index()).cloned().unwrap_or_default(),
            Work::Compute(_) | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => {
                Effects::default()
            }
        };
        reads.iter().filter_map(|&b| home(frame, b)).for_each(|home| insert(&mut effects.reads, home));
        writes.iter().filter_map(|&b| home(frame, b)).for_each(|home| insert(&mut effects.writes, home));
        effects
    }

    /// The message about a task, with another that writes a weight or a state that it has to do with, where it names none:
    /// the last one before it, or the first one behind.
    fn with_rival(&self, frame: &'a Frame, index: usize, message: String) -> String {
        if message.contains("task ") {
            return message;
        }
        let own = self.lasting_of(frame, index);
        let concerned = |home: Home<'a>| {
            let named = (home.0, home.1.name.as_str());
            [&own.reads, &own.writes].into_iter().any(|homes| homes.contains_key(&named))
        };
        let written =
            |i: usize| Some((i, listed(&self.lasting_of(frame, i).writes).find(|&h| concerned(h))?));
        let rival = (0..index).rev().find_map(written);
        match rival.or_else(|| (index + 1..frame.tasks.len()).find_map(written)) {
            Some((i, (target, binding))) => {
                let what = format!("`{}` of {}s", binding.name, target.name());
                format!("{message}; {} writes {what} too", describe(frame, i))
            }
            None => message,
        }
    }

    fn of_frame(&mut self, frame: &'a Frame, said: &Said<'_>, found: &mut Diagnostics) {
        let n = frame.buffers.len();
        let mut reader =
            Reader { frame, held: vec![None; n], wires: vec![Vec::new(); n], lasting: Lasting::default() };
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
        if frame.outputs.len() != said.outputs.len() {
            return refuse(format!("it returns {} of {} values", frame.outputs.len(), said.outputs.len()));
        }
        for (i, (output, (named, symbol))) in frame.outputs.iter().zip(&said.outputs).enumerate() {
            let is_named = output.name.as_deref() == *named;
            let held = reader.read(self, output.buffer);
            if !is_named || held.as_ref() != Ok(symbol) {
                let shown = name(frame, output.buffer);
                let by = writers[output.buffer.index()];
                let by = by.map_or(String::new(), |i| format!(", by {}", describe(frame, i)));
                refuse(format!("output {i}, `${shown}`, is another value{by} than the program returns"));
            }
        }
        for ((target, binding), symbol) in &said.lasting {
            if reader.lasting.get((*target, binding)) != Some(*symbol) {
                let home = |b: &BufferId| home(frame, *b).is_some_and(|h| h == (*target, *binding));
                let by = frame.tasks.iter().rposition(|task| task.writes.iter().any(home));
                let by = by.map_or(String::new(), |i| format!(", by {}", describe(frame, i)));
                let what = format!("`{}` of {}s", binding.name, target.name());
                refuse(format!("{what} is left another value{by} than the program assigns"));
            }
        }
        let n = reader.lasting.now.values().map(Vec::len).sum::<usize>();
        if n > said.lasting.len() {
            refuse(format!("it writes {n} weights and states, and the program {}", said.lasting.len()));
        }
    }
}

/// What buffers hold while a frame is read.
struct Reader<'a> {
    frame: &'a Frame,
    held: Vec<Option<Symbol>>,
    /// The tensors that are on each wire, by buffer, as far as they are there; none where nothing was packed.
    wires: Vec<Vec<Option<Symbol>>>,
    lasting: Lasting<'a>,
}

fn home(frame: &Frame, buffer: BufferId) -> Option<Home<'_>> {
    match &frame.buffers[buffer].place {
        Place::Weight(binding) => Some((Target::Param, binding)),
        Place::State(binding) => Some((Target::State, binding)),
        Place::Frame(_) | Place::Wire { .. } | Place::Argument(_) | Place::Result(_) | Place::Input(_) => {
            None
        }
    }
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
            Place::Weight(binding) => Ok(self.lasting_of(values, (Target::Param, binding), ty)),
            Place::State(binding) => Ok(self.lasting_of(values, (Target::State, binding), ty)),
            Place::Frame(_) | Place::Result(_) => {
                self.held[buffer.index()].ok_or_else(|| format!("`${}` holds nothing", name(frame, buffer)))
            }
            Place::Wire { wire, part } => {
                let on_wire = self.wires[wire.index()].get(*part).copied().flatten();
                let on_wire = on_wire.ok_or_else(|| format!("`${}` holds nothing", name(frame, buffer)))?;
                match frame.carried(*wire) {
                    Some((transfer, Side::Received)) => {
                        let parcel = transfer.parcels().get(*part);
                        let parcel = parcel.map(|parcel| (&parcel.op, parcel.to.clone())).into_iter();
                        let arrived = values.each(parcel, &[on_wire]);
                        arrived.first().copied().ok_or_else(|| "it is no part of a message".to_owned())
                    }
                    Some((_, Side::Sent)) | None => Ok(on_wire),
                }
            }
        }
    }

    /// The tensor of a buffer, or those that are on a wire.
    fn read_all(&self, values: &mut Values<'a>, buffer: BufferId) -> Result<Vec<Symbol>, String> {
        match &self.frame.buffers[buffer].content {
            Content::Tensor(_) => Ok(vec![self.read(values, buffer)?]),
            Content::Wire { .. } => match &self.wires[buffer.index()] {
                wire if wire.is_empty() => Err(format!("`${}` holds nothing", name(self.frame, buffer))),
                wire => {
                    let missing = || format!("part of `${}` holds nothing", name(self.frame, buffer));
                    wire.iter().map(|symbol| symbol.ok_or_else(missing)).collect()
                }
            },
        }
    }

    fn lasting_of(&self, values: &mut Values<'a>, home: Home<'a>, ty: &TensorType) -> Symbol {
        self.lasting.get(home).unwrap_or_else(|| values.given(Some(home.0), home.1, ty))
    }

    fn write(&mut self, values: &Values<'a>, buffer: BufferId, symbol: Symbol) {
        if let Place::Wire { wire, part } = self.frame.buffers[buffer].place {
            let n = self.frame.carried(wire).map_or(0, |(transfer, _)| transfer.parcels().len());
            let parts = &mut self.wires[wire.index()];
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
        let types: Vec<TensorType> = task
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
            Work::Compute(op) => values.make(Maker::Op(op), reads, types, 0).0,
            Work::Copy => reads,
            // A wire stands for the tensors that are in it: that they are there whole, for this transfer, is shown
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
                let at = stage.and_then(Stage::at);
                let maker = Maker::Call { callee, layers, stride: *stride, scan: *scan, at };
                let known = values.n;
                let results = values.call(maker, callee, reads, types, &mut self.lasting);
                // Even where nobody needs what it gives, a call that the program does not make may do harm.
                if values.n != known {
                    return Err("it is a call that the program does not make".to_owned());
                }
                results
            }
        };
        if let Some(wire) = wire {
            self.wires[wire.index()] = results.into_iter().map(Some).collect();
            return Ok(());
        }
        for (&buffer, symbol) in task.writes.iter().zip(results) {
            // What is received in a wire is there as it arrived.
            let arrived = matches!(task.work, Work::Unpack(_))
                && matches!(frame.buffers[buffer].place, Place::Wire { .. });
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
    Ok(values.each(parcels.iter().map(|parcel| (&parcel.op, parcel.to.clone())), sent))
}
