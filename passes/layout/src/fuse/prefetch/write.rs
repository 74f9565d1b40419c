//! Writes functions of layers that gather weights of the next layer and reduce gradients of the previous one.
//!
//! The caller decides which layer is next: layers run upwards or downwards. A call inside a function uses layers
//! relative to the function's own (`layers=1..2, stride=1` is the layer above). Upwards, a layer therefore reads the next
//! layer's shards of weights by such a call. Downwards, a function for the layer below (`turn`) reads that
//! layer's shards and calls the function for the layer above. Only shards of weights are read this way, before they are
//! gathered.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::module::{FuncId, Function, Module, Node, Output, ValueId};
use ithaca_ir::ops::{OpError, ScanOrder};
use ithaca_ir::{FunctionBuilder, Op, TensorType};
use ithaca_pass::rebuild::{Copy, ValueMap};

use super::body::{Body, Issue, Run};
use super::parts::{Gather, Tail, is_upload};

/// A layer's function beside its neighbours, which are told by the numbers of their bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Variant {
    /// The layer.
    pub(super) own: usize,
    /// The layer before it, if that leaves reductions to it.
    pub(super) before: Option<usize>,
    /// The next layer, if there is work for it or left to it.
    pub(super) next: Option<usize>,
    /// The number of arguments and results that layers hand on.
    pub(super) carried: usize,
}

/// The layers that work for their neighbours, and when.
#[derive(Clone, Copy)]
pub(super) struct Layers<'a> {
    /// The module of their functions.
    pub(super) module: &'a Module,
    pub(super) bodies: &'a [Body],
}

/// Functions that serve a layer beside its variants.
#[derive(Clone, Copy, Debug, Default)]
struct Helpers {
    /// Gathers the weights of a layer that no layer precedes.
    gather: Option<FuncId>,
    /// Reads the shards that the layer before gathers.
    shards: Option<FuncId>,
    /// Assigns the sums of the reductions that the next layer runs.
    assign: Option<FuncId>,
}

/// The functions that were added to a module.
#[derive(Default)]
pub(super) struct Functions {
    helpers: BTreeMap<usize, Helpers>,
    /// The function of a variant, and the offset of the layer that it is called for, 0 or 1 below.
    pub(super) variants: BTreeMap<Variant, (FuncId, u64)>,
}

impl Functions {
    /// The function that gathers weights for a first layer.
    pub(super) fn gather(&self, body: usize) -> Option<FuncId> {
        self.helpers.get(&body)?.gather
    }

    /// Adds these variants of a layer to `module`, in which functions precede their callers.
    ///
    /// Only functions in use are added: calls decide which ranks keep which weights and states, and an unused function
    /// would name weights and states of layers that no call runs on its ranks.
    pub(super) fn add(
        &mut self,
        module: &mut Module,
        layers: Layers<'_>,
        variants: &[Variant],
        all: &BTreeSet<Variant>,
        is_first: impl Fn(usize) -> bool,
    ) -> Result<(), OpError> {
        let named = variants.iter().flat_map(|v| [Some(v.own), v.before, v.next]);
        for body in named.flatten() {
            if let Entry::Vacant(helpers) = self.helpers.entry(body) {
                helpers.insert(layers.helpers(module, body, all, is_first(body))?);
            }
        }
        for &variant in variants {
            let added = layers.variant(module, variant, &self.helpers)?;
            self.variants.insert(variant, added);
        }
        Ok(())
    }
}

