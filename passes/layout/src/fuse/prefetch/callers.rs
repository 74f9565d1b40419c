//! Loops over layers of which each works for its neighbour: which there are, and how they are called.
//!
//! The first and the last layer are called by themselves. So whatever lies stacked in order of layers is cut in the same
//! places, in every loop over these layers: what the forward pass keeps is what the backward pass takes apart.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Module, Node, Output, ValueId};
use ithaca_ir::ops::structure::is_sliced;
use ithaca_ir::ops::{OpError, Scan, ScanOrder, Stage};
use ithaca_ir::{Dim, DimId, FunctionBuilder, Op, Space, TensorType};
use ithaca_pass::Context;

use super::body::{Body, Functions, Loop, Turn};

/// The loops of a module that are turned.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    /// What they call.
    pub(super) bodies: Vec<Body>,
    /// For a node of a function, which of them it calls.
    calls: BTreeMap<(FuncId, usize), usize>,
    /// For each of them that is called, its turns.
    turns: BTreeMap<usize, BTreeSet<Turn>>,
    /// Dimensions of layers that are cut, of functions.
    cut: BTreeSet<(FuncId, DimId)>,
    /// Functions that nobody calls any more.
    gone: BTreeSet<FuncId>,
}

/// A call over layers.
#[derive(Clone, Copy)]
struct Call<'a> {
    callee: FuncId,
    layers: &'a Layers,
    stride: u64,
    scan: Option<Scan>,
    stage: Option<Stage>,
}

impl<'a> Call<'a> {
    fn of(node: &'a Node) -> Option<Call<'a>> {
        let Op::Call { callee, layers, stride, scan, stage } = &node.op else { return None };
        Some(Call { callee: *callee, layers, stride: *stride, scan: *scan, stage: *stage })
    }

    fn n_layers(&self) -> u64 {
        self.layers.end - self.layers.start
    }

    fn looped(&self, node: &Node) -> Loop {
        Loop {
            callee: self.callee,
            order: self.scan.map_or(ScanOrder::Ascending, |scan| scan.order),
            carried: self.scan.map_or(node.results.len(), |scan| scan.carried),
        }
    }
}

impl Plan {
    /// The loops over functions that gather weights or reduce gradients, where a neighbour has time for it.
    pub(super) fn of(module: &Module, cx: &mut Context<'_>) -> Plan {
        let mut plan = Plan::default();
        // A pipeline calls a loop once for each micro-batch.
        let mut stacks: BTreeMap<(FuncId, DimId), Option<String>> = BTreeMap::new();
        for (id, function) in module.functions.iter() {
            for (n, node) in function.nodes.iter().enumerate() {
                let Some(call) = Call::of(node).filter(|call| call.n_layers() > 1) else { continue };
                let callee = &module.functions[call.callee];
                // Layers that call others meet at their ends.
                if callee.nodes.iter().any(|n| matches!(n.op, Op::Call { .. })) {
                    continue;
                }
                let of = call.looped(node);
                let known = plan.bodies.iter().position(|body| body.of == of);
                let number = known.unwrap_or_else(|| {
                    plan.bodies.push(Body::of(&module.space, callee, of, cx.prices));
                    plan.bodies.len() - 1
                });
                if !plan.bodies[number].is_rotated() {
                    continue;
                }
                let (needs, most) = (plan.bodies[number].n_arguments(callee), *node.op.info().operands.end());
                let why = match needs > most {
                    true => Some(format!("a layer would take {needs} arguments, and {most} is the most")),
                    false => call.scan.and_then(|scan| {
                        let known = stacks.entry((id, scan.over));
                        known.or_insert_with(|| whole(module, function, scan.over)).clone()
                    }),
                };
                if let Some(why) = why {
                    cx.note(format!(
                        "`prefetch`: weights of `@{}` are gathered within a layer only, for {why}",
                        callee.name
                    ));
                    continue;
                }
                if cx.rewrite() {
                    plan.calls.insert((id, n), number);
                    let n_pieces = pieces(call.n_layers(), call.scan.is_some()).len();
                    plan.turns
                        .entry(number)
                        .or_default()
                        .extend((0..n_pieces).map(|i| Turn::of(i, n_pieces)));
                    plan.cut.extend(call.scan.map(|scan| (id, scan.over)));
                }
            }
        }
        plan.gone = plan.gone(module);
        plan.say(module, cx);
        plan
    }

    /// Functions all of whose callers are turned.
    fn gone(&self, module: &Module) -> BTreeSet<FuncId> {
        let mut called: BTreeMap<FuncId, bool> = BTreeMap::new();
        for (id, function) in module.functions.iter() {
            for (n, node) in function.nodes.iter().enumerate() {
                if let Some(call) = Call::of(node) {
                    *called.entry(call.callee).or_insert(false) |= !self.calls.contains_key(&(id, n));
                }
            }
        }
        called.into_iter().filter(|(_, as_it_is)| !as_it_is).map(|(id, _)| id).collect()
    }

