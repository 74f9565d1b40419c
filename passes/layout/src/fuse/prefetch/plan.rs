//! Finds layers that do work for their neighbours: those of a loop, and calls one after another, as of layers that differ.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::module::{FuncId, Function, Layers, Module, Node, ValueId};
use ithaca_ir::ops::structure::is_sliced;
use ithaca_ir::ops::{OpError, Scan, ScanOrder, Stage};
use ithaca_ir::{DimId, Op};
use ithaca_pass::Context;
use ithaca_pass::choices::{Source, Topic};

use super::body::{Body, Run};
use super::parts::is_upload;
use super::write::{self, Variant};

/// The calls of a module to rewrite.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    /// The bodies of layers.
    pub(super) bodies: Vec<Body>,
    /// The nodes of functions that call layers with work for others.
    pub(super) calls: BTreeMap<(FuncId, usize), Worked>,
    /// The variants in use.
    pub(super) variants: BTreeSet<Variant>,
    /// The layer dimensions to cut, by function.
    pub(super) cut: BTreeSet<(FuncId, DimId)>,
    /// Functions without callers after the rewrite.
    pub(super) unused: BTreeSet<FuncId>,
}

/// A call of layers with work for others, by numbers of bodies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Worked {
    /// The first layer.
    pub(super) first: usize,
    /// The others, and the first in a loop.
    rest: usize,
    /// The layer before the first.
    pub(super) before: Option<usize>,
    /// The layer after the last.
    next: Option<usize>,
}

impl Worked {
    /// Whether the first layer has another schedule than the others.
    pub(super) fn is_first_apart(self) -> bool {
        self.first != self.rest
    }

    /// The variant that piece `number` of `n` calls, in execution order.
    pub(super) fn variant(
        self,
        layers: write::Layers<'_>,
        carried: usize,
        number: usize,
        n: usize,
    ) -> Variant {
        let own = if number == 0 { self.first } else { self.rest };
        let before = if number == 0 { self.before } else { Some(self.rest) };
        let next = if number + 1 == n { self.next } else { Some(self.rest) };
        layers.between(before, (own, carried), next)
    }
}

/// A call over layers.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) callee: FuncId,
    pub(super) layers: &'a Layers,
    stride: u64,
    pub(super) scan: Option<Scan>,
    stage: Option<Stage>,
}

impl<'a> Call<'a> {
    pub(super) fn of(node: &'a Node) -> Option<Call<'a>> {
        let Op::Call { callee, layers, stride, scan, stage } = &node.op else { return None };
        Some(Call { callee: *callee, layers, stride: *stride, scan: *scan, stage: *stage })
    }

    pub(super) fn n_layers(&self) -> u64 {
        self.layers.end - self.layers.start
    }

    /// The call of another function for these layers.
    pub(super) fn op(&self, callee: FuncId, layers: Layers, scan: Option<Scan>) -> Op {
        Op::Call { callee, layers, stride: self.stride, scan, stage: self.stage }
    }

    /// The order in which its layers run, if it has several.
    pub(super) fn order(&self) -> ScanOrder {
        self.scan.map_or(ScanOrder::Ascending, |scan| scan.order)
    }

    /// The number of arguments and results that layers hand on.
    pub(super) fn carried(&self, node: &Node) -> usize {
        self.scan.map_or(node.results.len().min(node.operands.len()), |scan| scan.carried)
    }

    /// The order of a run of layers in which the layers of `next` follow these.
    fn followed_by(&self, next: &Call<'_>) -> Option<ScanOrder> {
        let fits = |order| [self, next].iter().all(|call| call.n_layers() == 1 || call.order() == order);
        let is_beside = self.stride == next.stride;
        let up = next.layers.start == self.layers.end && fits(ScanOrder::Ascending);
        let down = next.layers.end == self.layers.start && fits(ScanOrder::Descending);
        match (is_beside, up, down) {
            (true, true, false) => Some(ScanOrder::Ascending),
            (true, false, true) => Some(ScanOrder::Descending),
            _ => None,
        }
    }
}

/// The pieces of a call, as ranges of its layers: first, middle, last. Without stacked results the first needs no
/// separate call, unless it is another function.
pub(super) fn pieces(call: Call<'_>, is_first_apart: bool) -> Vec<Range<u64>> {
    let n = call.n_layers();
    let cuts = match n {
        1 => vec![0, 1],
        3.. if is_first_apart || call.scan.is_some() => vec![0, 1, n - 1, n],
        _ => vec![0, n - 1, n],
    };
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

/// A call of layers that may work for others.
struct Site<'a> {
    node: usize,
    call: Call<'a>,
    order: ScanOrder,
    /// The index of the site whose layers follow.
    next: Option<usize>,
    /// The index of the site whose layers these follow.
    before: Option<usize>,
}

impl Plan {
    /// Finds the layers that gather weights or reduce gradients, if work moves to a neighbouring layer.
    ///
    /// # Errors
    /// `P05` for a choice that the record does not have.
    pub(super) fn of(module: &Module, cx: &mut Context<'_>) -> Result<Plan, OpError> {
        let mut plan = Plan::default();
        for (id, function) in module.functions.iter() {
            plan.add(module, (id, function), cx)?;
        }
        plan.unused = plan.unused(module);
        plan.report(module, cx);
        Ok(plan)
    }

