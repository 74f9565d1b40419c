//! The entry points of the oracle.

use ithaca_ir::{Level, Module};

use super::interpret::{self, Results, StepOptions};
use crate::error::RunError;
use crate::real::Real;
use crate::storage::{Rounding, Storage};
use crate::store::TensorSource;
use crate::tensor::Outputs;

/// Runs a module of the program level.
///
/// `weights` answer its `param`s and `inputs` its `input`s; a `state` is zero where `weights` has no tensor of its name.
/// Outputs are those of `main`, cut to the valid part of every dimension; integers are returned as numbers.
///
/// # Errors
/// [`RunError`]: another level, a source that cannot be read, a token outside its table.
pub fn run<T: Interpreted>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
) -> Result<Outputs<T>, RunError> {
    match module.level {
        Level::Program => step(module, weights, inputs, Storage::Wide).map(|results| results.outputs),
        found @ (Level::Sharded | Level::PerRank) => Err(another_level(Level::Program, found)),
    }
}

/// Runs a module on virtual ranks, all ranks node by node, with collectives in memory.
///
/// A `reshard` of a sharded module is carried out by assembling and redistributing. Outputs are assembled from the
/// ranks' boxes and cut as [`run`] does; ranks that hold the same elements must agree bit for bit.
///
/// # Errors
/// As [`run`], and [`RunError::ReplicasDiffer`].
pub fn run_ranks<T: Interpreted>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
) -> Result<Outputs<T>, RunError> {
    match module.level {
        Level::Program => Err(another_level(Level::PerRank, module.level)),
        Level::Sharded | Level::PerRank => {
            step(module, weights, inputs, Storage::Wide).map(|results| results.outputs)
        }
    }
}

fn another_level(expected: Level, found: Level) -> RunError {
    RunError::Level { expected: expected.name(), found: found.name() }
}

/// Runs a module of any level, and returns beside its outputs the weights and states that it assigned.
///
/// The next step reads the updates, layered over the weights of the first.
///
/// # Errors
/// As [`run_ranks`], whatever the level; copies of updates must agree bit for bit, as those of outputs.
pub fn step<T: Interpreted>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    storage: Storage,
) -> Result<Results<T>, RunError> {
    step_with(module, weights, inputs, &StepOptions::of(Rounding::Nearest(storage)))
}

/// As [`step`], with options.
///
/// # Errors
/// As [`step`].
pub fn step_with<T: Interpreted>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    options: &StepOptions<'_>,
) -> Result<Results<T>, RunError> {
    T::step(module, weights, inputs, options)
}

/// A number type of the interpreter. The interpreter is compiled here, once for each type: crates that use it may not be
/// optimised, and would run a copy of their own at half its speed.
pub trait Interpreted: Real {
    /// [`step_with`] numbers of this type.
    ///
    /// # Errors
    /// As [`step`].
    fn step(
        module: &Module,
        weights: &dyn TensorSource,
        inputs: &dyn TensorSource,
        options: &StepOptions<'_>,
    ) -> Result<Results<Self>, RunError>;
}

macro_rules! interpreted {
    ($($number:ty),*) => {
        $(impl Interpreted for $number {
            #[inline(never)]
            fn step(
                module: &Module,
                weights: &dyn TensorSource,
                inputs: &dyn TensorSource,
                options: &StepOptions<'_>,
            ) -> Result<Results<Self>, RunError> {
                interpret::run(module, weights, inputs, options)
            }
        })*
    };
}

interpreted!(f64, f32);
