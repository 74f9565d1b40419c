//! Random ways to distribute a program.

use ithaca_ir::entity::Entity;
use ithaca_ir::mesh::Mesh;
use ithaca_ir::module::Output;
use ithaca_ir::rule::FactorKind;
use ithaca_ir::{
    Axes, AxisId, DimId, Function, FunctionBuilder, Layout, Level, Module, Op, Space, TensorType, ValueId,
};

use crate::fuzz::Choices;

/// The program over `mesh`, its layouts chosen at random: a `reshard` stands wherever two do not fit.
pub(crate) fn distribute(module: &Module, mesh: Mesh, choices: &mut Choices) -> Module {
    let mut out = module.emptied(Level::Sharded);
    out.space.mesh = mesh;
    for function in module.functions.values() {
        let distributed = distribute_function(&out, function, choices);
        out.functions.push(distributed);
    }
    out
}

fn distribute_function(out: &Module, function: &Function, choices: &mut Choices) -> Function {
    let space = &out.space;
    let mut builder = FunctionBuilder::new(function.name.clone(), space, &out.functions);
    let mut map: Vec<ValueId> = Vec::new();
    let name = |v: ValueId| function.values[v].name.as_deref();
    for &param in &function.params {
        let ty = place(space, function.ty(param), choices);
        map.push(builder.param(ty, name(param)));
    }
    for node in &function.nodes {
        let old = function.operand_types(node);
        let results = function.result_types(node);
        let mut operands: Vec<ValueId> = node.operands.iter().map(|v| map[v.index()]).collect();
        let mut declared: Vec<TensorType> = Vec::new();
        match &node.op {
            Op::Param(_) | Op::Input(_) | Op::Positions { .. } => {
                declared.push(place(space, results[0], choices))
            }
            Op::Call { callee, .. } => {
                let callee = &out.functions[*callee];
                for (operand, &param) in operands.iter_mut().zip(&callee.params) {
                    *operand = reshard(&mut builder, *operand, callee.ty(param).layout.clone());
                }
            }
            op => {
                let rule = op.rule(&old, &results).expect("the other operations have rules");
                let axes = factor_axes(space, &rule, &old, &results, choices);
                for (operand, factors) in operands.iter_mut().zip(&rule.operands) {
                    let split = factors.iter().map(|&f| axes[f].iter().copied().collect()).collect();
                    *operand = reshard(&mut builder, *operand, Layout { split, ..Layout::default() });
                }
                declared.push(results[0].clone());
            }
        }
        let new = builder.node(node.op.clone(), &operands, &declared).unwrap();
        for (&value, &result) in new.iter().zip(&node.results) {
            builder.name(value, name(result));
            let moved = move_at_random(&mut builder, value, choices);
            map.push(moved);
        }
    }
    let outputs: Vec<Output> = function
        .outputs
        .iter()
        .enumerate()
        .map(|(i, output)| {
            let value = map[output.value.index()];
            // A block's result has the layout of its argument, so that it may run over several layers.
            let layout = match function.name.as_str() {
                "main" => Layout { partial: Default::default(), ..builder.ty(value).layout.clone() },
                _ => builder.ty(builder.function().params[i]).layout.clone(),
            };
            Output { name: output.name.clone(), value: reshard(&mut builder, value, layout) }
        })
        .collect();
    builder.finish(outputs)
}

fn reshard(builder: &mut FunctionBuilder<'_>, value: ValueId, layout: Layout) -> ValueId {
    let ty = builder.ty(value);
    if ty.layout == layout {
        return value;
    }
    let ty = ty.with_layout(layout);
    builder.push_as(Op::Reshard, &[value], ty).unwrap()
}

