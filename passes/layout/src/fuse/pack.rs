//! `pack`: coalesces independent collectives of one kind, between the same ranks and of one element type, into one
//! message.
//!
//! ```text
//! %q2 = all_to_all %q {axis=u, split=h, concat=s}
//! %k2 = all_to_all %k {axis=u, split=k, concat=s}
//! %v2 = all_to_all %v {axis=u, split=k, concat=s}
//! ```
//! The result is `%q2, %k2, %v2 = coalesced %q, %k, %v {ops=[all_to_all(axis=u, split=h, concat=s), …]}`. `RULES.md`
//! states the rules.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Level, ValueId};
use ithaca_ir::ops::{Fused, MAX_COALESCED, OpError, coalesced};
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, Module, Op, Space, TensorType};
use ithaca_pass::choices::{Choice, Topic, impossible};
use ithaca_pass::rebuild::Copy;
use ithaca_pass::{Context, Pass, options};
use serde::{Deserialize, Deserializer, Serialize};

use super::graph::Graph;

/// The options of [`Pack`], for the list of passes.
pub const OPTIONS: &str =
    "kinds=KIND[+KIND] of all_to_all, all_gather, reduce_scatter, all_reduce, permute; bytes=N, of a bucket";

/// A kind of collective that can be coalesced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// All-to-alls of any size: their blocks are copied anyway.
    AllToAll,
    /// All-gathers, in buckets.
    AllGather,
    /// Reduce-scatters, in buckets.
    ReduceScatter,
    /// All-reduces, in buckets.
    AllReduce,
    /// Permutes of parts along axes, of any size: they are sent from where they are.
    Permute,
}

impl Kind {
    fn of(op: &Op) -> Option<Kind> {
        match op.name() {
            "all_to_all" => Some(Kind::AllToAll),
            "all_gather" => Some(Kind::AllGather),
            "reduce_scatter" => Some(Kind::ReduceScatter),
            "all_reduce" => Some(Kind::AllReduce),
            "permute" => Some(Kind::Permute),
            _ => None,
        }
    }
}

/// The pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pack {
    /// The kinds to coalesce.
    #[serde(deserialize_with = "ascending")]
    pub kinds: Vec<Kind>,
    /// The maximum bytes of a bucket on a rank, on the larger side of the collectives.
    pub bytes: u64,
}

impl Default for Pack {
    /// All kinds; buckets of 25 MiB, as in PyTorch's `DistributedDataParallel`.
    fn default() -> Self {
        Self {
            kinds: vec![Kind::AllToAll, Kind::AllGather, Kind::ReduceScatter, Kind::AllReduce, Kind::Permute],
            bytes: 25 << 20,
        }
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
            let groups = grouping.chosen(cx)?;
            messages += groups.len();
            members += groups.iter().map(Vec::len).sum::<usize>();
            let priority = grouping.priority(&groups);
            let function = rewritten(&packed, function, &grouping.graph, &groups, &priority)?;
            packed.functions.push(function);
        }
        if messages > 0 {
            let messages =
                if messages == 1 { "one message".to_owned() } else { format!("{messages} messages") };
            cx.note(format!("{members} collectives are coalesced into {messages}"));
        }
        Ok(packed)
    }
}

/// The assignment of a function's collectives to messages.
struct Grouping<'a> {
    pack: &'a Pack,
    space: &'a Space,
    function: &'a Function,
    graph: Graph,
    /// By node, whether its operand comes from sources by local operations, or by an earlier gather.
    sourced: Vec<bool>,
    /// By node, the last attention that it waits for.
    attended: Vec<Option<usize>>,
}

impl<'a> Grouping<'a> {
    fn of(pack: &'a Pack, space: &'a Space, function: &'a Function) -> Self {
        let graph = Graph::of(function);
        let sourced = graph.all_before(|n| is_local(&function.nodes[n].op));
        Self { pack, space, function, graph, sourced, attended: attended(function) }
    }

    /// Whether a node sends between stages of a pipeline: each such message goes as soon as the stage has made it.
    fn changes_stage(&self, i: usize) -> bool {
        let node = &self.function.nodes[i];
        let at = |values: &[ValueId]| values.first().map(|&v| self.function.ty(v).layout.at);
        node.op == Op::Permute && at(&node.operands) != at(&node.results)
    }

