//! Sums of products: to the device's matrix products where the dimensions merge into batched ones, else to a kernel.

use ithaca_ir::ops::{Binary, Unary};
use ithaca_ir::{DType, DimId, TensorType};

use super::view::{Cx, View, float, step};
use crate::address::Address;
use crate::argument::{Pointer, arguments};
use crate::error::LowerError;
use crate::record::{Activation, Form, Matrix, Product, Record};
use crate::structs::Walk;
use crate::value::Int;

/// The most batched products of one einsum.
const MOST_PRODUCTS: i64 = 4096;

/// The longest rows that `dots` multiplies: a block has one row at a time, and longer ones would leave the others idle.
const LONGEST_DOT: i64 = 1 << 14;

/// A loop of an einsum: its extent, and its strides in x, y, z and the bias, zero where the tensor lacks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loop {
    pub(super) extent: i64,
    pub(super) x: i64,
    pub(super) y: i64,
    pub(super) z: i64,
    bias: i64,
}

/// A loop of one step.
pub(super) const ONCE: Loop = Loop { extent: 1, x: 0, y: 0, z: 0, bias: 0 };

/// The end of a product: what is added to it, and the function of each sum.
#[derive(Clone, Copy, Default)]
pub(crate) struct Epilogue<'a> {
    /// A tensor of the type of z.
    pub(crate) before: Option<View<'a>>,
    /// A tensor that has some of z's dimensions.
    pub(crate) bias: Option<View<'a>>,
    /// The function.
    pub(crate) of: Option<Unary>,
}

/// The activation of the device's products that is this function.
fn activation(of: Option<Unary>) -> Option<Activation> {
    match of {
        None => Some(Activation::Identity),
        Some(Unary::Relu) => Some(Activation::Relu),
        Some(Unary::GeluTanh) => Some(Activation::GeluTanh),
        Some(Unary::Silu | Unary::Gelu | Unary::QuickGelu | Unary::Tanh | Unary::Relu2 | Unary::Symlog) => {
            None
        }
    }
}

impl Loop {
    /// The loop with x and y exchanged.
    pub(super) fn swapped(self) -> Self {
        Loop { x: self.y, y: self.x, ..self }
    }
}

/// Joins neighbouring loops that run over memory as one; loops of one step vanish.
fn merged(loops: &[Loop]) -> Vec<Loop> {
    let mut out: Vec<Loop> = Vec::new();
    for l in loops.iter().filter(|l| l.extent != 1) {
        match out.last_mut() {
            Some(last)
                if last.x == l.x * l.extent
                    && last.y == l.y * l.extent
                    && last.z == l.z * l.extent
                    && last.bias == l.bias * l.extent =>
            {
                *last = Loop { extent: last.extent * l.extent, ..*l };
            }
            _ => out.push(*l),
        }
    }
    out
}

/// A matrix, column-major, whose elements are `row` and `column` apart; none when neither is one or the leading dimension
/// does not fit.
fn as_matrix((rows, columns): (i64, i64), row: i64, column: i64) -> Option<(Form, i64)> {
    if row == 1 || rows == 1 {
        let leading = if columns == 1 { rows } else { column };
        if leading >= rows {
            return Some((Form::Plain, leading));
        }
    }
    if column == 1 || columns == 1 {
        let leading = if rows == 1 { columns } else { row };
        return (leading >= columns).then_some((Form::Transposed, leading));
    }
    None
}

/// The loops of `z[batch, m, n] = sum over k of x[batch, m, k] y[batch, k, n]`.
#[derive(Clone, Debug)]
pub(super) struct Matmul {
    pub(super) batch: Vec<Loop>,
    pub(super) m: Loop,
    pub(super) n: Loop,
    pub(super) k: Loop,
}

/// A matrix product: forms, leading dimensions, and whether x and y are exchanged.
struct Found {
    loops: Matmul,
    order: Order,
    a: (Form, i64),
    b: (Form, i64),
    c: i64,
}

/// The operand that is the left one in the product of columns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// y, as columns are written.
    SecondFirst,
    /// x: the operands are exchanged.
    FirstFirst,
}

impl Matmul {
    /// The einsum as a product of the device, if it is one.
    fn find(mut self) -> Option<Found> {
        let mut order = Order::SecondFirst;
        // The product writes columns: the loop with stride one in z takes their place.
        if self.n.z != 1 && self.n.extent != 1 {
            if self.m.z != 1 && self.m.extent != 1 {
                return None;
            }
            let Matmul { batch, m, n, k } = self;
            let batch = batch.into_iter().map(Loop::swapped).collect();
            self = Matmul { batch, m: n.swapped(), n: m.swapped(), k: k.swapped() };
            order = Order::FirstFirst;
        }
        let Matmul { batch, m, n, k } = &self;
        let a = as_matrix((n.extent, k.extent), n.y, k.y)?;
        let b = as_matrix((k.extent, m.extent), k.x, m.x)?;
        let (form, c) = as_matrix((n.extent, m.extent), n.z, m.z)?;
        let inner = batch.last().unwrap_or(&ONCE).extent;
        let outer: i64 = batch.iter().rev().skip(1).map(|l| l.extent).product();
        let fits =
            [m.extent, n.extent, k.extent, a.1, b.1, c, inner].iter().all(|&x| i32::try_from(x).is_ok());
        (form == Form::Plain && fits && outer <= MOST_PRODUCTS).then_some(Found {
            loops: self,
            order,
            a,
            b,
            c,
        })
    }
}

