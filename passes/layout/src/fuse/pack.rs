//! `pack`: independent collectives of one kind, between the same ranks and of one element type, become one message.
//!
//! ```text
//! %q2 = all_to_all %q {axis=u, split=h, concat=s}
//! %k2 = all_to_all %k {axis=u, split=k, concat=s}
//! %v2 = all_to_all %v {axis=u, split=k, concat=s}
//! ```
//! becomes `%q2, %k2, %v2 = coalesced %q, %k, %v {ops=[all_to_all(axis=u, split=h, concat=s), …]}`. The rules stand in
//! `RULES.md`.

use std::collections::BTreeSet;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Level, Output, ValueId};
use ithaca_ir::ops::{MAX_COALESCED, OpError, coalesced};
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, FunctionBuilder, Module, Op, Space, TensorType};
use ithaca_pass::{Context, Pass, options};
use serde::{Deserialize, Deserializer, Serialize};

use super::graph::Graph;

/// The options of [`Pack`], for the list of passes.
pub const OPTIONS: &str =
    "kinds=KIND[+KIND] of all_to_all, all_gather, reduce_scatter, all_reduce, permute; bytes=N, of a bucket";

/// A kind of collective that may be packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// All-to-alls, however large: their blocks are copied anyway.
    AllToAll,
    /// All-gathers, in buckets.
    AllGather,
    /// Reduce-scatters, in buckets.
    ReduceScatter,
    /// All-reduces, in buckets.
    AllReduce,
    /// Permutes of parts along axes, in buckets.
    Permute,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 5] =
        [Kind::AllToAll, Kind::AllGather, Kind::ReduceScatter, Kind::AllReduce, Kind::Permute];

    /// The spelling in options, which is that of the operation.
    pub fn name(self) -> &'static str {
        match self {
            Kind::AllToAll => "all_to_all",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllReduce => "all_reduce",
            Kind::Permute => "permute",
        }
    }

    fn of(op: &Op) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == op.name())
    }
}

/// The pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pack {
    /// What is packed.
    #[serde(deserialize_with = "ascending")]
    pub kinds: Vec<Kind>,
    /// The most bytes of a bucket on a rank, on the larger side of the collectives.
    pub bytes: u64,
}

impl Default for Pack {
    /// All kinds but permutes, whose blocks need no copy alone; buckets of 25 MiB, as PyTorch's
    /// `DistributedDataParallel` has them.
    fn default() -> Self {
        Self {
            kinds: vec![Kind::AllToAll, Kind::AllGather, Kind::ReduceScatter, Kind::AllReduce],
            bytes: 25 << 20,
        }
    }
}

impl Pack {
    /// Reads the options of a pipeline.
    ///
    /// # Errors
    /// `P02` for an unknown option or kind, or a size that is not a whole number.
    pub fn from_pipeline(options: &[(String, String)]) -> Result<Pack, Diagnostic> {
        options::read("pack", OPTIONS, options)
    }
}

/// Kinds in order, each once.
fn ascending<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Kind>, D::Error> {
    let kinds = BTreeSet::deserialize(deserializer)?;
    Ok(kinds.into_iter().collect())
}

impl Pass for Pack {
    fn name(&self) -> &'static str {
        "pack"
    }

    fn options(&self) -> Vec<(String, String)> {
        options::write(self)
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level != Level::PerRank {
            let message = "`pack` needs a per-rank program, in which every communication is a collective";
            return Err(vec![Diagnostic::new("P03", message).help("run `lower-reshards` first")]);
        }
        let mut packed = module.emptied(module.level);
        let (mut messages, mut members) = (0, 0);
        for function in module.functions.values() {
            let grouping = Grouping::of(self, &module.space, function);
            let groups = grouping.groups(cx);
            messages += groups.len();
            members += groups.iter().map(Vec::len).sum::<usize>();
            let priority = grouping.priority(&groups);
            let rewritten = rewritten(&packed, function, &grouping.graph, &groups, &priority);
            let function = rewritten.map_err(|e| vec![Diagnostic::new(e.code, e.message)])?;
            packed.functions.push(function);
        }
        if messages > 0 {
            let messages = match messages {
                1 => "one message".to_owned(),
                n => format!("{n} messages"),
            };
            cx.note(format!("{members} collectives of the program travel as {messages}"));
        }
        Ok(packed)
    }
}

/// Which nodes of a function travel together.
struct Grouping<'a> {
    pack: &'a Pack,
    space: &'a Space,
    function: &'a Function,
    graph: Graph,
}

impl<'a> Grouping<'a> {
    fn of(pack: &'a Pack, space: &'a Space, function: &'a Function) -> Self {
        Self { pack, space, function, graph: Graph::of(function) }
    }

    /// Groups of two nodes and more: each collective, in order, joins the last group that it fits, or begins one.
    fn groups(&self, cx: &mut Context<'_>) -> Vec<Vec<usize>> {
        let plain: Vec<usize> = (0..self.function.nodes.len()).collect();
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for i in 0..self.function.nodes.len() {
            let op = &self.function.nodes[i].op;
            if !Kind::of(op).is_some_and(|kind| self.pack.kinds.contains(&kind)) {
                continue;
            }
            let alike = groups.iter().rposition(|group| self.alike(group[0], i));
            let joined = alike.filter(|&at| {
                let group = &groups[at];
                let full = group.len() == MAX_COALESCED || !self.fits(group, i);
                if full || self.other_chunk(group, i) || self.delays(group, i) {
                    return false;
                }
                let mut tried = groups.clone();
                tried[at].push(i);
                self.graph.order(&tried, &plain).is_some()
            });
            match joined {
                Some(at) if cx.rewrite() => groups[at].push(i),
                Some(_) | None => groups.push(vec![i]),
            }
        }
        groups.retain(|group| group.len() > 1);
        groups
    }

