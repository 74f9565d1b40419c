//! Finds loops whose layers do work for their neighbours, and rewrites their callers.
//!
//! The first and the last layer are called separately. Every stack over these layers is therefore cut at the same
//! positions in every loop, so the backward pass takes the pieces that the forward pass saved.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Module, Node, ValueId};
use ithaca_ir::ops::structure::is_sliced;
use ithaca_ir::ops::{OpError, Scan, ScanOrder, Stage};
use ithaca_ir::{Dim, DimId, Op, Space};
use ithaca_pass::Context;
use ithaca_pass::rebuild::Copy;

use super::body::{Body, Functions, LayerPosition, Loop};
use super::parts::is_upload;

/// The loops of a module to rewrite.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    /// The bodies of the loops.
    pub(super) bodies: Vec<Body>,
    /// The body that a node of a function calls.
    calls: BTreeMap<(FuncId, usize), usize>,
    /// The positions in use, for each body.
    pub(super) variants: BTreeMap<usize, BTreeSet<LayerPosition>>,
    /// The layer dimensions to cut, by function.
    cut: BTreeSet<(FuncId, DimId)>,
    /// Functions without callers after the rewrite.
    pub(super) unused: BTreeSet<FuncId>,
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

    /// The call of another function for these layers.
    fn op(&self, callee: FuncId, layers: Layers, scan: Option<Scan>) -> Op {
        Op::Call { callee, layers, stride: self.stride, scan, stage: self.stage }
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
    /// Finds the loops over functions that gather weights or reduce gradients, if work moves to a neighbouring layer.
    ///
    /// # Errors
    /// `P05` for a choice that the record does not have.
    pub(super) fn of(module: &Module, cx: &mut Context<'_>) -> Result<Plan, OpError> {
        let mut plan = Plan::default();
        // A pipeline calls a loop once per micro-batch.
        let mut stacks: BTreeMap<(FuncId, DimId), Option<String>> = BTreeMap::new();
        for (id, function) in module.functions.iter() {
            for (n, node) in function.nodes.iter().enumerate() {
                let Some(call) = Call::of(node).filter(|call| call.n_layers() > 1) else { continue };
                let callee = &module.functions[call.callee];
                // A group of layers is synchronised at its ends.
                if callee.nodes.iter().any(|n| matches!(n.op, Op::Call { .. })) {
                    continue;
                }
                let of = call.looped(node);
                let known = plan.bodies.iter().position(|body| body.of == of);
                let number = match known {
                    Some(number) => number,
                    None => {
                        plan.bodies.push(Body::of(&module.space, callee, of, cx)?);
                        plan.bodies.len() - 1
                    }
                };
                if !plan.bodies[number].is_rotated() {
                    continue;
                }
                let (needs, most) = (plan.bodies[number].n_arguments(callee), *node.op.info().operands.end());
                let why = if needs > most {
                    Some(format!("a layer would take {needs} arguments, and {most} is the most"))
                } else {
                    call.scan.and_then(|scan| {
                        let known = stacks.entry((id, scan.over));
                        known.or_insert_with(|| whole(module, function, scan.over)).clone()
                    })
                };
                if let Some(why) = why {
                    cx.note(format!(
                        "`prefetch`: weights of `@{}` are gathered within a layer only: {why}",
                        callee.name
                    ));
                    continue;
                }
                if cx.rewrite() {
                    plan.calls.insert((id, n), number);
                    let n_pieces = pieces(call.n_layers(), call.scan.is_some()).len();
                    plan.variants
                        .entry(number)
                        .or_default()
                        .extend((0..n_pieces).map(|i| LayerPosition::of(i, n_pieces)));
                    plan.cut.extend(call.scan.map(|scan| (id, scan.over)));
                }
            }
        }
        plan.unused = plan.unused(module);
        plan.report(module, cx);
        Ok(plan)
    }

    /// The functions whose calls are all rewritten.
    fn unused(&self, module: &Module) -> BTreeSet<FuncId> {
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

    fn report(&self, module: &Module, cx: &mut Context<'_>) {
        for &number in self.variants.keys() {
            let body = &self.bodies[number];
            let (gathers, ahead, deferred) = body.counts();
            let mut effects = Vec::new();
            if ahead > 0 {
                let callee = &module.functions[body.of.callee];
                let of_caches = callee.nodes.iter().any(|node| is_upload(&node.op));
                effects.push(if of_caches {
                    let copies = if gathers == 1 { "copy" } else { "copies" };
                    format!("{ahead} of {gathers} {copies} from host memory made during the previous layer")
                } else {
                    format!(
                        "{ahead} of {} of weights gathered during the previous layer",
                        counted(gathers as u64, "message")
                    )
                });
            }
            if deferred > 0 {
                effects.push(format!(
                    "{} of gradients run by the next layer",
                    counted(deferred as u64, "reduction")
                ));
            }
            let name = &module.functions[body.of.callee].name;
            cx.note(format!("`prefetch`: `@{name}`: {}", effects.join(", ")));
        }
    }

    /// The function with its loops rewritten and its callees renumbered; `called` maps functions to new functions, `loops` has the functions of
    /// each body. Declares new dimensions in `module`.
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
        let copy = Copy::of(function, &module.space, &module.functions);
        let mut caller = Caller { plan: self, id, called, loops, between, copy, stacks: BTreeMap::new() };
        for (n, node) in function.nodes.iter().enumerate() {
            caller.node(n, node)?;
        }
        Ok(caller.copy.finish())
    }
}

