//! Attention, forward and backward, and the merge of its parts.

use ithaca_ir::ops::attention::TABLE;
use ithaca_ir::ops::{Attention, Binary, Keyed, Sides, sums_in};
use ithaca_ir::strided::row_major;
use ithaca_ir::{DType, Dim, DimId, TensorType};

use super::view::{Cx, Local, View, as_stored, float, reals, signed, step, written};
use crate::argument::{Pointer, arguments};
use crate::catalogue::c_type;
use crate::error::LowerError;
use crate::flash::{self, Block, Flash, Operands, Starts};
use crate::split::{self, Split};
use crate::structs::{AttentionShape, Bias, Dropout, Gradient, Mask, Paged, Rows, Walk};
use crate::threads::packs;

/// The optional operands of an attention, after the others.
#[derive(Clone, Copy, Default)]
struct TrailingOperands<'v> {
    bias: Option<View<'v>>,
    starts: Option<View<'v>>,
    ends: Option<View<'v>>,
    key: Option<View<'v>>,
}

impl<'v> TrailingOperands<'v> {
    /// A bias where the attention has one, then first positions, ends or a key where one is left.
    fn of(a: &Attention, x: &[View<'v>], n: usize) -> Self {
        let bias = a.bias.as_ref().and_then(|_| x.get(n).copied());
        let last = x.get(n + usize::from(bias.is_some())).copied();
        let has = |is: bool| last.filter(|_| is);
        Self { bias, starts: has(a.starts), ends: has(a.ends), key: has(!a.starts && !a.ends) }
    }
}

/// The element types of the operands and of the result, which is the same or f32.
fn with_result(x: &TensorType, z: &TensorType) -> Result<[&'static str; 2], LowerError> {
    if z.dtype == x.dtype || z.dtype == DType::F32 {
        Ok([float(x)?, float(z)?])
    } else {
        LowerError::unsupported(format!("attention from {} to {}", x.dtype, z.dtype))
    }
}

/// The number of blocks for these rows.
fn blocks(rows: i64, block: Block) -> i64 {
    (rows + block.rows - 1) / block.rows
}

impl Cx<'_> {
    /// The kernels on tensor cores that compute an attention from these rows to these, if there are any.
    fn on_tensor_cores(
        &self,
        s: &AttentionShape,
        rows: &[View<'_>],
        results: &[View<'_>],
    ) -> Option<&'static Flash> {
        let dtypes: Vec<DType> = rows.iter().map(|x| x.ty.dtype).collect();
        let is_aligned = rows.iter().chain(results).all(|x| self.is_aligned(x.at));
        let bias = if s.bias.bounds == Pointer::NONE { flash::Bias::None } else { flash::Bias::Learned };
        flash::kernels_for(&Operands {
            width: s.width,
            value_width: s.value_width,
            dtypes: &dtypes,
            starts: if is_aligned { Starts::Aligned } else { Starts::Anywhere },
            rows: &[s.q, s.k, s.v, s.o, s.d_o, s.dq, s.dk, s.dv],
            bias,
            scale: s.scale,
        })
    }

    /// Whether a thread of an attention of few queries can read its columns of keys and values at once.
    fn has_wide_rows(&self, s: &AttentionShape, keys_and_values: &[View<'_>]) -> bool {
        let apart = |r: &Rows| r.front | r.token | r.head | r.token_block | r.head_block;
        keys_and_values.iter().all(|x| self.is_aligned(x.at))
            && (apart(&s.k) | apart(&s.v) | s.width | s.value_width) % split::COLUMNS == 0
    }

    fn mask(&self, a: &Attention) -> Result<Mask, LowerError> {
        if let Some([left, right]) = a.mask.band() {
            return Ok(Mask { left, right, chunk: 0, strips: Pointer::NONE });
        }
        // A ring has no last position, so no table holds its chunks.
        if let Some(([left, right], chunk)) = a.mask.band_in_chunks().filter(|_| a.wraps) {
            return Ok(Mask { left, right, chunk: signed(chunk), strips: Pointer::NONE });
        }
        let [queries, keys] = [a.queries, a.keys].map(|d| self.space.size(self.space.sequence(d)));
        // Queries behind tokens of a cache have positions of it.
        let queries = if a.starts { keys } else { queries };
        let strips = self.mask_strips(|| a.mask.table(queries, keys));
        Ok(Mask { left: -1, right: -1, chunk: 0, strips })
    }

    fn bias(&self, a: &Attention, table: Option<View<'_>>) -> Result<Bias, LowerError> {
        let (Some(bias), Some(table)) = (&a.bias, table) else { return Ok(Bias::default()) };
        let starts = bias.starts(self.space.size(bias.buckets));
        Ok(Bias {
            bounds: self.reals(starts.clone()),
            per_side: signed(starts.len() as u64),
            both_sides: bias.sides == Sides::Both,
            table: reals(table),
        })
    }

    fn dropout_of(
        &self,
        a: &Attention,
        heads: &TensorType,
        key: Option<View<'_>>,
    ) -> Result<Dropout, LowerError> {
        let Some(dropout) = &a.dropout else { return Ok(Dropout::default()) };
        let degree = self.space.mesh.degree(heads.axes_of(a.heads));
        if self.space.dims[a.heads].part.is_some_and(|part| part.runs != degree) {
            return LowerError::unsupported("dropout over parts of heads of several ranks at once");
        }
        match dropout.keyed {
            Keyed::Position => Ok(Dropout {
                rate: dropout.rate,
                seed: dropout.seed,
                key: key.map_or(Pointer::NONE, |key| key.at),
            }),
            Keyed::Stream => LowerError::unsupported("dropout keyed by the order in which a device computes"),
        }
    }

    /// q `[... queries heads width]`, k `[... keys kv_heads width]`, v `[... keys kv_heads e]`, then the trailing operands.
    fn shape_of(
        &self,
        a: &Attention,
        [q, k, v]: [View<'_>; 3],
        trailing: TrailingOperands<'_>,
    ) -> Result<AttentionShape, LowerError> {
        if let Some(movement) = &a.movement {
            return LowerError::unsupported(format!("an attention with movement `{}`", movement.name));
        }
        let [lq, lk, lv] = [q, k, v].map(|x| self.local(x.ty));
        let n = q.ty.dims.len();
        let (Some(front), Some(kn), Some(vn)) =
            (n.checked_sub(3), k.ty.dims.len().checked_sub(3), v.ty.dims.len().checked_sub(1))
        else {
            return LowerError::unsupported("an attention of fewer than three dimensions");
        };
        let whole: Vec<i64> = q.ty.dims[..front].iter().map(|&d| signed(self.space.size(d))).collect();
        let steps = row_major(&whole);
        let (mut sequences, mut first_sequence) = (Walk::<1>::default(), 0);
        for (d, &apart) in steps.iter().enumerate() {
            step(&mut sequences, lq.extents[d], [apart])?;
            first_sequence += signed(self.region(&lq)[d].start) * apart;
        }
        let first_head = self.region(&lq)[n - 2].start;
        let valid = if a.wraps { Dim::MAX_SIZE } else { self.space.dims[self.space.sequence(a.keys)].valid };
        let of_ring = |dim: DimId| if a.wraps { signed(self.space.dims[dim].valid) } else { 0 };
        Ok(AttentionShape {
            front: lq.extents[..front].iter().product(),
            queries: lq.extents[front],
            heads: lq.extents[front + 1],
            keys: lk.extents[kn],
            kv_heads: lk.extents[kn + 1],
            width: lq.extents[front + 2],
            value_width: lv.extents[vn],
            first_head: signed(first_head),
            first_kv_head: signed(self.region(&lk)[kn + 1].start),
            group: signed(self.space.size(a.heads) / self.space.size(a.kv_heads).max(1)).max(1),
            dropped_head: signed(self.space.origin(a.heads, first_head)),
            sequences,
            first_sequence,
            query_positions: self.sequence(q.ty, a.queries)?,
            key_positions: self.sequence(k.ty, a.keys)?,
            starts: trailing.starts.map_or(Pointer::NONE, |starts| starts.at),
            ends: trailing.ends.map_or(Pointer::NONE, |ends| ends.at),
            valid_keys: signed(valid.min(Dim::MAX_SIZE)),
            ring: of_ring(a.keys),
            step: of_ring(a.queries),
            mask: self.mask(a)?,
            scale: a.scale,
            softcap: a.softcap.unwrap_or(0.0),
            bias: self.bias(a, trailing.bias)?,
            dropout: self.dropout_of(a, q.ty, trailing.key)?,
            q: self.rows_of(q)?,
            k: self.rows_of(k)?,
            v: self.rows_of(v)?,
            ..AttentionShape::default()
        })
    }

    /// The offsets of the rows of a tensor `[... tokens heads width]`.
    fn rows_of(&self, view: View<'_>) -> Result<Rows, LowerError> {
        let strides = self.local_of(view).strides;
        let n = strides.len();
        let Some(token) = n.checked_sub(3) else {
            return LowerError::unsupported("an attention of fewer than three dimensions");
        };
        let front = token.checked_sub(1).map_or(0, |d| strides[d]);
        let rows = Rows { front, token: strides[token], head: strides[token + 1], ..Rows::default() };
        Ok(match view.cut() {
            None => rows,
            Some((place, run, block)) if place == token => {
                Rows { token_run: run, token_block: block, ..rows }
            }
            Some((place, run, block)) if place == token + 1 => {
                Rows { head_run: run, head_block: block, ..rows }
            }
            Some(_) => return LowerError::unsupported("an attention whose sequences are cut into blocks"),
        })
    }

    /// From q, k, v and maybe a bias, lengths or a key to o and maybe lse.
    pub(crate) fn attention(&self, a: &Attention, x: &[View<'_>], z: &[View<'_>]) -> Result<(), LowerError> {
        let s = self.shape_of(a, [x[0], x[1], x[2]], TrailingOperands::of(a, x, 3))?;
        let s = AttentionShape { o: self.rows_of(z[0])?, ..s };
        let lse = z.get(1).map_or(Pointer::NONE, |lse| lse.at);
        if a.starts
            && let Some(split) = Split::of(&s, self.has_wide_rows(&s, &x[1..3]), x[0].ty.dtype)
        {
            return self.split_attention((s, split, Paged::none()), [x[0], x[1], x[2]], z);
        }
        let [t, o] = with_result(x[0].ty, z[0].ty)?;
        let [q, k, v] = [x[0].at, x[1].at, x[2].at];
        if let Some(flash) = self.on_tensor_cores(&s, &x[..3], &z[..1]).filter(|_| !a.wraps && !a.ends) {
            let n = s.front * s.heads * blocks(s.queries, flash.forward);
            let arguments = arguments![q, k, v, written(z[0]), lse, s, n];
            return self.launch_blocks(&flash.kernel("flash", t), n, flash.forward, arguments);
        }
        let tile = if s.value_width <= 64 { 64 } else { 128 };
        let n = s.front * s.queries * s.heads * ((s.value_width + tile - 1) / tile);
        self.launch(&format!("attention<{t}, {o}, {tile}>"), n, arguments![q, k, v, z[0].at, lse, s, n])
    }

    /// An attention of few queries, of keys in pages or in rows.
    fn split_attention(
        &self,
        (s, split, pages): (AttentionShape, Split, Paged),
        [q, k, v]: [View<'_>; 3],
        z: &[View<'_>],
    ) -> Result<(), LowerError> {
        let lse = z.get(1).map_or(Pointer::NONE, |lse| lse.at);
        let [t, o] = with_result(q.ty, z[0].ty)?;
        let wide = sums_in(q.ty.dtype);
        let parts = self.workspace(signed(wide.bytes()) * split.numbers(&s));
        let arguments = arguments![q.at, k.at, v.at, z[0].at, lse, parts, s, split.by, pages, split.blocks];
        self.launch_blocks(&split.kernel(t, o), split.blocks, split.block(), arguments)?;
        if split.by.parts == 1 {
            return Ok(());
        }
        let n = self.local(z[0].ty).size;
        let kernel = format!("merge_splits<{}, {o}>", c_type(wide));
        self.launch(&kernel, n, arguments![parts, z[0].at, lse, s, split.by.parts, n])
    }

    /// From q, keys and values in pages, first positions and the table to o and maybe lse.
    pub(crate) fn attend_pages(
        &self,
        (a, paged): (&Attention, [DimId; 2]),
        x: &[View<'_>],
        z: &[View<'_>],
    ) -> Result<(), LowerError> {
        let types: Vec<&TensorType> = x.iter().map(|x| x.ty).collect();
        let seen = a.of_gathered(self.space, paged, &types, |seen| [seen[1].clone(), seen[2].clone()]);
        let [k, v] = [1, 2].map(|i| View { ty: &seen[i - 1], at: x[i].at, strided: None });
        as_stored(x[0], k)?;
        let trailing = TrailingOperands { starts: Some(x[3]), ..TrailingOperands::default() };
        let s = self.shape_of(a, [x[0], k, v], trailing)?;
        let s = AttentionShape { o: self.rows_of(z[0])?, ..s };
        let Some(split) = Split::of(&s, self.has_wide_rows(&s, &[k, v]), k.ty.dtype) else {
            return LowerError::unsupported("an attention of many queries over pages");
        };
        self.split_attention((s, split, self.paged(x[1], x[TABLE], (None, None))?), [x[0], k, v], z)
    }

    /// From q, k, v, d_o, lse, delta and maybe a bias and a key to dq, dk, dv and maybe the gradient of the bias.
    pub(crate) fn attention_backward(
        &self,
        a: &Attention,
        x: &[View<'_>],
        z: &[View<'_>],
    ) -> Result<(), LowerError> {
        const TILE: i64 = 64;
        let s = self.shape_of(a, [x[0], x[1], x[2]], TrailingOperands::of(a, x, 6))?;
        let s = AttentionShape {
            d_o: self.rows_of(x[3])?,
            dq: self.rows_of(z[0])?,
            dk: self.rows_of(z[1])?,
            dv: self.rows_of(z[2])?,
            ..s
        };
        let g = Gradient { d_o: reals(x[3]), lse: reals(x[4]), delta: reals(x[5]) };
        let [t, o] = with_result(x[0].ty, z[0].ty)?;
        let [q, k, v] = [x[0].at, x[1].at, x[2].at];
        if let Some(flash) = self.on_tensor_cores(&s, &x[..4], &z[..3]) {
            let [dq, dk, dv] = [z[0], z[1], z[2]].map(written);
            let n = s.front * s.heads * blocks(s.queries, flash.backward);
            let kernel = flash.kernel("flash_backward_queries", t);
            self.launch_blocks(&kernel, n, flash.backward, arguments![q, k, v, g, dq, s, n])?;
            let n = s.front * s.kv_heads * blocks(s.keys, flash.backward) * flash.parts;
            let kernel = flash.kernel("flash_backward_keys", t);
            return self.launch_blocks(&kernel, n, flash.backward, arguments![q, k, v, g, dk, dv, s, n]);
        }
        let rows = s.front * s.queries * s.heads * ((s.width + TILE - 1) / TILE);
        let kernel = format!("attention_backward_queries<{t}, {o}, {TILE}>");
        self.launch(&kernel, rows, arguments![q, k, v, g, z[0].at, s, rows])?;
        let widest = s.width.max(s.value_width);
        let columns = s.front * s.keys * s.kv_heads * ((widest + TILE - 1) / TILE);
        let kernel = format!("attention_backward_keys<{t}, {o}, {TILE}>");
        self.launch(&kernel, columns, arguments![q, k, v, g, z[1].at, z[2].at, s, columns])?;
        let Some(bias) = z.get(3) else { return Ok(()) };
        let n = self.local(bias.ty).size;
        self.launch_of("attention_backward_bias", x[0].ty, n, arguments![q, k, v, g, bias.at, s, n])
    }

    /// Explicit rows: the scores of the keys held.
    pub(crate) fn scores(
        &self,
        a: &Attention,
        q: View<'_>,
        k: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        plain_rows(a)?;
        let s = self.shape_of(a, [q, k, k], TrailingOperands::default())?;
        let n = s.front * s.queries * s.heads;
        let columns = self.local(z.ty).extents.last().copied().unwrap_or(1);
        self.launch_of("scores", q.ty, n, arguments![q.at, k.at, z.at, s, columns, n])
    }

    /// The values of the keys held, weighed by explicit rows. In the shape, the rows take the place of q and their columns
    /// that of its width.
    pub(crate) fn weigh(
        &self,
        a: &Attention,
        [rows, lse, v]: [View<'_>; 3],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        plain_rows(a)?;
        let s = self.shape_of(a, [rows, v, v], TrailingOperands::default())?;
        let n = self.local(z.ty).size;
        self.launch_of("weigh", v.ty, n, arguments![reals(rows), reals(lse), v.at, z.at, s, s.width, n])
    }

    /// A rank without elements of the second part keeps the first.
    pub(crate) fn merge(&self, x: &[View<'_>; 4], z: &[View<'_>; 2]) -> Result<(), LowerError> {
        let [o, lse, more_o, more_lse] = *x;
        let (n, rows) = (self.local(o.ty).size, self.local(lse.ty).size);
        if self.local(more_o.ty).size == 0 {
            self.copy(bytes(n, o.ty), o.at, z[0].at)?;
            return self.copy(bytes(rows, lse.ty), lse.at, z[1].at);
        }
        let kernel = format!("merge<{}, {}>", float(o.ty)?, lse_type(o.ty, lse.ty)?);
        let width = n / rows.max(1);
        let arguments = arguments![o.at, lse.at, more_o.at, more_lse.at, z[0].at, z[1].at, width, n];
        self.launch(&kernel, packs(n, o.ty.dtype), arguments)
    }

    pub(crate) fn merge_parts(&self, x: &[View<'_>; 2], z: &[View<'_>; 2]) -> Result<(), LowerError> {
        let (n, rows) = (self.local(z[0].ty).size, self.local(z[1].ty).size);
        if n == 0 {
            return Ok(());
        }
        let parts = self.local(x[0].ty).extents.first().copied().unwrap_or(1);
        let kernel = format!("merge_parts<{}, {}>", float(x[0].ty)?, lse_type(x[0].ty, x[1].ty)?);
        let width = n / rows.max(1);
        let arguments = arguments![x[0].at, x[1].at, z[0].at, z[1].at, parts, width, n];
        self.launch(&kernel, packs(n, x[0].ty.dtype), arguments)
    }

    pub(crate) fn sink(&self, x: &[View<'_>; 3], z: &[View<'_>; 2]) -> Result<(), LowerError> {
        let [o, lse, logits] = *x;
        let (rows, n) = (self.local(lse.ty).size, self.local(o.ty).size);
        if n == 0 {
            return Ok(());
        }
        let walk = self.walk(lse.ty, |_| true, [logits.ty])?;
        let kernel = format!("sink<{}, {}>", float(o.ty)?, lse_type(o.ty, lse.ty)?);
        let width = n / rows.max(1);
        let arguments = arguments![o.at, lse.at, reals(logits), z[0].at, z[1].at, walk, width, n];
        self.launch(&kernel, packs(n, o.ty.dtype), arguments)
    }

    pub(crate) fn sink_backward(&self, x: &[View<'_>; 4], z: &[View<'_>; 3]) -> Result<(), LowerError> {
        let [o, d_o, before, after] = *x;
        let (rows, n) = (self.local(before.ty).size, self.local(o.ty).size);
        let kernel = format!("sink_backward<{}, {}>", float(o.ty)?, lse_type(o.ty, before.ty)?);
        let width = n / rows.max(1);
        self.launch_rows(
            &kernel,
            (rows, width, o.ty.dtype),
            arguments![o.at, d_o.at, before.at, after.at, z[0].at, z[1].at, width, rows],
        )?;
        // The gradient of the logits is minus that of lse, summed.
        self.sum(z[1], z[2])?;
        self.scale(-1.0, z[2], z[2])
    }

    /// A rank without elements of y keeps x.
    pub(crate) fn accumulate(&self, x: View<'_>, y: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        if self.local(y.ty).size > 0 {
            return self.binary(Binary::Add, x, y, z);
        }
        self.copy(bytes(self.local(x.ty).size, x.ty), x.at, z.at)
    }

    /// A vocabulary whose padding is at its end, as its columns are counted from its start.
    pub(crate) fn vocabulary_extent(&self, local: &Local, at: usize, dim: DimId) -> Result<i64, LowerError> {
        let found = &self.space.dims[dim];
        let plain = found.order == ithaca_ir::Order::Contiguous && found.fetched.is_none();
        if !plain && found.valid != found.size {
            return LowerError::unsupported(format!(
                "a sum over `{}`, which has an order and padding,",
                found.name
            ));
        }
        let held = &self.region(local)[at];
        Ok(signed(held.end.min(found.valid).saturating_sub(held.start)))
    }
}

/// Bytes of `n` elements.
pub(crate) fn bytes(n: i64, ty: &TensorType) -> u64 {
    u64::try_from(n).unwrap_or(0) * ty.dtype.bytes()
}

/// The type of lse beside an output: as the output, or f32.
fn lse_type(o: &TensorType, lse: &TensorType) -> Result<&'static str, LowerError> {
    if lse.dtype == o.dtype || lse.dtype == DType::F32 {
        Ok(c_type(lse.dtype))
    } else {
        LowerError::unsupported(format!("lse in {}", lse.dtype))
    }
}

/// Explicit rows of scores have neither a bias nor dropout.
fn plain_rows(a: &Attention) -> Result<(), LowerError> {
    if a.bias.is_none() && a.dropout.is_none() {
        Ok(())
    } else {
        LowerError::unsupported("explicit rows of scores with a bias or dropout")
    }
}