    /// The schedules of layers, from which their functions are written.
    pub(super) fn layers<'a>(&'a self, module: &'a Module) -> write::Layers<'a> {
        write::Layers { module, bodies: &self.bodies }
    }

    /// Adds the calls of a function.
    fn add(
        &mut self,
        module: &Module,
        (id, function): (FuncId, &Function),
        cx: &mut Context<'_>,
    ) -> Result<(), OpError> {
        let mut sites = sites(module, function, cx);
        let mut worked = self.worked(module, &sites, cx)?;
        // Only links that carry something.
        let leaves = |worked: &Worked| self.bodies[worked.first].deferred().next().is_some();
        let is_gathered = |worked: &Worked| self.bodies[worked.first].ahead().next().is_some();
        keep_links(&mut sites, |s, next| {
            worked[s].as_ref().is_some_and(leaves) || worked[next].as_ref().is_some_and(is_gathered)
        });
        worked = self.worked(module, &sites, cx)?;
        // A pipeline calls a loop once per micro-batch.
        let mut stacks: BTreeMap<DimId, Option<String>> = BTreeMap::new();
        let mut stays = vec![false; sites.len()];
        for (s, site) in sites.iter().enumerate() {
            let node = &function.nodes[site.node];
            let Some(worked) = worked[s].filter(|worked| self.works(site, *worked)) else { continue };
            let arguments = self.variants_of(module, node, site.call, worked);
            let needs = arguments.map(|variant| self.layers(module).n_arguments(variant)).max();
            let (needs, most) = (needs.unwrap_or_default(), *node.op.info().operands.end());
            let why = if needs > most {
                Some(format!("a layer would take {needs} arguments, and {most} is the most"))
            } else {
                site.call.scan.and_then(|scan| {
                    let known = stacks.entry(scan.over);
                    known.or_insert_with(|| whole(module, function, scan.over)).clone()
                })
            };
            if let Some(why) = &why {
                let name = &module.functions[site.call.callee].name;
                cx.note(format!("`prefetch`: weights of `@{name}` are gathered within a layer only: {why}"));
            }
            stays[s] = why.is_some() || !cx.rewrite();
        }
        keep_links(&mut sites, |s, next| !stays[s] && !stays[next]);
        worked = self.worked(module, &sites, cx)?;
        for (s, site) in sites.iter().enumerate() {
            let worked = worked[s].filter(|worked| !stays[s] && self.works(site, *worked));
            let Some(worked) = worked else { continue };
            self.calls.insert((id, site.node), worked);
            let variants = self.variants_of(module, &function.nodes[site.node], site.call, worked);
            let variants: Vec<Variant> = variants.collect();
            self.variants.extend(variants);
            self.cut.extend(site.call.scan.map(|scan| (id, scan.over)));
        }
        Ok(())
    }

