//! Lays out training: weights and states, their gradients, steps of the optimizer, the loss over a split vocabulary.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::{AxisList, Layout};
use ithaca_ir::module::{FuncId, Function, Node, ValueId};
use ithaca_ir::ops::cache::CACHE;
use ithaca_ir::ops::{Binary, Binding, Loss, Op, OpError, Target, cast, state};
use ithaca_ir::{Arena, DType, DimId, Module, Space, TensorType};

use super::rewriter::{Outside, Plan, Rewriter, settled};
use super::strategy::Placement;
use super::{caches, replicas};

/// The type of the weight or state under `binding`.
fn lasting(
    plan: &Plan,
    placement: &Placement,
    space: &Space,
    (target, binding): (Target, &Binding),
    ty: &TensorType,
) -> TensorType {
    if target == Target::State && binding.name.starts_with(CACHE) {
        return caches::kept(plan, placement, ty);
    }
    let mut ty = plan.weight(placement, ty);
    if let Some(pending) = pending(plan, binding) {
        ty.layout.partial.clone_from(pending);
        return ty;
    }
    let is_persistent = target == Target::Param && plan.persistent.contains(&binding.name);
    if plan.zero.splits(target, binding) && !is_persistent {
        replicas::split(space, &ty, &plan.replicas)
    } else {
        ty
    }
}

/// The axes over which the state `binding` is a pending sum of gradients.
fn pending<'a>(plan: &'a Plan, binding: &Binding) -> Option<&'a AxisList> {
    let axes = plan.pending.get(state::gradient_of_sum(&binding.name)?)?;
    (!axes.is_empty()).then_some(axes)
}

/// The state of `binding`: a sum of gradients that is not pending is the gradient itself.
fn settled_state<'a>(plan: &Plan, binding: &'a Binding) -> Cow<'a, Binding> {
    match state::gradient_of_sum(&binding.name) {
        Some(gradient) if pending(plan, binding).is_none() => {
            Cow::Owned(Binding { name: gradient.to_owned(), ..binding.clone() })
        }
        _ => Cow::Borrowed(binding),
    }
}

/// The order in which the nodes of `function` are laid out. A contribution is added to a pending sum as soon as it is
/// made; what follows a reduction stays at the end, so that no kernel waits for it.
pub(super) fn order(plan: &Plan, function: &Function) -> Vec<usize> {
    let nodes = &function.nodes;
    let mut makers: Vec<Option<usize>> = vec![None; function.values.len()];
    for (i, node) in nodes.iter().enumerate() {
        node.results.iter().for_each(|v| makers[v.index()] = Some(i));
    }
    let made = |v: ValueId| makers[v.index()];
    let is_pending = |i: usize| matches!(&nodes[i].op, Op::State(b) if pending(plan, b).is_some());
    // By the node that makes a contribution, the nodes that add it.
    let mut additions: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    // A call may write the same sum.
    let calls = nodes.iter().any(|n| matches!(n.op, Op::Call { .. }));
    for (i, node) in nodes.iter().enumerate().filter(|_| !calls) {
        let (Op::Binary(Binary::Add), &[before, contribution]) = (&node.op, &node.operands[..]) else {
            continue;
        };
        let Some(read) = made(before).filter(|&read| is_pending(read)) else { continue };
        let mut chain = vec![i, read];
        let mut maker = made(contribution);
        while let Some(cast) = maker.filter(|&m| matches!(nodes[m].op, Op::Cast { .. })) {
            chain.push(cast);
            maker = made(nodes[cast].operands[0]);
        }
        chain.reverse();
        let stored = |n: &Node| {
            let Op::Assign { binding, .. } = &n.op else { return false };
            n.operands[0] == node.result() && pending(plan, binding).is_some()
        };
        chain.extend(nodes.iter().position(stored));
        if let Some(maker) = maker {
            additions.entry(maker).or_default().extend(chain);
        }
    }
    let early: BTreeSet<usize> = additions.values().flatten().copied().collect();
    let mut order = Vec::with_capacity(nodes.len());
    for i in (0..nodes.len()).filter(|i| !early.contains(i)) {
        order.push(i);
        order.extend(additions.get(&i).into_iter().flatten());
    }
    order
}

