//! Rewrites a layer's function so that it gathers weights of the next layer and reduces gradients of the previous one.
//!
//! The caller decides which layer is next: loops run upwards or downwards. A call inside a function uses layers
//! relative to the function's own (`layers=1..2, stride=1` is the layer above). A loop upwards therefore reads the next
//! layer's shards of weights by such a call. In a loop downwards, a function for the layer below (`turn`) reads that
//! layer's shards and calls the function for the layer above. Only shards of weights are read this way, before they are
//! gathered.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Module, Output, ValueId};
use ithaca_ir::ops::{OpError, ScanOrder};
use ithaca_ir::{FunctionBuilder, Op, Space, TensorType};
use ithaca_pass::Context;
use ithaca_pass::choices::{Choice, Topic, impossible};
use ithaca_pass::rebuild::Copy;

use super::parts::{Gather, Parts, Tail, is_upload};
use super::timeline::{self, Timeline};

/// A loop over layers, as its caller runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loop {
    /// The function.
    pub(super) callee: FuncId,
    /// The order of layers.
    pub(super) order: ScanOrder,
    /// The number of carried arguments and results.
    pub(super) carried: usize,
}

/// The schedule of a layer.
#[derive(Clone, Debug)]
pub(super) struct Body {
    pub(super) of: Loop,
    parts: Parts,
    /// Every gather, in order of issue.
    issues: Vec<Issue>,
    /// The tails that the next layer runs.
    deferred: Vec<usize>,
    /// The node before which the next layer assigns their sums.
    assigned: usize,
}

/// The issue of a gather.
#[derive(Clone, Copy, Debug)]
struct Issue {
    /// The index of the gather.
    gather: usize,
    /// The node before which it is issued.
    position: usize,
    /// Whether it gathers for the next layer.
    is_ahead: bool,
}

/// The position of a layer in its loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LayerPosition {
    /// The first: no layer precedes it.
    First,
    /// A middle layer.
    Middle,
    /// The last: no layer follows it.
    Last,
}

impl LayerPosition {
    /// The position of piece `number` of `n`, in execution order.
    pub(super) fn of(number: usize, n: usize) -> LayerPosition {
        match number {
            0 => LayerPosition::First,
            _ if number + 1 == n => LayerPosition::Last,
            _ => LayerPosition::Middle,
        }
    }

    fn has_next(self) -> bool {
        self != LayerPosition::Last
    }

    fn has_before(self) -> bool {
        self != LayerPosition::First
    }

    /// The suffix of its function's name.
    fn name(self) -> &'static str {
        match self {
            LayerPosition::First => "first",
            LayerPosition::Middle => "ahead",
            LayerPosition::Last => "last",
        }
    }
}

/// The functions that a loop calls in place of the layer's function.
#[derive(Clone, Debug)]
pub(super) struct Functions {
    /// Gathers weights for the first layer.
    pub(super) gather: Option<FuncId>,
    /// For each position in use, its function, and the offset of the layer that it is called for, 0 or 1 below.
    pub(super) variants: BTreeMap<LayerPosition, (FuncId, u64)>,
}

impl Body {
    /// The body of a loop over `function`, the same for all layers.
    ///
    /// # Errors
    /// `P05` for a choice that the record does not have.
    pub(super) fn of(
        space: &Space,
        function: &Function,
        of: Loop,
        cx: &mut Context<'_>,
    ) -> Result<Body, OpError> {
        let key = match of.order {
            ScanOrder::Ascending => format!("@{} upwards", function.name),
            ScanOrder::Descending => format!("@{} downwards", function.name),
        };
        Body::chosen(space, function, of, (&STRETCHES, -f64::INFINITY), (key, cx))
    }