    /// The nodes that may be in groups.
    fn members(&self) -> Vec<usize> {
        let may_join = |&i: &usize| {
            let kind = Kind::of(&self.function.nodes[i].op);
            kind.is_some_and(|kind| self.pack.kinds.contains(&kind)) && !self.changes_stage(i)
        };
        (0..self.function.nodes.len()).filter(may_join).collect()
    }

    /// The groups, by bytes or as they were recorded.
    fn chosen(&self, cx: &mut Context<'_>) -> Result<Vec<Vec<usize>>, OpError> {
        let members = self.members();
        if members.len() < 2 {
            return Ok(Vec::new());
        }
        let name = &self.function.name;
        match cx.choose(Topic::Messages, name.as_str())? {
            Choice::ByPrice(_) => {
                let groups = self.groups(&members, cx);
                let place = |i: &usize| members.binary_search(i).expect("groups have members").to_string();
                let text = |group: &Vec<usize>| group.iter().map(place).collect::<Vec<_>>().join(" ");
                cx.record(groups.iter().map(text).collect::<Vec<_>>().join(", "));
                Ok(groups)
            }
            Choice::Recorded(text) => {
                self.recorded(&members, text).map_err(|why| impossible(Topic::Messages, name, text, why))
            }
        }
    }

    /// The groups of a record, each of which is one possible message.
    fn recorded(&self, members: &[usize], text: &str) -> Result<Vec<Vec<usize>>, &'static str> {
        let member = |n: &str| n.parse().ok().and_then(|n: usize| members.get(n).copied());
        let group = |text: &str| text.split(' ').map(member).collect::<Option<Vec<usize>>>();
        let groups: Option<Vec<Vec<usize>>> =
            text.split(", ").filter(|group| !group.is_empty()).map(group).collect();
        let groups = groups.ok_or("the function has fewer collectives")?;
        let all: BTreeSet<usize> = groups.iter().flatten().copied().collect();
        if groups.iter().any(|group| group.len() < 2 || group.len() > MAX_COALESCED)
            || all.len() != groups.iter().map(Vec::len).sum::<usize>()
        {
            return Err("a message has several collectives, each of which is in one message");
        }
        if groups.iter().any(|group| group.iter().any(|&i| !self.alike(group[0], i))) {
            return Err("collectives of one message differ");
        }
        let plain: Vec<usize> = (0..self.function.nodes.len()).collect();
        self.graph.order(&groups, &plain).ok_or("messages would wait for each other")?;
        Ok(groups)
    }

    /// Groups of two or more nodes: each collective, in order, joins the last group that it fits, or starts one.
    fn groups(&self, members: &[usize], cx: &mut Context<'_>) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut paths = Paths::of(&self.graph);
        // Groups that may be alike: each step of a ring has one of its own.
        let mut numbers: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for &i in members {
            let (op, from, to) = self.ends(i);
            let moved = matches!(op, Op::Permute).then(|| [&from.layout.moved, &to.layout.moved]);
            let numbers = numbers.entry((op.name(), from.dtype, moved)).or_default();
            let alike = numbers.iter().rev().copied().find(|&at| self.alike(groups[at][0], i));
            let joined = alike.filter(|&at| {
                let group = &groups[at];
                let full = group.len() == MAX_COALESCED || !self.fits(group, i);
                let may_join = !full
                    && !self.other_chunk(group, i)
                    && !self.leaves_later(group, i)
                    && !self.delays(group, i);
                may_join && !paths.lead(&groups, at, i)
            });
            let at = match joined {
                Some(at) if cx.rewrite() => at,
                Some(_) | None => {
                    numbers.push(groups.len());
                    groups.push(Vec::new());
                    groups.len() - 1
                }
            };
            groups[at].push(i);
            paths.group[i] = Some(at);
        }
        groups.retain(|group| group.len() > 1);
        groups
    }

    /// The priority of nodes: their index, with two exceptions. Gathers of weights, states or inputs and their operands
    /// have the index of the previous bucket, so they are sent while it is used. And nodes that only finish a reduction come
    /// last, so that no other kernel waits for it.
    fn priority(&self, groups: &[Vec<usize>]) -> Vec<usize> {
        let n = self.function.nodes.len();
        let mut priority: Vec<usize> = (0..n).collect();
        (0..n).zip(self.finishing()).filter(|(_, finishes)| *finishes).for_each(|(i, _)| priority[i] += n);
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

    /// For each node whether it is light, needs a reduction, and nothing but such nodes needs it: the cast of a reduced gradient,
    /// say, or its sum with that of other micro-batches.
    fn finishing(&self) -> Vec<bool> {
        let op = |i: usize| &self.function.nodes[i].op;
        let mut ends: Vec<bool> = vec![false; self.function.nodes.len()];
        for (i, users) in self.graph.users().iter().enumerate().rev() {
            let may_wait = is_light(op(i)) || matches!(op(i), Op::Assign { .. });
            ends[i] = may_wait && users.iter().all(|&user| ends[user]);
        }
        let reduces = |i: usize| matches!(op(i), Op::AllReduce { .. } | Op::ReduceScatter { .. });
        let mut finishes: Vec<bool> = Vec::with_capacity(ends.len());
        for (i, &is_end) in ends.iter().enumerate() {
            finishes.push(is_end && self.graph.needs(i).iter().any(|&n| finishes[n] || reduces(n)));
        }
        finishes
    }

    fn ends(&self, i: usize) -> (&'a Op, &'a TensorType, &'a TensorType) {
        let node = &self.function.nodes[i];
        (&node.op, self.function.ty(node.operands[0]), self.function.ty(node.result()))
    }

    fn alike(&self, a: usize, b: usize) -> bool {
        coalesced::differ(self.space, self.ends(a), self.ends(b)).is_none()
    }

    /// Whether a node has another part of a dimension than the group: chunks are sent one after another.
    fn other_chunk(&self, group: &[usize], i: usize) -> bool {
        let part = |&i: &usize| {
            let (_, from, _) = self.ends(i);
            from.dims.iter().find_map(|&d| self.space.dims[d].part).map(|part| part.index)
        };
        let own = part(&i);
        own.is_some() && group.iter().filter_map(part).any(|index| Some(index) != own)
    }

    /// Whether the group would leave after an attention beside which it leaves alone: in a ring keys and values are sent
    /// during the step before, after which the sums are there that they would travel with.
    fn leaves_later(&self, group: &[usize], i: usize) -> bool {
        self.function.nodes[i].op == Op::Permute && self.attended[i] != self.attended[group[0]]
    }

    /// Whether a bucket has room. All-to-alls need a copy even when sent separately and permutes need none, so they have no
    /// limit.
    fn fits(&self, group: &[usize], i: usize) -> bool {
        let bytes = |&i: &usize| {
            let (_, from, to) = self.ends(i);
            self.space.max_local_bytes(from).max(self.space.max_local_bytes(to))
        };
        let total: u64 = group.iter().chain([&i]).map(bytes).sum();
        matches!(self.function.nodes[i].op, Op::AllToAll { .. } | Op::Permute) || total <= self.pack.bytes
    }

    /// Whether the group would delay work: a node before `i` needs its results, other than to add, convert or send them
    /// on, while the operand of `i` is not ready at the start.
    fn delays(&self, group: &[usize], i: usize) -> bool {
        if self.is_sourced(i) && group.iter().all(|&member| self.is_sourced(member)) {
            return false;
        }
        // A result that is only sent on, as over a second axis, waits for its bucket anyway.
        let waits = |op: &Op| !is_light(op) && !op.is_communication() && !matches!(op, Op::Assign { .. });
        let waiting = self.graph.descendants(group, i);
        waiting.iter().any(|&n| waits(&self.function.nodes[n].op))
    }

    fn is_sourced(&self, i: usize) -> bool {
        self.sourced[i]
    }
}

