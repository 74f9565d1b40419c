//! The results of a run of a module.

use crate::tensor::Outputs;

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Results<T> {
    /// The outputs of `main`, cut to the valid part of every dimension; integers are returned as numbers.
    pub outputs: Outputs<T>,
    /// Every weight and state that the run assigned, under its stored name and in its stored shape, in order of
    /// names. [`Tensors`](crate::store::Tensors) can be made of them, and [`Layered`](crate::store::Layered) over the
    /// weights is the source of the next step.
    pub kept: Outputs<T>,
}