    /// The body of a function outside loops, or of a loop whose layers are independent: it has only its own gathers, as
    /// late as possible.
    ///
    /// # Errors
    /// As [`Body::of`].
    pub(super) fn alone(
        space: &Space,
        function: &Function,
        callee: FuncId,
        cx: &mut Context<'_>,
    ) -> Result<Body, OpError> {
        let of = Loop { callee, order: ScanOrder::Ascending, carried: 0 };
        let key = format!("@{}", function.name);
        Body::chosen(space, function, of, (&STRETCHES[..1], 0.0), (key, cx))
    }

    /// The body by prices, with gathers within limits as in [`Body::scheduled`], or as it was recorded.
    fn chosen(
        space: &Space,
        function: &Function,
        of: Loop,
        (stretches, earliest): (&[f64], f64),
        (key, cx): (String, &mut Context<'_>),
    ) -> Result<Body, OpError> {
        let parts = Parts::of(function);
        if parts.gathers.is_empty() && parts.tails.is_empty() {
            return Ok(Body { of, issues: Vec::new(), deferred: Vec::new(), assigned: 0, parts });
        }
        match cx.ask(Topic::Prefetch, key.as_str())? {
            Choice::ByPrice(prices) => {
                let seconds = timeline::seconds(space, function, prices);
                let body = Body::scheduled(function, of, parts, &seconds, stretches, earliest);
                cx.record(body.text());
                Ok(body)
            }
            Choice::Recorded(text) => Body::recorded(function, of, parts, text)
                .ok_or_else(|| impossible(Topic::Prefetch, &key, text, "the function has other messages")),
        }
    }

    /// The positions as text: `0@5 1@+12; 0 1; 7` for gathers 0 and 1 before nodes 5 and 12, the second for the next layer, and
    /// for tails 0 and 1, which the next layer assigns before node 7.
    fn text(&self) -> String {
        let issue = |issue: &Issue| {
            let ahead = if issue.is_ahead { "+" } else { "" };
            format!("{}@{ahead}{}", issue.gather, issue.position)
        };
        let issues: Vec<String> = self.issues.iter().map(issue).collect();
        let deferred: Vec<String> = self.deferred.iter().map(ToString::to_string).collect();
        if deferred.is_empty() {
            return issues.join(" ");
        }
        format!("{}; {}; {}", issues.join(" "), deferred.join(" "), self.assigned)
    }

    /// The inverse of [`text`](Self::text); `None` for positions that the function does not have.
    fn recorded(function: &Function, of: Loop, parts: Parts, text: &str) -> Option<Body> {
        let n = function.nodes.len();
        let mut fields = text.split("; ");
        let words = |field: Option<&'_ str>| -> Vec<String> {
            field.unwrap_or_default().split(' ').filter(|w| !w.is_empty()).map(str::to_owned).collect()
        };
        let issue = |word: &String| {
            let (gather, at) = word.split_once('@')?;
            let (is_ahead, at) = at.strip_prefix('+').map_or((false, at), |at| (true, at));
            let (gather, position): (usize, usize) = (gather.parse().ok()?, at.parse().ok()?);
            let used = parts.gathers.get(gather)?.used;
            (position <= if is_ahead { n } else { used }).then_some(Issue { gather, position, is_ahead })
        };
        let issues: Vec<Issue> = words(fields.next()).iter().map(issue).collect::<Option<_>>()?;
        let deferred: Vec<usize> =
            words(fields.next()).iter().map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let assigned = match fields.next() {
            None => 0,
            Some(field) => field.parse().ok().filter(|&at: &usize| at <= n)?,
        };
        let gathers: BTreeSet<usize> = issues.iter().map(|issue| issue.gather).collect();
        let tails: BTreeSet<usize> = deferred.iter().copied().collect();
        let is_whole = gathers.len() == issues.len() && gathers.len() == parts.gathers.len();
        let is_known = tails.len() == deferred.len() && tails.iter().all(|&t| t < parts.tails.len());
        (is_whole && is_known).then_some(Body { of, issues, deferred, assigned, parts })
    }