/// For each node the last attention that it waits for.
fn attended(function: &Function) -> Vec<Option<usize>> {
    let mut of_values: Vec<Option<usize>> = vec![None; function.values.len()];
    let mut of_nodes = Vec::with_capacity(function.nodes.len());
    for (i, node) in function.nodes.iter().enumerate() {
        let before = node.operands.iter().filter_map(|v| of_values[v.index()]).max();
        of_nodes.push(before);
        let attends = matches!(node.op, Op::Attention(_) | Op::AttentionBackward(_));
        let after = if attends { Some(i) } else { before };
        node.results.iter().for_each(|v| of_values[v.index()] = after);
    }
    of_nodes
}

/// Sources, local operations, and gathers.
fn is_local(op: &Op) -> bool {
    matches!(
        op,
        Op::Param(_)
            | Op::State(_)
            | Op::Input(_)
            | Op::Cast { .. }
            | Op::Slice { .. }
            | Op::Scale { .. }
            | Op::AllGather { .. }
    )
}

/// Paths between groups, where each group is one unit: a group that led to itself would wait for itself.
struct Paths {
    users: Vec<Vec<usize>>,
    /// The group of each node.
    group: Vec<Option<usize>>,
    /// The last search that came by each node.
    seen: Vec<usize>,
    searches: usize,
}

