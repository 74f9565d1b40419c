//! The plan by which functions are rewritten, and the state of the rewriting.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::layout::{At, AxisList, Layout};
use ithaca_ir::module::{FuncId, Function, ValueId};
use ithaca_ir::ops::Op;
use ithaca_ir::{Arena, AxisId, DType, DimId, FunctionBuilder, TensorType};
use ithaca_pass::Context;
use ithaca_pass::roles::Roles;

use super::flow::Flows;
use super::legality::Decisions;
use super::placements::Placements;
use super::stages::Stages;
use super::zero::Zero;
use crate::strategy::Placement;

/// The decisions that the rewriting follows.
pub(super) struct Plan {
    /// Which axes split what, by function.
    pub(super) placements: Placements,
    /// Roles of dimensions.
    pub(super) roles: Roles,
    /// What was decided about dimensions.
    pub(super) decisions: Decisions,
    /// For key/value heads as they are loaded, the dimension in which attention sees them.
    pub(super) copies: BTreeMap<DimId, DimId>,
    /// For a vocabulary that weights are split along, the dimension that tells apart what its parts give.
    pub(super) parts: BTreeMap<DimId, DimId>,
    /// Heads of weights that the axes of caches do not split: those of keys and values, and of queries that do not divide.
    pub(super) heads_as_inside: BTreeSet<DimId>,
    /// What passes between functions.
    pub(super) flows: Flows,
    /// What is split over ranks that hold the same weights.
    pub(super) zero: Zero,
    /// The weights that stay whole, by name, although `zero` splits weights.
    pub(super) persistent: BTreeSet<String>,
    /// The axes along which ranks hold the same weights.
    pub(super) replicas: AxisList,
    /// By name of a gradient, the axes over which its sum is pending from one micro-batch to the next.
    pub(super) pending: BTreeMap<String, AxisList>,
    /// The element types in which gradients are sent, by name of the weight.
    pub(super) sent_as: BTreeMap<String, DType>,
}

impl Plan {
    /// Whether a dimension is one of heads, as weights or as attention have them.
    pub(super) fn is_head(&self, dim: DimId) -> bool {
        let copied = self.copies.values().any(|&c| c == dim);
        copied || self.roles.heads.iter().any(|&(h, k)| h == dim || k == dim)
    }

    /// A weight where the placement has it: split along heads, hidden width and vocabulary.
    pub(super) fn weight(&self, placement: &Placement, ty: &TensorType) -> TensorType {
        let mut ty = ty.with_layout(Layout::whole(ty.dims.len()));
        let of_experts = ty.dims.iter().any(|d| self.roles.experts.contains(d));
        for i in 0..ty.dims.len() {
            let dim = ty.dims[i];
            if self.roles.splits_weights(dim) && !self.decisions.whole.contains(&dim) {
                // An axis that splits experts does not split their width as well.
                let free = |a: &&AxisId| !of_experts || !placement.experts.contains(a);
                let axes = if self.heads_as_inside.contains(&dim) && self.copies.contains_key(&dim) {
                    // Attention has copies of them, and they are too few for all of its ranks.
                    placement.weights.iter().filter(|a| !placement.cache.contains(a)).copied().collect()
                } else if self.heads_as_inside.contains(&dim) {
                    placement.attention_heads()
                } else {
                    placement.weights.clone()
                };
                ty.layout.split[i] = axes.iter().filter(free).copied().collect();
            } else if self.roles.experts.contains(&dim) {
                ty.layout.split[i].clone_from(&placement.experts);
            }
        }
        ty
    }
}

/// Values outside attention.
#[derive(Clone, Copy)]
pub(super) enum Outside {
    /// Inputs, and integers between functions.
    Inputs,
    /// The residual stream.
    Residual,
}

pub(super) struct Rewriter<'a, 'p> {
    pub(super) plan: &'a Plan,
    /// Where one of several layouts is chosen.
    pub(super) cx: &'a mut Context<'p>,
    /// The placement of this function.
    pub(super) placement: &'a Placement,
    /// The functions before this one, laid out.
    pub(super) made: &'a Arena<FuncId, Function>,
    /// For each result of these functions, what it was outside attention if it is left inside.
    pub(super) given: &'a [Vec<Option<TensorType>>],
    pub(super) id: FuncId,
    pub(super) source: &'a Function,
    pub(super) b: FunctionBuilder<'a>,
    /// The new value of each old one.
    pub(super) map: BTreeMap<ValueId, ValueId>,
    /// For old values that become what lasts, and for what these are made of by element: the layout that they end in.
    pub(super) wanted: BTreeMap<ValueId, Layout>,
    /// For old values that attention reads or returns, the new value inside.
    pub(super) inside: BTreeMap<ValueId, ValueId>,
    /// For new values that came in inside attention, what they were outside.
    pub(super) outside: BTreeMap<ValueId, TensorType>,
    /// For weights that are kept in shards, the layout in which they are used.
    pub(super) gathered: BTreeMap<ValueId, Layout>,
    /// For old scalars that are sums over different axes, all still to be taken: the summands.
    pub(super) summands: BTreeMap<ValueId, Vec<ValueId>>,
    /// For old masks that are yet to be drawn, the key and the operation.
    pub(super) masks: BTreeMap<ValueId, (ValueId, Op)>,
    /// Reshards made before: the same value is never moved twice to the same layout.
    pub(super) resharded: BTreeMap<(ValueId, Layout), ValueId>,
    /// What each reshard was made of.
    pub(super) came_from: BTreeMap<ValueId, ValueId>,
    /// Copies of heads made before.
    pub(super) repeated: BTreeMap<(ValueId, DimId), ValueId>,
    /// Values that are weights, as they were loaded.
    pub(super) weights: BTreeSet<ValueId>,
    /// Stages of a pipeline.
    pub(super) stages: Stages,
    /// By name of a gradient whose contributions are summed, the axes over which all of them are pending.
    pub(super) contributions: &'a mut BTreeMap<String, AxisList>,
    /// For types of what passes from stage to stage, the layout in which ranks that hold the same send parts of it, if they do.
    pub(super) parts_sent: BTreeMap<TensorType, Option<Layout>>,
    /// What was sent to other stages before.
    pub(super) sent: BTreeMap<(ValueId, Option<At>), ValueId>,
}

/// The type once pending sums are taken, nothing else moved.
pub(super) fn settled(ty: &TensorType) -> TensorType {
    let mut ty = ty.clone();
    ty.layout.partial.clear();
    ty
}
