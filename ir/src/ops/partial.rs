//! Parts of attention and operations that join them: merging by online softmax, sinks, accumulation, explicit score rows.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::layout::Layout;
use crate::ops::check::{need_float, refuse, sums_in};
use crate::ops::context::Types;
use crate::ops::error::{OpError, ensure};
use crate::ops::table::attention::Attention;
use crate::ops::table::op::Op;
use crate::rule::RuleViolation;
use crate::space::Space;
use crate::types::TensorType;

/// The results of `merge`, `merge_parts`, `accumulate`, `sink`, `scores`, `row_lse` and `weigh`.
pub(super) fn infer(op: &Op, space: &Space, operands: &[&TensorType]) -> Result<Types, OpError> {
    let name = op.name();
    for ty in operands {
        need_float(name, ty.dtype)?;
        // A sum of pending sums is pending.
        ensure!(
            ty.layout.partial.is_empty() || *op == Op::Accumulate,
            "V11",
            "an operand of `{name}` is a sum still to be taken"
        );
    }
    let cx = Cx { name, space };
    match op {
        Op::Merge => cx.merge([0, 1, 2, 3].map(|i| operands[i])),
        Op::MergeParts { over } => cx.merge_parts(*over, operands[0], operands[1]),
        Op::Accumulate => cx.accumulate(operands[0], operands[1]),
        Op::Sink => cx.sink(operands[0], operands[1], operands[2]),
        Op::Scores { attention, columns } => cx.scores(attention, *columns, operands[0], operands[1]),
        Op::RowLse { over, parts } => cx.row_lse(*over, *parts, operands[0]),
        Op::Weigh { attention, columns } => cx.weigh(attention, *columns, [0, 1, 2].map(|i| operands[i])),
        _ => unreachable!("only operations on parts of attention come here"),
    }
}

struct Cx<'a> {
    name: &'static str,
    space: &'a Space,
}

