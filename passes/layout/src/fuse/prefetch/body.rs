//! A function of layers as one that gathers the weights of the next layer and reduces gradients of the one before.
//!
//! Which layer runs next is the caller's: layers run upwards or downwards. A call inside of a function runs for layers from
//! that of the function on (`layers=1..2, stride=1` is the layer above). So what runs upwards reads the next layer's parts of
//! weights by such a call; what runs downwards is called for the layer above by a function that runs for the layer below
//! (`turn`) and reads its parts. Only parts of weights are read that way, before they are gathered.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Module, Output, ValueId};
use ithaca_ir::ops::{OpError, ScanOrder};
use ithaca_ir::{FunctionBuilder, Op, Space, TensorType};
use ithaca_pass::Prices;

use super::parts::{Gather, Parts, Tail};
use super::timeline::{self, Timeline};

/// How a function is called by who loops over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loop {
    /// The function.
    pub(super) callee: FuncId,
    /// Which layer runs first.
    pub(super) order: ScanOrder,
    /// How many arguments and results are handed on.
    pub(super) carried: usize,
}

/// What runs when in a layer.
#[derive(Clone, Debug)]
pub(super) struct Body {
    pub(super) of: Loop,
    parts: Parts,
    /// Every gather, in the order in which they are issued.
    issues: Vec<Issue>,
    /// Tails that the next layer runs.
    deferred: Vec<usize>,
    /// Before which node the next layer assigns what they give.
    assigned: usize,
}

/// When a gather is issued.
#[derive(Clone, Copy, Debug)]
struct Issue {
    /// Which.
    gather: usize,
    /// Before which node.
    position: usize,
    /// Whether it is one of the next layer.
    is_ahead: bool,
}

/// Which layer of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Turn {
    /// The first: nothing is left of another.
    First,
    /// One that comes after a layer and before another.
    Middle,
    /// The last: it finishes what it begins.
    Last,
}

impl Turn {
    /// The turn of piece `number` of `n` of a loop, in the order in which they run.
    pub(super) fn of(number: usize, n: usize) -> Turn {
        match number {
            0 => Turn::First,
            _ if number + 1 == n => Turn::Last,
            _ => Turn::Middle,
        }
    }

    fn has_next(self) -> bool {
        self != Turn::Last
    }

    fn has_before(self) -> bool {
        self != Turn::First
    }

    /// What its function is called, behind the name of the layer's.
    fn name(self) -> &'static str {
        match self {
            Turn::First => "first",
            Turn::Middle => "ahead",
            Turn::Last => "last",
        }
    }
}

/// The functions that a loop calls in place of one.
#[derive(Clone, Debug)]
pub(super) struct Functions {
    /// Gathers for the first layer.
    pub(super) gather: Option<FuncId>,
    /// For each turn that is called: what is, and for how many layers below the one that is meant.
    pub(super) turns: BTreeMap<Turn, (FuncId, u64)>,
}

impl Body {
    /// The body of a loop over `function`, all of whose layers run alike.
    pub(super) fn of(space: &Space, function: &Function, of: Loop, prices: &dyn Prices) -> Body {
        let parts = Parts::of(function);
        let seconds = timeline::seconds(space, function, prices);
        let fitted = STRETCHES.iter().find_map(|&stretch| {
            let layer = Layer::of(function, &parts, &seconds, of.order, stretch);
            layer.timeline.gathers(&parts, &seconds).map(|starts| (layer, starts))
        });
        let (Layer { timeline, deferred, left_out, lead }, starts) = fitted.unwrap_or_else(|| {
            let layer = Layer::of(function, &parts, &seconds, of.order, 1.0);
            let starts = layer.timeline.crowded(&parts, &seconds);
            (layer, starts)
        });
        let place = |at: f64| timeline.position(function, &parts, &left_out, at);
        let issue = |(gather, &at): (usize, &f64)| match at < 0.0 {
            true => (at + timeline.end, Issue { gather, position: place(at + timeline.end), is_ahead: true }),
            false => {
                let position = place(at).min(parts.gathers[gather].used);
                (at, Issue { gather, position, is_ahead: false })
            }
        };
        let issues = in_order(starts.iter().enumerate().map(issue).collect());
        let assigned = timeline.position_from(function, &parts, &left_out, lead);
        Body { of, issues, deferred, assigned, parts }
    }