    fn say(&self, module: &Module, cx: &mut Context<'_>) {
        for &number in self.turns.keys() {
            let body = &self.bodies[number];
            let (gathers, ahead, deferred) = body.counts();
            let mut what = Vec::new();
            if ahead > 0 {
                what.push(format!(
                    "{ahead} of {} of weights travel in the layer before",
                    counted(gathers as u64, "message")
                ));
            }
            if deferred > 0 {
                what.push(format!(
                    "gradients of {} in the layer behind",
                    counted(deferred as u64, "reduction")
                ));
            }
            let name = &module.functions[body.of.callee].name;
            cx.note(format!("`prefetch`: of `@{name}` {}", what.join(", ")));
        }
    }

    /// The turns of a body that loops call; none where no loop is turned with it.
    pub(super) fn turns(&self, number: usize) -> Option<&BTreeSet<Turn>> {
        self.turns.get(&number)
    }

    /// Whether a function stays.
    pub(super) fn keeps(&self, function: FuncId) -> bool {
        !self.gone.contains(&function)
    }

    /// Whether loops of a function change.
    pub(super) fn changes(&self, function: FuncId) -> bool {
        self.calls.keys().any(|&(id, _)| id == function)
    }

    /// The function with its loops turned; `called` has what functions became, `loops` the functions of each body. New
    /// dimensions are declared in `module`.
    pub(super) fn rewritten(
        &self,
        module: &mut Module,
        (id, function): (FuncId, &Function),
        called: &[Option<FuncId>],
        loops: &BTreeMap<usize, Functions>,
    ) -> Result<Function, OpError> {
        let dims = self.cut.iter().filter(|&&(of, _)| of == id);
        let between: BTreeMap<DimId, DimId> =
            dims.filter_map(|&(_, dim)| Some((dim, declare(&mut module.space, dim)?))).collect();
        let b = FunctionBuilder::like(function, &module.space, &module.functions);
        let map = vec![Vec::new(); function.values.len()];
        let mut caller = Caller { plan: self, id, function, called, loops, between, b, map };
        for &param in &function.params {
            let name = function.values[param].name.as_deref();
            let new = caller.b.param(function.ty(param).clone(), name);
            caller.map[param.index()] = vec![new];
        }
        for (n, node) in function.nodes.iter().enumerate() {
            caller.node(n, node)?;
        }
        let outputs: Vec<Output> = function
            .outputs
            .iter()
            .map(|o| Output { name: o.name.clone(), value: caller.map[o.value.index()][0] })
            .collect();
        Ok(caller.b.finish(outputs))
    }
}

/// Why what is stacked along `over` in a function must stay whole; none when all of it comes from loops over these layers
/// and goes to such.
fn whole(module: &Module, function: &Function, over: DimId) -> Option<String> {
    let dim = &module.space.dims[over].name;
    let mut stacks: BTreeSet<ValueId> = BTreeSet::new();
    for node in &function.nodes {
        let looped =
            Call::of(node).and_then(|call| Some((call, call.scan.filter(|scan| scan.over == over)?)));
        for (i, &v) in node.operands.iter().enumerate() {
            let sliced = looped.is_some_and(|(call, scan)| {
                let callee = &module.functions[call.callee];
                is_sliced(Some(&scan), i, function.ty(v), callee.ty(callee.params[i]))
            });
            if sliced != stacks.contains(&v) {
                return Some(format!("something beside loops over `{dim}` makes or reads a stack of layers"));
            }
        }
        if let Some((_, scan)) = looped {
            stacks.extend(node.results.iter().skip(scan.carried));
        }
    }
    let returned = function.outputs.iter().any(|o| stacks.contains(&o.value));
    returned.then(|| format!("`@{}` returns a stack of layers `{dim}`", function.name))
}

/// A dimension for the layers between the first and the last; none where there are not two of them.
fn declare(space: &mut Space, of: DimId) -> Option<DimId> {
    let Dim { name, size, .. } = space.dims[of].clone();
    let n = size.checked_sub(2).filter(|&n| n > 1)?;
    let mut name = format!("{name}_between");
    while space.dims.values().any(|dim| dim.name == name) {
        name.push('_');
    }
    Some(space.dims.push(Dim::new(name, n)))
}

/// A function that calls loops, as it is rewritten.
struct Caller<'a> {
    plan: &'a Plan,
    id: FuncId,
    function: &'a Function,
    called: &'a [Option<FuncId>],
    loops: &'a BTreeMap<usize, Functions>,
    /// For a dimension of layers that is cut, that of the layers between the first and the last.
    between: BTreeMap<DimId, DimId>,
    b: FunctionBuilder<'a>,
    /// What became of each value: itself, or its pieces in order of layers.
    map: Vec<Vec<ValueId>>,
}

