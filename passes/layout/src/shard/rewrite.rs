//! Lays functions out, node by node: sources where the placement says, results where rules lead, reshards between.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::{AxisList, Layout};
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{Attention, Binary, Cache, Gradient, Loss, Op, OpError, Optimizer, Random, cast};
use ithaca_ir::{Arena, DType, DimId, FunctionBuilder, Module, TensorType};
use ithaca_pass::Context;

use super::flow::Passing;
use super::inner::is_attention;
use super::layouts::{Found, demand};
use super::rewriter::{Outside, Plan, Rewriter, settled};
use super::stages::Stages;
use super::training;

/// The functions that were laid out.
pub(super) struct Rewritten {
    /// The number of attention operations.
    pub(super) attentions: usize,
    /// By name of a gradient whose contributions are summed, the axes over which all of them are pending sums.
    pub(super) contributions: BTreeMap<String, AxisList>,
}

/// Fills `module` with the functions of `program`, laid out.
pub(super) fn functions(
    module: &mut Module,
    program: &Arena<FuncId, Function>,
    plan: &Plan,
    cx: &mut Context<'_>,
) -> Result<Rewritten, OpError> {
    let mut attentions = 0;
    let mut contributions = BTreeMap::new();
    let mut outside: Vec<Vec<Option<TensorType>>> = Vec::with_capacity(program.len());
    let main = program.ids().next_back();
    for (id, function) in program.iter() {
        let b = FunctionBuilder::like(function, &module.space, &module.functions);
        let placement = plan.placements.function(function);
        let mut rewriter = Rewriter {
            plan,
            cx,
            placement,
            made: &module.functions,
            given: &outside,
            id,
            source: function,
            b,
            wanted: training::wanted(plan, placement, &module.space, function),
            inside: BTreeMap::new(),
            outside: BTreeMap::new(),
            gathered: BTreeMap::new(),
            summands: BTreeMap::new(),
            masks: BTreeMap::new(),
            map: BTreeMap::new(),
            resharded: BTreeMap::new(),
            came_from: BTreeMap::new(),
            repeated: BTreeMap::new(),
            weights: BTreeSet::new(),
            stages: if Some(id) == main {
                Stages::of(function, &plan.placements.base.stages)
            } else {
                Stages::default()
            },
            contributions: &mut contributions,
            parts_sent: BTreeMap::new(),
            sent: BTreeMap::new(),
        };
        let (rewritten, left) = rewriter.function(Some(id) == main)?;
        attentions += rewritten;
        let Rewriter { b, .. } = rewriter;
        let outputs = function.outputs.iter().zip(&left);
        let outputs: Vec<Output> =
            outputs.map(|(o, left)| Output { name: o.name.clone(), value: left.value }).collect();
        let function = b.finish(outputs);
        module.functions.push(function);
        outside.push(left.into_iter().map(|left| left.outside).collect());
    }
    Ok(Rewritten { attentions, contributions })
}

/// How a result leaves its function.
struct FunctionResult {
    value: ValueId,
    /// The type outside attention of a value that stays inside.
    outside: Option<TensorType>,
}

impl Rewriter<'_, '_> {
    /// Rewrites the function; returns the number of its attention operations, and its results.
    fn function(&mut self, is_main: bool) -> Result<(usize, Vec<FunctionResult>), OpError> {
        let source = self.source;
        for (i, &param) in source.params.iter().enumerate() {
            let given = self.plan.flows.given(self.id, i).filter(|s| s.function.index() < self.made.len());
            let ty = match given {
                None => self.boundary(source.ty(param)),
                Some(s) => {
                    let function = &self.made[s.function];
                    function.ty(function.outputs[s.output].value).clone()
                }
            };
            let value = self.b.param(ty, source.values[param].name.as_deref());
            if let Some(outside) = given.and_then(|s| self.given[s.function.index()][s.output].clone()) {
                self.outside.insert(value, outside);
            }
            self.map.insert(param, value);
        }
        let mut attentions = 0;
        for i in training::order(self.plan, source) {
            let node = &source.nodes[i];
            attentions += usize::from(is_attention(&node.op));
            self.node(i, node)?;
        }
        let outputs = source.outputs.iter().enumerate();
        let left = outputs.map(|(i, output)| self.leaving(i, output.value, is_main));
        Ok((attentions, left.collect::<Result<_, _>>()?))
    }

