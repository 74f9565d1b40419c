//! Random attributes and operand types for an operation with a given result type.
//!
//! Programs for a rule are drawn from the result down to the values: each operand of the pattern is drawn for the type
//! chosen here. A draw may be wrong: inference runs afterwards, and a draw with another result type is discarded.

mod attention;
mod drawer;

use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{Attr, Unary};
use ithaca_ir::{DType, DimId, Layout, TensorType};

use super::draw::Draw;
use super::syntax::App;
pub(super) use drawer::Fixed;
use drawer::{
    Attributes, Drawer, call, from_parts, laid_out_as, renamed, whole_dims, with_dim, with_last, word,
};

/// Random attributes and operand types of `app` for a result of type `want`; `may_add` allows attributes that neither
/// the pattern nor `fixed` has. `None` when no operand gives `want`, or the draw failed.
pub(super) fn operands(
    draw: &mut Draw,
    app: &App,
    fixed: &Fixed,
    may_add: bool,
    want: &TensorType,
) -> Option<(Attributes, Vec<TensorType>)> {
    let mut d = Drawer { draw, app, fixed, may_add, attrs: Vec::new() };
    let operands = match app.op.as_str() {
        op if Unary::ALL.iter().any(|f| f.name() == op) => vec![want.clone()],
        "scale" => {
            d.number("factor", &[0.5, 2.0, -1.5, 3.0, 0.25, 1.0]);
            vec![want.clone()]
        }
        "clamp" | "clamp_backward" => {
            for (bound, numbers) in [("min", [-0.5, -2.0]), ("max", [0.5, 1.5])] {
                if d.wants(bound) {
                    d.number(bound, &numbers);
                }
            }
            vec![want.clone(); app.operands.len()]
        }
        "cast" => {
            d.attr("to", word(want.dtype.name()));
            // A mask is not a number.
            let numbers: Vec<DType> =
                DType::ALL.into_iter().filter(|&t| t.is_arithmetic() || t == DType::I32).collect();
            vec![TensorType { dtype: d.draw.rng.one_of(&numbers)?, ..want.clone() }]
        }
        "add" | "sub" | "mul" | "div" | "log_add_exp" => vec![want.clone(), d.part_of(want)],
        "accumulate" => vec![want.clone(), want.clone()],
        "unary_backward" | "gated" | "gated_backward" => {
            let f = d.draw.rng.one_of(&Unary::ALL)?;
            d.attr("of", word(f.name()));
            let mut operands = vec![want.clone(); app.operands.len()];
            if app.op != "unary_backward" {
                if d.wants("limit") {
                    d.number("limit", &[0.5, 1.5]);
                }
                // The number that is added to the second factor.
                let n_alike = if app.op == "gated" { 2 } else { 3 };
                operands.iter_mut().skip(n_alike).for_each(|c| *c = TensorType::new(want.dtype, []));
            }
            operands
        }
        "einsum" => d.einsum(want)?,
        "bias_product" => d.bias_product(want)?,
        "embed" => d.embed(want)?,
        "rms_norm" | "layer_norm" => d.norm(want, 1)?,
        "add_rms_norm" | "add_layer_norm" => d.norm(want, 2)?,
        "softmax" => {
            d.one_dim("over", &whole_dims(want))?;
            vec![want.clone()]
        }
        "rms_scale" => d.rms_scale(want)?,
        "rotary" => d.rotary(want)?,
        "attention" => d.attention(want)?,
        "attention_backward" => d.attention_backward(want)?,
        "merge" => {
            let (o, lse) = d.rows(want);
            vec![o.clone(), lse.clone(), o, lse]
        }
        "merge_parts" => {
            let (o, lse) = d.rows(want);
            let over = d.own_dim("over", &[2, 3])?;
            vec![with_dim(&o, 0, over), with_dim(&lse, 0, over)]
        }
        "sink" => {
            let (o, lse) = d.rows(want);
            let heads = d.draw.rng.one_of(&lse.dims)?;
            let logits = laid_out_as(&lse, DType::F32, vec![heads]);
            vec![o, lse, logits]
        }
        "scores" => d.scores(want)?,
        "weigh" => d.weigh(want)?,
        "row_lse" => {
            let over = d.own_dim("over", &[2, 3, 4])?;
            vec![with_last(want, over)]
        }
        op @ ("repeat" | "take" | "fetch") => {
            let derived = want.dims.iter().copied().filter(|&dim| d.base(dim).is_some());
            let to = d.one_dim("to", &derived.collect::<Vec<_>>())?;
            let from = d.base(to)?;
            if op == "repeat" {
                d.dim("from", from);
            }
            vec![renamed(want, to, from)?]
        }
        op @ ("sum_copies" | "join") => {
            let whole: Vec<DimId> =
                want.dims.iter().copied().filter(|&dim| !d.derived(dim).is_empty()).collect();
            let to = d.one_dim("to", &whole)?;
            let mut from = d.derived(to);
            if op == "sum_copies" {
                from.truncate(1);
                d.dim("from", from[0]);
            }
            from.into_iter().map(|dim| renamed(want, to, dim)).collect::<Option<_>>()?
        }
        "fetch_sum" => {
            let from = d.draw.space.dims.ids().find(|&dim| d.base(dim).is_some())?;
            d.dim("from", from);
            vec![renamed(want, d.base(from)?, from)?]
        }
        "reshard" => {
            let mut ty = want.with_layout(Layout::whole(want.dims.len()));
            ty.layout = d.draw.layout(&ty, want.dtype.is_float());
            for &axis in &want.layout.partial {
                ty.layout.split.iter_mut().for_each(|axes| axes.retain(|a| *a != axis));
                ty.layout = ty.layout.clone().without_partial(axis).with_partial(axis);
            }
            vec![ty]
        }
        "permute" => d.permute(want),
        "all_to_all" | "all_gather" | "slice" | "reduce_scatter" | "all_reduce" => d.collective(want)?,
        _ => return None,
    };
    Some((d.attrs, operands))
}

