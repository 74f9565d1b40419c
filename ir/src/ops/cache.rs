//! Caches of keys and values: types and factor rules of the operations that continue sequences.
//!
//! ```text
//! %start = state {name="cache.lengths"} : i32[b]
//! %end = advance %start, %new : i32[b]
//! %keys = append %cache, %k, %start, %end {over=c, rows=t} : bf16[b c k d]
//! %o = attention %q, %keys, %values, %start {…, starts} : bf16[b t h d]
//! ```
//! In pages a cache is `[p s k d]`: pages, of slots, that all sequences share. A table says which page has which tokens.
//!
//! ```text
//! %table = input {name="pages"} : i32[b n]
//! %pages = append_pages %cache, %k, %start, %end, %table {pages=p, slots=s, rows=t} : bf16[p s k d]
//! %keys = gather_pages %pages, %table {pages=p, slots=s, over=c} : bf16[b c k d]
//! ```
//! Pages beyond those that fit on the device are a state of their own in host memory. A step reads them from a copy that is made
//! before, and the tokens that it appends, which the copy lacks, from the pages themselves.
//!
//! ```text
//! %host = state {name="cache.host.key.{layer}", host=true} : bf16[q s k d]
//! %copy = upload %host : bf16[q s k d]
//! %more = append_pages %host, %k, %start, %end, %table {pages=q, slots=s, rows=t, after=p} : bf16[q s k d]
//! %keys = gather_pages %pages, %table, %copy, %more, %start {pages=p, slots=s, over=c, beyond=q} : bf16[b c k d]
//! ```
//! Pages are split as sequences of the batch are, so that a rank has the pages of its sequences, and slots as tokens of a cache:
//! ranks that split tokens have a part of each page.
//!
//! The number of tokens of a sequence is a value on the device and the capacity `c` of a cache is a size, so types, memory and
//! traffic do not depend on lengths. A cache is a state, written in place; its tokens may be split as those of any sequence, and
//! its layout does not depend on that of weights.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::ops::check::{need_float, refuse, sums_in};
use crate::ops::context::Types;
use crate::ops::error::{OpError, ensure};
use crate::rule::{FactorKind, FactorRule, RuleViolation};
use crate::space::Space;
use crate::types::TensorType;

pub use crate::ops::table::cache::{Cache, RotateAppend};

/// The prefix of the names of caches.
pub const CACHE: &str = "cache.";
/// What is behind the name of a cache, in the name of the scales of its rows.
pub const SCALES: &str = "_scale";
/// The prefix of the names of caches in host memory, which are in pages.
pub const HOST: &str = "cache.host.";
/// The name of the state that has the number of tokens of each sequence.
pub const LENGTHS: &str = "cache.lengths";
/// The name of the state that has the last token of each sequence.
pub const TOKEN: &str = "cache.token";
/// The name of the state that has the number of tokens of each sequence of a decoder that attends to an encoder.
pub const DECODED: &str = "cache.decoded";
/// The name of the state that has the position of the last token of each sequence that the encoder read.
pub const SOURCE: &str = "cache.source";

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
            Cache::Append { over, rows, .. } => {
                let (cache, x) = (operands[0], operands[1]);
                need_float(cx.name, x.dtype)?;
                let lengths = &operands[2..4];
                cx.lengths(lengths, cache)?;
                let of_cache = |&d: &DimId| if d == *rows { *over } else { d };
                cx.shape(
                    x.has(*rows) && x.dims.iter().map(of_cache).eq(cache.dims.iter().copied()),
                    "x has the dimensions of the cache, with the tokens of the step",
                )?;
                cx.shape(lengths.iter().all(|ty| !ty.has(*over)), "lengths are of sequences")?;
                return cx.with_scales(cache, operands.get(4));
            }
            Cache::AppendPages { pages, slots, rows, .. } => {
                let (cache, x, table) = (operands[0], operands[1], operands[4]);
                need_float(cx.name, x.dtype)?;
                cx.lengths(&operands[2..4], x)?;
                let sequences = cx.table((cache, table), [*pages, *slots])?;
                let of_token = &cache.dims[2..];
                cx.shape(
                    operands[2].dims[..] == *sequences
                        && x.dims.iter().eq(sequences.iter().chain([rows]).chain(of_token)),
                    "x has the sequences of the table, the tokens of the step, and what pages have of a token",
                )?;
                return cx.with_scales(cache, operands.get(5));
            }
            Cache::GatherPages { pages, slots, over, beyond } => {
                let (cache, table) = (operands[0], operands[1]);
                let sequences = cx.table((cache, table), [*pages, *slots])?;
                let entries = table.dims.last().map_or(0, |&d| space.size(d));
                cx.shape(
                    space.size(*over) == entries * space.size(*slots),
                    "tokens are as many as entries of the table times slots of a page",
                )?;
                let further = match beyond {
                    Some(_) => 5,
                    None => 2,
                };
                ensure!(
                    operands.len() == further,
                    "V01",
                    "`gather_pages` takes a copy of pages in host memory, these and the lengths with `beyond`, and only then"
                );
                if let Some(beyond) = beyond {
                    for of_host in &operands[2..4] {
                        cx.table((of_host, table), [*beyond, *slots])?;
                        cx.shape(
                            of_host.dtype == cache.dtype && of_host.dims[2..] == cache.dims[2..],
                            "pages in host memory have of a token what the others have",
                        )?;
                    }
                    cx.lengths(&operands[4..], table)?;
                }
                let dims = sequences.iter().chain([over]).chain(&cache.dims[2..]);
                TensorType::new(cache.dtype, dims.copied())
            }
            Cache::Upload => {
                cx.holds_numbers(operands[0])?;
                operands[0].clone()
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
            return Err(refuse(cx.name, space, RuleViolation::Pending(i)));
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
        let scaled = if results.len() > 1 { results[0].dims.last().copied() } else { None };
        let (of_pages, table) = match self {
            Cache::AppendPages { pages, rows, .. } => {
                (([Some(*pages), None], None, Some(*rows)), operands.get(4))
            }
            Cache::GatherPages { pages, slots, over, beyond } => {
                (([Some(*pages), *beyond], Some((*over, *slots)), None), operands.get(1))
            }
            _ => return self.rule_of_names(operands, results, scaled),
        };
        let (pages, tokens, rows) = of_pages;
        let [batch, entries] = [0, 1].map(|i| table.and_then(|table| table.dims.get(i)).copied());
        FactorRule::by_factor(operands, results, |dim| match tokens {
            _ if pages.contains(&Some(dim)) => (batch.unwrap_or(dim), FactorKind::Parallel),
            Some((over, slots)) if dim == over => (slots, FactorKind::Parallel),
            _ if [rows, entries, scaled].contains(&Some(dim)) => (dim, FactorKind::Whole),
            _ => (dim, FactorKind::Parallel),
        })
    }

    /// `scaled` is the dimension along which rows have scales.
    fn rule_of_names(
        &self,
        operands: &[&TensorType],
        results: &[&TensorType],
        scaled: Option<DimId>,
    ) -> FactorRule {
        let kind = |dim: DimId| match self {
            Cache::Append { rows, .. } if dim == *rows || Some(dim) == scaled => FactorKind::Whole,
            Cache::Argmax { over, .. } if dim == *over => FactorKind::Whole,
            Cache::LastToken { over } if dim == *over => FactorKind::Sum,
            _ => FactorKind::Parallel,
        };
        FactorRule::by_name(operands, results, kind)
    }
}