/// Whether a program sums gradients.
pub(super) fn has_sums(program: &Arena<FuncId, Function>) -> bool {
    let mut nodes = program.values().flat_map(|f| &f.nodes);
    nodes.any(|n| matches!(&n.op, Op::State(binding) if state::gradient_of_sum(&binding.name).is_some()))
}

/// The element types of weights by name, in which their gradients are sent.
pub(super) fn sent_as(module: &Module) -> BTreeMap<String, DType> {
    let nodes = module.functions.values().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
    let weight = |(f, n): (&Function, &Node)| match &n.op {
        Op::Param(binding) => Some((binding.name.clone(), f.ty(n.result()).dtype)),
        _ => None,
    };
    nodes.filter_map(weight).collect()
}

/// For the assigned values of `function`, and the values from which they are computed element by element, the final layout.
pub(super) fn wanted(
    plan: &Plan,
    placement: &Placement,
    space: &Space,
    function: &Function,
) -> BTreeMap<ValueId, Layout> {
    let mut wanted: BTreeMap<ValueId, Layout> = BTreeMap::new();
    for node in function.nodes.iter().rev() {
        if let Op::Assign { target, binding } = &node.op {
            let ty = lasting(plan, placement, space, (*target, binding), function.ty(node.operands[0]));
            wanted.insert(node.operands[0], ty.layout);
            continue;
        }
        let layout = node.results.first().and_then(|v| wanted.get(v)).cloned();
        let Some(layout) = layout.filter(|_| is_linear(&node.op)) else { continue };
        let result = function.ty(node.result());
        for &operand in &node.operands {
            let ty = function.ty(operand);
            // A value that is narrowed travels in the narrow type.
            if ty.dims == result.dims && ty.dtype.bytes() <= result.dtype.bytes() {
                wanted.entry(operand).or_insert_with(|| layout.clone());
            }
        }
    }
    wanted
}

/// The addition of values in `layout`.
fn addition(layout: &Layout) -> Op {
    if layout.partial.is_empty() { Op::Binary(Binary::Add) } else { Op::Accumulate }
}

/// Whether a sum over ranks may be taken before or after the operation, which goes element by element.
fn is_linear(op: &Op) -> bool {
    matches!(op, Op::Cast { .. } | Op::Scale { .. } | Op::Binary(Binary::Add | Binary::Sub))
}

impl Rewriter<'_, '_> {
    /// The new value of an old one; sums that were put off are taken.
    pub(super) fn value(&mut self, old: ValueId) -> Result<ValueId, OpError> {
        if self.masks.contains_key(&old) {
            // The reader does not determine its layout.
            let layout = self.boundary(self.source.ty(old)).layout;
            self.draw(old, layout)?;
        }
        let Some(mut parts) = self.summands.remove(&old) else { return Ok(self.map[&old]) };
        parts.sort_by_key(|&v| std::cmp::Reverse(self.b.ty(v).layout.partial.len()));
        let mut sum: Option<ValueId> = None;
        for part in parts {
            let Some(before) = sum else {
                sum = Some(part);
                continue;
            };
            // A sum that both lack is taken once.
            let mut layout = self.b.ty(before).layout.clone();
            layout.partial.retain(|a| self.b.ty(part).layout.partial.contains(a));
            let op = addition(&layout);
            let operands = [self.reshard(before, layout.clone())?, self.reshard(part, layout)?];
            sum = Some(self.b.push(op, &operands)?);
        }
        let sum = sum.expect("a sum has summands");
        self.b.name(sum, self.source.values[old].name.as_deref());
        self.map.insert(old, sum);
        Ok(sum)
    }

    /// Whether `node` adds scalars that are sums over different axes; then they are kept apart until they are needed, so
    /// that many sums are taken by one collective.
    pub(super) fn defers_sum(&mut self, node: &Node) -> bool {
        if node.op != Op::Binary(Binary::Add) || !self.source.ty(node.result()).dims.is_empty() {
            return false;
        }
        let mut parts: Vec<ValueId> = Vec::new();
        for old in &node.operands {
            let part = self.map[old];
            parts.extend(self.summands.get(old).cloned().unwrap_or_else(|| vec![part]));
        }
        if parts.iter().all(|&v| self.b.ty(v).layout == self.b.ty(parts[0]).layout) {
            return false;
        }
        let mut apart: Vec<ValueId> = Vec::new();
        for part in parts {
            let same = apart.iter_mut().find(|v| self.b.ty(**v).layout == self.b.ty(part).layout);
            match same {
                None => apart.push(part),
                Some(sum) => {
                    let op = addition(&self.b.ty(part).layout);
                    *sum = self.b.push(op, &[*sum, part]).expect("scalars of one type and layout add up");
                }
            }
        }
        self.map.insert(node.result(), apart[0]);
        self.summands.insert(node.result(), apart);
        true
    }

