//! Pairs of products with one operand in common, which rules cannot state: they have one result each, and a rule has one left side.
//!
//! ```text
//! %k = einsum %x, %wk
//! %v = einsum %x, %wv
//! ```
//! equals `%k, %v = product_pair %x, %wk, %wv` if the weights have one type. The cost decides, as for rules.

use ithaca_ir::ops::Fused;
use ithaca_ir::ops::attr::Names;
use ithaca_ir::{Op, TensorType, ValueId};

use super::block::Block;
use super::grow::Additions;
use super::language::{Term, add, rebuild};
use super::price::PriceList;

/// The name of the operation.
pub(super) const NAME: &str = "product_pair";

/// A pair of products in an e-graph.
pub(super) struct Pair {
    /// The term.
    pub(super) term: Term,
    /// The results that an exchange of blocks alone reads.
    sent: Vec<TensorType>,
}

impl Pair {
    /// Seconds of the kernels that pack what is sent, each an operation that reads and writes it.
    pub(super) fn packing(&self, prices: &mut PriceList<'_>) -> f64 {
        let copy = |ty: &TensorType| prices.seconds(&Op::Cast { to: ty.dtype }, &[ty], &[ty]);
        self.sent.iter().map(copy).sum()
    }
}

/// Adds the pairs of a function to its e-graph, as additions of a rule with this number. A product is in one pair at most.
pub(super) fn pairs(block: &mut Block<'_>, names: Names<'_>, made: &mut Additions, rule: usize) -> Vec<Pair> {
    let found: Vec<[usize; 2]> = found(block);
    let function = block.function;
    let mut pairs = Vec::with_capacity(found.len());
    for pair in found {
        let [first, second] = pair.map(|n| &function.nodes[n]);
        let classes = |values: &[ValueId]| values.iter().map(|&v| block.class(v)).collect::<Vec<_>>();
        let mut operands = classes(&first.operands);
        operands.extend(classes(&second.operands[1..]));
        let old = [first, second].map(|node| block.class(node.result()));
        let types = vec![function.ty(first.result()).clone(); 2];
        let op = Op::Fused(Fused::ProductPair);
        let new = add(&mut block.graph, names, &op, &types, &operands);
        let symbol = block.graph.analysis.apply(&op, &types, names);
        let term = Term { symbol, operands: operands.into_iter().collect() };
        made.terms.push((term.clone(), rule));
        for (old, new) in old.into_iter().zip(new) {
            block.graph.union(old, new);
        }
        let is_sent = |n: &&usize| is_only_sent(block, **n);
        let sent = pair.iter().filter(is_sent).map(|&n| function.ty(function.nodes[n].result()).clone());
        pairs.push(Pair { term, sent: sent.collect() });
    }
    rebuild(&mut block.graph);
    pairs
}

/// Products that share their first operand, of weights of one type, such that nothing between them reads the first result. Weights
/// that are gathered are none: the first product hides the gather of the second weight, and a pair would wait for both.
fn found(block: &Block<'_>) -> Vec<[usize; 2]> {
    let function = block.function;
    let nodes = &function.nodes;
    let products: Vec<usize> =
        (0..nodes.len()).filter(|&n| nodes[n].op == Op::Einsum && block.is_free(n)).collect();
    let fits = |a: usize, b: usize| {
        let [(x, y, z), (x2, y2, z2)] =
            [a, b].map(|n| (nodes[n].operands[0], nodes[n].operands[1], nodes[n].result()));
        let is_read = nodes[a + 1..=b].iter().any(|node| node.operands.contains(&z));
        let alike = function.ty(y) == function.ty(y2) && function.ty(z) == function.ty(z2);
        let is_sent = |v: &ValueId| nodes.iter().any(|n| n.op.is_communication() && n.results.contains(v));
        block.class(x) == block.class(x2) && alike && !is_read && ![y, y2].iter().any(is_sent)
    };
    let mut found: Vec<[usize; 2]> = Vec::new();
    for (i, &a) in products.iter().enumerate() {
        let is_taken = |n: usize| found.iter().flatten().any(|&taken| taken == n);
        if !is_taken(a)
            && let Some(&b) = products[i + 1..].iter().find(|&&b| !is_taken(b) && fits(a, b))
        {
            found.push([a, b]);
        }
    }
    found
}

/// Whether the result of a node is read by one exchange of blocks and nothing else.
fn is_only_sent(block: &Block<'_>, n: usize) -> bool {
    let function = block.function;
    let value = function.nodes[n].result();
    let mut readers = function.nodes.iter().filter(|node| node.operands.contains(&value));
    let exchanges = |op: &Op| matches!(op, Op::AllToAll { .. } | Op::ReduceScatter { .. });
    matches!((readers.next(), readers.next()), (Some(one), None) if exchanges(&one.op))
        && function.outputs.iter().all(|output| output.value != value)
}
