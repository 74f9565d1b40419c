//! Roles of dimensions by a program's operations: heads, sequences, vocabulary, feed-forward width.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::module::{Function, Node};
use ithaca_ir::ops::{Cache, Experts, Op, Window};
use ithaca_ir::{DimId, Module, Part, ValueId};

/// Dimensions by role. A dimension has at most one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    /// Pairs of query heads and the key/value heads that serve them.
    pub heads: BTreeSet<(DimId, DimId)>,
    /// Dimensions of inputs that are no sequence: the batch.
    pub batches: BTreeSet<DimId>,
    /// Query and key sequences.
    pub sequences: BTreeSet<DimId>,
    /// Key sequences that are no query sequence: caches of keys.
    pub caches: BTreeSet<DimId>,
    /// Of caches in pages: the pages, and the slots of a page.
    pub pages: BTreeMap<DimId, [DimId; 2]>,
    /// The pages in host memory.
    pub host_pages: BTreeSet<DimId>,
    /// Tables that token ids look up.
    pub vocabularies: BTreeSet<DimId>,
    /// Experts whose weights a rank may hold a part of.
    pub experts: BTreeSet<DimId>,
    /// Widths between two products of a feed-forward network.
    pub hidden: BTreeSet<DimId>,
}

impl Roles {
    /// The roles of the dimensions of `module`.
    pub fn of(module: &Module) -> Roles {
        let mut roles = Roles::default();
        let mut widths = BTreeSet::new();
        let mut products = BTreeSet::new();
        let mut residual = BTreeSet::new();
        let mut queries = BTreeSet::new();
        let mut explicit = Explicit::default();
        // A backward pass has the dimensions of its forward pass, and its parameters may be any of its values.
        let forward = |f: &&Function| f.origin.is_none();
        for function in module.functions.values().filter(forward) {
            // The residual stream: inputs, arguments and results of functions, rows of tables, and normalised values.
            for &value in function.params.iter().filter(|&&v| function.ty(v).dtype.is_float()) {
                residual.extend(function.ty(value).dims.iter().copied());
            }
            let mut weights = BTreeSet::new();
            for node in &function.nodes {
                match &node.op {
                    Op::Param(_) => {
                        weights.insert(node.result());
                    }
                    Op::Cast { .. } | Op::Scale { .. } if weights.contains(&node.operands[0]) => {
                        weights.insert(node.result());
                    }
                    Op::Attention(a) | Op::AttentionBackward(a) => {
                        roles.heads.insert((a.heads, a.kv_heads));
                        roles.sequences.extend([a.queries, a.keys]);
                        queries.insert(a.queries);
                        roles.caches.insert(a.keys);
                        widths.extend(a.bias.map(|b| b.buckets));
                        widths.insert(a.width);
                        widths.extend(function.ty(node.operands[2]).dims.last());
                    }
                    Op::Embed { over, .. } => {
                        let ids = function.values[node.operands[1]].ty.dims.len();
                        // Positions are one-dimensional and look up a table that is too small to split.
                        if ids > 1 {
                            roles.vocabularies.insert(*over);
                        }
                        widths.extend((ids <= 1).then_some(*over));
                        residual.extend(function.ty(node.operands[0]).dims[1..].iter().copied());
                    }
                    op if op.normalised().is_some() => residual.extend(op.normalised()),
                    Op::Input(_) => {
                        let ty = function.ty(node.result());
                        roles.batches.extend(ty.dims.iter().copied());
                        residual.extend(ty.dims.iter().copied().filter(|_| ty.dtype.is_float()));
                    }
                    // Routers compare all experts, so their scores are never split.
                    Op::Experts(Experts::Route(route) | Experts::RouteBackward(route)) => {
                        widths.extend([route.over, route.top]);
                    }
                    Op::Experts(Experts::Deal(deal)) => {
                        roles.experts.insert(deal.experts);
                    }
                    Op::Experts(
                        Experts::Dispatch(slots) | Experts::Combine(slots) | Experts::Products(slots),
                    ) => {
                        roles.experts.insert(slots.experts);
                    }
                    Op::Cache(
                        Cache::AppendPages { pages, slots, .. } | Cache::GatherPages { pages, slots, .. },
                    ) => {
                        let mut table = 4;
                        if let Op::Cache(Cache::GatherPages { over, beyond, .. }) = &node.op {
                            roles.pages.insert(*over, [*pages, *slots]);
                            roles.host_pages.extend(*beyond);
                            table = 1;
                        }
                        widths.extend(function.ty(node.operands[table]).dims.last());
                    }
                    Op::Softmax { over } => {
                        explicit.scores.push((*over, function.ty(node.operands[0]).dims.to_vec()));
                    }
                    Op::Window(Window::Cut { to, .. }) if is_renamed(module, function, node) => {
                        let from = function.ty(node.operands[0]).dims.last().copied();
                        explicit.renamed.extend(from.map(|from| (from, *to)));
                    }
                    // Parts of a head.
                    Op::Window(_) => {
                        let values = node.operands.iter().chain(&node.results);
                        widths.extend(values.filter_map(|&v| function.ty(v).dims.last()));
                    }
                    // Sums of squares, and of outputs times their gradients, multiply by no weight.
                    Op::Einsum if weights.contains(&node.operands[1]) => {
                        let weight = function.ty(node.operands[1]);
                        products.extend(weight.dims.iter().copied());
                        explicit.weights.push(weight.dims.to_vec());
                    }
                    _ => {}
                }
            }
        }
        // What a weight of heads has beside them is the width of a head or of the residual stream.
        let is_head = |d: &DimId| roles.heads.iter().any(|&(h, k)| h == *d || k == *d);
        let of_heads = explicit.weights.iter().filter(|dims| dims.iter().any(is_head));
        widths.extend(of_heads.flatten().copied().filter(|d| !is_head(d)));
        explicit.assign(&mut roles, &mut widths);
        // Types of token are looked up as tokens are, by a table that is too small to split.
        let rows = |d: &DimId| module.space.size(*d);
        let most = roles.vocabularies.iter().map(rows).max();
        roles.vocabularies.retain(|d| Some(rows(d)) == most);
        // Parts of a sequence are sequences, and those of a batch are batches.
        for (part, dim) in module.space.dims.iter() {
            let Some(Part { of, .. }) = dim.part else { continue };
            for all in [&mut roles.sequences, &mut roles.batches] {
                if all.contains(&of) {
                    all.insert(part);
                }
            }
        }
        let heads: BTreeSet<DimId> = roles.heads.iter().flat_map(|&(h, k)| [h, k]).collect();
        let Roles { batches, sequences, caches, .. } = &mut roles;
        caches.retain(|d| !queries.contains(d));
        // Stacks of micro-batches are taken apart by calls.
        let nodes = module.functions.values().flat_map(|f| &f.nodes);
        let stacks: BTreeSet<DimId> = nodes
            .filter_map(|n| match &n.op {
                Op::Call { scan, .. } => scan.map(|scan| scan.over),
                _ => None,
            })
            .collect();
        batches.retain(|d| {
            !stacks.contains(d)
                && !sequences.contains(d)
                && !products.contains(d)
                && !heads.contains(d)
                && !widths.contains(d)
        });
        roles.hidden = products
            .into_iter()
            .filter(|d| !heads.contains(d) && !widths.contains(d) && !residual.contains(d))
            .filter(|d| !roles.sequences.contains(d) && !roles.vocabularies.contains(d))
            .filter(|d| !roles.experts.contains(d))
            // Of one element there is nothing to split.
            .filter(|&d| module.space.size(d) > 1)
            .collect();
        roles
    }

