//! The operands that operations of experts take, and the types of their results.

use smallvec::{SmallVec, smallvec};

use crate::dim::DimId;
use crate::dtype::DType;
use crate::layout::AxisList;
use crate::ops::check::{need_float, sums_in, unplaced};
use crate::ops::context::Types;
use crate::ops::error::{OpError, ensure};
use crate::ops::table::experts::{Experts, Route, Shared, Slots};
use crate::space::Space;
use crate::types::TensorType;

impl Experts {
    /// The result types, their layouts left to the rule.
    pub(in crate::ops) fn infer(&self, space: &Space, operands: &[&TensorType]) -> Result<Types, OpError> {
        let cx = Cx { name: self.name(), space };
        match self {
            Experts::Route(route) => cx.route(route, operands),
            Experts::RouteBackward(route) => {
                cx.check_route(route, operands[0])?;
                cx.choices(operands[1])?;
                let rows = cx.chosen(route, operands[0]);
                cx.shape(
                    operands[1].dims == rows && operands[2].dims == rows,
                    "choices and gradients have the dimensions of the logits, the last chosen from",
                )?;
                need_float(cx.name, operands[2].dtype)?;
                Ok(smallvec![unplaced(operands[0])])
            }
            Experts::Deal(deal) => {
                let slots = Slots { experts: deal.experts, top: deal.top, shared: deal.shared };
                let tokens = cx.tokens(&slots, operands[0])?;
                cx.groups(&slots, &tokens)?;
                let fits = deal.bound.is_none_or(|bound| bound.is_finite() && bound > 0.0);
                cx.shape(fits, "the bound is a positive factor of the even share")?;
                Ok(smallvec![unplaced(operands[0])])
            }
            Experts::Dispatch(slots) => {
                let tokens = cx.tokens(slots, operands[0])?;
                let width = cx.width(&tokens, operands[1])?;
                cx.gates(operands[0], operands.get(2).copied())?;
                Ok(smallvec![TensorType::new(operands[1].dtype, cx.filled(slots, &tokens, width)?)])
            }
            Experts::Combine(slots) => {
                let (tokens, width) = cx.read(slots, operands[0], operands[1])?;
                cx.gates(operands[0], operands.get(2).copied())?;
                let dims = tokens.into_iter().chain([width]);
                Ok(smallvec![TensorType::new(operands[1].dtype, dims)])
            }
            Experts::Products(slots) => {
                let (tokens, width) = cx.read(slots, operands[0], operands[1])?;
                let alike =
                    cx.width(&tokens, operands[2])? == width && operands[2].dtype == operands[1].dtype;
                cx.shape(alike, "x has the width and the element type of the slots")?;
                let dtype = sums_in(operands[1].dtype);
                Ok(smallvec![TensorType { dtype, ..unplaced(operands[0]) }])
            }
        }
    }

    /// The axes by which the declared result of a dispatch splits the experts: every rank may fill the slots of its own.
    pub(in crate::ops) fn declared_experts(&self, declared: &[TensorType]) -> Option<(DimId, AxisList)> {
        match self {
            Experts::Dispatch(slots) => {
                let ty = declared.first().filter(|ty| ty.has(slots.experts))?;
                Some((slots.experts, ty.axes_of(slots.experts).into()))
            }
            Experts::Route(_)
            | Experts::RouteBackward(_)
            | Experts::Deal(_)
            | Experts::Combine(_)
            | Experts::Products(_) => None,
        }
    }
}

struct Cx<'a> {
    name: &'static str,
    space: &'a Space,
}

