//! A function of the program as a function of Python.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use ithaca_ir::boxes;
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::module::Layers;
use ithaca_ir::ops::{Binding, Random, ScanOrder, Stage, Target, structure};
use ithaca_ir::schedule::Stream;
use ithaca_ir::text::show;
use ithaca_ir::{Diagnostic, FuncId, Function, Module, Node, Op, TensorType, ValueId};

use super::library;
use super::python::{identifier, stored_name, string, tuple};

/// Prints the functions of a module.
pub(super) struct Printer<'a> {
    pub(super) module: &'a Module,
    names: Vec<String>,
    /// For each function, whether it depends on the layer that it runs for.
    by_layer: Vec<bool>,
    /// The keys of process groups that were used so far.
    pub(super) groups: BTreeSet<String>,
}

/// A function while it is printed.
pub(super) struct Scope<'a> {
    pub(super) module: &'a Module,
    pub(super) function: &'a Function,
    /// The variable of each value.
    pub(super) variables: Vec<String>,
    /// Values that are lists, of an element for each layer.
    stacks: BTreeSet<usize>,
    /// For values of collectives that are under way, the variable of the collective.
    pending: BTreeMap<usize, (String, Vec<ValueId>)>,
    out: String,
    indent: usize,
    in_flight: usize,
}

impl<'a> Printer<'a> {
    pub(super) fn new(module: &'a Module, prefix: &str) -> Self {
        let mut names: Vec<String> = Vec::new();
        for function in module.functions.values() {
            let taken = |name: &str| library::defines(name) || names.iter().any(|n| n == name);
            let name = identifier(&format!("{prefix}{}", function.name), &taken);
            // `main` of the module is that of the runtime.
            let name = if name == "main_" { "ranks_main".to_owned() } else { name };
            names.push(name);
        }
        let mut by_layer: Vec<bool> = Vec::new();
        for function in module.functions.values() {
            let depends = |node: &Node| match &node.op {
                Op::Param(binding) | Op::State(binding) | Op::Input(binding) | Op::Assign { binding, .. } => {
                    binding.is_per_layer()
                }
                Op::Random(Random::LayerKey) => true,
                Op::Call { callee, stride, .. } => *stride > 0 && by_layer[callee.index()],
                _ => false,
            };
            by_layer.push(function.nodes.iter().any(depends));
        }
        Self { module, names, by_layer, groups: BTreeSet::new() }
    }

    pub(super) fn name(&self, id: FuncId) -> &str {
        &self.names[id.index()]
    }

    /// The text of a function.
    ///
    /// # Errors
    /// `S42`, `S43`.
    pub(super) fn function(&mut self, id: FuncId) -> Result<String, Diagnostic> {
        let function = &self.module.functions[id];
        let mut scope = Scope::new(self.module, function, &self.names);
        let is_main = Some(id) == self.module.main();
        let params = function.params.iter().map(|&v| scope.of(v).to_owned());
        let layer = self.by_layer[id.index()].then(|| "layer".to_owned());
        let params: Vec<String> = layer.into_iter().chain(params).collect();
        scope.line(&format!("def {}({}):", self.name(id), params.join(", ")));
        scope.indent = 4;
        for (i, node) in function.nodes.iter().enumerate() {
            for &operand in &node.operands {
                scope.arrive(operand);
            }
            self.node(&mut scope, (i, node))?;
        }
        for output in &function.outputs {
            scope.arrive(output.value);
        }
        // What nobody reads has arrived before the function ends, too.
        let late: Vec<ValueId> =
            scope.pending.values().filter_map(|(_, values)| values.first().copied()).collect();
        late.into_iter().for_each(|value| scope.arrive(value));
        let results = function.outputs.iter().enumerate().map(|(n, output)| {
            let value = scope.of(output.value);
            if !is_main {
                return value.to_owned();
            }
            let name = output.name.clone().unwrap_or_else(|| n.to_string());
            format!("{}: ({}, {value})", string(&name), scope.ty(output.value))
        });
        let results: Vec<String> = results.collect();
        if is_main {
            scope.line(&format!("return {{{}}}", results.join(", ")));
        } else if !results.is_empty() {
            let list =
                if results.len() > 8 { format!("({})", results.join(", ")) } else { results.join(", ") };
            scope.line(&format!("return {list}"));
        } else if function.nodes.is_empty() {
            scope.line("pass");
        }
        Ok(scope.out)
    }

