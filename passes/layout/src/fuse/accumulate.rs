//! `accumulate`: adds a product to a sum of gradients in one kernel, as the C of a matrix product with β = 1.
//!
//! ```text
//! %dw     = einsum %x, %dy : bf16[m f]
//! %wide   = cast %dw {to=f32}
//! %before = state {name=sum.grad.w} : f32[m f]
//! %sum    = add %before, %wide
//! ```
//! becomes, where the product is made,
//! ```text
//! %before = state {name=sum.grad.w} : f32[m f]
//! %sum    = accumulate_product %x, %dy, %before
//! ```
//! The gradient is never written in the type of the weight, nor rounded to it. A product that only replaces a state is stored
//! where it is made, in the type of the state:
//! ```text
//! %dw   = einsum %x, %dy : f32[m f]
//! assign %dw {target=state, name=grad.w}
//! ```

use std::collections::BTreeMap;

use ithaca_ir::module::{Function, Level, Node};
use ithaca_ir::ops::{Binary, Binding, OpError, Target, sums_in};
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, Module, Op};
use ithaca_pass::rebuild::Copy;
use ithaca_pass::{Context, Pass};

use super::graph::Flow;

/// The pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct Accumulate;

impl Pass for Accumulate {
    fn name(&self) -> &'static str {
        "accumulate"
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level != Level::PerRank {
            let message =
                "`accumulate` needs a per-rank program, in which every communication is a collective";
            return Err(vec![Diagnostic::new("P03", message).help("run `lower-reshards` first")]);
        }
        let mut accumulated = module.emptied(module.level);
        for function in module.functions.values() {
            let found = found(function).into_iter().filter(|_| cx.rewrite());
            let found: BTreeMap<_, _> = found.collect();
            let function =
                if found.is_empty() { function.clone() } else { rewritten(&accumulated, function, &found)? };
            accumulated.functions.push(function);
        }
        Ok(accumulated)
    }
}

/// What becomes of a product.
enum Found {
    /// It is added to a state: these nodes become one kernel.
    Added { cast: Option<usize>, read: usize, sum: usize },
    /// It is cast and stored, by these nodes.
    Stored { cast: usize, assign: usize },
}

/// The products that are only added to states or stored, by node.
fn found(function: &Function) -> Vec<(usize, Found)> {
    let flow = Flow::of(function);
    let nodes = &function.nodes;
    // The node that makes operand `i` of a node for it alone.
    let only = |of: usize, i: usize| {
        let maker = flow.maker(*nodes[of].operands.get(i)?)?;
        (flow.after(maker).count() == 1 && !flow.is_returned(maker)).then_some(maker)
    };
    let is_product = |n: usize| nodes[n].op == Op::Einsum;
    let added = |sum: usize| {
        let read = only(sum, 0).filter(|&read| matches!(nodes[read].op, Op::State(_)))?;
        let added = only(sum, 1)?;
        let cast = matches!(nodes[added].op, Op::Cast { .. }).then_some(added);
        let product = cast.map_or(Some(added), |cast| only(cast, 0))?;
        let (made, before) =
            (function.ty(*nodes[product].results.first()?), function.ty(nodes[read].result()));
        let fits = is_product(product)
            && made.layout == before.layout
            && made.dims == before.dims
            && [made.dtype, sums_in(made.dtype)].contains(&before.dtype);
        let Op::State(state) = &nodes[read].op else { return None };
        let between = &nodes[product.min(read)..sum];
        let is_free = !between.iter().any(|n| touches(n, state, Access::Write));
        (fits && is_free).then_some((product, Found::Added { cast, read, sum }))
    };
    let stored = |assign: usize| {
        let Op::Assign { target: Target::State, binding } = &nodes[assign].op else { return None };
        let cast = only(assign, 0).filter(|&cast| matches!(nodes[cast].op, Op::Cast { .. }))?;
        let product = only(cast, 0).filter(|&product| is_product(product))?;
        let (made, wide) = (function.ty(nodes[product].result()), function.ty(nodes[cast].result()));
        let is_free = !nodes[product..assign].iter().any(|n| touches(n, binding, Access::Any));
        (sums_in(made.dtype) == wide.dtype && is_free).then_some((product, Found::Stored { cast, assign }))
    };
    let find = |n: usize| match &nodes[n].op {
        Op::Binary(Binary::Add) | Op::Accumulate => added(n),
        Op::Assign { .. } => stored(n),
        _ => None,
    };
    (0..nodes.len()).filter_map(find).collect()
}

/// How a node uses a state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Write,
    Any,
}

/// Whether a node may use a state so.
fn touches(node: &Node, state: &Binding, access: Access) -> bool {
    match &node.op {
        Op::Assign { target: Target::State, binding } => binding.name == state.name,
        Op::State(binding) => access == Access::Any && binding.name == state.name,
        op => matches!(op, Op::Call { .. }),
    }
}

/// The function with these products rewritten, by node.
fn rewritten(
    module: &Module,
    function: &Function,
    found: &BTreeMap<usize, Found>,
) -> Result<Function, OpError> {
    let gone = |i: usize| {
        found.values().any(|found| match *found {
            Found::Added { cast, read, sum } => [Some(read), Some(sum), cast].contains(&Some(i)),
            Found::Stored { cast, assign } => [cast, assign].contains(&i),
        })
    };
    let mut copy = Copy::of(function, &module.space, &module.functions);
    for (i, node) in function.nodes.iter().enumerate().filter(|&(i, _)| !gone(i)) {
        match found.get(&i) {
            None => copy.node(node)?,
            Some(Found::Added { read, sum, .. }) => {
                let read = &function.nodes[*read];
                copy.node(read)?;
                let mut operands = copy.values.operands(node);
                operands.push(copy.values[read.result()]);
                copy.node_as(Op::AccumulateProduct, &operands, &function.nodes[*sum].results)?;
            }
            Some(Found::Stored { cast, assign }) => {
                let operands = copy.values.operands(node);
                copy.node_as(Op::Einsum, &operands, &function.nodes[*cast].results)?;
                copy.node(&function.nodes[*assign])?;
            }
        }
    }
    Ok(copy.finish())
}