    /// Where nodes would stand: where they stood, but for gathers of what is there from the start, and what they read.
    /// Those stand where the bucket before stood, so that it is used while they travel.
    fn priority(&self, groups: &[Vec<usize>]) -> Vec<usize> {
        let mut priority: Vec<usize> = (0..self.function.nodes.len()).collect();
        let mut before: Vec<usize> = Vec::new();
        for group in groups.iter().filter(|group| group.iter().all(|&i| self.is_sourced(i))) {
            let alike = before.iter().rev().find(|&&other| self.alike(other, group[0]));
            let place = alike.copied().unwrap_or(group[0]);
            for &i in group {
                self.graph
                    .ancestors(i)
                    .into_iter()
                    .chain([i])
                    .for_each(|n| priority[n] = priority[n].min(place));
            }
            before.push(group[0]);
        }
        priority
    }

    fn ends(&self, i: usize) -> (&'a Op, &'a TensorType, &'a TensorType) {
        let node = &self.function.nodes[i];
        (&node.op, self.function.ty(node.operands[0]), self.function.ty(node.result()))
    }

    fn alike(&self, a: usize, b: usize) -> bool {
        coalesced::differ(self.space, self.ends(a), self.ends(b)).is_none()
    }

    /// Whether a node carries another part of a dimension than the group: chunks are cut to travel one after another.
    fn other_chunk(&self, group: &[usize], i: usize) -> bool {
        let part = |&i: &usize| {
            let (_, from, _) = self.ends(i);
            from.dims.iter().find_map(|&d| self.space.dims[d].part).map(|part| part.index)
        };
        let own = part(&i);
        own.is_some() && group.iter().filter_map(part).any(|index| Some(index) != own)
    }

    /// Whether a bucket has room. All-to-alls are packed alone as well, so they need none.
    fn fits(&self, group: &[usize], i: usize) -> bool {
        let bytes = |&i: &usize| {
            let (_, from, to) = self.ends(i);
            self.space.max_local_bytes(from).max(self.space.max_local_bytes(to))
        };
        let total: u64 = group.iter().chain([&i]).map(bytes).sum();
        matches!(self.function.nodes[i].op, Op::AllToAll { .. }) || total <= self.pack.bytes
    }

    /// Whether the group would hold up work: what needs its results before node `i`, beyond what only adds them up,
    /// converts them or sends them on, waits unless the operand of `i` is there from the start.
    fn delays(&self, group: &[usize], i: usize) -> bool {
        if self.is_sourced(i) && group.iter().all(|&member| self.is_sourced(member)) {
            return false;
        }
        // What only travels on, as over a second axis, waits for its like anyway.
        let waits = |op: &Op| !is_light(op) && !op.is_communication();
        let waiting = self.graph.descendants(group, i);
        waiting.iter().any(|&n| waits(&self.function.nodes[n].op))
    }

    /// Whether the operand of a node comes from sources by changes that need no other rank, or by a gather before.
    fn is_sourced(&self, i: usize) -> bool {
        let local = |&n: &usize| {
            matches!(
                self.function.nodes[n].op,
                Op::Param(_)
                    | Op::State(_)
                    | Op::Input(_)
                    | Op::Cast { .. }
                    | Op::Slice { .. }
                    | Op::Scale { .. }
                    | Op::AllGather { .. }
            )
        };
        self.graph.ancestors(i).iter().all(local)
    }
}

/// Work that is nothing beside a product.
fn is_light(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Scale { .. }
            | Op::Cast { .. }
            | Op::Accumulate
            | Op::Slice { .. }
            | Op::Rotary(_)
            | Op::Repeat { .. }
            | Op::SumCopies { .. }
            | Op::Take { .. }
            | Op::Join { .. }
    )
}

/// The function with its groups as one node each.
///
/// A group stands where the last of its operands is ready.
fn rewritten(
    module: &Module,
    function: &Function,
    graph: &Graph,
    groups: &[Vec<usize>],
    priority: &[usize],
) -> Result<Function, OpError> {
    let order = graph.order(groups, priority).expect("groups were joined only where an order remained");
    let mut b = FunctionBuilder::like(function, &module.space, &module.functions);
    let mut map: Vec<Option<ValueId>> = vec![None; function.values.len()];
    for &param in &function.params {
        let new = b.param(function.ty(param).clone(), function.values[param].name.as_deref());
        map[param.index()] = Some(new);
    }
    let there = |map: &[Option<ValueId>], v: ValueId| map[v.index()].expect("what is needed comes first");
    for unit in order {
        let nodes: Vec<_> = unit.iter().map(|&i| &function.nodes[i]).collect();
        let operands: Vec<ValueId> =
            nodes.iter().flat_map(|node| &node.operands).map(|&v| there(&map, v)).collect();
        let results: Vec<ValueId> = nodes.iter().flat_map(|node| node.results.iter().copied()).collect();
        let declared: Vec<TensorType> = results.iter().map(|&v| function.ty(v).clone()).collect();
        let op = match nodes.as_slice() {
            [one] => one.op.clone(),
            several => Op::Coalesced(several.iter().map(|node| node.op.clone()).collect()),
        };
        let new = b.node(op, &operands, &declared)?;
        for (&old, &new) in results.iter().zip(&new) {
            b.name(new, function.values[old].name.as_deref());
            map[old.index()] = Some(new);
        }
    }
    let output = |o: &Output| Output { name: o.name.clone(), value: there(&map, o.value) };
    let outputs: Vec<Output> = function.outputs.iter().map(output).collect();
    Ok(b.finish(outputs))
}