    /// Whether weights are split along `dim` by a tensor-parallel strategy.
    pub fn splits_weights(&self, dim: DimId) -> bool {
        self.heads.iter().any(|&(h, k)| h == dim || k == dim)
            || self.hidden.contains(&dim)
            || self.vocabularies.contains(&dim)
    }
}

/// Attention that is written out: products, a softmax, a product.
#[derive(Default)]
struct Explicit {
    /// For each softmax the dimension that it goes over, and those of the scores.
    scores: Vec<(DimId, Vec<DimId>)>,
    /// Dimensions that are seen under another name as well, with that name.
    renamed: Vec<(DimId, DimId)>,
    /// The dimensions of weights in products.
    weights: Vec<Vec<DimId>>,
}

impl Explicit {
    /// The dimensions of scores are tokens, under two names, and heads, which weights have too; the other dimensions of
    /// these weights are widths of a head or of the residual stream.
    fn assign(self, roles: &mut Roles, widths: &mut BTreeSet<DimId>) {
        let over: BTreeSet<DimId> = self.scores.iter().map(|&(over, _)| over).collect();
        for (from, to) in self.renamed {
            if over.contains(&to) {
                roles.sequences.insert(from);
                widths.insert(to);
            } else {
                widths.extend([from, to])
            }
        }
        for (over, scores) in self.scores {
            for head in scores.into_iter().filter(|&d| d != over) {
                for weight in self.weights.iter().filter(|dims| dims.contains(&head)) {
                    roles.heads.insert((head, head));
                    widths.extend(weight.iter().copied().filter(|&d| d != head));
                }
            }
        }
    }
}

/// Whether a node gives all of a dimension another name.
fn is_renamed(module: &Module, function: &Function, node: &Node) -> bool {
    let size = |v: ValueId| function.ty(v).dims.last().map(|&d| module.space.size(d));
    size(node.operands[0]) == size(node.result())
}
