//! Which function owns each weight: the first that reads it, so that each weight is updated once.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Node, ValueId};
use ithaca_ir::ops::{Binding, OpError};
use ithaca_ir::order::joined;
use ithaca_ir::{Module, Op};

use super::options::Training;
use super::pipelined::Stages;
use super::tape::Accumulation;
use super::tied::TiedWeight;
use super::update::OwnedWeights;

/// Assigns each weight to the first function that reads it; also returns the weights that functions of other stages
/// read.
///
/// # Errors
/// `P54` for weights that stages cannot share.
pub(super) fn owned(
    module: &Module,
    main: FuncId,
    layers: &[Vec<Layers>],
    (training, stages): (&Training, Option<&Stages>),
) -> Result<(Vec<OwnedWeights>, Vec<TiedWeight>), OpError> {
    let mut owned: Vec<OwnedWeights> = Vec::new();
    let mut tied: Vec<TiedWeight> = Vec::new();
    let mut owners: Vec<FuncId> = Vec::new();
    let mut seen: Vec<(&Binding, usize)> = Vec::new();
    let all_layers = |id: FuncId| &layers[id.index()][..];
    for (id, function) in module.functions.iter() {
        let layers = &layers[id.index()];
        if layers.is_empty() {
            continue;
        }
        let mut own = OwnedWeights {
            name: function.name.clone(),
            weights: Vec::new(),
            layers: joined(layers.clone()).into_iter().map(|l| (l, None)).collect(),
            gradients: training.gradients,
        };
        let mut here: Vec<&Binding> = Vec::new();
        for node in &function.nodes {
            let Op::Param(binding) = &node.op else { continue };
            if here.contains(&binding) || !is_trained(function, node.result()) {
                continue;
            }
            here.push(binding);
            if stages.is_some() && id == main {
                let message = format!("`@main` itself reads `{}`, which no stage owns", binding.name);
                return Err(OpError::new("P54", message));
            }
            let places = |id: FuncId| match stages {
                Some(stages) => {
                    stages.of_weights(id, binding.is_per_layer(), &module.functions[id].name).map(Some)
                }
                None => Ok(None),
            };
            let mine = places(id)?;
            let n_weights = if binding.is_per_layer() { count(&joined(layers.clone())) } else { 1 };
            let often = count(layers) > n_weights;
            // A weight of the same name in other layers is another weight.
            let runs =
                |owner: usize| !binding.is_per_layer() || overlap_with(all_layers(owners[owner]), layers);
            let known =
                seen.iter().find(|&&(known, owner)| known == binding && runs(owner)).map(|&(_, owner)| owner);
            let Some(owner) = known else {
                let accumulation = match training.micro_batches {
                    _ if often => Accumulation::Add,
                    1 => Accumulation::Assign,
                    _ => Accumulation::AddByOwner,
                };
                own.weights.push((binding.clone(), function.ty(node.result()).clone(), accumulation));
                seen.push((binding, owned.len()));
                continue;
            };
            let theirs = match stages {
                Some(_) => places(owners[owner])?,
                None => None,
            };
            if let (Some(mine), Some(theirs)) = (mine, theirs)
                && mine != theirs
            {
                let (&[(_, Some(user))], &[(_, Some(at))], false) =
                    (&mine[..], &theirs[..], binding.is_per_layer())
                else {
                    let message =
                        format!("two stages of the pipeline run layers with one `{}`", binding.name);
                    return Err(OpError::new("P54", message));
                };
                tied.push(TiedWeight {
                    binding: binding.clone(),
                    ty: function.ty(node.result()).clone(),
                    owner: (module.functions[owners[owner]].name.clone(), at),
                    user: (function.name.clone(), user),
                });
                continue;
            }
            let weight = owned.get_mut(owner).and_then(|o| o.weights.iter_mut().find(|w| w.0 == *binding));
            if let Some((_, _, accumulation)) = weight {
                let is_completed = *accumulation != Accumulation::Add
                    && runs_before(&module.functions[main], owners[owner], id);
                *accumulation = if is_completed { Accumulation::AddByOwner } else { Accumulation::Add };
            }
        }
        owned.push(own);
        owners.push(id);
    }
    assert!(owned.len() <= main.index() + 1, "every function owns once");
    // A weight that all layers share is updated once.
    let mut apart: Vec<OwnedWeights> = Vec::new();
    for (own, id) in owned.into_iter().zip(owners) {
        for (mut own, kind) in by_layer(own).into_iter().zip([true, false]) {
            if own.weights.is_empty() {
                continue;
            }
            if let Some(stages) = stages {
                own.layers = stages.of_weights(id, kind, &own.name)?;
            }
            apart.push(own);
        }
    }
    Ok((apart, tied))
}

/// Whether all calls of `first` come before all calls of `second`, so that its backward pass comes after all of them.
fn runs_before(main: &Function, first: FuncId, second: FuncId) -> bool {
    let calls = |of: FuncId| {
        let of_function = move |n: &Node| matches!(n.op, Op::Call { callee, .. } if callee == of);
        main.nodes.iter().enumerate().filter(move |(_, n)| of_function(n)).map(|(i, _)| i)
    };
    matches!((calls(first).max(), calls(second).min()), (Some(last), Some(next)) if last < next)
}

/// Whether a weight receives a gradient; a weight that only affects the choice of experts receives none.
fn is_trained(function: &Function, weight: ValueId) -> bool {
    let used = |node: &Node| {
        let passes = |i: usize| {
            if let Op::Experts(experts) = &node.op {
                return experts.has_gradient(i);
            }
            !matches!(node.op, Op::Cast { .. }) || is_trained(function, node.result())
        };
        node.operands.iter().enumerate().any(|(i, &v)| v == weight && passes(i))
    };
    function.nodes.iter().any(used) || function.outputs.iter().any(|o| o.value == weight)
}

/// The weights per layer, then the weights that all layers share.
fn by_layer(owned: OwnedWeights) -> Vec<OwnedWeights> {
    let OwnedWeights { name, weights, layers, gradients } = owned;
    let (own, shared): (Vec<_>, Vec<_>) = weights.into_iter().partition(|(b, _, _)| b.is_per_layer());
    let once = vec![(0..1, None)];
    let shared_name = if own.is_empty() { name.clone() } else { format!("{name}.shared") };
    vec![
        OwnedWeights { name, weights: own, layers, gradients },
        OwnedWeights { name: shared_name, weights: shared, layers: once, gradients },
    ]
}

/// Whether `a` and `b` have a layer in common.
fn overlap_with(a: &[Layers], b: &[Layers]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end))
}

/// The sum of the lengths of ranges.
fn count(layers: &[Layers]) -> u64 {
    layers.iter().map(|l| l.end - l.start).sum()
}
