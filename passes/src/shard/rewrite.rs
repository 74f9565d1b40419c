//! Lays functions out, node by node: sources where the placement says, results where rules lead, reshards between.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::{AxisList, Layout};
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{Attention, Op, OpError};
use ithaca_ir::{Arena, AxisId, DimId, FunctionBuilder, Module, TensorType};

use super::layouts::{Found, demand};
use super::legality::Decisions;
use super::placements::Placements;
use super::roles::Roles;
use super::strategy::Placement;

/// What the rewriting goes by.
pub(super) struct Plan {
    /// Which axes split what, by function.
    pub(super) placements: Placements,
    /// Roles of dimensions.
    pub(super) roles: Roles,
    /// What was decided about dimensions.
    pub(super) decisions: Decisions,
    /// For key/value heads as they are loaded, the dimension in which attention sees them.
    pub(super) copies: BTreeMap<DimId, DimId>,
}

/// Fills `module` with the functions of `program`, laid out; returns how many attention operations were rewritten.
pub(super) fn functions(
    module: &mut Module,
    program: &Arena<FuncId, Function>,
    plan: &Plan,
) -> Result<usize, OpError> {
    let mut attentions = 0;
    let main = program.ids().next_back();
    for (id, function) in program.iter() {
        let b = FunctionBuilder::new(function.name.as_str(), &module.space, &module.functions);
        let mut rewriter = Rewriter {
            plan,
            placement: plan.placements.function(&function.name),
            program,
            source: function,
            b,
            map: Vec::new(),
            resharded: BTreeMap::new(),
            came_from: BTreeMap::new(),
            repeated: BTreeMap::new(),
            weights: BTreeSet::new(),
        };
        let rewritten = rewriter.function(Some(id) == main)?;
        attentions += rewritten;
        let Rewriter { b, map, .. } = rewriter;
        let outputs: Vec<Output> = function
            .outputs
            .iter()
            .map(|o| Output { name: o.name.clone(), value: map[o.value.index()] })
            .collect();
        let function = b.finish(outputs);
        module.functions.push(function);
    }
    Ok(attentions)
}

/// What lies outside attention.
#[derive(Clone, Copy)]
enum Outside {
    /// Inputs, and integers between functions.
    Inputs,
    /// The residual stream.
    Residual,
}

struct Rewriter<'a> {
    plan: &'a Plan,
    /// The placement of this function.
    placement: &'a Placement,
    program: &'a Arena<FuncId, Function>,
    source: &'a Function,
    b: FunctionBuilder<'a>,
    /// The new value of each old one.
    map: Vec<ValueId>,
    /// Reshards made before: the same value is never moved twice to the same layout.
    resharded: BTreeMap<(ValueId, Layout), ValueId>,
    /// What each reshard was made of.
    came_from: BTreeMap<ValueId, ValueId>,
    /// Copies of heads made before.
    repeated: BTreeMap<(ValueId, DimId), ValueId>,
    /// Values that are weights, as they were loaded.
    weights: BTreeSet<ValueId>,
}

