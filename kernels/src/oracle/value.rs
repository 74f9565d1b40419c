//! Values, operands and results of operations, as one rank has them.

use ithaca_ir::TensorType;
use ithaca_ir::boxes::Region;

use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{Tensor, extents, strides};

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

/// An operand: one rank's part of a value.
#[derive(Clone, Debug)]
pub struct Operand<'a, T> {
    /// The type of the value.
    pub ty: &'a TensorType,
    /// The global indices that the rank holds.
    pub region: Region,
    /// The elements at these indices.
    pub elements: Elements<'a, T>,
}

/// The type of a result and the part of it that a rank computes.
#[derive(Clone, Debug)]
pub struct ResultSpec<'a> {
    /// The type of the value.
    pub ty: &'a TensorType,
    /// The global indices that the rank is to hold.
    pub region: Region,
}

/// The part of a tensor on a rank: its type and the global indices.
pub type Held<'a> = (&'a TensorType, &'a Region);

impl<'a, T: Real> Operand<'a, T> {
    /// The local shape.
    pub fn shape(&self) -> Vec<usize> {
        extents(&self.region)
    }

    /// The elements, of a float type.
    ///
    /// # Errors
    /// [`RunError::Invalid`] when they are integers.
    pub fn real(&self) -> Result<&'a [T], RunError> {
        match self.elements {
            Elements::Real(data) => Ok(data),
            Elements::Int(_) => Err(RunError::invalid("an operand is of integers where real numbers belong")),
        }
    }

    /// The elements, integers.
    ///
    /// # Errors
    /// [`RunError::Invalid`] when they are real numbers.
    pub fn int(&self) -> Result<&'a [i32], RunError> {
        match self.elements {
            Elements::Int(data) => Ok(data),
            Elements::Real(_) => {
                Err(RunError::invalid("an operand is of real numbers where integers belong"))
            }
        }
    }

    /// The type, and the indices held.
    pub fn held(&self) -> Held<'_> {
        (self.ty, &self.region)
    }

    /// The stride of each dimension of `ty`; zero for those that the operand lacks.
    pub fn strides_in(&self, ty: &TensorType) -> Vec<usize> {
        let own = strides(&self.shape());
        ty.dims.iter().map(|&d| self.ty.position(d).map_or(0, |i| own[i])).collect()
    }
}