impl Found {
    /// Whether the device's product adds the bias, a number for each element of its columns in memory. It adds none in f64.
    fn takes_bias(&self, dtype: DType) -> bool {
        let Matmul { batch: _, m, n, k: _ } = &self.loops;
        dtype != DType::F64 && (n.bias == 1 || n.extent == 1) && (m.bias == 0 || m.extent == 1)
    }
}

impl Cx<'_> {
    /// `z = f(before + x y + bias)`.
    pub(crate) fn einsum(
        &self,
        [x, y]: [View<'_>; 2],
        end: Epilogue<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let (lx, ly, lz) = (self.local(x.ty), self.local(y.ty), self.local(z.ty));
        float(x.ty)?;
        if lz.size == 0 {
            return Ok(());
        }
        let make = |dim: DimId, extent: i64| -> Result<Vec<Loop>, LowerError> {
            let Some(bias) = end.bias else {
                let legs = self.legs(dim, extent, [x, y, z])?.into_iter();
                return Ok(legs.map(|(extent, [x, y, z])| Loop { extent, x, y, z, bias: 0 }).collect());
            };
            let legs = self.legs(dim, extent, [x, y, z, bias])?.into_iter();
            Ok(legs.map(|(extent, [x, y, z, bias])| Loop { extent, x, y, z, bias }).collect())
        };
        let has = |ty: &TensorType, dim: DimId| ty.position(dim).is_some();
        let (mut batch, mut m, mut n, mut k) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut kept, mut summed): (Vec<Loop>, Vec<Loop>) = (Vec::new(), Vec::new());
        let mut is_product = true;
        for (&dim, &extent) in z.ty.dims.iter().zip(&lz.extents) {
            let loops = make(dim, extent)?;
            kept.extend(&loops);
            match (has(x.ty, dim), has(y.ty, dim)) {
                (true, true) => batch.extend(loops),
                (true, false) => m.extend(loops),
                (false, _) => n.extend(loops),
            }
        }
        for (&dim, &extent) in x.ty.dims.iter().zip(&lx.extents).filter(|(dim, _)| !has(z.ty, **dim)) {
            let loops = make(dim, extent)?;
            summed.extend(&loops);
            k.extend(loops);
            is_product &= has(y.ty, dim);
        }
        for (&dim, &extent) in y.ty.dims.iter().zip(&ly.extents) {
            if !has(z.ty, dim) && !has(x.ty, dim) {
                summed.extend(make(dim, extent)?);
                is_product = false;
            }
        }
        let [mut batch, mut m, mut n, k] = [batch, m, n, k].map(|loops| merged(&loops));
        // An outer loop over m or n that does not merge becomes a batch: its stride in the other operand is zero.
        for group in [&mut m, &mut n] {
            while group.len() > 1 {
                batch.insert(0, group.remove(0));
            }
        }
        let [m, n] = [m, n].map(|group| group.first().copied().unwrap_or(ONCE));
        let one_k = k.len() <= 1;
        let k = k.first().copied().unwrap_or(ONCE);
        let has_end = end.before.is_some() || end.bias.is_some() || end.of.is_some();
        // Matrices of one row and one column, of which a matrix product computes few at a time.
        let is_dot = m.extent == 1 && n.extent == 1 && (1..=LONGEST_DOT).contains(&k.extent);
        if is_product && one_k && is_dot && !has_end && !batch.is_empty() {
            let mut rows = Walk::<3>::default();
            for l in &batch {
                step(&mut rows, l.extent, [l.x, l.y, l.z])?;
            }
            let arguments = arguments![x.at, y.at, z.at, rows, lz.size, k.extent, k.x, k.y];
            let kernel = format!("dots<{}, {}>", float(x.ty)?, float(z.ty)?);
            return self.launch_rows(&kernel, (lz.size, k.extent, x.ty.dtype), arguments);
        }
        let matmul = Matmul { batch, m, n, k };
        let ends_in_place = z.cut().is_none() && end.before.is_none();
        if is_product && one_k && (!has_end || ends_in_place) && self.expert_products(&matmul, [x, y], z)? {
            return self.end_in_place(end, z);
        }
        if is_product
            && one_k
            && k.extent > 0
            && let Some(found) = matmul.find()
        {
            let is_plain = end.bias.is_none() && end.of.is_none();
            if is_plain || found.takes_bias(x.ty.dtype) && activation(end.of).is_some() {
                return self.products(&found, x, y, (end, z));
            }
            // After the product, in place.
            if z.cut().is_none() {
                self.products(&found, x, y, (Epilogue { before: end.before, ..Epilogue::default() }, z))?;
                return self.end_in_place(end, z);
            }
        }
        let (mut over, mut along) = (Walk::<4>::default(), Walk::<2>::default());
        for l in &kept {
            step(&mut over, l.extent, [l.x, l.y, l.z, l.bias])?;
        }
        for l in &summed {
            step(&mut along, l.extent, [l.x, l.y])?;
        }
        let n_summed = along.size();
        let [before, bias] = [end.before, end.bias].map(|view| view.map_or(Pointer::NONE, |view| view.at));
        let f = end.of.map_or(-1, |f| f as i32);
        let arguments = arguments![x.at, y.at, before, bias, f, z.at, over, along, lz.size, n_summed];
        let kernel = format!("einsum<{}, {}>", float(x.ty)?, float(z.ty)?);
        self.launch(&kernel, lz.size, arguments)
    }

    /// Adds the bias to a product and applies the function, in place.
    fn end_in_place(&self, end: Epilogue<'_>, z: View<'_>) -> Result<(), LowerError> {
        end.bias.map_or(Ok(()), |bias| self.binary(Binary::Add, z, bias, z))?;
        end.of.map_or(Ok(()), |f| self.elementwise("unary", z, arguments![f as i32, z.at, z.at]))
    }

    /// The innermost batch loop is the product's own; those around it are loops here.
    fn products(
        &self,
        found: &Found,
        x: View<'_>,
        y: View<'_>,
        (end, z): (Epilogue<'_>, View<'_>),
    ) -> Result<(), LowerError> {
        let Matmul { batch, m, n, k } = &found.loops;
        let (inner, outer) = batch.split_last().map_or((&ONCE, &[][..]), |(last, rest)| (last, rest));
        let (first, second) = match found.order {
            Order::SecondFirst => (y, x),
            Order::FirstFirst => (x, y),
        };
        let further =
            |of: View<'_>, n: i64| of.at.offset(u64::try_from(n).unwrap_or(0) * of.ty.dtype.bytes());
        let times: i64 = outer.iter().map(|l| l.extent).product();
        for i in 0..times {
            let (mut rest, mut dx, mut dy, mut dz, mut d_bias) = (i, 0, 0, 0, 0);
            for l in outer.iter().rev() {
                let j = rest % l.extent;
                rest /= l.extent;
                (dx, dy, dz, d_bias) = (dx + j * l.x, dy + j * l.y, dz + j * l.z, d_bias + j * l.bias);
            }
            let matrix = |at: Pointer, (form, leading): (Form, i64), step: i64| Matrix {
                at: at.address(),
                form,
                leading: Int::Const(leading),
                step: Int::Const(step),
            };
            let product = Product {
                dtype: x.ty.dtype,
                result: z.ty.dtype,
                rows: Int::Const(n.extent),
                columns: Int::Const(m.extent),
                inner: Int::Const(k.extent),
                batch: Int::Const(inner.extent),
                a: matrix(further(first, dy), found.a, inner.y),
                b: matrix(further(second, dx), found.b, inner.x),
                before: end.before.map_or(Address::NULL, |before| further(before, dz).address()),
                bias: end.bias.map_or(Address::NULL, |bias| further(bias, d_bias).address()),
                bias_step: Int::Const(inner.bias),
                activation: activation(end.of).unwrap_or(Activation::Identity),
                c: matrix(further(z, dz), (Form::Plain, found.c), inner.z),
            };
            self.trace.add(Record::Product(product));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_over_memory_merge() {
        let a = Loop { extent: 4, x: 6, y: 0, z: 6, bias: 0 };
        let b = Loop { extent: 6, x: 1, y: 0, z: 1, bias: 0 };
        assert_eq!(merged(&[a, ONCE, b]), [Loop { extent: 24, ..b }]);
        assert_eq!(merged(&[b, a]).len(), 2);
    }

    #[test]
    fn a_product_of_rows_is_one_of_columns() {
        // z[m, n] = x[m, k] y[k, n], all row-major.
        let (m, n, k) = (
            Loop { extent: 2, x: 3, y: 0, z: 4, bias: 0 },
            Loop { extent: 4, x: 0, y: 1, z: 1, bias: 0 },
            Loop { extent: 3, x: 1, y: 4, z: 0, bias: 0 },
        );
        let found = Matmul { batch: Vec::new(), m, n, k }.find().unwrap();
        assert!(found.order == Order::SecondFirst);
        assert_eq!((found.a, found.b, found.c), ((Form::Plain, 4), (Form::Plain, 3), 4));
        // z[n, m]: the operands are exchanged.
        let (m, n) = (Loop { z: 1, ..m }, Loop { z: 2, ..n });
        let found = Matmul { batch: Vec::new(), m, n, k }.find().unwrap();
        assert!(found.order == Order::FirstFirst);
    }
}
