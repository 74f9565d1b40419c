//! Rewrites callers of layers that do work for their neighbours.
//!
//! The first and the last layer of a loop are called separately. Every stack over these layers is therefore cut at the same
//! positions in every loop, so the backward pass takes the pieces that the forward pass saved.

use std::collections::BTreeMap;
use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Module, Node, ValueId};
use ithaca_ir::ops::{OpError, Scan, ScanOrder};
use ithaca_ir::{Dim, DimId, Space};
use ithaca_pass::rebuild::Copy;

use super::plan::{Call, Plan, Worked, pieces};
use super::write::Functions;

/// The function with its calls of layers rewritten and its callees renumbered; `called` maps functions to new functions.
/// Declares new dimensions in `module`.
pub(super) fn rewritten(
    plan: &Plan,
    module: &mut Module,
    old: &Module,
    id: FuncId,
    called: &[Option<FuncId>],
    functions: &Functions,
) -> Result<Function, OpError> {
    let function = &old.functions[id];
    let dims = plan.cut.iter().filter(|&&(of, _)| of == id);
    let between: BTreeMap<DimId, DimId> =
        dims.filter_map(|&(_, dim)| Some((dim, declare(&mut module.space, dim)?))).collect();
    let copy = Copy::of(function, &module.space, &module.functions);
    let handed = Vec::new();
    let mut caller =
        Caller { plan, old, id, called, functions, between, copy, stacks: BTreeMap::new(), handed };
    for (n, node) in function.nodes.iter().enumerate() {
        caller.node(n, node)?;
    }
    Ok(caller.copy.finish())
}

/// A dimension for the middle layers, if there are two or more.
fn declare(space: &mut Space, of: DimId) -> Option<DimId> {
    let Dim { name, size, .. } = &space.dims[of];
    let n = size.checked_sub(2).filter(|&n| n > 1)?;
    let name = space.free_name(format!("{name}_between"));
    Some(space.dims.push(Dim::new(name, n)))
}

/// A caller of layers during its rewrite.
struct Caller<'a> {
    plan: &'a Plan,
    old: &'a Module,
    id: FuncId,
    called: &'a [Option<FuncId>],
    functions: &'a Functions,
    /// For each layer dimension to cut, the dimension of the middle layers.
    between: BTreeMap<DimId, DimId>,
    copy: Copy<'a>,
    /// The pieces of each stack, in order of layers.
    stacks: BTreeMap<ValueId, Vec<ValueId>>,
    /// The weights gathered and the gradients left by a layer for the next call.
    handed: Vec<ValueId>,
}

impl Caller<'_> {
    fn node(&mut self, n: usize, node: &Node) -> Result<(), OpError> {
        let Some(call) = Call::of(node) else { return self.copy.node(node) };
        let worked = self.plan.calls.get(&(self.id, n)).copied();
        if worked.is_some() || call.scan.is_some_and(|scan| self.plan.cut.contains(&(self.id, scan.over))) {
            return self.rewrite_call(node, call, worked);
        }
        let op = call.op(self.callee(call.callee), call.layers.clone(), call.scan);
        self.copy.node_as(op, &self.copy.values.operands(node), &node.results)
    }

    fn callee(&self, old: FuncId) -> FuncId {
        self.called[old.index()].expect("callees precede their callers, and are kept while in use")
    }

    /// A call in pieces, by the functions of layers that work for others if it calls some.
    fn rewrite_call(&mut self, node: &Node, call: Call<'_>, worked: Option<Worked>) -> Result<(), OpError> {
        let (order, carried) = (call.order(), call.carried(node));
        let pieces = pieces(call, worked.is_some_and(Worked::is_first_apart));
        let n_pieces = pieces.len();
        let mut run: Vec<(usize, Range<u64>)> = pieces.into_iter().enumerate().collect();
        if order == ScanOrder::Descending {
            run.reverse();
        }
        let mut carried_values: Vec<ValueId> =
            node.operands[..carried].iter().map(|&v| self.copy.values[v]).collect();
        match worked {
            Some(Worked { before: Some(_), .. }) => carried_values.append(&mut self.handed),
            Some(Worked { first, before: None, .. }) => {
                if let Some(gather) = self.functions.gather(first) {
                    let first = match order {
                        ScanOrder::Ascending => call.layers.start..call.layers.start + 1,
                        ScanOrder::Descending => call.layers.end - 1..call.layers.end,
                    };
                    carried_values.extend(self.copy.b.node(call.op(gather, first, None), &[], &[])?);
                }
            }
            None => {}
        }
        let n_stacked = node.results.len().saturating_sub(carried);
        let mut stacked: Vec<Vec<Option<ValueId>>> = vec![vec![None; n_pieces]; n_stacked];
        for (index, (piece, range)) in run.into_iter().enumerate() {
            let (callee, below) = match worked {
                None => (self.callee(call.callee), 0),
                Some(worked) => {
                    let layers = self.plan.layers(self.old);
                    self.functions.variants[&worked.variant(layers, carried, index, n_pieces)]
                }
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
        self.handed = carried_values.split_off(carried);
        for (&old, pieces) in node.results[carried..].iter().zip(stacked) {
            let pieces: Vec<ValueId> = pieces.into_iter().map(|v| v.expect("every piece runs")).collect();
            if call.scan.is_some() {
                self.stacks.insert(old, pieces);
            } else {
                self.copy.set_all(&[old], &pieces);
            }
        }
        Ok(())
    }
}
