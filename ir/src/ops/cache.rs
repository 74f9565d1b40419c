//! Caches of keys and values: types and factor rules of the operations that continue sequences.
//!
//! ```text
//! %start = state {name="cache.lengths"} : i32[b]
//! %end = advance %start, %new : i32[b]
//! %keys = append %cache, %k, %start, %end {over=c, rows=t} : bf16[b c k d]
//! %o = attention %q, %keys, %values, %start {…, starts} : bf16[b t h d]
//! ```
//! The number of tokens of a sequence is a value on the device and the capacity `c` of a cache is a size, so types, memory and
//! traffic do not depend on lengths. A cache is a state, written in place; its tokens may be split as those of any sequence, and
//! its layout does not depend on that of weights.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::ops::check::{need_float, refuse, sums_in};
use crate::ops::context::Types;
use crate::ops::error::{OpError, ensure};
use crate::rule::{FactorKind, FactorRule, Misfit};
use crate::space::Space;
use crate::types::TensorType;

pub use crate::ops::table::cache::Cache;

/// The prefix of the names of caches.
pub const CACHE: &str = "cache.";
/// The name of the state that has the number of tokens of each sequence.
pub const LENGTHS: &str = "cache.lengths";
/// The name of the state that has the last token of each sequence.
pub const TOKEN: &str = "cache.token";

impl Cache {
    /// The types of the results, without layouts.
    pub(super) fn infer(&self, space: &Space, operands: &[&TensorType]) -> Result<Types, OpError> {
        let cx = Cx { name: self.name(), space };
        let result = match self {
            Cache::Advance => {
                cx.lengths(operands, operands[0])?;
                operands[0].clone()
            }
            Cache::TokenPositions { rows } => {
                cx.lengths(operands, operands[0])?;
                cx.shape(!operands[0].has(*rows), "the lengths lack the tokens of the step")?;
                TensorType::new(DType::I32, operands[0].dims.iter().copied().chain([*rows]))
            }
            Cache::Append { over, rows } => {
                let (cache, x) = (operands[0], operands[1]);
                need_float(cx.name, cache.dtype)?;
                ensure!(cache.dtype == x.dtype, "V04", "`{}` of {} to {}", cx.name, x.dtype, cache.dtype);
                cx.lengths(&operands[2..], cache)?;
                let of_cache = |&d: &DimId| if d == *rows { *over } else { d };
                cx.shape(
                    x.has(*rows) && x.dims.iter().map(of_cache).eq(cache.dims.iter().copied()),
                    "x has the dimensions of the cache, with the tokens of the step",
                )?;
                cx.shape(operands[2..].iter().all(|ty| !ty.has(*over)), "lengths are of sequences")?;
                cache.clone()
            }
            Cache::LastToken { over } => {
                let x = operands[0];
                need_float(cx.name, x.dtype)?;
                cx.lengths(&operands[1..], x)?;
                let is_sequence = |ty: &&TensorType| !ty.has(*over);
                cx.shape(
                    x.has(*over) && operands[1..].iter().all(is_sequence),
                    "x has the dimension `over`",
                )?;
                TensorType::new(x.dtype, x.dims.iter().copied().filter(|d| d != over))
            }
            Cache::Argmax { .. } => unreachable!("its layout is inferred with its type"),
            Cache::Choose => {
                cx.lengths(operands, operands[0])?;
                operands[0].clone()
            }
        };
        Ok(smallvec![result])
    }

    /// The types of the results of `argmax`, laid out.
    pub(super) fn infer_argmax(
        (over, parts): (DimId, Option<DimId>),
        space: &Space,
        operands: &[&TensorType],
    ) -> Result<Types, OpError> {
        let x = operands[0];
        let cx = Cx { name: "argmax", space };
        need_float(cx.name, x.dtype)?;
        cx.shape(x.has(over), "x has the dimension `over`")?;
        if let Some(i) = operands.iter().position(|ty| !ty.layout.partial.is_empty()) {
            return Err(refuse(cx.name, space, Misfit::Pending(i)));
        }
        if let Some(places) = operands.get(1) {
            ensure!(
                places.dtype == DType::I32,
                "V04",
                "`argmax` gives elements of i32, not {}",
                places.dtype
            );
            cx.shape(places.dims == x.dims && places.layout == x.layout, "both operands lie alike")?;
        }
        let axes = x.axes_of(over);
        let mut rows = TensorType::new(DType::I32, x.dims.iter().copied().filter(|&d| d != over));
        rows.layout.split =
            x.dims.iter().zip(&x.layout.split).filter(|&(&d, _)| d != over).map(|(_, s)| s.clone()).collect();
        rows.layout.moved.clone_from(&x.layout.moved);
        match parts {
            None => ensure!(
                axes.is_empty(),
                "V08",
                "`argmax` needs dimension `{}` whole, but it is split",
                space.dims[over].name
            ),
            Some(parts) => {
                let (n, degree) = (space.size(parts), space.mesh.degree(axes));
                cx.shape(
                    !x.has(parts) && n == degree,
                    &format!("`parts` of {n} must tell apart the {degree} ranks that hold parts of `over`"),
                )?;
                rows.dims.insert(0, parts);
                rows.layout.split.insert(0, axes.into());
            }
        }
        let values = TensorType { dtype: sums_in(x.dtype), ..rows.clone() };
        Ok(smallvec![rows, values])
    }

    /// The factor rule: every rank appends the rows whose positions it holds, so it has all rows; a rank that lacks the last
    /// token adds zero.
    pub(super) fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        let kind = |dim: DimId| match self {
            Cache::Append { rows, .. } if dim == *rows => FactorKind::Whole,
            Cache::Argmax { over, .. } if dim == *over => FactorKind::Whole,
            Cache::LastToken { over } if dim == *over => FactorKind::Sum,
            _ => FactorKind::Parallel,
        };
        FactorRule::by_name(operands, results, kind)
    }
}

struct Cx<'a> {
    name: &'static str,
    space: &'a Space,
}

impl Cx<'_> {
    /// The operands are integers alike, over dimensions of `of`.
    fn lengths(&self, operands: &[&TensorType], of: &TensorType) -> Result<(), OpError> {
        for ty in operands {
            ensure!(ty.dtype == DType::I32, "V04", "`{}` takes lengths of i32, not {}", self.name, ty.dtype);
            let known = ty.dims == operands[0].dims && ty.dims.iter().all(|&d| of.has(d));
            self.shape(known, "lengths have the same dimensions, those of sequences")?;
        }
        Ok(())
    }

    fn shape(&self, holds: bool, rule: &str) -> Result<(), OpError> {
        let _ = self.space;
        ensure!(holds, "V05", "`{}`: {rule}", self.name);
        Ok(())
    }
}