impl Cx<'_> {
    fn merge(&self, [o, lse, o2, lse2]: [&TensorType; 4]) -> Result<Types, OpError> {
        self.rows(o, lse)?;
        let alike = |a: &TensorType, b: &TensorType| a.dims == b.dims && a.dtype == b.dtype;
        self.shape(
            alike(o, o2) && alike(lse, lse2),
            "both parts have the same dimensions and element types",
        )?;
        self.layout(
            fits_in(&o2.layout, &o.layout)
                && fits_in(&lse2.layout, &lse.layout)
                && lse2.layout.moved == o2.layout.moved,
            "the second part is on the ranks of the first, or on some of them",
        )?;
        Ok(smallvec![o.clone(), lse.clone()])
    }

    fn merge_parts(&self, over: DimId, o: &TensorType, lse: &TensorType) -> Result<Types, OpError> {
        self.rows(o, lse)?;
        self.shape(o.dims.first() == Some(&over) && o.dims.len() >= 2, "`over` is the first dimension")?;
        self.whole(o, over)?;
        Ok(smallvec![without(o, over), without(lse, over)])
    }

    fn accumulate(&self, x: &TensorType, y: &TensorType) -> Result<Types, OpError> {
        let alike = x.dims == y.dims && x.dtype == y.dtype;
        self.shape(alike, "both operands have the same dimensions and element types")?;
        let fits = fits_in(&y.layout, &x.layout);
        self.layout(fits, "the second operand is on the ranks of the first, or on some of them")?;
        Ok(smallvec![x.clone()])
    }

    fn sink(&self, o: &TensorType, lse: &TensorType, logits: &TensorType) -> Result<Types, OpError> {
        self.rows(o, lse)?;
        self.shape(logits.dims.len() == 1, "the logits are a vector over the heads")?;
        let heads = logits.dims[0];
        let alike = lse.has(heads) && lse.axes_of(heads) == logits.axes_of(heads);
        self.layout(alike, "the logits are split as the heads are")?;
        Ok(smallvec![o.clone(), lse.clone()])
    }

    fn scores(
        &self,
        a: &Attention,
        columns: DimId,
        q: &TensorType,
        k: &TensorType,
    ) -> Result<Types, OpError> {
        let heads_fit = q.has(a.heads) && k.has(a.kv_heads) && q.axes_of(a.heads) == k.axes_of(a.kv_heads);
        self.shape(
            q.has(a.queries) && k.has(a.keys) && heads_fit,
            "q has queries and heads, k has keys and their heads, split alike",
        )?;
        self.block(columns, k, a.keys)?;
        let mut scores = without(q, a.width);
        scores.dtype = DType::F32;
        scores.dims.push(columns);
        scores.layout.split.push(Default::default());
        Ok(smallvec![scores])
    }

    fn row_lse(&self, over: DimId, parts: Option<DimId>, x: &TensorType) -> Result<Types, OpError> {
        self.shape(x.has(over), "x has the dimension `over`")?;
        let mut rows = without(x, over);
        rows.dtype = sums_in(x.dtype);
        let Some(parts) = parts else {
            self.whole(x, over)?;
            return Ok(smallvec![rows]);
        };
        let axes = x.axes_of(over);
        let (n, degree) = (self.space.size(parts), self.space.mesh.degree(axes));
        self.shape(
            !x.has(parts) && n == degree,
            &format!("`parts` of {n} must tell apart the {degree} ranks that hold parts of `over`"),
        )?;
        rows.dims.insert(0, parts);
        rows.layout.split.insert(0, axes.into());
        Ok(smallvec![rows])
    }

    fn weigh(&self, a: &Attention, columns: DimId, [s, lse, v]: [&TensorType; 3]) -> Result<Types, OpError> {
        let rows = without(s, columns);
        let heads_fit = v.has(a.keys) && v.axes_of(a.kv_heads) == s.axes_of(a.heads);
        self.shape(rows.dims == lse.dims && heads_fit, "scores, lse and v have the same rows and heads")?;
        self.layout(rows.layout == lse.layout, "lse is on the ranks of the scores")?;
        self.block(columns, v, a.keys)?;
        let mut o = lse.clone();
        o.dtype = DType::F32;
        o.dims.push(a.value_width(v));
        o.layout.split.push(Default::default());
        Ok(smallvec![o])
    }

    /// `columns` has as many elements as a rank holds of `keys`.
    fn block(&self, columns: DimId, ty: &TensorType, keys: DimId) -> Result<(), OpError> {
        let (n, held) = (self.space.size(columns), self.space.max_extent(keys, ty.axes_of(keys)));
        let name = &self.space.dims[columns].name;
        self.shape(n == held, &format!("{n} columns `{name}` are not the {held} keys that a rank holds"))
    }

    /// lse has the dimensions of o but the last, and the same layout.
    fn rows(&self, o: &TensorType, lse: &TensorType) -> Result<(), OpError> {
        self.shape(!o.dims.is_empty(), "o has a width")?;
        let width = o.dims[o.dims.len() - 1];
        let rows = without(o, width);
        self.shape(rows.dims == lse.dims, "lse has the dimensions of o but the last")?;
        self.layout(rows.layout == lse.layout, "o and lse are on the same ranks")?;
        self.whole(o, width)
    }

    fn whole(&self, ty: &TensorType, dim: DimId) -> Result<(), OpError> {
        match ty.axes_of(dim) {
            [] => Ok(()),
            _ => Err(refuse(self.name, self.space, RuleViolation::NotWhole(dim))),
        }
    }

    fn shape(&self, holds: bool, rule: &str) -> Result<(), OpError> {
        ensure!(holds, "V05", "`{}`: {rule}", self.name);
        Ok(())
    }

    fn layout(&self, holds: bool, rule: &str) -> Result<(), OpError> {
        ensure!(holds, "V07", "`{}`: {rule}", self.name);
        Ok(())
    }
}

/// The type without `dim`.
fn without(ty: &TensorType, dim: DimId) -> TensorType {
    let mut ty = ty.clone();
    if let Some(i) = ty.position(dim) {
        ty.dims.remove(i);
        ty.layout.split.remove(i);
    }
    ty
}

/// Whether the ranks of `part` are ranks of `whole`.
pub(super) fn fits_in(part: &Layout, whole: &Layout) -> bool {
    let by = |layout: &Layout, axis| layout.moved_along(axis).map_or(0, |m| m.by);
    let only = |layout: &Layout, axis| layout.moved_along(axis).and_then(|m| m.only);
    let mut axes = part.moved.iter().chain(&whole.moved).map(|m| m.axis);
    part.split == whole.split
        && part.partial == whole.partial
        && axes.all(|a| {
            by(part, a) == by(whole, a)
                && match (only(part, a), only(whole, a)) {
                    (_, None) => true,
                    (None, Some(_)) => false,
                    (Some((from, to)), Some((first, last))) => first <= from && to <= last,
                }
        })
}
