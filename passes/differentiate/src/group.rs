//! Groups of layers that are recomputed together: only the arguments of each group are saved (Chen et al., arXiv
//! 1604.06174; the uniform method of Megatron-LM).
//!
//! ```text
//! %x = call %x0 {callee=@block, layers=0..10}
//! ```
//! becomes, in groups of four,
//! ```text
//! %x1 = call %x0 {callee=@block.group, layers=0..2}
//! %x  = call %x1 {callee=@block.group2, layers=2..3}
//!
//! @block.group (%x):  %y = call %x {callee=@block, layers=0..4, stride=4}
//! @block.group2 (%x): %y = call %x {callee=@block, layers=0..2, stride=4}
//! ```
//! A group counts the layers of `main` in execution order, across functions: if two kinds of layers alternate, a group
//! calls both. Consecutive equal groups become one call. `joint`, `split` and `regroup` build the two
//! halves of a group.

use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Node, Output, ValueId};
use ithaca_ir::ops::OpError;
use ithaca_ir::{FunctionBuilder, Module, Op};
use ithaca_pass::rebuild::ValueMap;

/// A program whose layers run in groups.
pub(super) struct Grouped {
    /// The functions of the program, the functions of groups, and `main`.
    pub(super) module: Module,
    /// For each node of `main` its chunk of the pipeline.
    pub(super) chunks: Vec<Option<usize>>,
    /// The index of the first function of a group.
    first: usize,
}

impl Grouped {
    /// Whether a function is a group.
    pub(super) fn is_group(&self, id: FuncId) -> bool {
        id.index() >= self.first && Some(id) != self.module.main()
    }

    /// Whether a group calls this function.
    pub(super) fn is_member(&self, id: FuncId) -> bool {
        let groups = self.module.functions.iter().filter(|&(id, _)| self.is_group(id));
        groups.flat_map(|(_, group)| &group.nodes).any(|n| callee(n) == Some(id))
    }
}

fn callee(node: &Node) -> Option<FuncId> {
    match &node.op {
        Op::Call { callee, .. } => Some(*callee),
        _ => None,
    }
}

/// Puts the layers of `module` into groups of `every`; `chunks` gives each node of `main` its chunk of the pipeline,
/// and no group spans two chunks.
///
/// # Errors
/// None on a program that verifies.
pub(super) fn group(
    module: &Module,
    main: FuncId,
    chunks: &[Option<usize>],
    every: u64,
) -> Result<Grouped, OpError> {
    let split = split_main(module, main, chunks, every)?;
    let mut grouped = module.emptied(module.level);
    for (_, function) in module.functions.iter().filter(|&(id, _)| id != main) {
        grouped.functions.push(function.clone());
    }
    let first = grouped.functions.len();
    let mut groups: Vec<Function> = Vec::new();
    let mut steps: Vec<Step> = Vec::new();
    let mut at = 0;
    while at < split.function.nodes.len() {
        let own = split.groups[at];
        let n = split.groups[at..].iter().take_while(|&&g| own.is_some() && g == own).count();
        if n == 0 {
            steps.push(Step::Node(at));
            at += 1;
            continue;
        }
        let part = GroupCalls::of(&split.function, at..at + n);
        let (function, number) = part.function(&split.function, &grouped, every)?;
        let alike = |f: &Function| {
            f.values == function.values && f.nodes == function.nodes && f.outputs == function.outputs
        };
        let of = groups.iter().position(alike).unwrap_or(groups.len());
        if of == groups.len() {
            groups.push(function);
        }
        let next = GroupLoop { group: of, numbers: number..number + 1, chunk: split.chunks[at], part };
        match steps.last_mut() {
            Some(Step::Group(before)) if before.continues_with(&split.function, &next) => {
                before.numbers.end = next.numbers.end;
                before.part.outputs = next.part.outputs;
                before.part.nodes.end = next.part.nodes.end;
            }
            _ => steps.push(Step::Group(next)),
        }
        at += n;
    }
    for (i, mut function) in groups.into_iter().enumerate() {
        if i > 0 {
            function.name = format!("{}{}", function.name, i + 1);
        }
        grouped.functions.push(function);
    }
    let (function, chunks) = calls(&grouped, &split, &steps, first)?;
    grouped.functions.push(function);
    Ok(Grouped { module: grouped, chunks, first })
}

