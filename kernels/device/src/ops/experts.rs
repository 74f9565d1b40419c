//! Mixtures of experts.

use ithaca_ir::ops::experts::{self, Experts, Gates, Scoring};
use ithaca_ir::{DType, Space};

use super::view::{Cx, View, float, reals, signed};
use crate::address::Region;
use crate::argument::{Pointer, arguments};
use crate::error::LowerError;
use crate::flash::Block;
use crate::structs::{Groups, Reals, Route, Slots};

/// The block of warps that deal slots.
const DEAL: Block = Block { rows: 4, threads: 128, shared_bytes: 16 };

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
            Experts::Deal(deal) => {
                let groups = self.groups(&deal.shared, x[0])?;
                let [top, experts, slots] =
                    [deal.top, deal.experts, deal.shared.slots].map(|dim| signed(self.space.size(dim)));
                let overflow = match deal.bound {
                    Some(_) => Pointer { region: Region::Overflow, bytes: 0 },
                    None => Pointer::NONE,
                };
                let n = groups.count() * experts;
                let arguments = arguments![x[0].at, z[0].at, groups, top, experts, slots, overflow, n];
                self.launch_blocks("deal", (n + DEAL.rows - 1) / DEAL.rows, DEAL, arguments)
            }
            Experts::Dispatch(slots) => {
                let s = self.slots(slots, x[0], z[0])?;
                let ((gates, gated), n, ty) = (gates(x), s.groups.size(), z[0].ty);
                // Slots without a token are zero.
                self.fill(0.0, z[0])?;
                let arguments = arguments![s, x[1].at, gates, gated, z[0].at, n];
                self.launch_rows(&format!("dispatch<{}>", float(ty)?), (n, s.width, ty.dtype), arguments)
            }
            Experts::Combine(slots) => {
                let s = self.slots(slots, x[0], x[1])?;
                let ((gates, gated), n, ty) = (gates(x), s.groups.size(), z[0].ty);
                let arguments = arguments![s, x[1].at, gates, gated, z[0].at, n];
                self.launch_rows(&format!("combine<{}>", float(ty)?), (n, s.width, ty.dtype), arguments)
            }
            Experts::Products(slots) => {
                let s = self.slots(slots, x[0], x[1])?;
                let n = s.groups.size() * s.top;
                if z[0].ty.dtype != DType::F32 && x[1].ty.dtype != DType::F64 {
                    return LowerError::unsupported("products of slots in a narrow type");
                }
                let (kernel, dtype) = (format!("slot_products<{}>", float(x[1].ty)?), x[1].ty.dtype);
                self.launch_rows(&kernel, (n, s.width, dtype), arguments![s, x[1].at, x[2].at, z[0].at, n])
            }
        }
    }

    /// The groups of the tokens that the rank holds.
    fn groups(&self, shared: &experts::Shared, places: View<'_>) -> Result<Groups, LowerError> {
        let (extents, each) = (self.local(places.ty).extents, shared.tokens(self.space));
        match (extents.as_slice(), each) {
            (&[sequences, tokens, _], Some(each)) => {
                let [each_sequences, each_tokens] = each.map(signed);
                Ok(Groups { sequences, tokens, each_sequences, each_tokens })
            }
            _ => LowerError::unsupported("groups of tokens that do not divide their sequence"),
        }
    }

    /// The slots as kernels take them: `filled` has them, and its first dimension is the experts.
    fn slots(&self, slots: &experts::Slots, places: View<'_>, filled: View<'_>) -> Result<Slots, LowerError> {
        let lf = self.local(filled.ty);
        Ok(Slots {
            places: places.at,
            groups: self.groups(&slots.shared, places)?,
            top: signed(self.space.size(slots.top)),
            slots: signed(self.space.size(slots.shared.slots)),
            first: self.region(&lf).first().map_or(0, |r| signed(r.start)),
            held: lf.extents.first().copied().unwrap_or(1),
            width: lf.extents.last().copied().unwrap_or(1),
        })
    }
}

impl Groups {
    /// Tokens.
    fn size(&self) -> i64 {
        self.sequences * self.tokens
    }

    /// Groups.
    fn count(&self) -> i64 {
        self.size() / (self.each_sequences * self.each_tokens).max(1)
    }
}