    /// A weight where it is kept.
    pub(super) fn param(&mut self, binding: &Binding, ty: &TensorType) -> Result<Vec<ValueId>, OpError> {
        let used = self.plan.weight(self.placement, ty);
        let kept = self.lasting(Target::Param, binding, ty);
        let weight = self.b.push_as(Op::Param(binding.clone()), &[], kept)?;
        if self.b.ty(weight).layout != used.layout {
            self.gathered.insert(weight, used.layout);
        }
        self.weights.insert(weight);
        Ok(vec![weight])
    }

    /// A state where it is kept.
    pub(super) fn state(&mut self, binding: &Binding, ty: &TensorType) -> Result<Vec<ValueId>, OpError> {
        let ty = self.lasting(Target::State, binding, ty);
        let binding = settled_state(self.plan, binding).into_owned();
        Ok(vec![self.b.push_as(Op::State(binding), &[], ty)?])
    }

    /// Writes a value where it is kept.
    pub(super) fn assign(
        &mut self,
        target: Target,
        binding: &Binding,
        (value, dtype): (ValueId, DType),
    ) -> Result<Vec<ValueId>, OpError> {
        let ty = self.lasting(target, binding, self.b.ty(value));
        let value = self.reshard(value, ty.layout)?;
        // A reduced gradient comes in the type in which it was sent.
        let value = cast(&mut self.b, value, dtype)?;
        let binding = settled_state(self.plan, binding).into_owned();
        Ok(self.b.node(Op::Assign { target, binding }, &[value], &[])?.to_vec())
    }

    fn lasting(&self, target: Target, binding: &Binding, ty: &TensorType) -> TensorType {
        lasting(self.plan, self.placement, self.b.space(), (target, binding), ty)
    }

    /// A tensor of one number, where it is wanted.
    pub(super) fn fill(&mut self, i: usize, node: &Node) -> Result<Vec<ValueId>, OpError> {
        let ty = self.source.ty(node.result());
        let layout = match self.wanted.get(&node.result()) {
            Some(layout) => layout.clone(),
            None if self.plan.flows.inner(self.id).serves(i) => self.inside_rows(ty),
            None if self.is_residual(ty) => self.boundary(ty).layout,
            None => {
                let by_weights = self.plan.weight(self.placement, ty).layout;
                let mut layout = self.by_sequence(ty, Outside::Inputs).layout;
                for (split, weights) in layout.split.iter_mut().zip(by_weights.split) {
                    if split.is_empty() {
                        *split = weights;
                    }
                }
                layout
            }
        };
        let ty = ty.with_layout(layout);
        Ok(vec![self.b.push_as(node.op.clone(), &[], ty)?])
    }

    /// Weights that are kept in shards are gathered where they are used.
    pub(super) fn gather(&mut self, mut operands: Vec<ValueId>) -> Result<Vec<ValueId>, OpError> {
        for operand in &mut operands {
            if let Some(layout) = self.gathered.get(operand).cloned() {
                *operand = self.reshard(*operand, layout)?;
                self.weights.insert(*operand);
            }
        }
        Ok(operands)
    }

    /// The layout in which the first result of `node` is best made: for the gradient of a weight, that of the weight. What
    /// ZeRO splits further is left to the reduction, which scatters.
    pub(super) fn preferred(&self, node: &Node) -> Option<Layout> {
        let result = *node.results.iter().find(|v| self.wanted.contains_key(v))?;
        if matches!(node.op, Op::Cache(_)) {
            return self.wanted.get(&result).cloned();
        }
        if result == node.results[0] {
            Some(self.plan.weight(self.placement, self.source.ty(result)).layout)
        } else {
            None
        }
    }