    /// The `i`-th result as it leaves.
    fn leaving(&mut self, i: usize, old: ValueId, is_main: bool) -> Result<FunctionResult, OpError> {
        let value = self.value(old)?;
        let ty = self.b.ty(value).clone();
        let layout = match self.plan.flows.passing(self.id, i) {
            Passing::Inside if self.inside.contains_key(&old) => {
                let known = self.outside.get(&value).cloned();
                let outside = Some(known.unwrap_or_else(|| settled(&ty)));
                return Ok(FunctionResult { value: self.inside[&old], outside });
            }
            Passing::Inside | Passing::Kept => self.found(value).layout,
            Passing::Plain if self.is_residual(&ty) && !is_main => self.boundary(&ty).layout,
            Passing::Plain => settled(&ty).layout,
        };
        let mut value = self.reshard(value, layout)?;
        if is_main {
            value = self.located(value, None)?;
        }
        Ok(FunctionResult { value, outside: None })
    }

    fn node(&mut self, i: usize, node: &Node) -> Result<(), OpError> {
        let source = self.source;
        if self.defers_sum(node) || self.defers_mask(node)? {
            return Ok(());
        }
        self.draw_beside(node)?;
        let operands: Vec<ValueId> =
            node.operands.iter().map(|&v| self.value(v)).collect::<Result<_, _>>()?;
        let operands = self.sent(node, &operands)?;
        let declared = || source.ty(node.result());
        let results = match &node.op {
            Op::Param(binding) => self.param(binding, declared())?,
            Op::State(binding) => self.state(binding, declared())?,
            Op::Assign { target, binding } => {
                let dtype = source.ty(node.operands[0]).dtype;
                self.assign(*target, binding, (operands[0], dtype))?
            }
            Op::Fill { .. } => self.fill(i, node)?,
            Op::Input(_) | Op::Positions { .. } => {
                let at = self.at_source(node.result());
                let ty = self.by_sequence(declared(), Outside::Inputs).located(at);
                vec![self.b.push_as(node.op.clone(), &[], ty)?]
            }
            Op::Call { callee, layers, stride, scan, stage } => {
                let params = &self.made[*callee].params;
                let types: Vec<TensorType> =
                    params.iter().map(|&p| self.made[*callee].ty(p).clone()).collect();
                let mut arguments = Vec::new();
                for (value, mut ty) in operands.into_iter().zip(types) {
                    // One layer's own is taken from a stack.
                    let n_stacked =
                        self.b.ty(value).dims.len() - ty.dims.len().min(self.b.ty(value).dims.len());
                    ty.layout.split.insert_many(0, (0..n_stacked).map(|_| AxisList::new()));
                    arguments.push(self.reshard(value, ty.layout)?);
                }
                let stage = self.placed(*stage);
                let (layers, stride) = (layers.clone(), *stride);
                let op = Op::Call { callee: *callee, layers, stride, scan: *scan, stage };
                self.b.node(op, &arguments, &[])?.to_vec()
            }
            Op::Attention(attention) => self.attention(attention, node, &operands)?,
            Op::AttentionBackward(attention) => self.attention_backward(attention, &operands)?,
            Op::Optimizer(Optimizer::AdamW(_)) => self.step(node, &operands)?,
            Op::Random(Random::Key { .. }) => vec![self.b.push(node.op.clone(), &[])?],
            Op::Loss(Loss::CrossEntropy { over, ignore }) => {
                self.cross_entropy(node, (*over, *ignore), &operands)?
            }
            Op::Cache(Cache::Argmax { over, parts: None }) => self.argmax(node, *over, &operands)?,
            Op::Gradient(Gradient::Embed { over, padding: _ }) => {
                self.embed_backward(node, *over, &operands)?
            }
            _ if self.plan.flows.inner(self.id).serves(i) => self.served(node, &operands)?,
            _ => self.by_rule(node, &operands)?,
        };
        for (&old, &new) in node.results.iter().zip(&results) {
            self.b.name(new, source.values[old].name.as_deref());
            let new = self.reduced(old, new)?;
            self.map.insert(old, new);
        }
        self.note_readers(node);
        Ok(())
    }

