//! Random attributes and operand types for an operation with a given result type.
//!
//! Programs for a rule are drawn from the result down to the values: each operand of the pattern is drawn for the type
//! chosen here. A draw may be wrong: inference runs afterwards, and a draw with another result type is discarded.

use std::collections::BTreeMap;

use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{Attr, Unary};
use ithaca_ir::{DType, DimId, Layout, Order, TensorType};

use super::draw::Draw;
use super::syntax::App;

/// Attributes fixed by literals or bound variables.
pub(super) type Fixed = BTreeMap<String, Attr>;

/// Attributes by name.
type Attributes = Vec<(String, Attr)>;

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

struct Drawer<'a> {
    draw: &'a mut Draw,
    app: &'a App,
    fixed: &'a Fixed,
    may_add: bool,
    attrs: Attributes,
}

impl Drawer<'_> {
    /// Whether the pattern or the bound attributes have this one.
    fn names(&self, key: &str) -> bool {
        self.fixed.contains_key(key) || self.app.attrs.iter().any(|(name, _)| name.text == key)
    }

    /// Whether to include an optional attribute.
    fn wants(&mut self, key: &str) -> bool {
        self.names(key) || (self.may_add && self.draw.rng.once_in(3))
    }

    /// The dimension from which the operation derives `dim`.
    fn base(&self, dim: DimId) -> Option<DimId> {
        let dim = &self.draw.space.dims[dim];
        match self.app.op.as_str() {
            "repeat" | "sum_copies" => dim.copies,
            "take" | "join" => dim.part.map(|part| part.of),
            _ => dim.fetched.as_ref().map(|fetched| fetched.of),
        }
    }

    /// The dimensions that the operation derives from `base`.
    fn derived(&self, base: DimId) -> Vec<DimId> {
        self.draw.space.dims.ids().filter(|&dim| self.base(dim) == Some(base)).collect()
    }

    /// Sets an attribute: the fixed value, or else the drawn one.
    fn attr(&mut self, key: &str, drawn: Attr) {
        let attr = self.fixed.get(key).cloned().unwrap_or(drawn);
        self.attrs.push((key.to_owned(), attr));
    }

    fn number(&mut self, key: &str, from: &[f64]) {
        let x = self.draw.rng.one_of(from).unwrap_or(1.0);
        self.attr(key, Attr::Float(x));
    }

    fn dim(&mut self, key: &str, dim: DimId) {
        self.attrs.push((key.to_owned(), word(&self.draw.space.dims[dim].name)));
    }

    /// The fixed dimension, if there is one.
    fn fixed_dim(&self, key: &str) -> Option<DimId> {
        self.fixed.get(key).and_then(|attr| self.named(attr))
    }

    /// The dimension that an attribute names.
    fn named(&self, attr: &Attr) -> Option<DimId> {
        match attr {
            Attr::Word(word) => self.draw.space.dim(word),
            _ => None,
        }
    }

    /// One of `candidates`, or the fixed one if it is among them.
    fn one_dim(&mut self, key: &str, candidates: &[DimId]) -> Option<DimId> {
        let dim = if self.fixed.contains_key(key) {
            self.fixed_dim(key).filter(|d| candidates.contains(d))?
        } else {
            self.draw.rng.one_of(candidates)?
        };
        self.dim(key, dim);
        Some(dim)
    }

    /// A dimension declared by the operation, new unless it is fixed.
    fn own_dim(&mut self, key: &str, sizes: &[u64]) -> Option<DimId> {
        let dim =
            if self.fixed.contains_key(key) { self.fixed_dim(key)? } else { self.draw.sized_dim(sizes) };
        self.dim(key, dim);
        Some(dim)
    }

    fn one_axis(&mut self, candidates: &[AxisId]) -> Option<AxisId> {
        let axis = match self.fixed.get("axis") {
            Some(Attr::Word(word)) => self.draw.space.mesh.axis(word).filter(|a| candidates.contains(a))?,
            Some(_) => return None,
            None => self.draw.rng.one_of(candidates)?,
        };
        self.attrs.push(("axis".to_owned(), word(&self.draw.space.mesh.axes[axis].name)));
        Some(axis)
    }

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

    /// The types of the output and the lse of an attention that returns `want`.
    fn rows(&mut self, want: &TensorType) -> (TensorType, TensorType) {
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

    fn attention(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
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

    fn attention_backward(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
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

    fn scores(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
        let columns = self.one_dim("columns", &[*want.dims.last()?])?;
        let rows = without_last(want, want.dtype);
        let dtype = self.draw.rng.one_of(&[DType::F32, DType::BF16])?;
        let [q, k, _] = self.sides(&rows, dtype, None, None)?;
        let k = self.with_columns(k, columns)?;
        Some(vec![q, k])
    }

    fn weigh(&mut self, want: &TensorType) -> Option<Vec<TensorType>> {
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

fn word(name: &str) -> Attr {
    Attr::Word(name.to_owned())
}

fn call<const N: usize>(name: &str, args: [(&str, Attr); N]) -> Attr {
    Attr::Call(name.to_owned(), args.map(|(key, attr)| (key.to_owned(), attr)).to_vec())
}

fn whole_dims(ty: &TensorType) -> Vec<DimId> {
    ty.dims.iter().copied().filter(|&d| ty.axes_of(d).is_empty()).collect()
}

/// A tensor with some dimensions of `ty`, in its layout.
fn laid_out_as(ty: &TensorType, dtype: DType, dims: Vec<DimId>) -> TensorType {
    from_parts(dtype, dims.into_iter().map(|d| (d, ty.axes_of(d).into())).collect())
}

/// A tensor with all dimensions of `ty` but the last, in its layout.
fn without_last(ty: &TensorType, dtype: DType) -> TensorType {
    laid_out_as(ty, dtype, ty.dims[..ty.dims.len() - 1].to_vec())
}

fn from_parts(dtype: DType, parts: Vec<(DimId, AxisList)>) -> TensorType {
    let mut ty = TensorType::new(dtype, parts.iter().map(|(d, _)| *d));
    for (split, (_, axes)) in ty.layout.split.iter_mut().zip(parts) {
        *split = axes;
    }
    ty
}

/// The type with `dim`, unsplit, as its last dimension.
fn with_last(ty: &TensorType, dim: DimId) -> TensorType {
    with_dim(ty, ty.dims.len(), dim)
}

/// The type with `dim`, unsplit, at a position.
fn with_dim(ty: &TensorType, at: usize, dim: DimId) -> TensorType {
    let mut ty = ty.clone();
    ty.dims.insert(at, dim);
    ty.layout.split.insert(at, AxisList::new());
    ty
}

/// The type with dimension `to` in place of `from`, split in the same way.
fn renamed(ty: &TensorType, from: DimId, to: DimId) -> Option<TensorType> {
    let i = ty.position(from)?;
    let mut ty = ty.clone();
    ty.dims[i] = to;
    Some(ty)
}
