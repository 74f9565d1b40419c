//! Random operand types of attention and of its parts.

use ithaca_ir::layout::AxisList;
use ithaca_ir::ops::Attr;
use ithaca_ir::{DType, DimId, Order, TensorType};

use super::drawer::{Drawer, call, from_parts, laid_out_as, renamed, with_last, without_last, word};

impl Drawer<'_> {
    /// The types of the output and the lse of an attention that returns `want`.
    pub(super) fn rows(&mut self, want: &TensorType) -> (TensorType, TensorType) {
        if self.app.result == 1 {
            let width = self.draw.fresh_dim(&[2, 3]);
            let o = with_last(want, width);
            let dtype = self.draw.rng.one_of(&[DType::F32, DType::BF16]).unwrap_or(DType::F32);
            return (TensorType { dtype, ..o }, want.clone());
        }
        let mut lse = without_last(want, DType::F32);
        lse.layout.moved.clone_from(&want.layout.moved);
        (want.clone(), lse)
    }

    /// `q`, `k` and `v` of an attention whose queries and heads have the layout of `rows`, `[… queries heads]`.
    ///
    /// `width` is the width of queries and keys, `e` of values; an absent one is drawn.
    fn sides(
        &mut self,
        rows: &TensorType,
        dtype: DType,
        width: Option<DimId>,
        e: Option<DimId>,
    ) -> Option<[TensorType; 3]> {
        let n = rows.dims.len();
        if n < 2 {
            return None;
        }
        let (queries, heads) = (rows.dims[n - 2], rows.dims[n - 1]);
        let kv_heads = self.kv_heads(rows, heads)?;
        let keys = match self.fixed_dim("keys") {
            Some(keys) => keys,
            None if rows.axes_of(queries).is_empty() && self.draw.rng.once_in(2) => queries,
            None => self.draw.sized_dim(&[2, 3, 4, 8]),
        };
        let width = match (width.or(self.fixed_dim("width")), e) {
            (Some(width), _) => width,
            (None, Some(e)) if self.draw.rng.once_in(2) => e,
            (None, _) => self.draw.fresh_dim(&[2, 3]),
        };
        let e = match e {
            Some(e) => e,
            None if self.draw.rng.once_in(2) => width,
            None => self.draw.fresh_dim(&[2, 3]),
        };
        self.dim("queries", queries);
        self.dim("heads", heads);
        self.dim("kv_heads", kv_heads);
        self.dim("keys", keys);
        self.dim("width", width);
        self.scores_attrs(queries, keys);
        let q = TensorType { dtype, ..with_last(rows, width) };
        let front: Vec<(DimId, AxisList)> =
            rows.dims[..n - 2].iter().map(|&d| (d, rows.axes_of(d).into())).collect();
        let side = |last: DimId| {
            let mut parts = front.clone();
            parts.push((keys, AxisList::new()));
            parts.push((kv_heads, rows.axes_of(heads).into()));
            parts.push((last, AxisList::new()));
            from_parts(dtype, parts)
        };
        Some([q, side(width), side(e)])
    }

    /// Key/value heads for these heads: the same, or fewer that each serve a group.
    fn kv_heads(&mut self, rows: &TensorType, heads: DimId) -> Option<DimId> {
        if let Some(fixed) = self.fixed_dim("kv_heads") {
            return Some(fixed);
        }
        let dim = self.draw.space.dims[heads].clone();
        if dim.granule != 1 {
            return None;
        }
        if dim.copies.is_some() || dim.order != Order::Contiguous || self.draw.rng.once_in(3) {
            return Some(heads);
        }
        let degree = self.draw.space.mesh.degree(rows.axes_of(heads));
        let groups: Vec<u64> = (1..=4).filter(|g| dim.size.is_multiple_of(g * degree)).collect();
        let group = self.draw.rng.one_of(&groups)?;
        let kv_heads = self.draw.fresh_dim(&[dim.size / group]);
        self.draw.space.dims[heads].granule = group;
        self.draw.space.dims[kv_heads].uneven = dim.uneven;
        Some(kv_heads)
    }

    fn scores_attrs(&mut self, queries: DimId, keys: DimId) {
        let (n_queries, n_keys) = (self.draw.space.size(queries), self.draw.space.size(keys));
        let mut masks = vec![word("full"), Attr::Numbers("prefix".to_owned(), vec![1])];
        if n_queries == n_keys {
            let window = call("window", [("left", Attr::Int(1)), ("right", Attr::Int(0))]);
            masks.extend([word("causal"), window.clone(), Attr::All(vec![word("causal"), window])]);
        }
        let mask = self.draw.rng.one_of(&masks).unwrap_or(word("full"));
        self.attr("mask", mask);
        self.number("scale", &[0.5, 1.0, 2.0, 4.0]);
        if self.wants("softcap") {
            self.number("softcap", &[0.5, 2.0]);
        }
    }

    pub(super) fn attention(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        let choices = match self.app.result {
            0 => ["output", "with_lse", "part"].as_slice(),
            _ => ["with_lse", "part"].as_slice(),
        };
        let mut returns = "output".to_owned();
        if self.wants("returns") || self.app.result > 0 {
            returns = self.draw.rng.one_of(choices)?.to_owned();
            if let Some(Attr::Word(fixed)) = self.fixed.get("returns") {
                returns.clone_from(fixed);
            }
        }
        if returns != "output" || self.names("returns") {
            self.attr("returns", word(&returns));
        }
        let (rows, e) = match self.app.result {
            0 => (without_last(want, want.dtype), want.dims.last().copied()),
            _ => (want.clone(), None),
        };
        let dtype = match (self.app.result, returns.as_str()) {
            (0, "output" | "with_lse") => want.dtype,
            _ => self.draw.rng.one_of(&[DType::F32, DType::BF16])?,
        };
        let mut operands: Vec<TensorType> = self.sides(&rows, dtype, None, e)?.into();
        self.bias(3, &rows, &mut operands)?;
        Some(operands)
    }

    /// The learned bias, if the pattern has an operand for it.
    fn bias(&mut self, n_others: usize, rows: &TensorType, operands: &mut Vec<TensorType>) -> Option<()> {
        if self.app.operands.len() > n_others {
            let buckets = self.draw.fresh_dim(&[4, 8]);
            let name = word(&self.draw.space.dims[buckets].name);
            let sides = word(self.draw.rng.one_of(&["both", "before"])?);
            let args = [("buckets", name), ("max_distance", Attr::Int(16)), ("sides", sides)];
            self.attr("bias", call("relative", args));
            operands.push(laid_out_as(rows, DType::F32, vec![buckets, *rows.dims.last()?]));
        }
        Some(())
    }

    pub(super) fn attention_backward(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        if self.app.result > 0 {
            return None;
        }
        let rows = without_last(want, want.dtype);
        let [q, k, v] = self.sides(&rows, want.dtype, want.dims.last().copied(), None)?;
        let d_o = TensorType { dtype: want.dtype, ..with_last(&rows, *v.dims.last()?) };
        let lse = TensorType { dtype: DType::F32, ..rows.clone() };
        let mut operands = vec![q, k, v, d_o, lse.clone(), lse];
        self.bias(6, &rows, &mut operands)?;
        Some(operands)
    }

    pub(super) fn scores(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        let columns = self.one_dim("columns", &[*want.dims.last()?])?;
        let rows = without_last(want, want.dtype);
        let dtype = self.draw.rng.one_of(&[DType::F32, DType::BF16])?;
        let [q, k, _] = self.sides(&rows, dtype, None, None)?;
        let k = self.with_columns(k, columns)?;
        Some(vec![q, k])
    }

    pub(super) fn weigh(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        let rows = without_last(want, DType::F32);
        let [_, _, v] = self.sides(&rows, DType::F32, None, want.dims.last().copied())?;
        let columns = self.own_dim("columns", &[2, 3, 4])?;
        let v = self.with_columns(v, columns)?;
        Some(vec![with_last(&rows, columns), rows, v])
    }

    /// The keys' type with the dimension `columns` for the keys.
    fn with_columns(&mut self, side: TensorType, columns: DimId) -> Option<TensorType> {
        let keys = side.dims[side.dims.len() - 3];
        let n = self.draw.space.size(columns);
        if self.draw.space.size(keys) == n {
            return Some(side);
        }
        let new = self.draw.fresh_dim(&[n]);
        self.attrs.retain(|(key, _)| key != "keys");
        self.dim("keys", new);
        renamed(&side, keys, new)
    }
}
