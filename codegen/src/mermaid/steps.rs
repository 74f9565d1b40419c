//! A function as the steps of a diagram.

use ithaca_ir::layout::At;
use ithaca_ir::message::{self, Parcel};
use ithaca_ir::ops::{Binding, Fused, Op, Stage};
use ithaca_ir::traffic::{self, Phases};
use ithaca_ir::{FuncId, Function, Module, Node};

use super::mesh::{Drawn, Ends};
use super::repeat;
use super::step::{Phase, Step};

/// The steps of a function and of its callees.
pub(super) fn of_function(module: &Module, drawn: &Drawn, id: FuncId) -> Vec<(Phase, Step)> {
    from(module, drawn, id, Phase::Forward)
}

/// As [`of_function`], from `phase` on. A function with calls goes through phases, a function without calls stays in
/// one.
fn from(module: &Module, drawn: &Drawn, id: FuncId, mut phase: Phase) -> Vec<(Phase, Step)> {
    let mut steps: Vec<(Phase, Step)> = Vec::new();
    let phases = Phases::of(module, &module.functions[id]);
    let calls = module.functions[id].nodes.iter().any(|n| matches!(n.op, Op::Call { .. }));
    for node in &module.functions[id].nodes {
        if let Op::Call { callee, layers, stride: _, scan: _, stage } = &node.op {
            let at = stage.and_then(Stage::at);
            let there = drawn.only(&module.space.mesh, at);
            // Some stages of a large mesh are not drawn.
            let Some(over) = there.ends() else { continue };
            let called = call(module, (&there, over, at), *callee, layers.end - layers.start, phase);
            // States are cleared in any phase, which continues afterwards.
            let last = last_phase(&called).filter(|&last| last != Phase::Load);
            let start = match &called {
                Step::Call { phase: Some(own), .. } => *own,
                Step::Call { phase: None, .. }
                | Step::Local { .. }
                | Step::Exchange { .. }
                | Step::Again { .. } => phase,
            };
            phase = last.unwrap_or(phase);
            steps.push((start, called));
            continue;
        }
        phase = match own_phase(&node.op) {
            Some(own) if calls && phase != Phase::Update => own,
            _ => phase,
        };
        if let Some(step) = step(module, drawn, id, node) {
            push(&mut steps, served(module, (id, &phases), node).unwrap_or(phase), step);
        }
    }
    repeat::folded(steps)
}