    /// The body with the first of these stretches by which all gathers fit. No gather starts before `earliest`; a
    /// negative start is in the previous layer.
    fn scheduled(
        function: &Function,
        of: Loop,
        parts: Parts,
        seconds: &[f64],
        stretches: &[f64],
        earliest: f64,
    ) -> Body {
        let layer = |&stretch: &f64| Layer::of(function, &parts, seconds, of.order, stretch);
        let fitted = stretches.iter().map(layer).find(|layer| layer.starts.is_some());
        let Layer { timeline, deferred, lead, starts } = fitted.unwrap_or_else(|| layer(&1.0));
        let starts = starts.unwrap_or_else(|| timeline.crowded(&parts, seconds));
        let issue = |(gather, at): (usize, f64)| {
            let at = at.max(earliest);
            let is_ahead = at < 0.0;
            let start = if is_ahead { at + timeline.end } else { at };
            let latest = if is_ahead { usize::MAX } else { parts.gathers[gather].used };
            (start, Issue { gather, position: timeline.position(start).min(latest), is_ahead })
        };
        let mut issues: Vec<(f64, Issue)> = starts.into_iter().enumerate().map(issue).collect();
        issues.sort_by(|(a, x), (b, y)| x.position.cmp(&y.position).then(a.total_cmp(b)));
        let issues = issues.into_iter().map(|(_, issue)| issue).collect();
        let assigned = timeline.position_from(lead);
        Body { of, issues, deferred, assigned, parts }
    }