impl Drawer<'_> {
    /// A second operand: the whole type, or some of its dimensions.
    fn part_of(&mut self, want: &TensorType) -> TensorType {
        let all = self.draw.rng.once_in(2);
        let mut dims: Vec<DimId> =
            want.dims.iter().copied().filter(|_| all || self.draw.rng.once_in(2)).collect();
        if self.draw.rng.once_in(5) {
            self.draw.rng.shuffle(&mut dims);
        }
        laid_out_as(want, want.dtype, dims)
    }

    fn einsum(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        let mut parts: [Vec<(DimId, AxisList)>; 2] = Default::default();
        for &d in &want.dims {
            let axes: AxisList = want.axes_of(d).into();
            let side = self.draw.rng.below(4);
            if side != 1 {
                parts[0].push((d, axes.clone()));
            }
            if side != 0 && side != 2 {
                parts[1].push((d, axes));
            }
        }
        let pending = want.layout.partial.clone();
        let n_sums = self.draw.rng.below(2) + usize::from(!pending.is_empty());
        for i in 0..n_sums {
            let axes = if i == 0 { pending.clone() } else { AxisList::new() };
            let degree = self.draw.space.mesh.degree(&axes);
            let unused: Vec<DimId> = self.draw.space.dims.ids().filter(|&d| !want.has(d)).collect();
            let known = unused.into_iter().filter(|&d| {
                self.draw.space.can_split(d, &axes) && parts.iter().flatten().all(|(e, _)| *e != d)
            });
            let known: Vec<DimId> = known.collect();
            let sum = match self.draw.rng.once_in(2).then(|| self.draw.rng.one_of(&known)).flatten() {
                Some(dim) => dim,
                None => self.draw.fresh_dim(&[degree, 2 * degree, 3 * degree]),
            };
            let side = self.draw.rng.below(5);
            for (s, part) in parts.iter_mut().enumerate() {
                if side > 1 || side == s {
                    let at = self.draw.rng.below(part.len() + 1);
                    part.insert(at, (sum, axes.clone()));
                }
            }
        }
        Some(parts.map(|part| from_parts(want.dtype, part)).into())
    }

    fn bias_product(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        if self.wants("of") {
            let f = self.draw.rng.one_of(&Unary::ALL)?;
            self.attr("of", word(f.name()));
        }
        let mut operands = self.einsum(want)?;
        operands.push(self.part_of(want));
        operands.resize(self.app.operands.len(), want.clone());
        Some(operands)
    }

    fn embed(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        let n_ids = self.draw.rng.below(want.dims.len() + 1);
        let degree = self.draw.space.mesh.degree(&want.layout.partial);
        let over = self.own_dim("over", &[2 * degree, 3 * degree])?;
        let ids = laid_out_as(want, DType::I32, want.dims[..n_ids].to_vec());
        let rows = laid_out_as(want, want.dtype, want.dims[n_ids..].to_vec());
        let table = with_dim(&rows, 0, over).split(over, want.layout.partial.clone());
        Some(vec![table, ids])
    }

    /// A norm of the sum of `n` tensors.
    fn norm(&mut self, want: &TensorType, n: usize) -> Option<Vec<TensorType>> {
        let over = self.one_dim("over", &whole_dims(want))?;
        self.number("eps", &[1e-6, 1e-2]);
        if self.app.op.ends_with("rms_norm") && self.wants("offset") {
            self.number("offset", &[1.0, 0.5]);
        }
        let mut operands = vec![want.clone(); n];
        for _ in n..self.app.operands.len() {
            let dims = want.dims.iter().copied().filter(|&d| d == over || self.draw.rng.once_in(4)).collect();
            operands.push(laid_out_as(want, want.dtype, dims));
        }
        Some(operands)
    }

    fn rms_scale(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        let over: Vec<DimId> = match self.fixed.get("over") {
            Some(Attr::List(items)) => items.iter().map(|item| self.named(item)).collect::<Option<_>>()?,
            _ => {
                let mut dims = want.dims.to_vec();
                self.draw.rng.shuffle(&mut dims);
                dims.truncate(1 + self.draw.rng.below(2));
                dims
            }
        };
        let names = over.iter().map(|&d| word(&self.draw.space.dims[d].name)).collect();
        self.attr("over", Attr::List(names));
        self.number("eps", &[1e-6, 1e-2]);
        let sum = if want.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let rest = want.dims.iter().copied().filter(|d| !over.contains(d)).collect();
        Some(vec![want.clone(), laid_out_as(want, sum, rest), self.part_of(want)])
    }

    fn rotary(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        let over = self.one_dim("over", &whole_dims(want))?;
        let width = self.draw.space.size(over) / 2 * 2;
        let width = self.draw.rng.one_of(&[width, 2])?;
        self.attr("width", Attr::Int(width));
        self.number("theta", &[100.0, 10_000.0]);
        let linear = call("linear", [("factor", Attr::Float(2.0))]);
        let scaling = self.draw.rng.one_of(&[word("none"), linear])?;
        self.attr("scaling", scaling);
        let others: Vec<DimId> = want.dims.iter().copied().filter(|&d| d != over).collect();
        let tokens = self.draw.rng.one_of(&others)?;
        Some(vec![want.clone(), laid_out_as(want, DType::I32, vec![tokens])])
    }

    fn permute(&mut self, want: &TensorType) -> Vec<TensorType> {
        let splits: Vec<AxisId> = want.layout.split.iter().flatten().copied().collect();
        if self.draw.rng.once_in(2) {
            let layout = self.draw.moved(&want.layout, &splits);
            return vec![want.with_layout(layout)];
        }
        let mut layout = Layout::whole(want.dims.len());
        let mut axes = splits;
        self.draw.rng.shuffle(&mut axes);
        for axis in axes {
            layout.split[self.draw.rng.below(want.dims.len())].push(axis);
        }
        vec![want.with_layout(layout)]
    }

    fn collective(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        let mut ty = want.clone();
        let free = self.draw.free_axes(&want.layout);
        let innermost = |axis: AxisId| {
            (0..want.dims.len()).find(|&i| want.layout.split[i].last() == Some(&axis)).map(|i| want.dims[i])
        };
        let split: Vec<AxisId> =
            self.draw.space.mesh.axes.ids().filter(|&axis| innermost(axis).is_some()).collect();
        let at = |d: DimId| want.position(d);
        match self.app.op.as_str() {
            "all_gather" => {
                let axis = self.one_axis(&free)?;
                let dim = self.one_dim("dim", &want.dims)?;
                ty.layout.split[at(dim)?].push(axis);
            }
            "all_reduce" => {
                let axis = self.one_axis(&free)?;
                ty.layout = ty.layout.with_partial(axis);
            }
            "slice" | "reduce_scatter" => {
                let axis = self.one_axis(&split)?;
                let dim = self.one_dim("dim", &[innermost(axis)?])?;
                ty.layout.split[at(dim)?].pop();
                if self.app.op == "reduce_scatter" {
                    ty.layout = ty.layout.with_partial(axis);
                }
            }
            _ => {
                let axis = self.one_axis(&split)?;
                let dim = self.one_dim("split", &[innermost(axis)?])?;
                let others: Vec<DimId> = want.dims.iter().copied().filter(|&d| d != dim).collect();
                let concat = self.one_dim("concat", &others)?;
                ty.layout.split[at(dim)?].pop();
                ty.layout.split[at(concat)?].push(axis);
            }
        }
        Some(vec![ty])
    }
}