    /// The body of a function that nobody loops over, or whose layers have nothing to do with each other: its own gathers
    /// only, as early as they must start.
    pub(super) fn alone(space: &Space, function: &Function, callee: FuncId, prices: &dyn Prices) -> Body {
        let parts = Parts::of(function);
        let seconds = timeline::seconds(space, function, prices);
        let timeline = Timeline::of(function, &parts, &seconds, &BTreeSet::new(), 0.0);
        let starts = timeline.gathers(&parts, &seconds);
        let starts = starts.unwrap_or_else(|| timeline.crowded(&parts, &seconds));
        let issue = |(gather, &at): (usize, &f64)| {
            let position = timeline.position(function, &parts, &BTreeSet::new(), at.max(0.0));
            let position = position.min(parts.gathers[gather].used);
            (at, Issue { gather, position, is_ahead: false })
        };
        let issues = in_order(starts.iter().enumerate().map(issue).collect());
        let of = Loop { callee, order: ScanOrder::Ascending, carried: 0 };
        Body { of, issues, deferred: Vec::new(), assigned: 0, parts }
    }

    /// How many messages of weights there are, how many of them the layer before gathers, and how many reductions the next
    /// one runs.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        (self.parts.gathers.len(), self.ahead().count(), self.deferred.len())
    }

    /// Whether layers have to do with each other.
    pub(super) fn is_rotated(&self) -> bool {
        self.ahead().next().is_some() || !self.deferred.is_empty()
    }

    /// The gathers of the next layer.
    fn ahead(&self) -> impl Iterator<Item = &Gather> {
        self.issues.iter().filter(|issue| issue.is_ahead).map(|issue| &self.parts.gathers[issue.gather])
    }

    /// What is gathered ahead.
    pub(super) fn gathered(&self, function: &Function) -> Vec<ValueId> {
        self.ahead().flat_map(|gather| function.nodes[gather.node].results.to_vec()).collect()
    }

    /// What tails are given that the next layer runs.
    pub(super) fn pending(&self) -> Vec<ValueId> {
        let mut seen = BTreeSet::new();
        let all = self.deferred.iter().flat_map(|&t| self.parts.tails[t].given.iter().copied());
        all.filter(|v| seen.insert(v.index())).collect()
    }

    /// The most arguments that a layer takes.
    pub(super) fn n_arguments(&self, function: &Function) -> usize {
        let parts: usize = self.ahead().map(|gather| function.nodes[gather.node].operands.len()).sum();
        function.params.len() + self.gathered(function).len() + self.pending().len() + parts
    }

    /// The function itself, its gathers where they should be issued.
    pub(super) fn arranged(&self, module: &Module, function: &Function) -> Result<Function, OpError> {
        let at_home = |issue: &Issue| match issue.is_ahead {
            true => Issue { position: 0, is_ahead: false, ..*issue },
            false => *issue,
        };
        let mut issues: Vec<Issue> = self.issues.iter().map(at_home).collect();
        issues.sort_by_key(|issue| issue.position);
        let plain = Body { issues, deferred: Vec::new(), ..self.clone() };
        Writer::new(&plain, module, function, function.name.clone()).layer(None, &Helpers::default())
    }

    /// Adds the functions of these turns of loops to `module`, whose functions stand before their callers.
    ///
    /// None is added that nobody calls: what lasts is told by who runs what, and such a function would name weights and
    /// states of layers, on ranks, that no call runs.
    pub(super) fn add(
        &self,
        module: &mut Module,
        function: &Function,
        called: &BTreeSet<Turn>,
    ) -> Result<Functions, OpError> {
        let named = |part: &str| format!("{}.{part}", function.name);
        let mut helpers = Helpers::default();
        let mut gather = None;
        if self.ahead().next().is_some() {
            let shards = Writer::new(self, module, function, named("shards")).shards()?;
            helpers.shards = Some(module.functions.push(shards));
            let first = Writer::new(self, module, function, named("gather")).gather()?;
            gather = Some(module.functions.push(first));
        }
        if !self.deferred.is_empty() {
            let assign = Writer::new(self, module, function, named("assign")).assign()?;
            helpers.assign = Some(module.functions.push(assign));
        }
        let mut turns: BTreeMap<Turn, (FuncId, u64)> = BTreeMap::new();
        for &turn in called {
            // Without something left of another layer the first one is as those behind it.
            if let (Turn::Middle, true, Some(&first)) =
                (turn, self.deferred.is_empty(), turns.get(&Turn::First))
            {
                turns.insert(turn, first);
                continue;
            }
            let what = turn.name();
            let layer = Writer::new(self, module, function, named(what)).layer(Some(turn), &helpers)?;
            let layer = module.functions.push(layer);
            let below = turn.has_next() && self.of.order == ScanOrder::Descending;
            let called = match (below, helpers.shards) {
                (true, Some(shards)) => {
                    let outer = turned(module, layer, shards, named(&format!("{what}.turn")))?;
                    (module.functions.push(outer), 1)
                }
                (true | false, _) => (layer, 0),
            };
            turns.insert(turn, called);
        }
        Ok(Functions { gather, turns })
    }
}

