//! The oracle: an interpreter in plain loops, for whole programs and for per-rank programs on virtual ranks.
//!
//! Everything else is judged by it, so it is written to be seen to be right: one loop nest per operation
//! ([`eval`](mod@eval)), one assembly per collective ([`collective`]), nothing clever. A per-rank operation is the
//! same operation on a box of global indices, so both levels share the loops; a whole program is a per-rank program
//! on one rank.
//!
//! Real numbers of every element type are held as `T`: a value typed `bf16` is not rounded to `bf16`, unless
//! [`Storage::AsTyped`] asks for that. Integers are held exactly.

pub mod attention;
pub mod collective;
pub mod eval;
mod experts;

pub(crate) mod gradients;
mod interpret;
mod lasting;
pub(crate) mod loss;
mod movement;
mod norms;
mod optimizer;
mod partial;
mod parts;
pub(crate) mod products;
pub(crate) mod random;
mod rows;
pub(crate) mod unary;
mod window;

#[cfg(test)]
pub(crate) mod tests;

use std::borrow::Cow;
use std::ops::Range;

use ithaca_ir::boxes::Region;
use ithaca_ir::{DimId, Level, Module, Rank, TensorType};

use crate::Outputs;
use crate::error::RunError;
use crate::place;
use crate::real::Real;
use crate::storage::Storage;
use crate::store::TensorSource;
use crate::tensor::{Tensor, extents, index};

/// A tensor of real numbers or of integers.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<T> {
    /// Of a float type.
    Real(Tensor<T>),
    /// Of type `i32` or `bool`.
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
    /// Of type `i32` or `bool`.
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

/// A result: what one rank is to hold of a value.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The type of the value.
    pub ty: &'a TensorType,
    /// The global indices that the rank is to hold.
    pub region: Region,
}

/// What a run gave.
#[derive(Clone, Debug)]
pub struct Results<T> {
    /// The outputs of `main`, cut to the valid part of every dimension; integers are returned as numbers.
    pub outputs: Outputs<T>,
    /// Every weight and state that the run assigned, under its stored name and in its stored shape, in order of
    /// names. [`Tensors`](crate::store::Tensors) can be made of them, and [`Layered`](crate::store::Layered) over the
    /// weights is what the next step reads.
    pub kept: Outputs<T>,
}

/// Runs a module of the program level.
///
/// `weights` answer its `param`s and `inputs` its `input`s; a `state` is zero where `weights` has none of its name.
/// Outputs are those of `main`, cut to the valid part of every dimension; integers are returned as numbers.
///
/// # Errors
/// [`RunError`]: another level, a source that cannot be read, a token outside its table.
pub fn run<T: Real>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
) -> Result<Outputs<T>, RunError> {
    match module.level {
        Level::Program => step(module, weights, inputs, Storage::Wide).map(|results| results.outputs),
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
        Level::Sharded | Level::PerRank => {
            step(module, weights, inputs, Storage::Wide).map(|results| results.outputs)
        }
        Level::Program => {
            Err(RunError::Level { expected: Level::PerRank.name(), found: module.level.name() })
        }
    }
}

/// Runs a module of any level, values being kept as `storage` says.
///
/// # Errors
/// As [`run_ranks`], whatever the level.
pub fn run_stored<T: Real>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    storage: Storage,
) -> Result<Outputs<T>, RunError> {
    step(module, weights, inputs, storage).map(|results| results.outputs)
}

/// Runs a module of any level, and returns beside its outputs the weights and states that it assigned.
///
/// Further steps are run by giving back what was kept, over the weights of the first.
///
/// # Errors
/// As [`run_ranks`], whatever the level; copies of what is kept must agree bit for bit as those of outputs.
pub fn step<T: Real>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    storage: Storage,
) -> Result<Results<T>, RunError> {
    T::interpret(module, weights, inputs, storage)
}

