//! The schedule of a layer: when its weights are gathered, by itself and by the layer before it, and which reductions of
//! gradients it leaves to the next one.

use std::collections::BTreeSet;

use ithaca_ir::Space;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Module, ValueId};
use ithaca_ir::ops::{OpError, ScanOrder};
use ithaca_pass::choices::{Choice, Topic, impossible};
use ithaca_pass::{Context, Prices};

use super::parts::{Gather, Parts, Tail, is_upload};
use super::timeline::{self, Timeline};

/// A layer beside the layer before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The function.
    pub(super) callee: FuncId,
    /// The order of layers.
    pub(super) order: ScanOrder,
    /// The function of the layer before it, the same in a loop.
    pub(super) after: FuncId,
}

impl Run {
    /// In a loop.
    pub(super) fn in_loop(callee: FuncId, order: ScanOrder) -> Run {
        Run { callee, order, after: callee }
    }

    pub(super) fn is_in_loop(self) -> bool {
        self.callee == self.after
    }

    /// The key of its choice.
    pub(super) fn key(self, module: &Module) -> String {
        let name = &module.functions[self.callee].name;
        match self.order {
            _ if !self.is_in_loop() => format!("@{name} after @{}", module.functions[self.after].name),
            ScanOrder::Ascending => format!("@{name} upwards"),
            ScanOrder::Descending => format!("@{name} downwards"),
        }
    }
}

/// The schedule of a layer.
#[derive(Clone, Debug)]
pub(super) struct Body {
    pub(super) of: Run,
    pub(super) parts: Parts,
    /// Every gather, in order of issue.
    pub(super) issues: Vec<Issue>,
    /// The tails that the next layer runs.
    deferred: Vec<Deferred>,
    /// The node before which it assigns the sums of the tails that the layer before it left.
    pub(super) assigned: usize,
}

/// A tail that the next layer runs, from the first node that would end after the layer.
#[derive(Clone, Debug)]
struct Deferred {
    /// The index of the whole tail.
    of: usize,
    /// The first node.
    from: usize,
    tail: Tail,
}

/// The issue of a gather.
#[derive(Clone, Copy, Debug)]
pub(super) struct Issue {
    /// The index of the gather.
    pub(super) gather: usize,
    /// The node before which it is issued.
    pub(super) position: usize,
    /// Whether the layer before issues it, among its own nodes.
    pub(super) is_ahead: bool,
}

impl Body {
    /// The body of a layer.
    ///
    /// # Errors
    /// `P05` for a choice that the record does not have.
    pub(super) fn of(module: &Module, of: Run, cx: &mut Context<'_>) -> Result<Body, OpError> {
        let (function, after) = (&module.functions[of.callee], &module.functions[of.after]);
        let scheduled = |parts: Parts, prices: &dyn Prices| {
            let seconds = |function: &Function| timeline::seconds(&module.space, function, prices);
            let own = Priced { function, parts: &parts, seconds: &seconds(function) };
            if of.is_in_loop() {
                let layer = Layer::in_loop(own, of.order, &STRETCHES);
                return Body::in_loop(of, parts, &layer);
            }
            let before = Priced { function: after, parts: &Parts::of(after), seconds: &seconds(after) };
            let (layer, before) = Layer::after(own, before, of.order);
            Body::made(of, parts, &layer, &before)
        };
        Body::chosen((function, after), of, (of.key(module), cx), scheduled)
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
        let of = Run::in_loop(callee, ScanOrder::Ascending);
        let scheduled = |parts: Parts, prices: &dyn Prices| {
            let own =
                Priced { function, parts: &parts, seconds: &timeline::seconds(space, function, prices) };
            let mut layer = Layer::in_loop(own, of.order, &STRETCHES[..1]);
            layer.starts.iter_mut().for_each(|at| *at = at.max(0.0));
            Body::in_loop(of, parts, &layer)
        };
        Body::chosen((function, function), of, (format!("@{}", function.name), cx), scheduled)
    }