impl Caller<'_> {
    fn node(&mut self, n: usize, node: &Node) -> Result<(), OpError> {
        let body = self.plan.calls.get(&(self.id, n)).copied();
        let Some(call) = Call::of(node) else { return self.copy(node, node.op.clone()) };
        let is_cut = call.scan.is_some_and(|scan| self.plan.cut.contains(&(self.id, scan.over)));
        match body {
            Some(number) => self.turned(node, call, Some(number)),
            None if is_cut => self.turned(node, call, None),
            None => {
                let Call { callee, layers, stride, scan, stage } = call;
                let callee = self.callee(callee);
                self.copy(node, Op::Call { callee, layers: layers.clone(), stride, scan, stage })
            }
        }
    }

    fn callee(&self, old: FuncId) -> FuncId {
        self.called[old.index()].expect("callees stand before their callers, and stay where they are called")
    }

    fn copy(&mut self, node: &Node, op: Op) -> Result<(), OpError> {
        let operands: Vec<ValueId> = node.operands.iter().map(|v| self.map[v.index()][0]).collect();
        let declared: Vec<TensorType> = node.results.iter().map(|&v| self.function.ty(v).clone()).collect();
        let results = self.b.node(op, &operands, &declared)?;
        for (&old, &new) in node.results.iter().zip(&results) {
            self.b.name(new, self.function.values[old].name.as_deref());
            self.map[old.index()] = vec![new];
        }
        Ok(())
    }

    /// A loop in pieces, turned if it has a body.
    fn turned(&mut self, node: &Node, call: Call<'_>, body: Option<usize>) -> Result<(), OpError> {
        let Loop { order, carried, .. } = call.looped(node);
        let pieces = pieces(call.n_layers(), call.scan.is_some());
        let n_pieces = pieces.len();
        let mut run: Vec<(usize, Range<u64>)> = pieces.into_iter().enumerate().collect();
        if order == ScanOrder::Descending {
            run.reverse();
        }
        let mut handed: Vec<ValueId> =
            node.operands[..carried].iter().map(|v| self.map[v.index()][0]).collect();
        if let Some(gather) = body.and_then(|number| self.loops[&number].gather) {
            let first = match order {
                ScanOrder::Ascending => call.layers.start..call.layers.start + 1,
                ScanOrder::Descending => call.layers.end - 1..call.layers.end,
            };
            let op = Op::Call {
                callee: gather,
                layers: first,
                stride: call.stride,
                scan: None,
                stage: call.stage,
            };
            handed.extend(self.b.node(op, &[], &[])?);
        }
        let n_stacked = node.results.len().saturating_sub(carried);
        let mut stacked: Vec<Vec<Option<ValueId>>> = vec![vec![None; n_pieces]; n_stacked];
        for (turn, (piece, range)) in run.into_iter().enumerate() {
            let (callee, below) = match body {
                None => (self.callee(call.callee), 0),
                Some(number) => self.loops[&number].turns[&Turn::of(turn, n_pieces)],
            };
            let mut operands = handed.clone();
            for v in &node.operands[carried..] {
                let all = &self.map[v.index()];
                operands.push(if all.len() == n_pieces && call.scan.is_some() { all[piece] } else { all[0] });
            }
            let n = range.end - range.start;
            let start = call.layers.start + range.start - below;
            let n_handed = handed.len();
            let scan = call.scan.filter(|_| n > 1).map(|scan| Scan {
                over: self.between[&scan.over],
                carried: n_handed,
                order,
            });
            let op =
                Op::Call { callee, layers: start..start + n, stride: call.stride, scan, stage: call.stage };
            let results = self.b.node(op, &operands, &[])?;
            let n_handed = results.len() - n_stacked;
            handed = results[..n_handed].to_vec();
            for (pieces, &value) in stacked.iter_mut().zip(&results[n_handed..]) {
                pieces[piece] = Some(value);
            }
        }
        for (i, &old) in node.results.iter().enumerate() {
            self.map[old.index()] = match i.checked_sub(carried) {
                None => {
                    self.b.name(handed[i], self.function.values[old].name.as_deref());
                    vec![handed[i]]
                }
                Some(i) => stacked[i].iter().copied().map(|v| v.expect("every piece runs")).collect(),
            };
        }
        Ok(())
    }
}

/// The pieces of a loop, by number in its layers: the first, those between, the last. Where nothing is stacked there is no
/// need to call the first by itself.
fn pieces(n_layers: u64, is_stacked: bool) -> Vec<Range<u64>> {
    let cuts = if is_stacked && n_layers > 2 {
        vec![0, 1, n_layers - 1, n_layers]
    } else {
        vec![0, n_layers - 1, n_layers]
    };
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}