    fn node(&mut self, scope: &mut Scope<'a>, (i, node): (usize, &'a Node)) -> Result<(), Diagnostic> {
        let results: Vec<&str> = node.results.iter().map(|&v| scope.variables[v.index()].as_str()).collect();
        let moves = matches!(node.op, Op::Permute | Op::Coalesced(_));
        let at = match &node.op {
            Op::Call { stage, .. } => stage.and_then(Stage::at),
            _ if moves && scope.places(node).len() > 1 => None,
            // Beside values of one place, those of all ranks.
            _ => scope.places(node).into_iter().flatten().next(),
        };
        let before = scope.indent;
        if let Some(At { axis, coordinate }) = at {
            if !results.is_empty() {
                let nothing = format!("{} = None", results.join(" = "));
                scope.line(&nothing);
            }
            let axis = string(&self.module.space.mesh.axes[axis].name);
            scope.line(&format!("if on({axis}, {coordinate}):"));
            scope.indent += 4;
        }
        match &node.op {
            Op::Call { .. } => self.call(scope, node),
            Op::Assign { target, binding } => {
                let kind = match target {
                    Target::Param => "param",
                    Target::State => "state",
                };
                let value = node.operands[0];
                let place = place(binding);
                let (x, ty) = (scope.of(value), scope.ty(value));
                scope.line(&format!("assign(\"{kind}\", {x}, {}, {ty}{place})", stored_name(&binding.name)));
            }
            op if op.is_communication() => {
                let collective = self.collective(scope, node);
                let is_read_next =
                    scope.function.nodes.get(i + 1).is_none_or(|next| {
                        next.operands.iter().any(|operand| node.results.contains(operand))
                    });
                if is_read_next || at.is_some() {
                    scope.assign(node, &format!("{collective}.wait()"));
                } else {
                    scope.in_flight += 1;
                    let variable = format!("transfer{}", scope.in_flight);
                    scope.line(&format!("{variable} = {collective}"));
                    for &value in &node.results {
                        scope.pending.insert(value.index(), (variable.clone(), node.results.to_vec()));
                    }
                }
            }
            _ => {
                let expression = scope.expression(node)?;
                scope.assign(node, &expression);
            }
        }
        scope.indent = before;
        Ok(())
    }

    /// The start of a collective.
    fn collective(&mut self, scope: &Scope<'a>, node: &Node) -> String {
        let space = &self.module.space;
        let members: &[Op] = match &node.op {
            Op::Coalesced(members) => members,
            op => std::slice::from_ref(op),
        };
        let first = (scope.function.ty(node.operands[0]), scope.function.ty(node.results[0]));
        let name = |axis: ithaca_ir::AxisId| string(&space.mesh.axes[axis].name);
        let axes = tuple(boxes::axes(space, &members[0], first.0, first.1).iter().map(|&a| name(a)));
        // Transfers between stages wait for no others.
        let stages = (first.0.layout.at != first.1.layout.at).then_some(first.0.layout.at).flatten();
        let stream = stages
            .map(|sender| Stream::between_stages(scope.function.phase, sender, first.1.layout.at))
            .map(|stream| string(stream.name()));
        self.groups.insert(stream.clone().unwrap_or_else(|| axes.clone()));
        let group = stream.map(|stream| format!(", group={stream}")).unwrap_or_default();
        let ends = node.operands.iter().zip(&node.results);
        let parcels = ends.map(|(&x, &z)| format!("({}, {}, {})", scope.of(x), scope.ty(x), scope.ty(z)));
        let parcels: Vec<String> = parcels.collect();
        format!("{}({axes}, {}{group})", members[0].name(), parcels.join(", "))
    }

    fn call(&self, scope: &mut Scope<'a>, node: &Node) {
        let Op::Call { callee, layers, stride, scan, .. } = &node.op else { return };
        let target = &self.module.functions[*callee];
        let Layers { start, end } = layers.clone();
        let n = end.saturating_sub(start);
        let by_layer = self.by_layer[callee.index()];
        let shift = |number: String| match stride {
            0 => number,
            1 => format!("{number} + layer"),
            _ => format!("{number} + {stride} * layer"),
        };
        let is_sliced = |i: usize, v: ValueId| {
            let parameter = target.params[i];
            structure::is_sliced(scan.as_ref(), i, scope.function.ty(v), target.ty(parameter))
        };
        let sliced: Vec<bool> = node.operands.iter().enumerate().map(|(i, &v)| is_sliced(i, v)).collect();
        let n_carried = scan.as_ref().map_or(target.outputs.len(), |scan| scan.carried);
        let name = self.name(*callee);
        if n == 1 && scan.is_none() {
            let layer = by_layer.then(|| shift(start.to_string()));
            let arguments = layer.into_iter().chain(node.operands.iter().map(|&v| scope.of(v).to_owned()));
            let call = format!("{name}({})", arguments.collect::<Vec<_>>().join(", "));
            scope.assign(node, &call);
            return;
        }
        let results: Vec<String> = node.results.iter().map(|&v| scope.of(v).to_owned()).collect();
        let (carried, stacks) = results.split_at(n_carried.min(results.len()));
        for (variable, &operand) in carried.iter().zip(&node.operands) {
            let operand = scope.of(operand).to_owned();
            if *variable != operand {
                scope.line(&format!("{variable} = {operand}"));
            }
        }
        for (stack, &value) in stacks.iter().zip(&node.results[carried.len()..]) {
            scope.line(&format!("{stack} = [None] * {n}"));
            scope.stacks.insert(value.index());
        }
        let is_descending = scan.as_ref().is_some_and(|scan| scan.order == ScanOrder::Descending);
        let range = if is_descending { format!("reversed(range({n}))") } else { format!("range({n})") };
        scope.line(&format!("for i in {range}:"));
        let layer = by_layer.then(|| shift(if start == 0 { "i".to_owned() } else { format!("{start} + i") }));
        let argument = |(i, &v): (usize, &ValueId)| match (carried.get(i), sliced[i]) {
            (Some(carried), _) => carried.clone(),
            (None, true) => format!("{}[i]", scope.variables[v.index()]),
            (None, false) => scope.of(v).to_owned(),
        };
        let arguments: Vec<String> =
            layer.into_iter().chain(node.operands.iter().enumerate().map(argument)).collect();
        let targets: Vec<String> =
            carried.iter().cloned().chain(stacks.iter().map(|stack| format!("{stack}[i]"))).collect();
        let call = format!("{name}({})", arguments.join(", "));
        let line = if targets.is_empty() { call } else { format!("{} = {call}", list(&targets)) };
        scope.indent += 4;
        scope.line(&line);
        scope.indent -= 4;
    }
}