/// Why the stacks along `over` in a function cannot be cut; `None` if only loops over these layers make and read them.
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
                return Some(format!(
                    "an operation other than a loop over `{dim}` makes or reads a stack of layers"
                ));
            }
        }
        if let Some((_, scan)) = looped {
            stacks.extend(node.results.iter().skip(scan.carried));
        }
    }
    let returned = function.outputs.iter().any(|o| stacks.contains(&o.value));
    returned.then(|| format!("`@{}` returns a stack of layers `{dim}`", function.name))
}

/// A dimension for the middle layers, if there are two or more.
fn declare(space: &mut Space, of: DimId) -> Option<DimId> {
    let Dim { name, size, .. } = &space.dims[of];
    let n = size.checked_sub(2).filter(|&n| n > 1)?;
    let name = space.free_name(format!("{name}_between"));
    Some(space.dims.push(Dim::new(name, n)))
}

/// A caller of loops during its rewrite.
struct Caller<'a> {
    plan: &'a Plan,
    id: FuncId,
    called: &'a [Option<FuncId>],
    loops: &'a BTreeMap<usize, Functions>,
    /// For each layer dimension to cut, the dimension of the middle layers.
    between: BTreeMap<DimId, DimId>,
    copy: Copy<'a>,
    /// The pieces of each stack, in order of layers.
    stacks: BTreeMap<ValueId, Vec<ValueId>>,
}

impl Caller<'_> {
    fn node(&mut self, n: usize, node: &Node) -> Result<(), OpError> {
        let Some(call) = Call::of(node) else { return self.copy.node(node) };
        let body = self.plan.calls.get(&(self.id, n)).copied();
        if body.is_some() || call.scan.is_some_and(|scan| self.plan.cut.contains(&(self.id, scan.over))) {
            return self.rewrite_loop(node, call, body);
        }
        let op = call.op(self.callee(call.callee), call.layers.clone(), call.scan);
        self.copy.node_as(op, &self.copy.values.operands(node), &node.results)
    }

    fn callee(&self, old: FuncId) -> FuncId {
        self.called[old.index()].expect("callees precede their callers, and are kept while in use")
    }

    /// A loop in pieces, by the functions of its body if it has one.
    fn rewrite_loop(&mut self, node: &Node, call: Call<'_>, body: Option<usize>) -> Result<(), OpError> {
        let Loop { order, carried, .. } = call.looped(node);
        let pieces = pieces(call.n_layers(), call.scan.is_some());
        let n_pieces = pieces.len();
        let mut run: Vec<(usize, Range<u64>)> = pieces.into_iter().enumerate().collect();
        if order == ScanOrder::Descending {
            run.reverse();
        }
        let mut carried_values: Vec<ValueId> =
            node.operands[..carried].iter().map(|&v| self.copy.values[v]).collect();
        if let Some(gather) = body.and_then(|number| self.loops[&number].gather) {
            let first = match order {
                ScanOrder::Ascending => call.layers.start..call.layers.start + 1,
                ScanOrder::Descending => call.layers.end - 1..call.layers.end,
            };
            carried_values.extend(self.copy.b.node(call.op(gather, first, None), &[], &[])?);
        }
        let n_stacked = node.results.len().saturating_sub(carried);
        let mut stacked: Vec<Vec<Option<ValueId>>> = vec![vec![None; n_pieces]; n_stacked];
        for (index, (piece, range)) in run.into_iter().enumerate() {
            let (callee, below) = match body {
                None => (self.callee(call.callee), 0),
                Some(number) => self.loops[&number].variants[&LayerPosition::of(index, n_pieces)],
            };
            let mut operands = carried_values.clone();
            let given = |v| self.stacks.get(v).map_or_else(|| self.copy.values[*v], |pieces| pieces[piece]);
            operands.extend(node.operands[carried..].iter().map(given));
            let n = range.end - range.start;
            let start = call.layers.start + range.start - below;
            let n_carried = carried_values.len();
            let scan = call.scan.filter(|_| n > 1).map(|scan| Scan {
                over: self.between[&scan.over],
                carried: n_carried,
                order,
            });
            let results = self.copy.b.node(call.op(callee, start..start + n, scan), &operands, &[])?;
            let n_carried = results.len() - n_stacked;
            carried_values = results[..n_carried].to_vec();
            for (pieces, &value) in stacked.iter_mut().zip(&results[n_carried..]) {
                pieces[piece] = Some(value);
            }
        }
        let carried = carried.min(node.results.len());
        self.copy.set_all(&node.results[..carried], &carried_values);
        for (&old, pieces) in node.results[carried..].iter().zip(stacked) {
            let pieces = pieces.into_iter().map(|v| v.expect("every piece runs")).collect();
            self.stacks.insert(old, pieces);
        }
        Ok(())
    }
}

/// The pieces of a loop, as ranges of its layers: first, middle, last. Without stacked results the first needs no
/// separate call.
fn pieces(n_layers: u64, is_stacked: bool) -> Vec<Range<u64>> {
    let cuts = if is_stacked && n_layers > 2 {
        vec![0, 1, n_layers - 1, n_layers]
    } else {
        vec![0, n_layers - 1, n_layers]
    };
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}