/// `main` with its calls of layers split so that each belongs to one group.
struct SplitMain {
    function: Function,
    /// For each node its group.
    groups: Vec<Option<usize>>,
    /// For each node its chunk of the pipeline.
    chunks: Vec<Option<usize>>,
}

/// The group that layers are currently added to.
struct OpenGroup {
    group: usize,
    chunk: Option<usize>,
    layers: u64,
}

fn split_main(
    module: &Module,
    main: FuncId,
    chunks: &[Option<usize>],
    every: u64,
) -> Result<SplitMain, OpError> {
    let source = &module.functions[main];
    let is_layer = layers_among(module, source);
    let mut b = FunctionBuilder::like(source, &module.space, &module.functions);
    let mut map = ValueMap::new(source);
    let (mut groups, mut of_chunks) = (Vec::new(), Vec::new());
    let mut n_groups = 0;
    let mut open: Option<OpenGroup> = None;
    for (node, &chunk) in source.nodes.iter().zip(chunks) {
        let call = match &node.op {
            Op::Call { callee, layers, stride: 0, scan: None, stage: None } if is_layer[callee.index()] => {
                Some((*callee, layers))
            }
            _ => None,
        };
        let Some((callee, layers)) = call else {
            open = None;
            map.copy(&mut b, node)?;
            groups.push(None);
            of_chunks.push(chunk);
            continue;
        };
        let mut operands = map.operands(node);
        let mut results: Vec<ValueId> = Vec::new();
        let mut start = layers.start;
        while start < layers.end {
            let current = open.take().filter(|c| c.layers < every && c.chunk == chunk);
            let mut own = current.unwrap_or_else(|| {
                n_groups += 1;
                OpenGroup { group: n_groups - 1, chunk, layers: 0 }
            });
            let end = layers.end.min(start.saturating_add(every - own.layers));
            results = b.call(callee, start..end, &operands)?.to_vec();
            for (operand, &result) in operands.iter_mut().zip(&results) {
                *operand = result;
            }
            groups.push(Some(own.group));
            of_chunks.push(chunk);
            own.layers += end - start;
            open = Some(own);
            start = end;
        }
        map.replace(&mut b, &node.results, &results);
    }
    let function = b.finish(map.outputs());
    Ok(SplitMain { function, groups, chunks: of_chunks })
}

/// Which functions are layers: those called for several layers, or that read weights per layer.
fn layers_among(module: &Module, main: &Function) -> Vec<bool> {
    let per_layer = |op: &Op| matches!(op, Op::Param(binding) if binding.is_per_layer());
    let mut among: Vec<bool> =
        module.functions.values().map(|f| f.nodes.iter().any(|n| per_layer(&n.op))).collect();
    for node in &main.nodes {
        if let Op::Call { callee, layers, .. } = &node.op {
            among[callee.index()] |= layers.end - layers.start > 1;
        }
    }
    among
}

/// Whether a node from `end` on reads a value, or `main` returns it.
fn is_read_after(main: &Function, end: usize, v: ValueId) -> bool {
    main.nodes[end..].iter().any(|n| n.operands.contains(&v)) || main.outputs.iter().any(|o| o.value == v)
}

/// Consecutive calls of one group.
struct GroupCalls {
    nodes: Range<usize>,
    /// Values that the group reads; if it can loop, the carried ones come first.
    params: Vec<ValueId>,
    /// Values of the group that are read later.
    outputs: Vec<ValueId>,
    is_loop: bool,
}

impl GroupCalls {
    fn of(main: &Function, nodes: Range<usize>) -> Self {
        let inside = &main.nodes[nodes.clone()];
        let made =
            |v: ValueId| inside.iter().find_map(|n| Some((n, n.results.iter().position(|&r| r == v)?)));
        let mut read: Vec<ValueId> = Vec::new();
        for &v in inside.iter().flat_map(|n| &n.operands) {
            if made(v).is_none() && !read.contains(&v) {
                read.push(v);
            }
        }
        let results = inside.iter().flat_map(|n| n.results.iter().copied());
        let outputs: Vec<ValueId> = results.filter(|&v| is_read_after(main, nodes.end, v)).collect();
        // The value that an output replaces.
        let before = |&output: &ValueId| {
            let mut v = output;
            while let Some((node, i)) = made(v) {
                v = *node.operands.get(i)?;
            }
            (main.ty(v) == main.ty(output)).then_some(v)
        };
        let carried: Option<Vec<ValueId>> = outputs.iter().map(before).collect();
        let distinct = |vs: &Vec<ValueId>| vs.iter().enumerate().all(|(i, v)| !vs[..i].contains(v));
        let carried = carried.filter(distinct);
        let is_loop = carried.is_some();
        let mut params = carried.unwrap_or_default();
        for v in read {
            if !params.contains(&v) {
                params.push(v);
            }
        }
        Self { nodes, params, outputs, is_loop }
    }

