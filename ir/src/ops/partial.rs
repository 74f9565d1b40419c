//! Parts of attention and operations that join them: merging by online softmax, sinks, accumulation, explicit score rows.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::layout::Layout;
use crate::ops::check::{need_float, sums_in};
use crate::ops::context::Types;
use crate::ops::error::{OpError, ensure};
use crate::ops::table::attention::Attention;
use crate::ops::table::op::Op;
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
        if o.dims != o2.dims || lse.dims != lse2.dims || o.dtype != o2.dtype || lse.dtype != lse2.dtype {
            return Err(self.shape("both parts have the same dimensions and element types"));
        }
        if !fits_in(&o2.layout, &o.layout)
            || !fits_in(&lse2.layout, &lse.layout)
            || lse2.layout.moved != o2.layout.moved
        {
            return Err(self.layout("the second part lies where the first does, or on some of these ranks"));
        }
        Ok(smallvec![o.clone(), lse.clone()])
    }

    fn merge_parts(&self, over: DimId, o: &TensorType, lse: &TensorType) -> Result<Types, OpError> {
        self.rows(o, lse)?;
        if o.dims.first() != Some(&over) || o.dims.len() < 2 {
            return Err(self.shape("`over` is the first dimension"));
        }
        self.whole(o, over)?;
        Ok(smallvec![without(o, over), without(lse, over)])
    }

    fn accumulate(&self, x: &TensorType, y: &TensorType) -> Result<Types, OpError> {
        if x.dims != y.dims || x.dtype != y.dtype {
            return Err(self.shape("both operands have the same dimensions and element types"));
        }
        if fits_in(&y.layout, &x.layout) {
            Ok(smallvec![x.clone()])
        } else {
            Err(self.layout("the second operand lies where the first does, or on some of these ranks"))
        }
    }

    fn sink(&self, o: &TensorType, lse: &TensorType, logits: &TensorType) -> Result<Types, OpError> {
        self.rows(o, lse)?;
        let [heads] = logits.dims.as_slice() else {
            return Err(self.shape("the logits are a vector over the heads"));
        };
        if lse.has(*heads) && lse.axes_of(*heads) == logits.axes_of(*heads) {
            Ok(smallvec![o.clone(), lse.clone()])
        } else {
            Err(self.layout("the logits are split as the heads are"))
        }
    }

    fn scores(
        &self,
        a: &Attention,
        columns: DimId,
        q: &TensorType,
        k: &TensorType,
    ) -> Result<Types, OpError> {
        let heads_fit = q.has(a.heads) && k.has(a.kv_heads) && q.axes_of(a.heads) == k.axes_of(a.kv_heads);
        if !q.has(a.queries) || !k.has(a.keys) || !heads_fit {
            return Err(self.shape("q has queries and heads, k has keys and their heads, split alike"));
        }
        self.block(columns, k, a.keys)?;
        let mut scores = without(q, a.width);
        scores.dtype = DType::F32;
        scores.dims.push(columns);
        scores.layout.split.push(Default::default());
        Ok(smallvec![scores])
    }

    fn row_lse(&self, over: DimId, parts: Option<DimId>, x: &TensorType) -> Result<Types, OpError> {
        if !x.has(over) {
            return Err(self.shape("x has the dimension `over`"));
        }
        let mut rows = without(x, over);
        rows.dtype = sums_in(x.dtype);
        let Some(parts) = parts else {
            self.whole(x, over)?;
            return Ok(smallvec![rows]);
        };
        let axes = x.axes_of(over);
        if x.has(parts) || self.space.size(parts) != self.space.mesh.degree(axes) {
            return Err(self.shape(&format!(
                "`parts` of {} must tell apart the {} ranks that hold parts of `over`",
                self.space.size(parts),
                self.space.mesh.degree(axes)
            )));
        }
        rows.dims.insert(0, parts);
        rows.layout.split.insert(0, axes.into());
        Ok(smallvec![rows])
    }

    fn weigh(&self, a: &Attention, columns: DimId, [s, lse, v]: [&TensorType; 3]) -> Result<Types, OpError> {
        if without(s, columns).dims != lse.dims
            || !v.has(a.keys)
            || v.axes_of(a.kv_heads) != s.axes_of(a.heads)
        {
            return Err(self.shape("scores, lse and v have the same rows and heads"));
        }
        if without(s, columns).layout != lse.layout {
            return Err(self.layout("lse lies where the scores do"));
        }
        self.block(columns, v, a.keys)?;
        let mut o = lse.clone();
        o.dtype = DType::F32;
        o.dims.push(a.value_width(v));
        o.layout.split.push(Default::default());
        Ok(smallvec![o])
    }

    /// `columns` has as many elements as a rank holds of `keys`.
    fn block(&self, columns: DimId, ty: &TensorType, keys: DimId) -> Result<(), OpError> {
        let held = self.space.max_extent(keys, ty.axes_of(keys));
        if self.space.size(columns) == held {
            Ok(())
        } else {
            Err(self.shape(&format!(
                "{} columns `{}` are not the {held} keys that a rank holds",
                self.space.size(columns),
                self.space.dims[columns].name
            )))
        }
    }

    /// lse has the dimensions of o but the last, and the same layout.
    fn rows(&self, o: &TensorType, lse: &TensorType) -> Result<(), OpError> {
        let Some(&width) = o.dims.last() else { return Err(self.shape("o has a width")) };
        let rows = without(o, width);
        if rows.dims != lse.dims {
            return Err(self.shape("lse has the dimensions of o but the last"));
        }
        if rows.layout == lse.layout {
            self.whole(o, width)
        } else {
            Err(self.layout("o and lse lie on the same ranks"))
        }
    }

    fn whole(&self, ty: &TensorType, dim: DimId) -> Result<(), OpError> {
        ensure!(
            ty.axes_of(dim).is_empty(),
            "V08",
            "`{}` needs dimension `{}` whole, but it is split",
            self.name,
            self.space.dims[dim].name
        );
        Ok(())
    }

    fn shape(&self, what: &str) -> OpError {
        OpError::new("V05", format!("`{}`: {what}", self.name))
    }

    fn layout(&self, what: &str) -> OpError {
        OpError::new("V07", format!("`{}`: {what}", self.name))
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