impl<'a> Layers<'a> {
    fn function(self, body: usize) -> &'a Function {
        &self.module.functions[self.bodies[body].of.callee]
    }

    /// The variant of a layer between these.
    pub(super) fn between(
        self,
        before: Option<usize>,
        (own, carried): (usize, usize),
        next: Option<usize>,
    ) -> Variant {
        let leaves = |body: usize| self.bodies[body].deferred().next().is_some();
        let is_needed = |next: &usize| leaves(own) || self.bodies[*next].ahead().next().is_some();
        // The reductions left to the next layer do not depend on the layer before.
        let alike = |body: usize| {
            let of = self.bodies[body].of;
            let same = |other: &Body| (other.of.callee, other.of.order) == (of.callee, of.order);
            self.bodies.iter().position(same).unwrap_or(body)
        };
        let before = before.filter(|&body| leaves(body)).map(alike);
        Variant { own, before, next: next.filter(is_needed), carried }
    }

    /// The number of a variant's arguments.
    pub(super) fn n_arguments(self, variant: Variant) -> usize {
        let Variant { own, before, next, carried: _ } = variant;
        let function = self.function(own);
        let sent = |n: usize| self.bodies[n].sent(self.function(n)).len();
        let pending = before.map_or(0, |b| self.bodies[b].pending().len());
        function.params.len() + self.bodies[own].gathered(function).len() + pending + next.map_or(0, sent)
    }

    /// Adds the helpers in use of a layer.
    fn helpers(
        self,
        module: &mut Module,
        body: usize,
        all: &BTreeSet<Variant>,
        is_first: bool,
    ) -> Result<Helpers, OpError> {
        let (function, body_of) = (self.function(body), &self.bodies[body]);
        let named = |module: &Module, part: &str| free(module, format!("{}.{part}", self.base(body)));
        let mut helpers = Helpers::default();
        if body_of.ahead().next().is_some() {
            let of_weights = body_of.ahead().filter(|gather| !is_upload(&function.nodes[gather.node].op));
            let sources = Vec::from_iter(of_weights.flat_map(|gather| &gather.sources).copied());
            if !sources.is_empty() && all.iter().any(|variant| variant.next == Some(body)) {
                let shards = part(
                    module,
                    function,
                    named(module, "shards"),
                    (&[], &sources, &body_of.sent(function)),
                )?;
                helpers.shards = Some(module.functions.push(shards));
            }
            if is_first {
                let gathers = Vec::from_iter(body_of.ahead().flat_map(Gather::nodes));
                let results = body_of.gathered(function);
                let first = part(module, function, named(module, "gather"), (&[], &gathers, &results))?;
                helpers.gather = Some(module.functions.push(first));
            }
        }
        if all.iter().any(|variant| variant.before == Some(body)) {
            let assignments = Vec::from_iter(body_of.deferred().flat_map(|tail| &tail.assignment).copied());
            let assign =
                part(module, function, named(module, "assign"), (&body_of.sums(), &assignments, &[]))?;
            helpers.assign = Some(module.functions.push(assign));
        }
        Ok(helpers)
    }

    /// Adds the function of a variant.
    fn variant(
        self,
        module: &mut Module,
        variant: Variant,
        helpers: &BTreeMap<usize, Helpers>,
    ) -> Result<(FuncId, u64), OpError> {
        let name = free(module, self.name(variant));
        let writer = Writer::new(self, module, variant, name.clone());
        let layer = module.functions.push(writer.layer(helpers)?);
        let shards = variant.next.and_then(|next| helpers[&next].shards);
        match (self.bodies[variant.own].of.order, shards) {
            (ScanOrder::Descending, Some(shards)) => {
                let outer = for_layer_below(module, layer, shards, format!("{name}.turn"))?;
                Ok((module.functions.push(outer), 1))
            }
            (ScanOrder::Ascending | ScanOrder::Descending, _) => Ok((layer, 0)),
        }
    }

    /// The name of a variant's function, with those of neighbours of other functions.
    fn name(self, Variant { own, before, next, .. }: Variant) -> String {
        let position = match (before, next) {
            (_, Some(next)) if !self.bodies[next].of.is_in_loop() => {
                let Run { callee, order, .. } = self.bodies[next].of;
                let is_first = before.is_none() && order == ScanOrder::Descending;
                format!(".{}before_{}", if is_first { "first_" } else { "" }, self.short(callee))
            }
            (_, None) => ".last".to_owned(),
            (None, Some(_)) => ".first".to_owned(),
            (Some(_), Some(_)) => ".ahead".to_owned(),
        };
        format!("{}{position}", self.base(own))
    }

    /// The name of a layer's function, with that of the layer before it if that is another.
    fn base(self, own: usize) -> String {
        let Run { callee, after, .. } = self.bodies[own].of;
        let name = &self.module.functions[callee].name;
        if callee == after { name.clone() } else { format!("{name}.after_{}", self.short(after)) }
    }

    /// A function's name up to the first point; suffixes such as `backward` are the same for neighbours.
    fn short(self, function: FuncId) -> &'a str {
        let name = &self.module.functions[function].name;
        name.split_once('.').map_or(name.as_str(), |(first, _)| first)
    }
}

/// `name`, or the same with a number if `module` has such a function.
fn free(module: &Module, name: String) -> String {
    let taken = |name: &String| module.function(name).is_some();
    let numbered = (2..).map(|n| format!("{name}_{n}"));
    let names = std::iter::once(name.clone()).chain(numbered);
    names.into_iter().find(|name| !taken(name)).expect("numbers do not end")
}

/// The function itself, with its own gathers at their positions.
pub(super) fn arranged(body: &Body, module: &Module, function: &Function) -> Result<Function, OpError> {
    let mut copy = copy_of(module, function, function.name.clone());
    function.params.iter().for_each(|&p| copy.param(p));
    let moved = body.parts.of_gathers();
    for i in 0..=function.nodes.len() {
        for issue in body.issues.iter().filter(|issue| issue.position == i) {
            add(&mut copy, function, body.parts.gathers[issue.gather].nodes())?;
        }
        if i < function.nodes.len() && !moved.contains(&i) {
            add(&mut copy, function, [i])?;
        }
    }
    Ok(copy.finish())
}