/// What the interpreter is compiled for: here, once for each type, not again in every crate that calls it.
pub trait Interpreted: Sized {
    /// [`step`] with numbers of this type.
    ///
    /// # Errors
    /// As [`step`].
    fn interpret(
        module: &Module,
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        storage: Storage,
    ) -> Result<Results<Self>, RunError>;
}

macro_rules! interpreted {
    ($($number:ty),*) => {$(
        impl Interpreted for $number {
            fn interpret(
                module: &Module,
                weights: &dyn TensorSource,
                inputs: &dyn TensorSource,
                storage: Storage,
            ) -> Result<Results<Self>, RunError> {
                interpret::run(module, weights, inputs, storage)
            }
        }
    )*};
}

interpreted!(f64, f32);

/// An output from what the ranks hold of it: every element at its position, cut to the valid part.
///
/// # Errors
/// [`RunError::ReplicasDiffer`] when two ranks hold different numbers (bit for bit) for one element;
/// [`RunError::Invalid`] for a sum that is still to be taken, and for elements that no rank holds.
pub fn assemble<'a, T: Real>(
    space: &ithaca_ir::Space,
    name: &str,
    ty: &TensorType,
    local: impl FnMut(Rank) -> Result<Cow<'a, [T]>, RunError>,
) -> Result<Tensor<T>, RunError> {
    let shape: Vec<usize> = ty.dims.iter().map(|&d| index(space.dims[d].valid.min(space.size(d)))).collect();
    let whole = put_together(space, name, ty, &shape, place::stored_at, local)?;
    let data: Option<Vec<T>> = whole.into_iter().collect();
    let data = data.ok_or_else(|| RunError::invalid(format!("no rank holds a part of `{name}`")))?;
    Ok(Tensor::new(shape, data))
}

/// What ranks hold of a tensor, in `shape`, each element where `places` puts its index along each dimension.
///
/// # Errors
/// As [`assemble`]; what no rank holds is `None`.
pub(crate) fn put_together<'a, T: Real>(
    space: &ithaca_ir::Space,
    name: &str,
    ty: &TensorType,
    shape: &[usize],
    places: fn(&ithaca_ir::Space, DimId, Range<u64>) -> Vec<Option<usize>>,
    mut local: impl FnMut(Rank) -> Result<Cow<'a, [T]>, RunError>,
) -> Result<Vec<Option<T>>, RunError> {
    if !ty.layout.partial.is_empty() {
        return Err(RunError::invalid(format!("`{name}` is a sum still to be taken")));
    }
    let mut whole: Vec<Option<T>> = vec![None; shape.iter().product()];
    for rank in space.mesh.iter_ranks().filter(|&rank| space.holds(ty, rank)) {
        let held = space.local_box(ty, rank);
        let along = |(&d, range): (_, &Range<u64>)| places(space, d, range.clone());
        let (starts, row) = place::rows(ty.dims.iter().zip(&held).map(along).collect(), shape);
        let data = local(rank)?;
        if data.len() != extents(&held).iter().product::<usize>() {
            return Err(RunError::invalid(format!("`{name}` has another size than its type")));
        }
        let places = starts.flat_map(|start| row.iter().map(move |&i| Some(start? + i?)));
        for (place, &x) in places.zip(data.iter()) {
            let Some(i) = place else { continue };
            match whole[i].replace(x) {
                Some(y) if y.to_f64().to_bits() != x.to_f64().to_bits() => {
                    return Err(RunError::ReplicasDiffer {
                        output: name.to_owned(),
                        rank: rank.0,
                        at: unravel(shape, i),
                        found: x.to_f64(),
                        expected: y.to_f64(),
                    });
                }
                _ => {}
            }
        }
    }
    Ok(whole)
}

/// The position of the `i`-th element of a tensor, row-major.
fn unravel(shape: &[usize], mut i: usize) -> Vec<u64> {
    let mut at: Vec<u64> = shape
        .iter()
        .rev()
        .map(|&n| {
            let here = (i % n) as u64;
            i /= n;
            here
        })
        .collect();
    at.reverse();
    at
}