/// Sometimes a collective, sometimes a reshard, mostly nothing.
fn move_at_random(builder: &mut FunctionBuilder<'_>, value: ValueId, choices: &mut Choices) -> ValueId {
    let space = builder.space();
    let ty = builder.ty(value).clone();
    let split: Vec<(DimId, AxisId)> =
        ty.dims.iter().zip(&ty.layout.split).filter_map(|(&d, axes)| Some((d, *axes.last()?))).collect();
    let free = |more: &[AxisId], without: Option<DimId>| -> Vec<DimId> {
        let legal = |d: DimId| {
            let axes: Vec<AxisId> = ty.axes_of(d).iter().chain(more).copied().collect();
            Some(d) != without && space.can_split(d, &axes)
        };
        ty.dims.iter().copied().filter(|&d| legal(d)).collect()
    };
    // One axis, or all from it on.
    let jointly = |choices: &mut Choices, axes: &[AxisId]| -> Axes {
        let first = choices.below(axes.len());
        if choices.below(2) == 0 { axes[first].into() } else { Axes::new(&axes[first..]).expect("few axes") }
    };
    let op = match choices.below(7) {
        1 if !ty.layout.partial.is_empty() => Op::AllReduce { axis: jointly(choices, &ty.layout.partial) },
        2 if !ty.layout.partial.is_empty() => {
            let axis = jointly(choices, &ty.layout.partial);
            match free(&axis, None).as_slice() {
                [] => return value,
                dims => Op::ReduceScatter { axis, dim: choices.one_of(dims) },
            }
        }
        3 if !split.is_empty() => {
            let (dim, axis) = choices.one_of(&split);
            let axes = ty.axes_of(dim);
            let first = choices.below(axes.len());
            let joint = Axes::new(&axes[first..]).expect("few axes");
            Op::AllGather { axis: if choices.below(2) == 0 { axis.into() } else { joint }, dim }
        }
        4 if !split.is_empty() => {
            let (concat, axis) = choices.one_of(&split);
            match free(&[axis], Some(concat)).as_slice() {
                [] => return value,
                dims => Op::all_to_all(axis, choices.one_of(dims), concat),
            }
        }
        5 => {
            let unused = space.mesh.axes.ids().find(|&a| ty.layout.axes().all(|used| used != a));
            let Some(axis) = unused else { return value };
            match free(&[axis], None).as_slice() {
                [] => return value,
                dims => Op::Slice { axis, dim: choices.one_of(dims) },
            }
        }
        6 => {
            let placed = place(space, &ty, choices);
            return reshard(builder, value, placed.layout);
        }
        _ => return value,
    };
    builder.push(op, &[value]).unwrap()
}

/// The type in a random legal layout, nothing pending.
fn place(space: &Space, ty: &TensorType, choices: &mut Choices) -> TensorType {
    let mut layout = Layout::whole(ty.dims.len());
    for axis in space.mesh.axes.ids() {
        let i = choices.below(ty.dims.len() + 1);
        if let Some(&dim) = ty.dims.get(i) {
            let mut axes = layout.split[i].clone();
            axes.push(axis);
            if space.can_split(dim, &axes) {
                layout.split[i] = axes;
            }
        }
    }
    ty.with_layout(layout)
}

/// For each factor of a rule the axes that split it, legal for every dimension that it is.
fn factor_axes(
    space: &Space,
    rule: &ithaca_ir::rule::FactorRule,
    operands: &[&TensorType],
    results: &[&TensorType],
    choices: &mut Choices,
) -> Vec<Vec<AxisId>> {
    let mut axes: Vec<Vec<AxisId>> = vec![Vec::new(); rule.factors.len()];
    let tensors: Vec<_> =
        operands.iter().zip(&rule.operands).chain(results.iter().zip(&rule.results)).collect();
    for axis in space.mesh.axes.ids() {
        let factor = choices.below(rule.factors.len() + 1);
        let Some(FactorKind::Parallel | FactorKind::Sum) = rule.factors.get(factor) else { continue };
        let mut more = axes[factor].clone();
        more.push(axis);
        let legal = tensors.iter().all(|(ty, factors)| {
            ty.dims.iter().zip(factors.iter()).all(|(&d, &f)| f != factor || space.can_split(d, &more))
        });
        if legal {
            axes[factor] = more;
        }
    }
    axes
}