    /// The layers of each site beside their neighbours; none of a single layer without.
    fn worked(
        &mut self,
        module: &Module,
        sites: &[Site<'_>],
        cx: &mut Context<'_>,
    ) -> Result<Vec<Option<Worked>>, OpError> {
        let mut bodies = Vec::with_capacity(sites.len());
        for site in sites {
            let in_loop = Run::in_loop(site.call.callee, site.order);
            let after = |other: usize| Run { after: sites[other].call.callee, ..in_loop };
            let rest = match site.call.n_layers() {
                1 => None,
                _ => Some(self.body(module, in_loop, cx)?),
            };
            let first = match (site.before, rest) {
                (Some(before), _) => Some(self.body(module, after(before), cx)?),
                (None, None) if site.next.is_some() => {
                    // As it is after others, in the record perhaps elsewhere.
                    let alike = |other: &&Site<'_>| Run::in_loop(other.call.callee, other.order) == in_loop;
                    let here = sites.iter().filter(alike).filter_map(|other| Some(after(other.before?)));
                    let anywhere = module.functions.iter().map(|(after, _)| Run { after, ..in_loop });
                    let mut runs = here.chain([in_loop]).chain(anywhere);
                    let run = runs.find(|run| is_known(*run, module, cx)).unwrap_or(in_loop);
                    Some(self.body(module, run, cx)?)
                }
                (None, _) => rest,
            };
            bodies.push(first.map(|first| (first, rest.unwrap_or(first))));
        }
        let worked = |(site, body): (&Site<'_>, &Option<(usize, usize)>)| {
            let (first, rest) = (*body)?;
            let before = site.before.and_then(|before| Some(bodies[before]?.1));
            let next = site.next.and_then(|next| Some(bodies[next]?.0));
            Some(Worked { first, rest, before, next })
        };
        Ok(sites.iter().zip(&bodies).map(worked).collect())
    }

    /// Whether a layer of the site does work for a neighbour.
    fn works(&self, site: &Site<'_>, worked: Worked) -> bool {
        let in_loop = site.call.n_layers() > 1 && self.bodies[worked.rest].is_rotated();
        in_loop || site.next.is_some() || site.before.is_some()
    }

    /// The variants that a call calls.
    fn variants_of(
        &self,
        module: &Module,
        node: &Node,
        call: Call<'_>,
        worked: Worked,
    ) -> impl Iterator<Item = Variant> {
        let carried = call.carried(node);
        let n = pieces(call, worked.is_first_apart()).len();
        (0..n).map(move |i| worked.variant(self.layers(module), carried, i, n))
    }

    /// The number of the body of these layers.
    fn body(&mut self, module: &Module, of: Run, cx: &mut Context<'_>) -> Result<usize, OpError> {
        if let Some(known) = self.bodies.iter().position(|body| body.of == of) {
            return Ok(known);
        }
        self.bodies.push(Body::of(module, of, cx)?);
        Ok(self.bodies.len() - 1)
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
        let used: BTreeSet<usize> = self.variants.iter().map(|variant| variant.own).collect();
        for body in used.into_iter().map(|number| &self.bodies[number]) {
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
            if !effects.is_empty() {
                let name = &module.functions[body.of.callee].name;
                cx.note(format!("`prefetch`: `@{name}`: {}", effects.join(", ")));
            }
        }
    }
}

/// The loops over layers in a function, and the single layers that follow others or are followed by some.
fn sites<'a>(module: &Module, function: &'a Function, cx: &Context<'_>) -> Vec<Site<'a>> {
    let calls = function.nodes.iter().enumerate();
    let calls: Vec<(usize, Call<'a>)> = calls.filter_map(|(n, node)| Some((n, Call::of(node)?))).collect();
    // A group of layers is synchronised at its ends.
    let is_layer = |call: &Call<'_>| {
        let callee = &module.functions[call.callee];
        callee.nodes.iter().all(|n| !matches!(n.op, Op::Call { .. }))
    };
    let link = |(m, a): &(usize, Call<'_>), (n, b): &(usize, Call<'_>)| {
        let made = &function.nodes[*m].results;
        let hands_on = function.nodes[*n].operands.iter().any(|v| made.contains(v));
        // The layers of a stage begin and end with many kinds of neighbours, each of which would have functions of its own.
        let is_staged = a.stage.is_some() || b.stage.is_some();
        let fits = a.callee != b.callee && is_layer(a) && is_layer(b) && hands_on && !is_staged;
        let run = Run { after: a.callee, ..Run::in_loop(b.callee, b.order()) };
        a.followed_by(b).filter(|_| fits && is_known(run, module, cx))
    };
    let mut links: Vec<Option<ScanOrder>> = calls.windows(2).map(|pair| link(&pair[0], &pair[1])).collect();
    // A layer alone runs upwards or downwards.
    for i in 1..links.len() {
        if calls[i].1.n_layers() == 1
            && links[i - 1].is_some_and(|order| links[i].is_some_and(|o| o != order))
        {
            links[i] = None;
        }
    }
    let of = |i: usize| links.get(i).copied().flatten();
    let mut sites: Vec<Site<'a>> = Vec::new();
    for (i, &(node, call)) in calls.iter().enumerate() {
        let before = i.checked_sub(1).and_then(of);
        let order = before.or(of(i)).unwrap_or(call.order());
        if !is_layer(&call) || call.n_layers() == 1 && before.is_none() && of(i).is_none() {
            continue;
        }
        let site = sites.len();
        if before.is_some() {
            sites[site - 1].next = Some(site);
        }
        sites.push(Site { node, call, order, next: None, before: before.map(|_| site - 1) });
    }
    sites
}

/// Whether the schedule of a layer is in the record; without a record every schedule is made by prices.
fn is_known(run: Run, module: &Module, cx: &Context<'_>) -> bool {
    match cx.source() {
        Source::Prices(_) => true,
        Source::Record(choices) => choices.of(Topic::Prefetch).contains_key(&run.key(module)),
    }
}

/// Leaves those links between sites of which this says so.
fn keep_links(sites: &mut [Site<'_>], keeps: impl Fn(usize, usize) -> bool) {
    for s in 0..sites.len() {
        if let Some(next) = sites[s].next.filter(|&next| !keeps(s, next)) {
            (sites[s].next, sites[next].before) = (None, None);
        }
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