impl Rewriter<'_> {
    /// Rewrites the function; the outputs are left in `map`.
    fn function(&mut self, is_main: bool) -> Result<usize, OpError> {
        let source = self.source;
        for &param in &source.params {
            let ty = self.boundary(source.ty(param));
            let value = self.b.param(ty, source.values[param].name.as_deref());
            self.map.push(value);
        }
        let mut attentions = 0;
        for node in &source.nodes {
            attentions += usize::from(super::is_attention(&node.op));
            self.node(node)?;
        }
        for output in &source.outputs {
            let value = self.map[output.value.index()];
            let ty = self.b.ty(value).clone();
            let leaves = if self.is_residual(&ty) && !is_main { self.boundary(&ty) } else { settled(&ty) };
            self.map[output.value.index()] = self.reshard(value, leaves.layout)?;
        }
        Ok(attentions)
    }

    fn node(&mut self, node: &Node) -> Result<(), OpError> {
        let source = self.source;
        let operands: Vec<ValueId> = node.operands.iter().map(|v| self.map[v.index()]).collect();
        let results = match &node.op {
            Op::Param(_) => {
                let ty = self.weight(source.ty(node.result()));
                let weight = self.b.push_as(node.op.clone(), &[], ty)?;
                self.weights.insert(weight);
                vec![weight]
            }
            Op::Input(_) | Op::Positions => {
                let ty = self.by_sequence(source.ty(node.result()), Outside::Inputs);
                vec![self.b.push_as(node.op.clone(), &[], ty)?]
            }
            Op::Call { callee, .. } => {
                let params = &self.program[*callee].params;
                let types: Vec<TensorType> =
                    params.iter().map(|&p| self.boundary(self.program[*callee].ty(p))).collect();
                let mut arguments = Vec::new();
                for (value, ty) in operands.into_iter().zip(types) {
                    arguments.push(self.reshard(value, ty.layout)?);
                }
                self.b.node(node.op.clone(), &arguments, &[])?.to_vec()
            }
            Op::Attention(attention) => self.attention(attention, &operands)?,
            Op::AttentionBackward(attention) => self.attention_backward(attention, &operands)?,
            _ => self.by_rule(node, &operands)?,
        };
        for (&old, &new) in node.results.iter().zip(&results) {
            self.b.name(new, source.values[old].name.as_deref());
            self.map.push(new);
        }
        Ok(())
    }

    /// An operation on values: operands in the layouts that its rule demands.
    fn by_rule(&mut self, node: &Node, operands: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let declared: Vec<TensorType> = node
            .results
            .iter()
            .map(|&v| TensorType::new(self.source.ty(v).dtype, self.source.ty(v).dims.iter().copied()))
            .collect();
        let layouts = {
            let found: Vec<Found<'_>> = operands.iter().map(|&v| self.found(v)).collect();
            let types: Vec<&TensorType> = found.iter().map(|f| f.ty).collect();
            let results: Vec<&TensorType> = declared.iter().collect();
            let rule = node.op.rule(&types, &results).ok_or_else(|| {
                let message = format!("`{}` belongs to a program that is laid out already", node.op.name());
                OpError::new("P14", message)
            })?;
            demand(&rule, &found)
        };
        let mut moved = Vec::with_capacity(operands.len());
        for (&value, layout) in operands.iter().zip(layouts) {
            moved.push(self.reshard(value, layout)?);
        }
        Ok(self.b.node(node.op.clone(), &moved, &declared)?.to_vec())
    }

    /// Attention in its inside layout, the results where the queries were.
    fn attention(&mut self, attention: &Attention, operands: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let outside = settled(self.b.ty(operands[0]));
        let (attention, inside) = self.enter(attention, operands, 3)?;
        let results = self.b.node(Op::Attention(attention), &inside, &[])?;
        results.into_iter().map(|result| self.leave(result, &outside)).collect()
    }

    /// The backward pass in the inside layout of the forward pass, gradients where q, k and v were.
    fn attention_backward(
        &mut self,
        attention: &Attention,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>, OpError> {
        let kv_heads = attention.kv_heads;
        let with_gradient = operands[..3].iter().chain(&operands[6..]);
        let outside: Vec<TensorType> = with_gradient.map(|&v| settled(self.b.ty(v))).collect();
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

    /// The attention as it is inside, and its operands there; the bias, if any, stands at `n_plain`.
    fn enter(
        &mut self,
        attention: &Attention,
        operands: &[ValueId],
        n_plain: usize,
    ) -> Result<(Attention, Vec<ValueId>), OpError> {
        let mut attention = attention.clone();
        let copied = self.plan.copies.get(&attention.kv_heads).copied();
        let mut inside = Vec::with_capacity(operands.len());
        for (i, &operand) in operands.iter().enumerate() {
            let mut value = operand;
            let is_key = i == 1 || i == 2;
            if let Some(to) = copied.filter(|_| is_key) {
                let settled = settled(self.b.ty(value)).layout;
                value = self.reshard(value, settled)?;
                value = self.repeat(value, attention.kv_heads, to)?;
            }
            let sequence = match (is_key, i < n_plain) {
                (true, _) => self.key_sequence(attention.keys),
                (false, true) => {
                    self.plan.placements.attention_sequence(&self.source.name, attention.queries)
                }
                (false, false) => AxisList::new(),
            };
            let layout = self.inside(self.b.ty(value), &sequence);
            inside.push(self.reshard(value, layout)?);
        }
        attention.kv_heads = copied.unwrap_or(attention.kv_heads);
        if !self.key_sequence(attention.keys).is_empty() {
            let movement = self.plan.placements.movement(&self.source.name, &attention).ok_or_else(|| {
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

    /// The axes that split `keys` inside attention.
    fn key_sequence(&self, keys: DimId) -> AxisList {
        let mut axes = self.plan.placements.attention_sequence(&self.source.name, keys);
        if self.plan.roles.caches.contains(&keys) {
            axes.extend(self.placement.cache.iter().copied());
        }
        axes
    }

    /// The layout of an operand inside attention, its sequence split by `sequence`.
    fn inside(&self, ty: &TensorType, sequence: &AxisList) -> Layout {
        let mut layout = Layout::whole(ty.dims.len());
        for (i, &dim) in ty.dims.iter().enumerate() {
            if self.plan.roles.sequences.contains(&dim) {
                layout.split[i].clone_from(sequence);
            } else if self.is_head(dim) {
                layout.split[i] = self.placement.attention_heads();
            } else if self.plan.roles.batches.contains(&dim) {
                layout.split[i].clone_from(&self.placement.batch);
            }
        }
        layout
    }

    fn is_head(&self, dim: DimId) -> bool {
        let copied = self.plan.copies.values().any(|&c| c == dim);
        copied || self.plan.roles.heads.iter().any(|&(h, k)| h == dim || k == dim)
    }

    /// A weight where the placement has it: split along heads, hidden width and vocabulary.
    fn weight(&self, ty: &TensorType) -> TensorType {
        let mut ty = settled(ty);
        let of_experts = ty.dims.iter().any(|d| self.plan.roles.experts.contains(d));
        for i in 0..ty.dims.len() {
            let dim = ty.dims[i];
            if self.plan.roles.splits_weights(dim) && !self.plan.decisions.whole.contains(&dim) {
                let free = |a: &&AxisId| !of_experts || !self.placement.experts.contains(a);
                ty.layout.split[i] = self.placement.weights.iter().filter(free).copied().collect();
            } else if self.plan.roles.experts.contains(&dim) {
                ty.layout.split[i].clone_from(&self.placement.experts);
            }
        }
        ty
    }

    /// What passes between functions: the residual stream in its layout, integers as inputs are.
    fn boundary(&self, ty: &TensorType) -> TensorType {
        match ty.dtype.is_float() {
            true => self.by_sequence(ty, Outside::Residual),
            false => self.by_sequence(ty, Outside::Inputs),
        }
    }

    /// Whether a value has only dimensions that no weight is split along.
    fn is_residual(&self, ty: &TensorType) -> bool {
        ty.dims.iter().all(|&d| !self.plan.roles.splits_weights(d))
    }

    fn by_sequence(&self, ty: &TensorType, outside: Outside) -> TensorType {
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
    fn found(&self, value: ValueId) -> Found<'_> {
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

    /// `value` in `layout`.
    fn reshard(&mut self, value: ValueId, layout: Layout) -> Result<ValueId, OpError> {
        let ty = self.b.ty(value);
        if ty.layout == layout {
            return Ok(value);
        }
        if let Some(&made) = self.resharded.get(&(value, layout.clone())) {
            return Ok(made);
        }
        // What was there before it came here need not go back.
        let mut before = self.came_from.get(&value).copied();
        while let Some(earlier) = before {
            if self.b.ty(earlier).layout == layout {
                return Ok(earlier);
            }
            before = self.came_from.get(&earlier).copied();
        }
        let to = ty.with_layout(layout.clone());
        let made = self.b.push_as(Op::Reshard, &[value], to)?;
        self.resharded.insert((value, layout), made);
        self.came_from.insert(made, value);
        Ok(made)
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

/// The type once pending sums are taken, nothing else moved.
fn settled(ty: &TensorType) -> TensorType {
    let mut ty = ty.clone();
    ty.layout.partial.clear();
    ty
}