    /// An operation on values: operands in the layouts that its rule demands.
    pub(super) fn by_rule(&mut self, node: &Node, operands: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        if let Some(value) = self.by_element(node, operands)? {
            return Ok(vec![value]);
        }
        let used: Vec<ValueId> = operands.to_vec();
        let operands = &self.gather(used)?;
        let declared = self.unplaced_results(node);
        let layouts = self.demanded(node, operands, &declared)?;
        let moved = self.reshard_all(operands, layouts)?;
        Ok(self.b.node(node.op.clone(), &moved, &declared)?.to_vec())
    }

    /// The types of the results of `node`, without layouts.
    pub(super) fn unplaced_results(&self, node: &Node) -> Vec<TensorType> {
        let types = node.results.iter().map(|&v| self.source.ty(v));
        types.map(|ty| TensorType::new(ty.dtype, ty.dims.iter().copied())).collect()
    }

    /// The layouts that the rule of `node` demands of its operands.
    pub(super) fn demanded(
        &self,
        node: &Node,
        operands: &[ValueId],
        declared: &[TensorType],
    ) -> Result<Vec<Layout>, OpError> {
        let found: Vec<Found<'_>> = operands.iter().map(|&v| self.found(v)).collect();
        let types: Vec<&TensorType> = found.iter().map(|f| f.ty).collect();
        let results: Vec<&TensorType> = declared.iter().collect();
        let Some(rule) = node.op.rule(&types, &results) else {
            // Any operation takes whole values as they are.
            if found.iter().all(|f| f.layout.is_whole()) {
                return Ok(found.into_iter().map(|f| f.layout).collect());
            }
            let message = format!("`{}` belongs to a program that is laid out already", node.op.name());
            return Err(OpError::new("P14", message));
        };
        Ok(demand(&rule, &found, self.preferred(node).as_ref()))
    }