    /// The function of the group, and the index of its first layers.
    fn function(&self, main: &Function, module: &Module, every: u64) -> Result<(Function, u64), OpError> {
        let nodes = &main.nodes[self.nodes.clone()];
        let calls: Vec<(FuncId, &Layers, &Node)> = nodes
            .iter()
            .filter_map(|n| match &n.op {
                Op::Call { callee, layers, .. } => Some((*callee, layers, n)),
                _ => None,
            })
            .collect();
        let number = calls.first().map_or(0, |(_, layers, _)| layers.start / every);
        // If layers do not ascend, they keep their absolute numbers.
        let ascending = calls.iter().all(|(_, layers, _)| layers.start >= number * every);
        let (number, stride) = if ascending { (number, every) } else { (0, 0) };
        let by = number * stride;
        let (first, _, _) = calls.first().expect("a group has a call");
        let first = &module.functions[*first];
        let name = format!("{}.group", first.name);
        let mut b = FunctionBuilder::part_of(name, first, &module.space, &module.functions);
        let mut map = ValueMap::new(main);
        for &v in &self.params {
            map.insert(v, b.param(main.ty(v).clone(), None));
        }
        for (callee, layers, node) in calls {
            let layers = layers.start - by..layers.end - by;
            let op = Op::Call { callee, layers, stride, scan: None, stage: None };
            let results = b.node(op, &map.operands(node), &[])?;
            node.results.iter().zip(&results).for_each(|(&old, &new)| map.insert(old, new));
        }
        let output = |&v: &ValueId| Output { name: None, value: map[v] };
        Ok((b.finish(self.outputs.iter().map(output).collect::<Vec<_>>()), number))
    }
}

/// Consecutive iterations of one group.
struct GroupLoop {
    /// The index of the group's function among the groups.
    group: usize,
    /// The indices of the groups that it runs.
    numbers: Layers,
    chunk: Option<usize>,
    /// All their calls: the parameters of the first, the outputs of the last.
    part: GroupCalls,
}

impl GroupLoop {
    /// Whether `next` is a further iteration: it reads the values carried out of this one, and no other node does.
    fn continues_with(&self, main: &Function, next: &GroupLoop) -> bool {
        let n = self.part.outputs.len();
        let read_later = |&v: &ValueId| is_read_after(main, next.part.nodes.end, v);
        next.part.is_loop
            && (self.group, self.chunk) == (next.group, next.chunk)
            && self.numbers.end == next.numbers.start
            && self.part.nodes.end == next.part.nodes.start
            && next.part.params[..n] == self.part.outputs[..]
            && next.part.params[n..] == self.part.params[n..]
            && !self.part.outputs.iter().any(read_later)
    }
}

/// A step of the new `main`.
enum Step {
    Node(usize),
    Group(GroupLoop),
}

fn calls(
    grouped: &Module,
    split: &SplitMain,
    steps: &[Step],
    first: usize,
) -> Result<(Function, Vec<Option<usize>>), OpError> {
    let source = &split.function;
    let mut b = FunctionBuilder::like(source, &grouped.space, &grouped.functions);
    let mut map = ValueMap::new(source);
    let mut chunks = Vec::with_capacity(steps.len());
    for step in steps {
        match step {
            Step::Node(i) => {
                map.copy(&mut b, &source.nodes[*i])?;
                chunks.push(split.chunks[*i]);
            }
            Step::Group(GroupLoop { group, numbers, chunk, part }) => {
                let operands: Vec<ValueId> = part.params.iter().map(|&v| map[v]).collect();
                let results = b.call(FuncId::new(first + group), numbers.clone(), &operands)?;
                for (&old, &new) in part.outputs.iter().zip(&results) {
                    b.name(new, source.values[old].name.as_deref());
                    map.insert(old, new);
                }
                chunks.push(*chunk);
            }
        }
    }
    Ok((b.finish(map.outputs()), chunks))
}