/// A call for the layer above.
fn above(callee: FuncId) -> Op {
    Op::Call { callee, layers: 1..2, stride: 1, scan: None, stage: None }
}

/// A function for the layer below: it reads that layer's shards of weights, the last parameters of `layer`, and calls
/// `layer` for the layer above.
fn for_layer_below(
    module: &Module,
    layer: FuncId,
    shards: FuncId,
    name: String,
) -> Result<Function, OpError> {
    let (called, read) = (&module.functions[layer], &module.functions[shards]);
    let mut b = FunctionBuilder::part_of(name, called, &module.space, &module.functions);
    let own = &called.params[..called.params.len() - read.outputs.len()];
    let mut arguments: Vec<ValueId> =
        own.iter().map(|&p| b.param(called.ty(p).clone(), called.values[p].name.as_deref())).collect();
    let here = Op::Call { callee: shards, layers: 0..1, stride: 1, scan: None, stage: None };
    arguments.extend(b.node(here, &[], &[])?);
    let results = b.node(above(layer), &arguments, &[])?;
    Ok(b.finish(unnamed(results)))
}

fn unnamed(values: impl IntoIterator<Item = ValueId>) -> Vec<Output> {
    values.into_iter().map(|value| Output { name: None, value }).collect()
}

/// A copy of a function in one of its own.
fn copy_of<'a>(module: &'a Module, function: &'a Function, name: String) -> Copy<'a> {
    let b = FunctionBuilder::part_of(name, function, &module.space, &module.functions);
    Copy::into(function, b)
}

/// A function of these parameters, nodes and results of another.
fn part(
    module: &Module,
    function: &Function,
    name: String,
    (params, nodes, results): (&[ValueId], &[usize], &[ValueId]),
) -> Result<Function, OpError> {
    let mut copy = copy_of(module, function, name);
    params.iter().for_each(|&v| copy.param(v));
    add(&mut copy, function, nodes.iter().copied())?;
    let results = unnamed(results.iter().map(|&v| copy.values[v]));
    Ok(copy.b.finish(results))
}

/// Adds the nodes that are not in the copy yet.
fn add(
    copy: &mut Copy<'_>,
    function: &Function,
    nodes: impl IntoIterator<Item = usize>,
) -> Result<(), OpError> {
    for node in nodes.into_iter().map(|i| &function.nodes[i]) {
        if !is_done(&copy.values, node) {
            copy.node(node)?;
        }
    }
    Ok(())
}

fn is_done(values: &ValueMap<'_>, node: &Node) -> bool {
    !node.results.is_empty() && node.results.iter().all(|&v| values.get(v).is_some())
}

/// A layer and its function.
#[derive(Clone, Copy)]
struct Member<'a> {
    number: usize,
    body: &'a Body,
    function: &'a Function,
}

/// Writes the function of a variant.
struct Writer<'a> {
    own: Member<'a>,
    before: Option<Member<'a>>,
    next: Option<Member<'a>>,
    carried: usize,
    /// The gathers for the layer itself and for the next one.
    issues: Vec<Issue>,
    copy: Copy<'a>,
    /// The values of the next layer.
    of_next: ValueMap<'a>,
}

impl<'a> Writer<'a> {
    fn new(layers: Layers<'a>, module: &'a Module, variant: Variant, name: String) -> Self {
        let member = |number: usize| Member {
            number,
            body: &layers.bodies[number],
            function: layers.function(number),
        };
        let (own, next) = (member(variant.own), variant.next.map(member));
        // The layer before issued the others.
        let here = |issue: &&Issue| !issue.is_ahead;
        let issues: Vec<Issue> = match next {
            Some(next) if next.number == own.number => own.body.issues.clone(),
            Some(next) => {
                let ahead = next.body.issues.iter().filter(|issue| issue.is_ahead);
                own.body.issues.iter().filter(here).chain(ahead).copied().collect()
            }
            None => own.body.issues.iter().filter(here).copied().collect(),
        };
        Self {
            own,
            before: variant.before.map(member),
            next,
            carried: variant.carried.min(own.function.params.len()),
            issues,
            copy: copy_of(module, own.function, name),
            of_next: ValueMap::new(next.unwrap_or(own).function),
        }
    }