/// How much longer kernels are taken to be, one after another, until what travels finds its time: kernels wait where there is
/// more to send than to compute.
const STRETCHES: [f64; 8] = [1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0];

/// A layer between two others.
struct Layer {
    timeline: Timeline,
    /// Tails that the next layer runs.
    deferred: Vec<usize>,
    /// Their nodes.
    left_out: BTreeSet<usize>,
    /// Seconds of the reductions that the layer before left.
    lead: f64,
}

impl Layer {
    fn of(function: &Function, parts: &Parts, seconds: &[f64], order: ScanOrder, stretch: f64) -> Layer {
        // Nothing waits behind the last kernels.
        let plain = Timeline::of(function, parts, seconds, &BTreeSet::new(), 0.0);
        let seconds = timeline::stretched(function, seconds, stretch);
        // A layer upwards cannot name the one below it.
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
        let timeline = Timeline::of(function, parts, &seconds, &left_out, lead);
        Layer { timeline, deferred, left_out, lead }
    }
}

/// What is issued, in order of position and time.
fn in_order(mut issues: Vec<(f64, Issue)>) -> Vec<Issue> {
    issues.sort_by(|(a, x), (b, y)| x.position.cmp(&y.position).then(a.total_cmp(b)));
    issues.into_iter().map(|(_, issue)| issue).collect()
}

/// Functions that layers call.
#[derive(Clone, Copy, Debug, Default)]
struct Helpers {
    shards: Option<FuncId>,
    assign: Option<FuncId>,
}

/// One layer further.
fn above(callee: FuncId) -> Op {
    Op::Call { callee, layers: 1..2, stride: 1, scan: None, stage: None }
}

/// Runs for the layer below: reads its parts of weights, which `layer` takes last, and calls that for the layer above.
fn turned(module: &Module, layer: FuncId, shards: FuncId, name: String) -> Result<Function, OpError> {
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
    b: FunctionBuilder<'a>,
    map: Vec<Option<ValueId>>,
}

impl<'a> Writer<'a> {
    fn new(body: &'a Body, module: &'a Module, function: &'a Function, name: String) -> Self {
        let b = FunctionBuilder::part_of(name, function, &module.space, &module.functions);
        Self { body, function, b, map: vec![None; function.values.len()] }
    }

    /// Parts of the weights that are gathered ahead.
    fn shards(mut self) -> Result<Function, OpError> {
        let sent = self.sent();
        for gather in self.body.ahead() {
            self.nodes(&gather.sources)?;
        }
        let values = sent.iter().map(|&v| self.there(v)).collect();
        Ok(self.finish(values))
    }

    /// The weights that are gathered ahead.
    fn gather(mut self) -> Result<Function, OpError> {
        for gather in self.body.ahead() {
            self.nodes(&gather.sources)?;
            self.nodes(&[gather.node])?;
        }
        let values = self.body.gathered(self.function).iter().map(|&v| self.there(v)).collect();
        Ok(self.finish(values))
    }

    /// What is done with gradients that were reduced.
    fn assign(mut self) -> Result<Function, OpError> {
        for sum in self.sums() {
            self.param(sum);
        }
        for tail in self.deferred() {
            self.nodes(&tail.assignment)?;
        }
        Ok(self.finish(Vec::new()))
    }