    /// The numbers of messages of weights, of messages that the previous layer gathers, and of reductions that the next
    /// layer runs.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        (self.parts.gathers.len(), self.ahead().count(), self.deferred.len())
    }

    /// Whether a layer does work for its neighbours.
    pub(super) fn is_rotated(&self) -> bool {
        self.ahead().next().is_some() || !self.deferred.is_empty()
    }

    /// The gathers for the next layer.
    fn ahead(&self) -> impl Iterator<Item = &Gather> {
        self.issues.iter().filter(|issue| issue.is_ahead).map(|issue| &self.parts.gathers[issue.gather])
    }

    fn deferred(&self) -> impl Iterator<Item = &Tail> {
        self.deferred.iter().map(|&t| &self.parts.tails[t])
    }

    /// The results of the gathers ahead.
    fn made_ahead(&self, function: &Function) -> BTreeSet<ValueId> {
        self.ahead().flat_map(|gather| function.nodes[gather.node].results.to_vec()).collect()
    }

    /// The operands of the gathers ahead, beside those that other gathers ahead make, and those in host memory, which layers
    /// read as those of the next layer.
    fn sent(&self, function: &Function) -> Vec<ValueId> {
        let made = self.made_ahead(function);
        let of_weights = self.ahead().filter(|gather| !is_upload(&function.nodes[gather.node].op));
        let operands = of_weights.flat_map(|gather| function.nodes[gather.node].operands.to_vec());
        operands.filter(|v| !made.contains(v)).collect()
    }

    /// The sums of the tails that the next layer runs.
    fn sums(&self) -> Vec<ValueId> {
        self.deferred().flat_map(|tail| tail.sums.iter().copied()).collect()
    }

    /// The weights gathered ahead that other nodes read than gathers ahead.
    pub(super) fn gathered(&self, function: &Function) -> Vec<ValueId> {
        let ahead: BTreeSet<usize> = self.ahead().map(|gather| gather.node).collect();
        let others = function.nodes.iter().enumerate().filter(|(n, _)| !ahead.contains(n));
        let read: BTreeSet<ValueId> = others.flat_map(|(_, node)| node.operands.to_vec()).collect();
        let made = self.ahead().flat_map(|gather| function.nodes[gather.node].results.to_vec());
        made.filter(|v| read.contains(v)).collect()
    }

    /// The operands of the tails that the next layer runs.
    pub(super) fn pending(&self) -> Vec<ValueId> {
        let mut seen = BTreeSet::new();
        let all = self.deferred().flat_map(|tail| tail.inputs.iter().copied());
        all.filter(|v| seen.insert(v.index())).collect()
    }

    /// The maximum number of a layer's arguments.
    pub(super) fn n_arguments(&self, function: &Function) -> usize {
        let values = [self.gathered(function), self.pending(), self.sent(function)];
        function.params.len() + values.iter().map(Vec::len).sum::<usize>()
    }

    /// The function itself, with its own gathers at their positions.
    pub(super) fn arranged(&self, module: &Module, function: &Function) -> Result<Function, OpError> {
        Writer::new(self, module, function, function.name.clone()).layer(None, &Helpers::default())
    }

    /// Adds the functions for these positions to `module`, in which functions precede their callers.
    ///
    /// Only functions in use are added: calls decide which ranks keep which weights and states, and an unused function
    /// would name weights and states of layers that no call runs on its ranks.
    pub(super) fn add(
        &self,
        module: &mut Module,
        function: &Function,
        called: &BTreeSet<LayerPosition>,
    ) -> Result<Functions, OpError> {
        let named = |part: &str| format!("{}.{part}", function.name);
        let mut helpers = Helpers::default();
        let mut gather = None;
        if self.ahead().next().is_some() {
            let of_weights = self.ahead().filter(|gather| !is_upload(&function.nodes[gather.node].op));
            let sources = Vec::from_iter(of_weights.flat_map(|gather| &gather.sources).copied());
            let writer = Writer::new(self, module, function, named("shards"));
            if !sources.is_empty() {
                let shards = writer.part(&[], sources.into_iter(), &self.sent(function))?;
                helpers.shards = Some(module.functions.push(shards));
            }
            let writer = Writer::new(self, module, function, named("gather"));
            let first = writer.part(&[], self.ahead().flat_map(Gather::nodes), &self.gathered(function))?;
            gather = Some(module.functions.push(first));
        }
        if !self.deferred.is_empty() {
            let assignments = self.deferred().flat_map(|tail| &tail.assignment).copied();
            let writer = Writer::new(self, module, function, named("assign"));
            let assign = writer.part(&self.sums(), assignments, &[])?;
            helpers.assign = Some(module.functions.push(assign));
        }
        let mut variants: BTreeMap<LayerPosition, (FuncId, u64)> = BTreeMap::new();
        for &layer_position in called {
            // If no tails are deferred, the middle layers are like the first.
            if let (LayerPosition::Middle, true, Some(&first)) =
                (layer_position, self.deferred.is_empty(), variants.get(&LayerPosition::First))
            {
                variants.insert(layer_position, first);
                continue;
            }
            let suffix = layer_position.name();
            let layer =
                Writer::new(self, module, function, named(suffix)).layer(Some(layer_position), &helpers)?;
            let layer = module.functions.push(layer);
            let below = layer_position.has_next() && self.of.order == ScanOrder::Descending;
            let called = match (below, helpers.shards) {
                (true, Some(shards)) => {
                    let outer = for_layer_below(module, layer, shards, named(&format!("{suffix}.turn")))?;
                    (module.functions.push(outer), 1)
                }
                (true | false, _) => (layer, 0),
            };
            variants.insert(layer_position, called);
        }
        Ok(Functions { gather, variants })
    }
}

/// Factors by which kernels are assumed to take longer, tried in order until all gathers fit: kernels wait if
/// communication takes longer than computation.
const STRETCHES: [f64; 8] = [1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0];

/// A middle layer.
struct Layer {
    timeline: Timeline,
    /// The tails that the next layer runs.
    deferred: Vec<usize>,
    /// Seconds of the previous layer's deferred reductions.
    lead: f64,
    /// The starts of gathers, if they all fit.
    starts: Option<Vec<f64>>,
}