    /// The body by prices, or as it was recorded.
    fn chosen(
        (function, after): (&Function, &Function),
        of: Run,
        (key, cx): (String, &mut Context<'_>),
        scheduled: impl FnOnce(Parts, &dyn Prices) -> Body,
    ) -> Result<Body, OpError> {
        let parts = Parts::of(function);
        // A layer after another may take over reductions of that.
        if of.is_in_loop() && parts.gathers.is_empty() && parts.tails.is_empty() {
            return Ok(Body { of, issues: Vec::new(), deferred: Vec::new(), assigned: 0, parts });
        }
        match cx.choose(Topic::Prefetch, key.as_str())? {
            Choice::ByPrice(prices) => {
                let body = scheduled(parts, prices);
                cx.record(body.text());
                Ok(body)
            }
            Choice::Recorded(text) => Body::recorded((function, after), of, parts, text)
                .ok_or_else(|| impossible(Topic::Prefetch, &key, text, "the function has other messages")),
        }
    }

    /// The body of layers in a loop.
    fn in_loop(of: Run, parts: Parts, layer: &Layer) -> Body {
        Body::made(of, parts, layer, &layer.timeline)
    }

    /// The body of a layer, and its timeline beside that of the layer before; a gather with a negative start is in the latter.
    fn made(of: Run, parts: Parts, layer: &Layer, before: &Timeline) -> Body {
        let issue = |(gather, &at): (usize, &f64)| {
            let is_ahead = at < 0.0;
            let (start, timeline, latest) = if is_ahead {
                (at + before.end, before, usize::MAX)
            } else {
                (at, &layer.timeline, parts.gathers[gather].used)
            };
            (start, Issue { gather, position: timeline.position(start).min(latest), is_ahead })
        };
        let mut issues: Vec<(f64, Issue)> = layer.starts.iter().enumerate().map(issue).collect();
        issues.sort_by(|(a, x), (b, y)| x.position.cmp(&y.position).then(a.total_cmp(b)));
        let issues = issues.into_iter().map(|(_, issue)| issue).collect();
        let assigned = layer.timeline.position_from(layer.lead);
        Body { of, issues, deferred: layer.deferred.clone(), assigned, parts }
    }

    /// The positions as text: `0@5 1@+12; 0 1; 7` for gathers 0 and 1 before nodes 5 and 12, the second in the layer before,
    /// for tails 0 and 1, which the next layer runs, the second from node 40 on if it is `1>40`, and for node 7, before which the
    /// sums of the layer before are assigned.
    fn text(&self) -> String {
        let issue = |issue: &Issue| {
            let ahead = if issue.is_ahead { "+" } else { "" };
            format!("{}@{ahead}{}", issue.gather, issue.position)
        };
        let issues: Vec<String> = self.issues.iter().map(issue).collect();
        let deferred = self.deferred.iter().map(|Deferred { of, from, .. }| {
            let is_whole = self.parts.tails[*of].nodes().all(|n| n >= *from);
            if is_whole { of.to_string() } else { format!("{of}>{from}") }
        });
        let deferred: Vec<String> = deferred.collect();
        if deferred.is_empty() && self.of.is_in_loop() {
            return issues.join(" ");
        }
        format!("{}; {}; {}", issues.join(" "), deferred.join(" "), self.assigned)
    }

    /// The inverse of [`text`](Self::text); `None` for positions that the functions do not have.
    fn recorded(
        (function, after): (&Function, &Function),
        of: Run,
        parts: Parts,
        text: &str,
    ) -> Option<Body> {
        let mut fields = text.split("; ");
        let words = |field: Option<&'_ str>| -> Vec<String> {
            field.unwrap_or_default().split(' ').filter(|w| !w.is_empty()).map(str::to_owned).collect()
        };
        let issue = |word: &String| {
            let (gather, at) = word.split_once('@')?;
            let (is_ahead, at) = at.strip_prefix('+').map_or((false, at), |at| (true, at));
            let (gather, position): (usize, usize) = (gather.parse().ok()?, at.parse().ok()?);
            let used = parts.gathers.get(gather)?.used;
            let latest = if is_ahead { after.nodes.len() } else { used };
            (position <= latest).then_some(Issue { gather, position, is_ahead })
        };
        let issues: Vec<Issue> = words(fields.next()).iter().map(issue).collect::<Option<_>>()?;
        let tail = |word: &String| {
            let (of, from) = word.split_once('>').unwrap_or((word, "0"));
            let (of, from) = (of.parse().ok()?, from.parse().ok()?);
            Some(Deferred { of, from, tail: parts.tail_from(function, of, from)? })
        };
        let deferred: Vec<Deferred> = words(fields.next()).iter().map(tail).collect::<Option<_>>()?;
        let assigned = match fields.next() {
            None => 0,
            Some(field) => field.parse().ok().filter(|&at: &usize| at <= function.nodes.len())?,
        };
        let gathers: BTreeSet<usize> = issues.iter().map(|issue| issue.gather).collect();
        let tails: BTreeSet<usize> = deferred.iter().map(|deferred| deferred.of).collect();
        let is_whole = gathers.len() == issues.len() && gathers.len() == parts.gathers.len();
        (is_whole && tails.len() == deferred.len()).then_some(Body { of, issues, deferred, assigned, parts })
    }

