//! Values that pass between functions, and their layouts: values carried from layer to layer, values saved for the
//! backward pass, and those of them that belong inside attention.
//!
//! A result that is read only by functions of the same origin is *kept*: no other function has to agree on its layout, so it
//! stays where it was made, and a value that attention reads or returns stays inside attention.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{Op, OpError};
use ithaca_ir::{FunctionBuilder, Module};
use ithaca_pass::rebuild::ValueMap;

use super::inner::{Inner, is_attention};

/// How a result leaves its function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passing {
    /// To the next layer, or to readers as any other value.
    Plain,
    /// To functions of the same origin alone, in the layout that it has.
    Kept,
    /// To functions of the same origin alone, where only attention reads it.
    Inside,
}

/// A result of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Source {
    pub(super) function: FuncId,
    pub(super) output: usize,
}

/// The values that pass between the functions of a module.
#[derive(Clone, Debug)]
pub(super) struct Flows {
    /// For each function the inside of its attention.
    inner: Vec<Inner>,
    /// For each parameter of each function the result that it is given; none where layers hand it on.
    params: Vec<Vec<Option<Source>>>,
    /// For each result of each function how it leaves.
    outputs: Vec<Vec<Passing>>,
}

impl Flows {
    /// The flows of `module`.
    pub(super) fn of(module: &Module) -> Self {
        let functions = &module.functions;
        let inner: Vec<Inner> = functions.values().map(Inner::of).collect();
        let mut params: Vec<Vec<Option<Source>>> =
            functions.values().map(|f| vec![None; f.params.len()]).collect();
        let mut handed: Vec<usize> = vec![0; functions.len()];
        let mut readers: Vec<Vec<Readers>> =
            functions.values().map(|f| vec![Readers::default(); f.outputs.len()]).collect();
        for caller in functions.values() {
            let made = made_by_calls(caller);
            let of = |v: &ValueId| made[v.index()];
            for node in &caller.nodes {
                let Op::Call { callee, .. } = &node.op else {
                    for source in node.operands.iter().filter_map(of) {
                        readers[source.function.index()][source.output].others = true;
                    }
                    continue;
                };
                let n_handed = &mut handed[callee.index()];
                *n_handed = (*n_handed).max(handed_on(node));
                for (i, source) in node.operands.iter().enumerate().filter_map(|(i, v)| Some((i, of(v)?))) {
                    params[callee.index()][i].get_or_insert(source);
                    let by = &mut readers[source.function.index()][source.output];
                    let same_origin =
                        functions[*callee].model_name() == functions[source.function].model_name();
                    if same_origin && *callee != source.function {
                        by.same_origin.push((*callee, i));
                    } else {
                        by.others = true;
                    }
                }
            }
            for source in caller.outputs.iter().filter_map(|o| of(&o.value)) {
                readers[source.function.index()][source.output].others = true;
            }
        }
        for (params, &n) in params.iter_mut().zip(&handed) {
            params.iter_mut().take(n).for_each(|p| *p = None);
        }
        let passing = |(id, function): (FuncId, &Function)| -> Vec<Passing> {
            let beside = beside_attention(function);
            let outputs = function.outputs.iter().enumerate();
            let one = |(i, output): (usize, &Output)| {
                let Readers { same_origin, others } = &readers[id.index()][i];
                let inside = |&(f, p): &(FuncId, usize)| {
                    let reads = inner[f.index()].reads(functions[f].params[p]);
                    !reads.outside && !leaves(&functions[f], functions[f].params[p])
                };
                match () {
                    () if i < handed[id.index()] || *others || same_origin.is_empty() => Passing::Plain,
                    () if beside[output.value.index()] && same_origin.iter().all(inside) => Passing::Inside,
                    () => Passing::Kept,
                }
            };
            outputs.map(one).collect()
        };
        let outputs = functions.iter().map(passing).collect();
        Self { inner, params, outputs }
    }

    /// The inside of attention in `function`.
    pub(super) fn inner(&self, function: FuncId) -> &Inner {
        &self.inner[function.index()]
    }

    /// The result that the `i`-th parameter of `function` is given, where it is one of another function.
    pub(super) fn given(&self, function: FuncId, i: usize) -> Option<Source> {
        self.params[function.index()][i]
    }

    /// How the `i`-th result of `function` leaves it.
    pub(super) fn passing(&self, function: FuncId, i: usize) -> Passing {
        self.outputs[function.index()][i]
    }
}

/// The readers of a result.
#[derive(Clone, Debug, Default)]
struct Readers {
    /// Parameters of functions of the same family.
    same_origin: Vec<(FuncId, usize)>,
    /// Whether anything else does.
    others: bool,
}

/// For each value of a function the result of a call that it is.
fn made_by_calls(caller: &Function) -> Vec<Option<Source>> {
    let mut made = vec![None; caller.values.len()];
    for node in &caller.nodes {
        let Op::Call { callee, .. } = node.op else { continue };
        for (output, v) in node.results.iter().enumerate() {
            made[v.index()] = Some(Source { function: callee, output });
        }
    }
    made
}