impl Layer {
    fn of(function: &Function, parts: &Parts, seconds: &[f64], order: ScanOrder, stretch: f64) -> Layer {
        // No kernel follows the last ones.
        let plain = Timeline::of(function, parts, seconds, &BTreeSet::new(), 0.0);
        let stretched = timeline::stretched(function, seconds, stretch);
        // In a loop upwards, a layer cannot refer to the one below.
        let deferred: Vec<usize> = match order {
            ScanOrder::Ascending => Vec::new(),
            ScanOrder::Descending => (0..parts.tails.len())
                .filter(|&t| parts.tails[t].reduction.iter().any(|&n| plain.finish[n] > plain.end))
                .collect(),
        };
        let tails = || deferred.iter().map(|&t| &parts.tails[t]);
        let left_out: BTreeSet<usize> = tails().flat_map(Tail::nodes).collect();
        let reductions = tails().flat_map(|tail| &tail.reduction);
        let lead: f64 =
            reductions.filter(|&&n| function.nodes[n].op.is_communication()).map(|&n| seconds[n]).sum();
        let timeline = Timeline::of(function, parts, &stretched, &left_out, lead);
        let starts = timeline.gathers(parts, seconds);
        Layer { timeline, deferred, lead, starts }
    }
}

/// Functions that layers call.
#[derive(Clone, Copy, Debug, Default)]
struct Helpers {
    shards: Option<FuncId>,
    assign: Option<FuncId>,
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
    Ok(b.finish(results.into_iter().map(|value| Output { name: None, value })))
}

/// Writes one function of a loop.
struct Writer<'a> {
    body: &'a Body,
    function: &'a Function,
    copy: Copy<'a>,
}

impl<'a> Writer<'a> {
    fn new(body: &'a Body, module: &'a Module, function: &'a Function, name: String) -> Self {
        let b = FunctionBuilder::part_of(name, function, &module.space, &module.functions);
        Self { body, function, copy: Copy::into(function, b) }
    }

    /// A function of these nodes.
    fn part(
        mut self,
        params: &[ValueId],
        nodes: impl Iterator<Item = usize>,
        results: &[ValueId],
    ) -> Result<Function, OpError> {
        params.iter().for_each(|&v| self.copy.param(v));
        self.nodes(nodes)?;
        let results = results.iter().map(|&v| self.copy.values[v]).collect();
        Ok(self.finish(results))
    }

    /// A layer at a position in a loop; unchanged with `None`.
    fn layer(
        mut self,
        layer_position: Option<LayerPosition>,
        helpers: &Helpers,
    ) -> Result<Function, OpError> {
        let (body, function) = (self.body, self.function);
        let carried = body.of.carried.min(function.params.len());
        let (gathered, pending) = (body.gathered(function), body.pending());
        let before = layer_position.is_some_and(LayerPosition::has_before);
        let next = layer_position.is_some_and(LayerPosition::has_next);
        let downwards = body.of.order == ScanOrder::Descending;

        // Values of other layers.
        let received = |b: &mut FunctionBuilder<'_>, values: &[ValueId]| -> Vec<ValueId> {
            values.iter().map(|&v| b.param(function.ty(v).clone(), None)).collect()
        };
        function.params[..carried].iter().for_each(|&p| self.copy.param(p));
        gathered.iter().for_each(|&v| self.copy.param(v));
        let left = received(&mut self.copy.b, if before { &pending } else { &[] });
        function.params[carried..].iter().for_each(|&p| self.copy.param(p));
        let sent = body.sent(function);
        let shards = received(&mut self.copy.b, if next && downwards { &sent } else { &[] });

