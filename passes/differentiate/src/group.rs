//! Groups of layers that are computed again together: of each group only the arguments are kept (Chen et al., arXiv
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
//! A group counts the layers of `main` in the order in which they run, whatever their functions: where two kinds of layers
//! alternate, a group calls both. Groups that are alike and follow each other are one call. What the two halves of a group
//! are stands in `regroup`.

use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Node, Output, ValueId};
use ithaca_ir::ops::OpError;
use ithaca_ir::{FunctionBuilder, Module, Op};

use super::joint::copy_node;

/// A program whose layers run in groups.
pub(super) struct Grouped {
    /// The program: its functions, those that run groups, and `main`.
    pub(super) module: Module,
    /// For each node of `main` its chunk of a pipeline.
    pub(super) chunks: Vec<Option<usize>>,
    /// The number of the first function that runs a group.
    first: usize,
}

impl Grouped {
    /// Whether a function runs a group.
    pub(super) fn is_group(&self, id: FuncId) -> bool {
        id.index() >= self.first && Some(id) != self.module.main()
    }

    /// Whether a function runs in groups.
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

/// `module` with its layers in groups of `every`; `chunks` are those of a pipeline, for each node of `main`, across which
/// no group goes.
///
/// # Errors
/// None on a program that verifies.
pub(super) fn group(
    module: &Module,
    main: FuncId,
    chunks: &[Option<usize>],
    every: u64,
) -> Result<Grouped, OpError> {
    let cut = cut(module, main, chunks, every)?;
    let mut grouped = module.emptied(module.level);
    for (_, function) in module.functions.iter().filter(|&(id, _)| id != main) {
        grouped.functions.push(function.clone());
    }
    let first = grouped.functions.len();
    let mut groups: Vec<Function> = Vec::new();
    let mut steps: Vec<Step> = Vec::new();
    let mut at = 0;
    while at < cut.function.nodes.len() {
        let own = cut.groups[at];
        let n = cut.groups[at..].iter().take_while(|&&g| own.is_some() && g == own).count();
        if n == 0 {
            steps.push(Step::Node(at));
            at += 1;
            continue;
        }
        let part = Part::of(&cut.function, at..at + n);
        let (function, number) = part.function(&cut.function, &grouped, every)?;
        let alike = |f: &Function| {
            f.values == function.values && f.nodes == function.nodes && f.outputs == function.outputs
        };
        let of = groups.iter().position(alike).unwrap_or(groups.len());
        if of == groups.len() {
            groups.push(function);
        }
        let next = Turns { group: of, numbers: number..number + 1, chunk: cut.chunks[at], part };
        match steps.last_mut() {
            Some(Step::Group(before)) if before.goes_on(&cut.function, &next) => {
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
    let (function, chunks) = calls(&grouped, &cut, &steps, first)?;
    grouped.functions.push(function);
    Ok(Grouped { module: grouped, chunks, first })
}

/// `main` whose calls of layers each lie in one group.
struct Cut {
    function: Function,
    /// For each node the group that it is of.
    groups: Vec<Option<usize>>,
    /// For each node its chunk of a pipeline.
    chunks: Vec<Option<usize>>,
}

/// The group that layers are counted into.
struct Counted {
    group: usize,
    chunk: Option<usize>,
    layers: u64,
}

fn cut(module: &Module, main: FuncId, chunks: &[Option<usize>], every: u64) -> Result<Cut, OpError> {
    let source = &module.functions[main];
    let is_layer = layers_among(module, source);
    let mut b = FunctionBuilder::like(source, &module.space, &module.functions);
    let mut map: Vec<Option<ValueId>> = vec![None; source.values.len()];
    let (mut groups, mut of_chunks) = (Vec::new(), Vec::new());
    let mut n_groups = 0;
    let mut counted: Option<Counted> = None;
    for (node, &chunk) in source.nodes.iter().zip(chunks) {
        let call = match &node.op {
            Op::Call { callee, layers, stride: 0, scan: None, stage: None } if is_layer[callee.index()] => {
                Some((*callee, layers))
            }
            _ => None,
        };
        let Some((callee, layers)) = call else {
            counted = None;
            copy_node(&mut b, source, node, &mut map)?;
            groups.push(None);
            of_chunks.push(chunk);
            continue;
        };
        let known = |v: &ValueId| map[v.index()].expect("what a call reads was put before it");
        let mut operands: Vec<ValueId> = node.operands.iter().map(known).collect();
        let mut results: Vec<ValueId> = Vec::new();
        let mut start = layers.start;
        while start < layers.end {
            let open = counted.take().filter(|c| c.layers < every && c.chunk == chunk);
            let mut own = open.unwrap_or_else(|| {
                n_groups += 1;
                Counted { group: n_groups - 1, chunk, layers: 0 }
            });
            let end = layers.end.min(start.saturating_add(every - own.layers));
            results = b.call(callee, start..end, &operands)?.to_vec();
            for (operand, &result) in operands.iter_mut().zip(&results) {
                *operand = result;
            }
            groups.push(Some(own.group));
            of_chunks.push(chunk);
            own.layers += end - start;
            counted = Some(own);
            start = end;
        }
        for (&old, &new) in node.results.iter().zip(&results) {
            b.name(new, source.values[old].name.as_deref());
            map[old.index()] = Some(new);
        }
    }
    let output = |o: &Output| Output {
        name: o.name.clone(),
        value: map[o.value.index()].expect("every node of main was copied"),
    };
    let function = b.finish(source.outputs.iter().map(output).collect::<Vec<_>>());
    Ok(Cut { function, groups, chunks: of_chunks })
}

/// Which functions are layers: those that run for several, or read weights of their layer.
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

/// Consecutive calls of one group.
struct Part {
    nodes: Range<usize>,
    /// Values that it reads; where it may be a loop, first those in whose place the outputs are handed on.
    params: Vec<ValueId>,
    /// Values that are read behind it.
    outputs: Vec<ValueId>,
    is_loop: bool,
}

impl Part {
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
        let is_read = |v: ValueId| {
            main.nodes[nodes.end..].iter().any(|n| n.operands.contains(&v))
                || main.outputs.iter().any(|o| o.value == v)
        };
        let results = inside.iter().flat_map(|n| n.results.iter().copied());
        let outputs: Vec<ValueId> = results.filter(|&v| is_read(v)).collect();
        // What was in the place of an output before the group.
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

    /// The function of the group, and the number for which it runs these layers.
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
        // Layers that are counted otherwise stay as they are.
        let ascending = calls.iter().all(|(_, layers, _)| layers.start >= number * every);
        let (number, stride) = if ascending { (number, every) } else { (0, 0) };
        let by = number * stride;
        let (first, _, _) = calls.first().expect("a group has a call");
        let first = &module.functions[*first];
        let name = format!("{}.group", first.name);
        let mut b = FunctionBuilder::part_of(name, first, &module.space, &module.functions);
        let mut map: Vec<Option<ValueId>> = vec![None; main.values.len()];
        for &v in &self.params {
            map[v.index()] = Some(b.param(main.ty(v).clone(), None));
        }
        let known = |map: &[Option<ValueId>], v: ValueId| {
            map[v.index()].expect("a group reads its parameters and what it made")
        };
        for (callee, layers, node) in calls {
            let operands: Vec<ValueId> = node.operands.iter().map(|&v| known(&map, v)).collect();
            let layers = layers.start - by..layers.end - by;
            let op = Op::Call { callee, layers, stride, scan: None, stage: None };
            let results = b.node(op, &operands, &[])?;
            for (&old, &new) in node.results.iter().zip(&results) {
                map[old.index()] = Some(new);
            }
        }
        let output = |&v: &ValueId| Output { name: None, value: known(&map, v) };
        Ok((b.finish(self.outputs.iter().map(output).collect::<Vec<_>>()), number))
    }
}

/// Turns of one group that follow each other.
struct Turns {
    /// The number of the group's function among those of groups.
    group: usize,
    /// The layers for which it runs.
    numbers: Layers,
    chunk: Option<usize>,
    /// The calls of all of them: the parameters of the first, the outputs of the last.
    part: Part,
}

impl Turns {
    /// Whether `next` is one turn more: it takes what these hand on, and nothing else does.
    fn goes_on(&self, main: &Function, next: &Turns) -> bool {
        let n = self.part.outputs.len();
        let read_later = |v: &ValueId| {
            main.nodes[next.part.nodes.end..].iter().any(|node| node.operands.contains(v))
                || main.outputs.iter().any(|o| o.value == *v)
        };
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
    /// The node of this number.
    Node(usize),
    Group(Turns),
}

fn calls(
    grouped: &Module,
    cut: &Cut,
    steps: &[Step],
    first: usize,
) -> Result<(Function, Vec<Option<usize>>), OpError> {
    let source = &cut.function;
    let mut b = FunctionBuilder::like(source, &grouped.space, &grouped.functions);
    let mut map: Vec<Option<ValueId>> = vec![None; source.values.len()];
    let mut chunks = Vec::with_capacity(steps.len());
    for step in steps {
        match step {
            Step::Node(i) => {
                copy_node(&mut b, source, &source.nodes[*i], &mut map)?;
                chunks.push(cut.chunks[*i]);
            }
            Step::Group(Turns { group, numbers, chunk, part }) => {
                let known = |v: &ValueId| map[v.index()].expect("what a group reads was put before it");
                let operands: Vec<ValueId> = part.params.iter().map(known).collect();
                let results = b.call(FuncId::new(first + group), numbers.clone(), &operands)?;
                for (&old, &new) in part.outputs.iter().zip(&results) {
                    b.name(new, source.values[old].name.as_deref());
                    map[old.index()] = Some(new);
                }
                chunks.push(*chunk);
            }
        }
    }
    let output = |o: &Output| Output {
        name: o.name.clone(),
        value: map[o.value.index()].expect("what main returns is made by a node or a group"),
    };
    Ok((b.finish(source.outputs.iter().map(output).collect::<Vec<_>>()), chunks))
}