/// The phase of a transfer between pipeline stages, whatever the phase of the steps before it.
fn served(module: &Module, (id, phases): (FuncId, &Phases<'_>), node: &Node) -> Option<Phase> {
    let function = &module.functions[id];
    let (&from, &to) = (node.operands.first()?, node.results.first()?);
    let moves = node.op.is_communication() && function.ty(from).layout.at != function.ty(to).layout.at;
    moves.then(|| match phases.of_node(node) {
        traffic::Phase::Forward => Phase::Forward,
        traffic::Phase::Backward => Phase::Backward,
        traffic::Phase::Update => Phase::Update,
    })
}

fn call(
    module: &Module,
    (drawn, over, at): (&Drawn, Ends, Option<At>),
    callee: FuncId,
    layers: u64,
    phase: Phase,
) -> Step {
    let function = &module.functions[callee];
    let name = function.name.clone();
    let own = phase_of(function);
    let is_leaf = !function.nodes.iter().any(|n| matches!(n.op, Op::Call { .. }));
    let phase = own.unwrap_or(if is_leaf { Phase::Forward } else { phase });
    let steps = from(module, drawn, callee, phase);
    let mesh = &module.space.mesh;
    let stage = at.map(|at| format!("{}={}", mesh.axes[at.axis].name, at.coordinate));
    Step::Call { name, over, stage, layers, phase: is_leaf.then_some(phase), steps }
}

/// The phase of a function; `None` if its operations determine it. Clearing of sums belongs to the load.
fn phase_of(function: &Function) -> Option<Phase> {
    let clears = function.params.is_empty() && function.outputs.is_empty();
    match function.phase {
        traffic::Phase::Update if clears => Some(Phase::Load),
        traffic::Phase::Backward => Some(Phase::Backward),
        traffic::Phase::Update => Some(Phase::Update),
        traffic::Phase::Forward => None,
    }
}

/// The phase that an operation outside of called functions begins.
fn own_phase(op: &Op) -> Option<Phase> {
    let optimizer = |binding: &Binding| binding.name.starts_with("optimizer.").then_some(Phase::Update);
    match op {
        Op::Gradient(_) | Op::AttentionBackward(_) | Op::Fused(Fused::GatedBackward { .. }) => {
            Some(Phase::Backward)
        }
        Op::Optimizer(_) => Some(Phase::Update),
        Op::State(binding) | Op::Assign { binding, .. } => optimizer(binding),
        _ => None,
    }
}

/// The phase at the end of a step.
fn last_phase(step: &Step) -> Option<Phase> {
    match step {
        Step::Local { .. } | Step::Exchange { .. } => None,
        Step::Call { phase, steps, .. } => phase.or_else(|| steps.last().map(|(phase, _)| *phase)),
        Step::Again { steps, .. } => steps.last().map(|(phase, _)| *phase),
    }
}

/// The step of a node; `None` for a node that only names a tensor.
fn step(module: &Module, drawn: &Drawn, id: FuncId, node: &Node) -> Option<Step> {
    let function = &module.functions[id];
    match &node.op {
        Op::Param(_) | Op::Input(_) | Op::State(_) | Op::Fill { .. } | Op::Positions { .. } => return None,
        _ => {}
    }
    let space = &module.space;
    let made = node.results.first().or(node.operands.first());
    let at = made.and_then(|&v| function.ty(v).layout.at);
    let parcels = message::parcels(&node.op, &function.operand_types(node), &function.result_types(node));
    // A collective within a stage is drawn between its ranks.
    let arrows = |Parcel { op, from, to }: &Parcel| {
        if from.layout.at == to.layout.at {
            drawn.only(&space.mesh, at).arrows(space, op, from, to)
        } else {
            drawn.arrows(space, op, from, to)
        }
    };
    // All tensors of a message take the same way.
    let sent = parcels.first().zip(traffic::axis(space, &parcels));
    let sent = sent.map(|(first, axis)| Step::Exchange {
        kind: first.op.name(),
        axis,
        count: 1,
        bytes: message::busiest_bytes(space, &parcels),
        arrows: arrows(first),
    });
    let here = || drawn.only(&space.mesh, at).ends();
    sent.or_else(|| Some(Step::Local { ops: vec![(node.op.name(), 1)], over: here()? }))
}

/// Adds a step, or counts it into the last step of the same kind.
fn push(steps: &mut Vec<(Phase, Step)>, phase: Phase, step: Step) {
    let last = steps.last_mut().filter(|(last, _)| *last == phase);
    let is_counted = last.is_some_and(|(_, last)| joined(last, &step));
    if !is_counted {
        steps.push((phase, step));
    }
}

/// Counts `next` into `last` if both are of one kind. Returns whether they are.
fn joined(last: &mut Step, next: &Step) -> bool {
    match (last, next) {
        (Step::Local { ops, over }, Step::Local { ops: more, over: there }) if over == there => {
            for &(name, n) in more {
                match ops.iter_mut().find(|(have, _)| *have == name) {
                    Some((_, count)) => *count += n,
                    None => ops.push((name, n)),
                }
            }
            true
        }
        (
            Step::Exchange { kind, axis, count, bytes, arrows },
            Step::Exchange { kind: k, axis: a, count: c, bytes: b, arrows: ar },
        ) if kind == k && axis == a && arrows == ar => {
            *count += c;
            *bytes += b;
            true
        }
        _ => false,
    }
}