        let sums = if before { self.reductions(&pending, &left)? } else { Vec::new() };
        let moved = body.parts.of_gathers();
        let left_out: BTreeSet<usize> = body.deferred().filter(|_| next).flat_map(Tail::nodes).collect();
        let mut fetched: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        let mut shards = shards.into_iter();
        for i in 0..=function.nodes.len() {
            if let (true, true, Some(callee)) = (before, i == body.assigned, helpers.assign) {
                self.copy.b.node(above(callee), &sums, &[])?;
            }
            for issue in body.issues.iter().filter(|issue| issue.position == i) {
                let gather = &body.parts.gathers[issue.gather];
                match (layer_position, issue.is_ahead) {
                    (None, _) | (Some(_), false) => {
                        self.nodes(gather.nodes())?;
                    }
                    (Some(_), true) if next => {
                        if let (false, true, Some(callee)) = (downwards, fetched.is_empty(), helpers.shards) {
                            shards = self.copy.b.node(above(callee), &[], &[])?.to_vec().into_iter();
                        }
                        let node = &function.nodes[gather.node];
                        if is_upload(&node.op) {
                            fetched.extend(self.upload_of_next(gather)?);
                            continue;
                        }
                        let parts =
                            node.operands.iter().map(|v| fetched.get(v).copied().or_else(|| shards.next()));
                        let parts: Vec<ValueId> = parts.flatten().collect();
                        let declared: Vec<TensorType> =
                            node.results.iter().map(|&v| function.ty(v).clone()).collect();
                        let results = self.copy.b.node(node.op.clone(), &parts, &declared)?.to_vec();
                        fetched.extend(node.results.iter().copied().zip(results));
                    }
                    (Some(_), true) => {}
                }
            }
            if i < function.nodes.len() && !moved.contains(&i) && !left_out.contains(&i) {
                self.nodes([i])?;
            }
        }

        let results = carried.min(function.outputs.len());
        let output = |o: &Output| self.copy.values[o.value];
        let mut values: Vec<ValueId> = function.outputs[..results].iter().map(output).collect();
        if next {
            values.extend(gathered.iter().map(|v| fetched[v]));
            values.extend(pending.iter().map(|&v| self.copy.values[v]));
        }
        values.extend(function.outputs[results..].iter().map(output));
        let mut finished = self.finish(values);
        if layer_position.is_none() {
            for (output, old) in finished.outputs.iter_mut().zip(&function.outputs) {
                output.name.clone_from(&old.name);
            }
        }
        Ok(finished)
    }

    /// The copy of a state in host memory that the next layer reads.
    fn upload_of_next(&mut self, gather: &Gather) -> Result<Option<(ValueId, ValueId)>, OpError> {
        let node = &self.function.nodes[gather.node];
        let source = &self.function.nodes[gather.sources[0]];
        let Op::State(binding) = &source.op else { return Ok(None) };
        let ty = self.function.ty(source.result()).clone();
        let pages = self.copy.b.push_as(Op::State(binding.of_next_layer()), &[], ty)?;
        Ok(Some((node.result(), self.copy.b.push(node.op.clone(), &[pages])?)))
    }

    /// The reductions that the previous layer deferred; returns the sums.
    fn reductions(&mut self, pending: &[ValueId], left: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let kept = self.copy.values.clone();
        pending.iter().zip(left).for_each(|(&old, &new)| self.copy.values.insert(old, new));
        self.nodes(self.body.deferred().flat_map(|tail| &tail.reduction).copied())?;
        let sums = self.body.sums().iter().map(|&v| self.copy.values[v]).collect();
        // The layer's own values replace those of the previous layer.
        self.copy.values = kept;
        Ok(sums)
    }

    /// Adds the nodes that are not in the function yet.
    fn nodes(&mut self, nodes: impl IntoIterator<Item = usize>) -> Result<(), OpError> {
        for node in nodes.into_iter().map(|i| &self.function.nodes[i]) {
            let is_done = |v: &ValueId| self.copy.values.get(*v).is_some();
            if node.results.is_empty() || !node.results.iter().all(is_done) {
                self.copy.node(node)?;
            }
        }
        Ok(())
    }

    fn finish(self, values: Vec<ValueId>) -> Function {
        self.copy.b.finish(values.into_iter().map(|value| Output { name: None, value }))
    }
}