impl Paths {
    fn of(graph: &Graph) -> Self {
        let users = graph.users();
        let n = users.len();
        Self { users, group: vec![None; n], seen: vec![0; n], searches: 0 }
    }

    /// Whether a path leads from a group to a later node.
    ///
    /// Only nodes before `to` are on the way, as those behind it lead to no group so far.
    fn lead(&mut self, groups: &[Vec<usize>], from: usize, to: usize) -> bool {
        self.searches += 1;
        let mut open = groups[from].clone();
        open.iter().for_each(|&i| self.seen[i] = self.searches);
        while let Some(i) = open.pop() {
            for &user in self.users[i].iter().filter(|&&user| user <= to) {
                if user == to {
                    return true;
                }
                if self.seen[user] == self.searches {
                    continue;
                }
                let unit = self.group[user].map_or(std::slice::from_ref(&user), |group| &groups[group]);
                unit.iter().for_each(|&i| self.seen[i] = self.searches);
                open.extend(unit);
            }
        }
        false
    }
}

/// Work that is negligible beside a matrix product.
fn is_light(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Fused(Fused::Gated { .. } | Fused::GatedBackward { .. })
            | Op::Scale { .. }
            | Op::Clamp { .. }
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

/// The function with each group as one node, at the position where its last operand is ready.
fn rewritten(
    module: &Module,
    function: &Function,
    graph: &Graph,
    groups: &[Vec<usize>],
    priority: &[usize],
) -> Result<Function, OpError> {
    let order = graph.order(groups, priority).expect("every group keeps an order");
    let mut copy = Copy::of(function, &module.space, &module.functions);
    for unit in order {
        if let [one] = unit[..] {
            copy.node(&function.nodes[one])?;
            continue;
        }
        let nodes: Vec<_> = unit.iter().map(|&i| &function.nodes[i]).collect();
        let operands: Vec<ValueId> = nodes.iter().flat_map(|node| copy.values.operands(node)).collect();
        let results: Vec<ValueId> = nodes.iter().flat_map(|node| node.results.iter().copied()).collect();
        let members = nodes.iter().map(|node| node.op.clone()).collect();
        copy.node_as(Op::Coalesced(members), &operands, &results)?;
    }
    Ok(copy.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups grow node by node, as the pass makes them: a node joins where no path leads to it, which is where there is an
    /// order of all units.
    #[test]
    fn a_group_without_a_path_to_a_node_leaves_an_order() {
        let mut state = 1u64;
        let mut below = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let (mut joined, mut apart) = (0, 0);
        for _ in 0..400 {
            let n = 2 + below(14);
            let needs: Vec<Vec<usize>> = (0..n).map(|i| (0..i).filter(|_| below(5) == 0).collect()).collect();
            let graph = Graph::of_needs(needs);
            let plain: Vec<usize> = (0..n).collect();
            let (mut groups, mut paths) = (Vec::<Vec<usize>>::new(), Paths::of(&graph));
            for i in 0..n {
                let at = below(groups.len() + 1);
                if at == groups.len() {
                    groups.push(Vec::new());
                } else {
                    let mut tried = groups.clone();
                    tried[at].push(i);
                    let leads = paths.lead(&groups, at, i);
                    assert_eq!(graph.order(&tried, &plain).is_none(), leads, "{tried:?} of {graph:?}");
                    if leads {
                        apart += 1;
                        continue;
                    }
                    joined += 1;
                }
                groups[at].push(i);
                paths.group[i] = Some(at);
            }
        }
        assert!(joined > 100 && apart > 100, "{joined} {apart}");
    }
}