impl Cx<'_> {
    fn route(&self, route: &Route, operands: &[&TensorType]) -> Result<Types, OpError> {
        let logits = operands[0];
        self.check_route(route, logits)?;
        if let Some(bias) = operands.get(1) {
            need_float(self.name, bias.dtype)?;
            self.shape(bias.dims.as_slice() == [route.over], "the bias is a vector over the experts")?;
        }
        let dims = self.chosen(route, logits);
        Ok(smallvec![TensorType::new(logits.dtype, dims.iter().copied()), TensorType::new(DType::I32, dims)])
    }

    fn check_route(&self, route: &Route, logits: &TensorType) -> Result<(), OpError> {
        need_float(self.name, logits.dtype)?;
        let fits = logits.dims.last() == Some(&route.over) && !logits.has(route.top);
        self.shape(fits, "`over` is the last dimension of the logits, and `top` none of them")?;
        let (experts, top) = (self.space.size(route.over), self.space.size(route.top));
        let reach = match route.groups {
            None => experts,
            Some(g) => {
                let size = experts / g.count.max(1);
                let (kept, n) = (g.kept, g.count);
                self.shape(
                    n != 0 && experts.is_multiple_of(n) && (1..=n).contains(&kept) && size >= 2,
                    &format!("{experts} experts cannot be chosen from {kept} of {n} groups; a group has two or more"),
                )?;
                size * kept
            }
        };
        let fits = (1..=reach).contains(&top) && experts <= 1 << 31;
        self.shape(fits, &format!("{top} experts cannot be chosen from {reach}"))?;
        self.shape(route.scale.is_finite(), "the scale is finite")
    }

    /// The dimensions of the choices.
    fn chosen(&self, route: &Route, logits: &TensorType) -> SmallVec<[DimId; 4]> {
        let n = logits.dims.len() - 1;
        logits.dims[..n].iter().copied().chain([route.top]).collect()
    }

    fn choices(&self, choices: &TensorType) -> Result<(), OpError> {
        let dtype = choices.dtype;
        ensure!(dtype == DType::I32, "V04", "`{}` takes choices and places in i32, not {dtype}", self.name);
        Ok(())
    }

    /// The dimensions of tokens, those of the choices but the last.
    fn tokens(&self, slots: &Slots, choices: &TensorType) -> Result<Vec<DimId>, OpError> {
        self.choices(choices)?;
        let (last, tokens) =
            choices.dims.split_last().map_or((None, &[][..]), |(last, rest)| (Some(*last), rest));
        let fits = last == Some(slots.top) && !choices.has(slots.experts);
        self.shape(fits, "choices end in `top`, and `experts` is none of their dimensions")?;
        Ok(tokens.to_vec())
    }

    /// The dimension of x after those of tokens.
    fn width(&self, tokens: &[DimId], x: &TensorType) -> Result<DimId, OpError> {
        need_float(self.name, x.dtype)?;
        let front = x.dims.len().checked_sub(1);
        self.shape(
            front.is_some_and(|n| x.dims[..n] == *tokens),
            "x has the dimensions of the tokens and its width",
        )?;
        Ok(x.dims[tokens.len()])
    }

    /// The dimensions of slots.
    fn filled(&self, slots: &Slots, tokens: &[DimId], width: DimId) -> Result<Vec<DimId>, OpError> {
        self.groups(slots, tokens)?;
        let Shared { batches, groups, slots: each, .. } = slots.shared;
        let dims = vec![slots.experts, batches, groups, each, width];
        let twice = dims.iter().enumerate().any(|(i, d)| dims[..i].contains(d));
        self.shape(!twice, "experts, tokens, slots and width are different dimensions")?;
        Ok(dims)
    }

    /// Groups of tokens divide the tokens, and their slots can be numbered.
    fn groups(&self, slots: &Slots, tokens: &[DimId]) -> Result<(), OpError> {
        let Shared { batch, sequence, .. } = slots.shared;
        let fits = tokens == [batch, sequence] && slots.shared.tokens(self.space).is_some();
        self.shape(fits, "tokens are those of a batch of sequences, and groups divide both")?;
        let numbers =
            u128::from(self.space.size(slots.experts)) * u128::from(self.space.size(slots.shared.slots));
        self.shape(numbers <= 1 << 31, "the slots of all experts for a group are numbered in i32")
    }

    /// Slots that are read: the dimensions of tokens, and the width.
    fn read(
        &self,
        slots: &Slots,
        choices: &TensorType,
        y: &TensorType,
    ) -> Result<(Vec<DimId>, DimId), OpError> {
        need_float(self.name, y.dtype)?;
        let tokens = self.tokens(slots, choices)?;
        self.shape(!y.dims.is_empty(), "slots end in a width")?;
        let width = y.dims[y.dims.len() - 1];
        let fits = self.filled(slots, &tokens, width)? == y.dims.as_slice();
        self.shape(fits, "slots have experts, tokens or groups with slots, and a width")?;
        Ok((tokens, width))
    }

    fn gates(&self, choices: &TensorType, gates: Option<&TensorType>) -> Result<(), OpError> {
        let Some(gates) = gates else { return Ok(()) };
        need_float(self.name, gates.dtype)?;
        self.shape(gates.dims == choices.dims, "gates have the dimensions of the choices")
    }

    fn shape(&self, holds: bool, rule: &str) -> Result<(), OpError> {
        ensure!(holds, "V05", "`{}`: {rule}", self.name);
        Ok(())
    }
}