    /// A layer; as it is where it is nobody's turn.
    fn layer(mut self, turn: Option<Turn>, helpers: &Helpers) -> Result<Function, OpError> {
        let (body, function) = (self.body, self.function);
        let carried = body.of.carried.min(function.params.len());
        let (gathered, pending) = (body.gathered(function), body.pending());
        let before = turn.is_some_and(Turn::has_before);
        let next = turn.is_some_and(Turn::has_next);
        let downwards = body.of.order == ScanOrder::Descending;

        function.params[..carried].iter().for_each(|&p| self.param(p));
        gathered.iter().for_each(|&v| self.param(v));
        let left: Vec<ValueId> = match before {
            true => pending.iter().map(|&v| self.b.param(function.ty(v).clone(), None)).collect(),
            false => Vec::new(),
        };
        function.params[carried..].iter().for_each(|&p| self.param(p));
        let sent = self.sent();
        let shards: Vec<ValueId> = match next && downwards {
            true => sent.iter().map(|&v| self.b.param(function.ty(v).clone(), None)).collect(),
            false => Vec::new(),
        };

        let sums = if before { self.reductions(&pending, &left)? } else { Vec::new() };
        let moved = body.parts.of_gathers();
        let left_out: BTreeSet<usize> = match next {
            true => self.deferred().iter().flat_map(|tail| tail.nodes()).collect(),
            false => BTreeSet::new(),
        };
        let mut fetched: Vec<ValueId> = Vec::new();
        let mut shards = shards.into_iter();
        for i in 0..=function.nodes.len() {
            if let (true, true, Some(callee)) = (before, i == body.assigned, helpers.assign) {
                self.b.node(above(callee), &sums, &[])?;
            }
            for issue in body.issues.iter().filter(|issue| issue.position == i) {
                let gather = &body.parts.gathers[issue.gather];
                match (turn, issue.is_ahead) {
                    (None, _) | (Some(_), false) => {
                        self.nodes(&gather.sources)?;
                        self.nodes(&[gather.node])?;
                    }
                    (Some(_), true) if next => {
                        if let (false, true, Some(callee)) = (downwards, fetched.is_empty(), helpers.shards) {
                            shards = self.b.node(above(callee), &[], &[])?.to_vec().into_iter();
                        }
                        let node = &function.nodes[gather.node];
                        let parts: Vec<ValueId> = shards.by_ref().take(node.operands.len()).collect();
                        let declared: Vec<TensorType> =
                            node.results.iter().map(|&v| function.ty(v).clone()).collect();
                        fetched.extend(self.b.node(node.op.clone(), &parts, &declared)?);
                    }
                    (Some(_), true) => {}
                }
            }
            if i < function.nodes.len() && !moved.contains(&i) && !left_out.contains(&i) {
                self.nodes(&[i])?;
            }
        }

        let results = carried.min(function.outputs.len());
        let output = |w: &Self, o: &Output| w.there(o.value);
        let mut values: Vec<ValueId> = function.outputs[..results].iter().map(|o| output(&self, o)).collect();
        if next {
            values.extend(fetched);
            values.extend(pending.iter().map(|&v| self.there(v)));
        }
        values.extend(function.outputs[results..].iter().map(|o| output(&self, o)));
        let mut finished = self.finish(values);
        if turn.is_none() {
            for (output, old) in finished.outputs.iter_mut().zip(&function.outputs) {
                output.name.clone_from(&old.name);
            }
        }
        Ok(finished)
    }

    /// The reductions that the layer before left; gives the sums.
    fn reductions(&mut self, pending: &[ValueId], left: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let kept = self.map.clone();
        for (&old, &new) in pending.iter().zip(left) {
            self.map[old.index()] = Some(new);
        }
        for tail in self.deferred() {
            self.nodes(&tail.reduction)?;
        }
        let sums = self.sums().iter().map(|&v| self.there(v)).collect();
        // The layer has values of its own under the same names.
        self.map = kept;
        Ok(sums)
    }

    /// Nodes that are not there yet.
    fn nodes(&mut self, list: &[usize]) -> Result<(), OpError> {
        for &i in list {
            let node = &self.function.nodes[i];
            if !node.results.is_empty() && node.results.iter().all(|v| self.map[v.index()].is_some()) {
                continue;
            }
            let operands: Vec<ValueId> = node.operands.iter().map(|&v| self.there(v)).collect();
            let declared: Vec<TensorType> =
                node.results.iter().map(|&v| self.function.ty(v).clone()).collect();
            let results = self.b.node(node.op.clone(), &operands, &declared)?;
            for (&old, &new) in node.results.iter().zip(&results) {
                self.b.name(new, self.function.values[old].name.as_deref());
                self.map[old.index()] = Some(new);
            }
        }
        Ok(())
    }

    fn param(&mut self, value: ValueId) {
        let name = self.function.values[value].name.as_deref();
        let new = self.b.param(self.function.ty(value).clone(), name);
        self.map[value.index()] = Some(new);
    }

    fn there(&self, value: ValueId) -> ValueId {
        self.map[value.index()].expect("what is needed comes first")
    }

    fn deferred(&self) -> Vec<&'a Tail> {
        self.body.deferred.iter().map(|&t| &self.body.parts.tails[t]).collect()
    }

    /// What the gathers that are issued ahead send.
    fn sent(&self) -> Vec<ValueId> {
        self.body.ahead().flat_map(|g| self.function.nodes[g.node].operands.to_vec()).collect()
    }

    fn sums(&self) -> Vec<ValueId> {
        self.deferred().iter().flat_map(|tail| tail.sums.iter().copied()).collect()
    }

    fn finish(self, values: Vec<ValueId>) -> Function {
        self.b.finish(values.into_iter().map(|value| Output { name: None, value }))
    }
}