    /// Attention in its inside layout; the results that are read outside, where the queries were.
    fn attention(
        &mut self,
        attention: &Attention,
        node: &Node,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>, OpError> {
        let outside = self.outside_of(operands[0]);
        let (attention, inside) = self.enter(attention, operands, 3)?;
        let heads = attention.heads;
        let mut results = self.b.node(Op::Attention(attention), &inside, &[])?;
        if self.plan.decisions.cleared.contains(&heads) {
            results[0] = self.clear_padding(results[0], heads)?;
        }
        let old = node.operands[..3].iter().chain(&node.results);
        self.inside.extend(old.copied().zip(inside[..3].iter().chain(&results).copied()));
        let results = node.results.iter().zip(results);
        let left = |(&old, result): (&ValueId, ValueId)| {
            if self.is_read_outside(old) { self.leave(result, &outside) } else { Ok(result) }
        };
        results.map(left).collect()
    }

    /// `x` with zeros in the padding of `dim`.
    fn clear_padding(&mut self, x: ValueId, dim: DimId) -> Result<ValueId, OpError> {
        const PADDING: i64 = -1;
        let TensorType { dtype, layout, .. } = self.b.ty(x).clone();
        let split = self.b.ty(x).axes_of(dim).into();
        let mut ty = TensorType::new(DType::I32, [dim]).located(layout.at);
        ty.layout.split[0] = split;
        let positions = self.b.push_as(Op::Positions { padding: PADDING }, &[], ty)?;
        let valid = self.b.push(Op::Loss(Loss::Valid { ignore: PADDING }), &[positions])?;
        let valid = cast(&mut self.b, valid, dtype)?;
        self.b.push(Op::Binary(Binary::Mul), &[x, valid])
    }

    /// Whether something outside attention reads a value.
    fn is_read_outside(&self, old: ValueId) -> bool {
        let flows = &self.plan.flows;
        let inside = |i: usize| flows.passing(self.id, i) == Passing::Inside;
        let mut outputs = self.source.outputs.iter().enumerate();
        flows.inner(self.id).reads(old).outside || outputs.any(|(i, o)| o.value == old && !inside(i))
    }

    /// The type of a value outside attention.
    fn outside_of(&self, value: ValueId) -> TensorType {
        self.outside.get(&value).cloned().unwrap_or_else(|| settled(self.b.ty(value)))
    }

    /// The backward pass in the inside layout of the forward pass, gradients where q, k and v were.
    fn attention_backward(
        &mut self,
        attention: &Attention,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>, OpError> {
        let kv_heads = attention.kv_heads;
        let with_gradient = operands[..3].iter().chain(&operands[6..]);
        let outside: Vec<TensorType> = with_gradient.map(|&v| self.outside_of(v)).collect();
        let (attention, inside) = self.enter(attention, operands, 6)?;
        let copied = attention.kv_heads;
        let gradients = self.b.node(Op::AttentionBackward(attention), &inside, &[])?;
        let mut results = Vec::with_capacity(gradients.len());
        for (i, (mut gradient, outside)) in gradients.into_iter().zip(&outside).enumerate() {
            if (1..3).contains(&i) && copied != kv_heads {
                // Copies go home as they are and are summed there: that is less than sums over ranks would be.
                let mut there = outside.clone();
                there.dims.iter_mut().filter(|d| **d == kv_heads).for_each(|d| *d = copied);
                gradient = self.leave(gradient, &there)?;
                gradient = self.b.push(Op::SumCopies { from: copied, to: kv_heads }, &[gradient])?;
            }
            results.push(self.leave(gradient, outside)?);
        }
        Ok(results)
    }

    /// A node that only serves attention, in its layout.
    fn served(&mut self, node: &Node, operands: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let layouts: Vec<Layout> = operands.iter().map(|&v| self.inside_rows(self.b.ty(v))).collect();
        let inside = self.reshard_all(operands, layouts)?;
        let declared: Vec<TensorType> = node.results.iter().map(|&v| self.source.ty(v).clone()).collect();
        Ok(self.b.node(node.op.clone(), &inside, &declared)?.to_vec())
    }

    /// The attention in its inside layout, and its operands; the bias, if any, is operand `n_plain`.
    fn enter(
        &mut self,
        attention: &Attention,
        operands: &[ValueId],
        n_plain: usize,
    ) -> Result<(Attention, Vec<ValueId>), OpError> {
        let mut attention = attention.clone();
        let copied = self.plan.copies.get(&attention.kv_heads).copied();
        let keys = self.plan.placements.key_sequence(self.source, attention.keys, &self.plan.roles);
        let mut inside = Vec::with_capacity(operands.len());
        for (i, &operand) in operands.iter().enumerate() {
            let mut value = operand;
            let is_key = attention.is_of_keys(i);
            // A value that was kept inside has its copies.
            if let Some(to) = copied.filter(|&to| is_key && !self.b.ty(value).has(to)) {
                let settled = settled(self.b.ty(value)).layout;
                value = self.reshard(value, settled)?;
                value = self.repeat(value, attention.kv_heads, to)?;
            }
            let sequence = match (is_key, i < n_plain) {
                (true, _) => keys.clone(),
                (false, true) => self.plan.placements.attention_sequence(self.source, attention.queries),
                (false, false) => AxisList::new(),
            };
            let layout = self.inside(self.b.ty(value), &sequence);
            inside.push(self.reshard(value, layout)?);
        }
        attention.kv_heads = copied.unwrap_or(attention.kv_heads);
        if !keys.is_empty() {
            let movement = self.plan.placements.movement(self.source, &attention).ok_or_else(|| {
                OpError::new("P14", "a strategy splits the sequence inside attention and names no movement")
            })?;
            attention.movement = Some(movement);
        }
        Ok((attention, inside))
    }

    /// A result of attention where a value of type `outside` was, dimension by dimension.
    fn leave(&mut self, result: ValueId, outside: &TensorType) -> Result<ValueId, OpError> {
        let mut layout = Layout::whole(self.b.ty(result).dims.len());
        for (i, &dim) in self.b.ty(result).dims.iter().enumerate() {
            layout.split[i] = outside.axes_of(dim).into();
        }
        self.reshard(result, layout)
    }

    /// The layout inside attention of values with the dimensions of queries.
    pub(super) fn inside_rows(&self, ty: &TensorType) -> Layout {
        let sequence = ty.dims.iter().find(|d| self.plan.roles.sequences.contains(d));
        let axes = sequence.map(|&d| self.plan.placements.attention_sequence(self.source, d));
        self.inside(ty, &axes.unwrap_or_default())
    }

    /// The layout of an operand inside attention, its sequence split by `sequence`.
    fn inside(&self, ty: &TensorType, sequence: &AxisList) -> Layout {
        let mut layout = Layout::whole(ty.dims.len());
        for (i, &dim) in ty.dims.iter().enumerate() {
            if self.plan.roles.sequences.contains(&dim) {
                layout.split[i].clone_from(sequence);
            } else if self.plan.is_head(dim) {
                layout.split[i] = self.placement.attention_heads();
            } else if self.plan.roles.batches.contains(&dim) {
                layout.split[i].clone_from(&self.placement.batch);
            }
        }
        layout
    }

    /// The type between functions: the residual stream in its layout, integers like inputs.
    pub(super) fn boundary(&self, ty: &TensorType) -> TensorType {
        if ty.dtype.is_float() {
            self.by_sequence(ty, Outside::Residual)
        } else {
            self.by_sequence(ty, Outside::Inputs)
        }
    }

    /// Whether a value has only dimensions that no weight is split along.
    pub(super) fn is_residual(&self, ty: &TensorType) -> bool {
        ty.dims.iter().all(|&d| !self.plan.roles.splits_weights(d))
    }

    pub(super) fn by_sequence(&self, ty: &TensorType, outside: Outside) -> TensorType {
        let mut ty = ty.with_layout(Layout::whole(ty.dims.len()));
        for i in 0..ty.dims.len() {
            if self.plan.roles.sequences.contains(&ty.dims[i]) {
                ty.layout.split[i] = match outside {
                    Outside::Inputs => self.plan.placements.sequence(ty.dims[i]).clone(),
                    Outside::Residual => self.plan.placements.residual_sequence(ty.dims[i]),
                };
                if self.plan.roles.caches.contains(&ty.dims[i]) {
                    ty.layout.split[i].extend(self.placement.cache.iter().copied());
                }
            } else if self.plan.roles.batches.contains(&ty.dims[i]) {
                ty.layout.split[i].clone_from(&self.placement.batch);
            }
        }
        ty
    }

    /// An operand for [`demand`]. A pending sum counts as scattered along the sequence where the residual stream is
    /// split by the axes of the sum, and as taken whole elsewhere.
    pub(super) fn found(&self, value: ValueId) -> Found<'_> {
        let ty = self.b.ty(value);
        let weight = self.weights.contains(&value);
        let mut layout = settled(ty).layout;
        for (i, dim) in ty.dims.iter().enumerate() {
            if !self.plan.roles.sequences.contains(dim) {
                continue;
            }
            let scattered: AxisList = layout.split[i].iter().chain(&ty.layout.partial).copied().collect();
            if !ty.layout.partial.is_empty()
                && scattered == self.plan.placements.residual_sequence(*dim)
                && self.b.space().can_split(*dim, &scattered)
            {
                layout.split[i] = scattered;
                break;
            }
        }
        Found { ty, layout, weight }
    }

    /// Each of `values` in its layout.
    pub(super) fn reshard_all(
        &mut self,
        values: &[ValueId],
        layouts: Vec<Layout>,
    ) -> Result<Vec<ValueId>, OpError> {
        values.iter().zip(layouts).map(|(&value, layout)| self.reshard(value, layout)).collect()
    }

    /// `value` in `layout`.
    pub(super) fn reshard(&mut self, value: ValueId, layout: Layout) -> Result<ValueId, OpError> {
        let ty = self.b.ty(value);
        // A change of layout leaves a value on its ranks.
        let layout = layout.located(ty.layout.at);
        if let Some(known) = self.known(value, &layout) {
            return Ok(known);
        }
        let to = ty.with_layout(layout.clone());
        let made = self.b.push_as(Op::Reshard, &[value], to)?;
        self.resharded.insert((value, layout), made);
        self.came_from.insert(made, value);
        Ok(made)
    }

    /// `value` in `layout`, if it was in this layout before or has been brought there.
    pub(super) fn known(&self, value: ValueId, layout: &Layout) -> Option<ValueId> {
        if let Some(&made) = self.resharded.get(&(value, layout.clone())) {
            return Some(made);
        }
        let mut earlier = std::iter::successors(Some(value), |v| self.came_from.get(v).copied());
        earlier.find(|&v| self.b.ty(v).layout == *layout)
    }

    /// `value` with each of the heads `from` repeated to those of `to`.
    fn repeat(&mut self, value: ValueId, from: DimId, to: DimId) -> Result<ValueId, OpError> {
        if let Some(&made) = self.repeated.get(&(value, to)) {
            return Ok(made);
        }
        let made = self.b.push(Op::Repeat { from, to }, &[value])?;
        self.repeated.insert((value, to), made);
        Ok(made)
    }
}
