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
//! The gradient is never written in the type of the weight, nor rounded to it.

use std::collections::BTreeMap;

use ithaca_ir::module::{Function, Level, Node};
use ithaca_ir::ops::{Binary, OpError, Target, sums_in};
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
            let additions = additions(function).into_iter().filter(|_| cx.rewrite());
            let additions: BTreeMap<_, _> = additions.map(|addition| (addition.product, addition)).collect();
            let function = if additions.is_empty() {
                function.clone()
            } else {
                rewritten(&accumulated, function, &additions)?
            };
            accumulated.functions.push(function);
        }
        Ok(accumulated)
    }
}

/// The nodes of an addition that becomes one kernel.
struct Addition {
    product: usize,
    cast: Option<usize>,
    read: usize,
    sum: usize,
}

/// The additions of products to states.
fn additions(function: &Function) -> Vec<Addition> {
    let flow = Flow::of(function);
    let nodes = &function.nodes;
    // The node that makes operand `i` of a node for it alone.
    let only = |of: usize, i: usize| {
        let maker = flow.maker(*nodes[of].operands.get(i)?)?;
        (flow.after(maker).count() == 1 && !flow.is_returned(maker)).then_some(maker)
    };
    let find = |sum: usize| {
        if !matches!(nodes[sum].op, Op::Binary(Binary::Add) | Op::Accumulate) {
            return None;
        }
        let read = only(sum, 0).filter(|&read| matches!(nodes[read].op, Op::State(_)))?;
        let added = only(sum, 1)?;
        let cast = matches!(nodes[added].op, Op::Cast { .. }).then_some(added);
        let product = cast.map_or(Some(added), |cast| only(cast, 0))?;
        let (made, before) =
            (function.ty(*nodes[product].results.first()?), function.ty(nodes[read].result()));
        let fits = nodes[product].op == Op::Einsum
            && made.layout == before.layout
            && made.dims == before.dims
            && sums_in(made.dtype) == before.dtype;
        let is_touched = |n: &Node| touches(n, &nodes[read]);
        let between = &nodes[product.min(read)..sum];
        (fits && !between.iter().any(is_touched)).then_some(Addition { product, cast, read, sum })
    };
    (0..nodes.len()).filter_map(find).collect()
}

/// Whether a node may write the state that `read` reads.
fn touches(node: &Node, read: &Node) -> bool {
    match (&node.op, &read.op) {
        (Op::Assign { target: Target::State, binding }, Op::State(state)) => binding.name == state.name,
        (op, _) => matches!(op, Op::Call { .. }),
    }
}

/// The function with these additions, by the node of the product.
fn rewritten(
    module: &Module,
    function: &Function,
    additions: &BTreeMap<usize, Addition>,
) -> Result<Function, OpError> {
    let gone = |i: usize| additions.values().any(|a| [Some(a.read), Some(a.sum), a.cast].contains(&Some(i)));
    let mut copy = Copy::of(function, &module.space, &module.functions);
    for (i, node) in function.nodes.iter().enumerate().filter(|&(i, _)| !gone(i)) {
        let Some(addition) = additions.get(&i) else {
            copy.node(node)?;
            continue;
        };
        let read = &function.nodes[addition.read];
        copy.node(read)?;
        let mut operands = copy.values.operands(node);
        operands.push(copy.values[read.result()]);
        copy.node_as(Op::AccumulateProduct, &operands, &function.nodes[addition.sum].results)?;
    }
    Ok(copy.finish())
}