impl<'a> Scope<'a> {
    fn new(module: &'a Module, function: &'a Function, functions: &[String]) -> Self {
        let mut variables: Vec<String> = Vec::new();
        let mut used: BTreeSet<String> = functions.iter().cloned().collect();
        for (id, value) in function.values.iter() {
            let name = value.name.as_deref().map_or_else(|| format!("t{}", id.index()), str::to_owned);
            let taken = |name: &str| {
                library::defines(name) || name.starts_with("transfer") || name == "i" || used.contains(name)
            };
            let name = identifier(&name, &taken);
            used.insert(name.clone());
            variables.push(name);
        }
        Self {
            module,
            function,
            variables,
            stacks: BTreeSet::new(),
            pending: BTreeMap::new(),
            out: String::new(),
            indent: 0,
            in_flight: 0,
        }
    }

    pub(super) fn line(&mut self, text: &str) {
        writeln!(self.out, "{}{text}", " ".repeat(self.indent)).expect("writing to a string does not fail");
    }

    /// The variable of a value.
    pub(super) fn of(&self, value: ValueId) -> &str {
        &self.variables[value.index()]
    }

    /// The type of a value, as a literal.
    pub(super) fn ty(&self, value: ValueId) -> String {
        self.type_text(self.function.ty(value))
    }

    pub(super) fn type_text(&self, ty: &TensorType) -> String {
        string(&show(&self.module.space, ty).to_string())
    }

    /// Waits for a value that may be under way.
    fn arrive(&mut self, value: ValueId) {
        let Some((variable, values)) = self.pending.remove(&value.index()) else { return };
        for other in &values {
            self.pending.remove(&other.index());
        }
        let targets: Vec<String> = values.iter().map(|&v| self.variables[v.index()].clone()).collect();
        let line = format!("{} = {variable}.wait()", list(&targets));
        self.line(&line);
    }

    /// The results of an operation, with the type of a single one.
    fn assign(&mut self, node: &Node, expression: &str) {
        let targets: Vec<String> = node.results.iter().map(|&v| self.variables[v.index()].clone()).collect();
        let line = if targets.is_empty() {
            expression.to_owned()
        } else {
            format!("{} = {expression}", list(&targets))
        };
        self.line(&line);
    }

    /// The places of a node's values, each once; ranks of no place are none.
    fn places(&self, node: &Node) -> BTreeSet<Option<At>> {
        node.operands.iter().chain(&node.results).map(|&v| self.function.ty(v).layout.at).collect()
    }
}

/// Variables or values as a tuple; in brackets, where lines break, when there are many.
fn list(items: &[String]) -> String {
    let list = items.join(", ");
    if items.len() > 1 && list.len() > 60 { format!("({list})") } else { list }
}

/// The keyword arguments of a binding.
pub(super) fn place(binding: &Binding) -> String {
    let Binding { name: _, stored, view, window, ahead, fill, host: _ } = binding;
    let sizes = |sizes: &[u64]| tuple(sizes.iter().map(u64::to_string));
    let mut out = String::new();
    for (key, list) in [("stored", stored), ("view", view)] {
        if !list.is_empty() {
            out.push_str(&format!(", {key}={}", sizes(list)));
        }
    }
    if !window.is_empty() {
        let ranges = window.iter().map(|range| format!("({}, {})", range.start, range.end));
        out.push_str(&format!(", window={}", tuple(ranges)));
    }
    if *ahead != 0 {
        out.push_str(&format!(", ahead={ahead}"));
    }
    if *fill != 0 {
        out.push_str(&format!(", fill={fill}"));
    }
    out
}
