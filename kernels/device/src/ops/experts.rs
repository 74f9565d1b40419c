//! Mixtures of experts.

use ithaca_ir::ops::experts::{self, Experts, Gates, Scoring};
use ithaca_ir::{DType, Space};

use super::view::{Cx, View, reals, signed};
use crate::argument::{Pointer, arguments};
use crate::error::LowerError;
use crate::structs::{Reals, Route, Slots};

/// Threads that share a row of slots: the kernels' `kLanes`.
const LANES: i64 = 32;

fn route_of(space: &Space, route: &experts::Route) -> Route {
    let (groups, kept) = route.groups.map_or((0, 0), |g| (signed(g.count), signed(g.kept)));
    Route {
        experts: signed(space.size(route.over)),
        top: signed(space.size(route.top)),
        sigmoid: route.scoring == Scoring::Sigmoid,
        shares: route.gates == Gates::Shares,
        scale: route.scale,
        groups,
        kept,
    }
}

/// Gates, and whether there are any.
fn gates(x: &[View<'_>]) -> (Reals, bool) {
    let none = Reals { data: Pointer::NONE, storage: 1 };
    x.get(2).map_or((none, false), |&gates| (reals(gates), true))
}

impl Cx<'_> {
    pub(crate) fn experts(&self, op: &Experts, x: &[View<'_>], z: &[View<'_>]) -> Result<(), LowerError> {
        match op {
            Experts::Route(route) => {
                let r = route_of(self.space, route);
                let tokens = self.local(x[0].ty).size / r.experts.max(1);
                let bias = x.get(1).map_or(Pointer::NONE, |bias| bias.at);
                self.launch_of(
                    "route",
                    x[0].ty,
                    tokens,
                    arguments![r, x[0].at, bias, z[0].at, z[1].at, tokens],
                )
            }
            Experts::RouteBackward(route) => {
                let r = route_of(self.space, route);
                let tokens = self.local(x[0].ty).size / r.experts.max(1);
                self.launch_of(
                    "route_backward",
                    x[0].ty,
                    tokens,
                    arguments![r, x[0].at, x[1].at, reals(x[2]), z[0].at, tokens],
                )
            }
            Experts::Dispatch(slots) => {
                let s = self.slots(slots, x[0], z[0])?;
                let ((gates, gated), n) = (gates(x), s.held * s.groups * LANES);
                self.launch_of("dispatch", z[0].ty, n, arguments![s, x[1].at, gates, gated, z[0].at, n])
            }
            Experts::Combine(slots) => {
                let s = self.slots(slots, x[0], x[1])?;
                let ((gates, gated), n) = (gates(x), s.groups * s.group * LANES);
                self.launch_of("combine", z[0].ty, n, arguments![s, x[1].at, gates, gated, z[0].at, n])
            }
            Experts::Products(slots) => {
                let s = self.slots(slots, x[0], x[1])?;
                let n = s.groups * s.group * s.top;
                if z[0].ty.dtype != DType::F32 && x[1].ty.dtype != DType::F64 {
                    return LowerError::unsupported("products of slots in a narrow type");
                }
                self.launch_of("slot_products", x[1].ty, n, arguments![s, x[1].at, x[2].at, z[0].at, n])
            }
        }
    }

    /// The slots as kernels take them: `filled` has them, and its first dimension is the experts.
    fn slots(
        &self,
        slots: &experts::Slots,
        choices: View<'_>,
        filled: View<'_>,
    ) -> Result<Slots, LowerError> {
        let (group, each) = match slots.capacity {
            None => (1, 1),
            Some(capacity) => match capacity.tokens(self.space) {
                Some(tokens) => (signed(tokens), signed(self.space.size(capacity.slots))),
                None => return LowerError::unsupported("groups of tokens that do not divide their sequence"),
            },
        };
        let (lc, lf) = (self.local(choices.ty), self.local(filled.ty));
        let top = lc.extents.last().copied().unwrap_or(1);
        let tokens = if top > 0 { lc.size / top } else { 0 };
        Ok(Slots {
            choices: choices.at,
            top,
            groups: tokens / group.max(1),
            group,
            slots: each,
            first: self.region(&lf).first().map_or(0, |r| signed(r.start)),
            held: lf.extents.first().copied().unwrap_or(1),
            width: lf.extents.last().copied().unwrap_or(1),
        })
    }
}