/// Scales are those of rows of `of`, along its last dimension.
pub(super) fn check_scales(name: &str, of: &TensorType, scales: &TensorType) -> Result<(), OpError> {
    ensure!(scales.dtype == DType::F32, "V04", "`{name}` takes scales of f32, not {}", scales.dtype);
    let rows = &of.dims[..of.dims.len().saturating_sub(1)];
    ensure!(
        scales.dims.as_slice() == rows,
        "V05",
        "`{name}`: scales have the dimensions of a cache but the last"
    );
    let alike = scales.layout.split.iter().eq(&of.layout.split[..rows.len()]);
    ensure!(
        alike && scales.layout.moved == of.layout.moved,
        "V07",
        "`{name}`: scales are laid out otherwise than the rows that they are of"
    );
    Ok(())
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

    /// The sequences of a table of pages, with an entry for each part of a sequence.
    fn table<'t>(
        &self,
        (cache, table): (&TensorType, &'t TensorType),
        of_cache: [DimId; 2],
    ) -> Result<&'t [DimId], OpError> {
        self.holds_numbers(cache)?;
        ensure!(
            table.dtype == DType::I32,
            "V04",
            "`{}` takes a table of i32, not {}",
            self.name,
            table.dtype
        );
        self.shape(cache.dims.get(..2) == Some(&of_cache[..]), "a cache in pages is of pages, then slots")?;
        self.shape(
            table.dims.len() == 2 && table.dims.iter().all(|&d| !cache.has(d)),
            "a table has entries for each sequence of one batch",
        )?;
        Ok(&table.dims[..1])
    }

    fn holds_numbers(&self, cache: &TensorType) -> Result<(), OpError> {
        ensure!(cache.dtype.is_float(), "V04", "`{}` needs real numbers, not {}", self.name, cache.dtype);
        Ok(())
    }

    /// A cache, and the scales of its rows where it has them.
    fn with_scales(&self, cache: &TensorType, scales: Option<&&TensorType>) -> Result<Types, OpError> {
        self.holds_numbers(cache)?;
        let is_scaled = !cache.dtype.is_arithmetic();
        ensure!(
            scales.is_some() == is_scaled,
            "V01",
            "`{}` takes scales with a cache of {}, and with no other",
            self.name,
            DType::F8E4M3
        );
        let Some(&scales) = scales else { return Ok(smallvec![cache.clone()]) };
        check_scales(self.name, cache, scales)?;
        Ok(smallvec![cache.clone(), scales.clone()])
    }

    fn shape(&self, holds: bool, rule: &str) -> Result<(), OpError> {
        let _ = self.space;
        ensure!(holds, "V05", "`{}`: {rule}", self.name);
        Ok(())
    }
}