    fn layer(mut self, helpers: &BTreeMap<usize, Helpers>) -> Result<Function, OpError> {
        let Member { body, function, .. } = self.own;
        let downwards = body.of.order == ScanOrder::Descending;

        // Values of other layers.
        let received = |b: &mut FunctionBuilder<'_>, of: &Function, values: &[ValueId]| -> Vec<ValueId> {
            values.iter().map(|&v| b.param(of.ty(v).clone(), None)).collect()
        };
        function.params[..self.carried].iter().for_each(|&p| self.copy.param(p));
        body.gathered(function).iter().for_each(|&v| self.copy.param(v));
        let pending = self.before.map(|of| (of, of.body.pending()));
        let left = pending.as_ref().map(|(of, values)| received(&mut self.copy.b, of.function, values));
        function.params[self.carried..].iter().for_each(|&p| self.copy.param(p));
        if let (true, Some(next)) = (downwards, self.next) {
            let sent = next.body.sent(next.function);
            let shards = received(&mut self.copy.b, next.function, &sent);
            sent.iter().zip(shards).for_each(|(&v, shard)| self.of_next.insert(v, shard));
        }

        let sums = match (&pending, left) {
            (Some((of, pending)), Some(left)) => self.reductions(*of, pending, &left)?,
            _ => Vec::new(),
        };
        let assign = self.before.and_then(|before| helpers[&before.number].assign);
        let moved = body.parts.of_gathers();
        let left_out: BTreeSet<usize> =
            body.deferred().filter(|_| self.next.is_some()).flat_map(Tail::nodes).collect();
        for i in 0..=function.nodes.len() {
            if let (true, Some(callee)) = (i == body.assigned, assign) {
                self.copy.b.node(above(callee), &sums, &[])?;
            }
            let issues = Vec::from_iter(self.issues.iter().filter(|issue| issue.position == i).copied());
            for issue in issues {
                match self.next.filter(|_| issue.is_ahead) {
                    None => add(&mut self.copy, function, body.parts.gathers[issue.gather].nodes())?,
                    Some(next) => self.gather_for(next, issue.gather, helpers[&next.number].shards)?,
                }
            }
            if i < function.nodes.len() && !moved.contains(&i) && !left_out.contains(&i) {
                add(&mut self.copy, function, [i])?;
            }
        }

        let results = self.carried.min(function.outputs.len());
        let output = |o: &Output| self.copy.values[o.value];
        let mut values: Vec<ValueId> = function.outputs[..results].iter().map(output).collect();
        if let Some(next) = self.next {
            values.extend(next.body.gathered(next.function).iter().map(|&v| self.of_next[v]));
            values.extend(body.pending().iter().map(|&v| self.copy.values[v]));
        }
        values.extend(function.outputs[results..].iter().map(output));
        Ok(self.copy.b.finish(unnamed(values)))
    }

    /// Gathers weights of the next layer, of which upwards `shards` reads the shards.
    fn gather_for(&mut self, next: Member<'a>, gather: usize, shards: Option<FuncId>) -> Result<(), OpError> {
        let gather = &next.body.parts.gathers[gather];
        let node = &next.function.nodes[gather.node];
        if is_upload(&node.op) {
            return self.upload_for(next, gather);
        }
        let is_read = |v: &ValueId| self.of_next.get(*v).is_some();
        if let (false, Some(callee)) = (node.operands.iter().all(is_read), shards) {
            let read = self.copy.b.node(above(callee), &[], &[])?.to_vec();
            let sent = next.body.sent(next.function);
            sent.iter().zip(read).for_each(|(&v, shard)| self.of_next.insert(v, shard));
        }
        let declared: Vec<TensorType> = self.of_next.declared(&node.results);
        let results = self.copy.b.node(node.op.clone(), &self.of_next.operands(node), &declared)?.to_vec();
        node.results.iter().zip(results).for_each(|(&old, new)| self.of_next.insert(old, new));
        Ok(())
    }

    /// The copy of a state in host memory that the next layer reads.
    fn upload_for(&mut self, next: Member<'a>, gather: &Gather) -> Result<(), OpError> {
        let (node, source) = (&next.function.nodes[gather.node], &next.function.nodes[gather.sources[0]]);
        if let Op::State(binding) = &source.op {
            let ty = next.function.ty(source.result()).clone();
            let pages = self.copy.b.push_as(Op::State(binding.of_next_layer()), &[], ty)?;
            let copied = self.copy.b.push(node.op.clone(), &[pages])?;
            self.of_next.insert(node.result(), copied);
        }
        Ok(())
    }

    /// The reductions that the layer before left; returns the sums.
    fn reductions(
        &mut self,
        before: Member<'a>,
        pending: &[ValueId],
        left: &[ValueId],
    ) -> Result<Vec<ValueId>, OpError> {
        let mut values = ValueMap::new(before.function);
        pending.iter().zip(left).for_each(|(&old, &new)| values.insert(old, new));
        for &i in before.body.deferred().flat_map(|tail| &tail.reduction) {
            let node = &before.function.nodes[i];
            if !is_done(&values, node) {
                values.copy(&mut self.copy.b, node)?;
            }
        }
        Ok(before.body.sums().iter().map(|&v| values[v]).collect())
    }
}