    /// Operations by element that need no demand: casts of weights in shards, sums of pending sums, and what is made of
    /// gradients where these are kept.
    pub(super) fn by_element(
        &mut self,
        node: &Node,
        operands: &[ValueId],
    ) -> Result<Option<ValueId>, OpError> {
        match (&node.op, operands) {
            (Op::Cast { .. } | Op::Scale { .. }, &[x]) => {
                if let Some(layout) = self.gathered.get(&x).cloned() {
                    let value = self.b.push(node.op.clone(), &[x])?;
                    self.gathered.insert(value, layout);
                    return Ok(Some(value));
                }
                let ty = self.b.ty(x);
                let wider = match node.op {
                    Op::Cast { to } => to.bytes() >= ty.dtype.bytes(),
                    _ => false,
                };
                let stays = || self.is_added(node.result()) || self.place_in_sum(node.result()).is_some();
                if wider && !ty.layout.partial.is_empty() && stays() {
                    return self.b.push(node.op.clone(), &[x]).map(Some);
                }
            }
            (Op::Binary(Binary::Add), &[x, y]) => {
                let (x_ty, y_ty) = (self.b.ty(x), self.b.ty(y));
                if x_ty == y_ty && !x_ty.layout.partial.is_empty() {
                    return self.b.push(Op::Accumulate, &[x, y]).map(Some);
                }
            }
            _ => return Ok(None),
        }
        let ends = node.operands.iter().map(|v| self.wanted.get(v).cloned());
        let Some(ends) = ends.collect::<Option<Vec<Layout>>>() else { return Ok(None) };
        let moved = self.reshard_all(operands, ends)?;
        self.b.push(node.op.clone(), &moved).map(Some)
    }
    /// A step of the optimizer, where its moments are kept.
    pub(super) fn step(&mut self, node: &Node, operands: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        const MOMENT: usize = 2;
        let layout = settled(self.b.ty(operands[MOMENT])).layout;
        let is_scalar = |&v: &ValueId| self.b.ty(v).dims.is_empty();
        let own = |v: &ValueId| if is_scalar(v) { Layout::default() } else { layout.clone() };
        let moved = self.reshard_all(operands, operands.iter().map(own).collect())?;
        Ok(self.b.node(node.op.clone(), &moved, &[])?.to_vec())
    }

    /// The loss; where ranks have parts of the vocabulary each gives the lse of its part, and the logit of the label if it
    /// has it (Shoeybi et al., arXiv 1909.08053, section 3).
    pub(super) fn cross_entropy(
        &mut self,
        node: &Node,
        (over, ignore): (DimId, i64),
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>, OpError> {
        let logits = settled(self.b.ty(operands[0]));
        let degree = self.b.space().mesh.degree(logits.axes_of(over));
        let parts = self.plan.parts.get(&over).copied();
        let Some(parts) = parts.filter(|&p| degree > 1 && self.b.space().size(p) == degree) else {
            return self.by_rule(node, operands);
        };
        let x = self.reshard(operands[0], logits.layout.clone())?;
        let mut rows = Layout::default();
        let kept = logits.dims.iter().zip(&logits.layout.split).filter(|&(&d, _)| d != over);
        rows.split.extend(kept.map(|(_, split)| split.clone()));
        let labels = self.reshard(operands[1], rows.clone())?;

        let of_parts = self.b.push(Op::RowLse { over, parts: Some(parts) }, &[x])?;
        let mut whole = rows.clone();
        whole.split.insert(0, Default::default());
        let of_parts = self.reshard(of_parts, whole)?;
        let lse = self.b.push(Op::RowLse { over: parts, parts: None }, &[of_parts])?;
        let dtype: DType = self.b.ty(lse).dtype;

        let nll = node.results[0];
        let read = self.source.nodes.iter().any(|n| n.operands.contains(&nll));
        if !read && self.source.outputs.iter().all(|o| o.value != nll) {
            // A backward pass that computes the loss again asks for its lse alone; the first result is not read.
            return Ok(vec![lse, lse]);
        }
        let picked = self.b.push(Op::Loss(Loss::Pick { over, ignore }), &[x, labels])?;
        let picked = self.reshard(picked, rows)?;
        let valid = self.b.push(Op::Loss(Loss::Valid { ignore }), &[labels])?;
        let valid = cast(&mut self.b, valid, dtype)?;
        let counted = self.b.push(Op::Binary(Binary::Mul), &[lse, valid])?;
        let nll = self.b.push(Op::Binary(Binary::Sub), &[counted, picked])?;
        Ok(vec![nll, lse])
    }
}
