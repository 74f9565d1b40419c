//! The oracle: an interpreter in plain loops, for whole programs and for per-rank programs on virtual ranks.
//!
//! Everything else is judged by it, so it is written to be seen to be right: one loop nest per operation
//! ([`eval`](mod@eval)), one assembly per collective ([`collective`]), nothing clever. A per-rank operation is the
//! same operation on a box of global indices, so both levels share the loops; a whole program is a per-rank program
//! on one rank.
//!
//! Real numbers of every element type are held as `T`: a value typed `bf16` is not rounded to `bf16`. Integers are
//! held exactly.

pub mod attention;
pub mod collective;
pub mod eval;

mod interpret;
pub(crate) mod products;
mod rows;

#[cfg(test)]
pub(crate) mod tests;

use ithaca_ir::boxes::Region;
use ithaca_ir::{Level, Module, Rank, TensorType};

use crate::Outputs;
use crate::error::RunError;
use crate::real::Real;
use crate::store::TensorSource;
use crate::tensor::Tensor;

/// A tensor of real numbers or of integers.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<T> {
    /// Of a float type.
    Real(Tensor<T>),
    /// Of type `i32`.
    Int(Tensor<i32>),
}

impl<T: Real> Value<T> {
    /// The elements.
    pub fn elements(&self) -> Elements<'_, T> {
        match self {
            Value::Real(t) => Elements::Real(&t.data),
            Value::Int(t) => Elements::Int(&t.data),
        }
    }
}

/// Elements of a local tensor, row-major.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a, T> {
    /// Of a float type.
    Real(&'a [T]),
    /// Of type `i32`.
    Int(&'a [i32]),
}

/// An operand: what one rank holds of a value.
#[derive(Clone, Debug)]
pub struct Operand<'a, T> {
    /// The type of the value.
    pub ty: &'a TensorType,
    /// The global indices that the rank holds.
    pub region: Region,
    /// The elements at these indices.
    pub elements: Elements<'a, T>,
}

/// Runs a module of the program level.
///
/// `weights` answer its `param`s and `inputs` its `input`s. Outputs are those of `main`, cut to the valid part of
/// every dimension; integers are returned as numbers.
///
/// # Errors
/// [`RunError`]: another level, a source that cannot be read, a token outside its table.
pub fn run<T: Real>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
) -> Result<Outputs<T>, RunError> {
    match module.level {
        Level::Program => interpret::run(module, weights, inputs),
        Level::Sharded | Level::PerRank => {
            Err(RunError::Level { expected: Level::Program.name(), found: module.level.name() })
        }
    }
}

/// Runs a module on virtual ranks, all ranks node by node, with collectives in memory.
///
/// A `reshard` of a sharded module is carried out by assembling and redistributing. Outputs are assembled from the
/// ranks' boxes and cut as [`run`] does; ranks that hold the same elements must agree bit for bit.
///
/// # Errors
/// As [`run`], and [`RunError::ReplicasDiffer`].
pub fn run_ranks<T: Real>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
) -> Result<Outputs<T>, RunError> {
    match module.level {
        Level::Sharded | Level::PerRank => interpret::run(module, weights, inputs),
        Level::Program => {
            Err(RunError::Level { expected: Level::PerRank.name(), found: module.level.name() })
        }
    }
}

/// An output from what the ranks hold of it, cut to the valid part.
///
/// # Errors
/// [`RunError::ReplicasDiffer`] when two ranks hold different numbers (bit for bit) for one element;
/// [`RunError::Invalid`] for a sum that is still to be taken, and for elements that no rank holds.
pub fn assemble<'a, T: Real>(
    space: &ithaca_ir::Space,
    name: &str,
    ty: &TensorType,
    mut local: impl FnMut(Rank) -> Result<std::borrow::Cow<'a, [T]>, RunError>,
) -> Result<Tensor<T>, RunError> {
    if !ty.layout.partial.is_empty() {
        return Err(RunError::invalid(format!("output `{name}` is a sum still to be taken")));
    }
    let valid: Region = ty.dims.iter().map(|&d| 0..space.dims[d].valid.min(space.size(d))).collect();
    let mut whole: Vec<Option<T>> = vec![None; crate::tensor::extents(&valid).iter().product()];
    for rank in space.mesh.iter_ranks() {
        let held = space.local_box(ty, rank);
        let kept = ithaca_ir::boxes::intersect(&held, &valid);
        let block = crate::tensor::read_part(&held, &local(rank)?, &kept);
        let indices = crate::tensor::Offsets::of_part(&valid, &kept);
        for (i, x) in indices.zip(block) {
            match whole[i].replace(x) {
                Some(y) if y.to_f64().to_bits() != x.to_f64().to_bits() => {
                    return Err(RunError::ReplicasDiffer {
                        output: name.to_owned(),
                        rank: rank.0,
                        at: unravel(&valid, i),
                        found: x.to_f64(),
                        expected: y.to_f64(),
                    });
                }
                _ => {}
            }
        }
    }
    let shape = crate::tensor::extents(&valid);
    let data: Option<Vec<T>> = whole.into_iter().collect();
    let data = data.ok_or_else(|| RunError::invalid(format!("no rank holds a part of output `{name}`")))?;
    Ok(Tensor::new(shape, data))
}

/// The index of the `i`-th element of a region, row-major.
fn unravel(region: &Region, mut i: usize) -> Vec<u64> {
    let mut at: Vec<u64> = region
        .iter()
        .rev()
        .map(|r| {
            let n = crate::tensor::length(r);
            let here = r.start + (i % n) as u64;
            i /= n;
            here
        })
        .collect();
    at.reverse();
    at
}