    /// The numbers of messages of weights, of messages that the previous layer gathers, and of reductions that the next
    /// layer runs.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        (self.parts.gathers.len(), self.ahead().count(), self.deferred.len())
    }

    /// Whether it gathers weights.
    pub(super) fn gathers(&self) -> bool {
        !self.parts.gathers.is_empty()
    }

    /// Whether it gathers weights, or leaves reductions to the next layer.
    pub(super) fn has_messages(&self) -> bool {
        self.gathers() || !self.deferred.is_empty()
    }

    /// Whether a layer does work for its neighbours.
    pub(super) fn is_rotated(&self) -> bool {
        self.ahead().next().is_some() || !self.deferred.is_empty()
    }

    /// The gathers for the next layer.
    pub(super) fn ahead(&self) -> impl Iterator<Item = &Gather> {
        self.issues.iter().filter(|issue| issue.is_ahead).map(|issue| &self.parts.gathers[issue.gather])
    }

    pub(super) fn deferred(&self) -> impl Iterator<Item = &Tail> {
        self.deferred.iter().map(|deferred| &deferred.tail)
    }

    /// The results of the gathers ahead.
    fn made_ahead(&self, function: &Function) -> BTreeSet<ValueId> {
        self.ahead().flat_map(|gather| function.nodes[gather.node].results.to_vec()).collect()
    }

    /// The operands of the gathers ahead, beside those that other gathers ahead make, and those in host memory, which layers
    /// read as those of the next layer.
    pub(super) fn sent(&self, function: &Function) -> Vec<ValueId> {
        let made = self.made_ahead(function);
        let of_weights = self.ahead().filter(|gather| !is_upload(&function.nodes[gather.node].op));
        let operands = of_weights.flat_map(|gather| function.nodes[gather.node].operands.to_vec());
        operands.filter(|v| !made.contains(v)).collect()
    }

    /// The sums of the tails that the next layer runs.
    pub(super) fn sums(&self) -> Vec<ValueId> {
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
}

/// Factors by which kernels are assumed to take longer, tried in order until all gathers fit: kernels wait if
/// communication takes longer than computation.
const STRETCHES: [f64; 8] = [1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0];

/// A function with its prices.
#[derive(Clone, Copy)]
struct Priced<'a> {
    function: &'a Function,
    parts: &'a Parts,
    /// Of each node.
    seconds: &'a [f64],
}

/// Communication beside the kernels of a layer.
#[derive(Clone, Copy)]
struct Load {
    /// By how much kernels take longer.
    stretch: f64,
    /// Whether the stream of weights and gradients has hardly idle time.
    is_crowded: bool,
}

/// A middle layer.
struct Layer {
    timeline: Timeline,
    /// The tails that the next layer runs.
    deferred: Vec<Deferred>,
    /// Seconds of these reductions.
    leaves: f64,
    /// Seconds of the reductions that the layer before left.
    lead: f64,
    load: Load,
    /// The starts of gathers.
    starts: Vec<f64>,
}

impl Layer {
    /// A layer in a loop, with the first of these stretches by which all gathers fit.
    fn in_loop(of: Priced<'_>, order: ScanOrder, stretches: &[f64]) -> Layer {
        for &stretch in stretches {
            let layer = Layer::of(of, order, Load { stretch, is_crowded: stretch > 1.0 }, None);
            if let Some(starts) = layer.timeline.gathers(of.parts, of.seconds) {
                return Layer { starts, ..layer };
            }
        }
        let layer = Layer::of(of, order, Load { stretch: 1.0, is_crowded: true }, None);
        Layer { starts: layer.timeline.crowded(of.parts, of.seconds), ..layer }
    }

    /// A layer after one of another function, and the timeline of that.
    fn after(of: Priced<'_>, before: Priced<'_>, order: ScanOrder) -> (Layer, Timeline) {
        let [alone, other] = [of, before].map(|of| Layer::in_loop(of, order, &STRETCHES));
        let timeline = other.timeline.with_gathers(&other.starts, before.parts, before.seconds);
        let layer = Layer::of(of, order, alone.load, Some(other.leaves));
        let starts = layer.timeline.gathers_after(&timeline, of.parts, of.seconds);
        (Layer { starts, ..layer }, timeline)
    }

    /// The layer without its gathers, after one that leaves it reductions of `lead` seconds, in a loop its own.
    fn of(of: Priced<'_>, order: ScanOrder, load: Load, lead: Option<f64>) -> Layer {
        let Priced { function, parts, seconds } = of;
        // No kernel follows the last ones.
        let plain = Timeline::of(function, parts, seconds, &BTreeSet::new(), 0.0);
        let stretched = timeline::stretched(function, seconds, load.stretch);
        let late = |of: usize| {
            let mut reductions = parts.tails[of].reduction.iter().copied();
            let late = reductions.find(|&n| plain.finish[n] > plain.end)?;
            // On a crowded stream the earlier ones end late as well.
            let from = if load.is_crowded { 0 } else { late };
            Some(Deferred { of, from, tail: parts.tail_from(function, of, from)? })
        };
        // Upwards, a layer cannot refer to the one below.
        let deferred: Vec<Deferred> = match order {
            ScanOrder::Ascending => Vec::new(),
            ScanOrder::Descending => (0..parts.tails.len()).filter_map(late).collect(),
        };
        let tails = || deferred.iter().map(|deferred| &deferred.tail);
        let left_out: BTreeSet<usize> = tails().flat_map(Tail::nodes).collect();
        let reductions = tails().flat_map(|tail| &tail.reduction);
        let leaves: f64 =
            reductions.filter(|&&n| function.nodes[n].op.is_communication()).map(|&n| seconds[n]).sum();
        let lead = lead.unwrap_or(leaves);
        let timeline = Timeline::of(function, parts, &stretched, &left_out, lead);
        Layer { timeline, deferred, leaves, lead, load, starts: Vec::new() }
    }
}