/// How many results of a call become arguments of the next layer.
fn handed_on(call: &Node) -> usize {
    match &call.op {
        Op::Call { layers, scan, .. } if layers.end > layers.start + 1 => {
            scan.map_or(call.results.len(), |scan| scan.carried)
        }
        _ => 0,
    }
}

/// For each value whether attention reads it as q, k or v, or returns it.
fn beside_attention(function: &Function) -> Vec<bool> {
    let mut beside = vec![false; function.values.len()];
    for node in function.nodes.iter().filter(|n| matches!(n.op, Op::Attention(_))) {
        node.operands.iter().take(3).chain(&node.results).for_each(|v| beside[v.index()] = true);
    }
    beside
}

fn leaves(function: &Function, value: ValueId) -> bool {
    function.outputs.iter().any(|o| o.value == value)
}

/// The same program, with two copies of each saved value that is read both inside and outside attention, such as the
/// output of attention: delta reads it inside, the gradient of the output projection outside.
///
/// # Errors
/// None on a program that verifies.
pub(super) fn keep_both_sides(module: &Module) -> Result<Module, OpError> {
    let flows = Flows::of(module);
    let duplicated = DuplicatedValues::of(module, &flows);
    if duplicated.results.iter().all(Vec::is_empty) {
        return Ok(module.clone());
    }
    let mut rebuilt = module.emptied(module.level);
    for (id, function) in module.functions.iter() {
        let function = duplicated.rebuild(&rebuilt, &flows, id, function)?;
        rebuilt.functions.push(function);
    }
    Ok(rebuilt)
}

/// Results that functions return twice, and parameters that they take twice.
struct DuplicatedValues {
    /// For each function the results that it gives a second time, after the others.
    results: Vec<Vec<usize>>,
    /// For each function the parameters that it takes a second time, after the others.
    params: Vec<Vec<usize>>,
}

impl DuplicatedValues {
    fn of(module: &Module, flows: &Flows) -> Self {
        let none = || vec![Vec::new(); module.functions.len()];
        let (mut results, mut params): (Vec<Vec<usize>>, Vec<Vec<usize>>) = (none(), none());
        for (id, function) in module.functions.iter() {
            for (i, &param) in function.params.iter().enumerate() {
                let Some(source) = flows.given(id, i) else { continue };
                let made = &module.functions[source.function];
                let reads = flows.inner(id).reads(param);
                let kept = flows.passing(source.function, source.output) == Passing::Kept
                    && beside_attention(made)[made.outputs[source.output].value.index()];
                if kept && reads.inside && reads.outside && always(module, id, i, source) {
                    params[id.index()].push(i);
                    let given = &mut results[source.function.index()];
                    if !given.contains(&source.output) {
                        given.push(source.output);
                    }
                }
            }
        }
        Self { results, params }
    }

    fn rebuild(
        &self,
        rebuilt: &Module,
        flows: &Flows,
        id: FuncId,
        function: &Function,
    ) -> Result<Function, OpError> {
        let mut b = FunctionBuilder::like(function, &rebuilt.space, &rebuilt.functions);
        let mut map = ValueMap::with_params(&mut b, function);
        // The value inside attention, and the second result of a call.
        let mut inside: Vec<Option<ValueId>> = vec![None; function.values.len()];
        let mut again: Vec<Option<ValueId>> = vec![None; function.values.len()];
        for &i in &self.params[id.index()] {
            let param = function.params[i];
            inside[param.index()] = Some(b.param(function.ty(param).clone(), None));
        }
        for (i, node) in function.nodes.iter().enumerate() {
            let inner = is_attention(&node.op) || flows.inner(id).serves(i);
            let operand = |&v: &ValueId| inside[v.index()].filter(|_| inner).unwrap_or(map[v]);
            let mut operands: Vec<ValueId> = node.operands.iter().map(operand).collect();
            if let Op::Call { callee, .. } = node.op {
                let twice = self.params[callee.index()].iter().map(|&p| node.operands[p]);
                operands.extend(
                    twice.map(|v| again[v.index()].expect("a function that takes a duplicate is given one")),
                );
            }
            let results = b.node(node.op.clone(), &operands, &map.declared(&node.results))?;
            map.replace(&mut b, &node.results, &results);
            if let Op::Call { callee, .. } = node.op {
                let more = &results[node.results.len()..];
                for (&output, &new) in self.results[callee.index()].iter().zip(more) {
                    again[node.results[output].index()] = Some(new);
                }
            }
        }
        let mut outputs = map.outputs();
        outputs.extend(self.results[id.index()].iter().map(|&i| outputs[i].clone()).collect::<Vec<_>>());
        Ok(b.finish(outputs))
    }
}

/// Whether every call of `function` gives its `i`-th parameter this result.
fn always(module: &Module, function: FuncId, i: usize, source: Source) -> bool {
    module.functions.values().all(|caller| {
        let made = made_by_calls(caller);
        let mut calls =
            caller.nodes.iter().filter(|n| matches!(n.op, Op::Call { callee, .. } if callee == function));
        calls.all(|call| made[call.operands[i].index()] == Some(source))
    })
}
