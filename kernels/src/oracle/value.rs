//! Values, operands and results of operations, as one rank has them.

use ithaca_ir::boxes::Region;
use ithaca_ir::{DimId, Op, Space, TensorType};

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
    /// The elements of each dimension.
    pub(super) fn shape(&self) -> &[usize] {
        match self {
            Value::Real(t) => &t.shape,
            Value::Int(t) => &t.shape,
        }
    }

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

impl<'a, T: Real> Elements<'a, T> {
    /// Elements of a float type.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for integers.
    pub fn real(self) -> Result<&'a [T], RunError> {
        match self {
            Elements::Real(data) => Ok(data),
            Elements::Int(_) => Err(RunError::invalid("an operand is of integers where real numbers belong")),
        }
    }

    /// Integers.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for real numbers.
    pub fn int(self) -> Result<&'a [i32], RunError> {
        match self {
            Elements::Int(data) => Ok(data),
            Elements::Real(_) => {
                Err(RunError::invalid("an operand is of real numbers where integers belong"))
            }
        }
    }

    /// How many.
    pub(crate) fn n(self) -> usize {
        match self {
            Elements::Real(data) => data.len(),
            Elements::Int(data) => data.len(),
        }
    }

    /// A tensor of this shape with the elements at `places`.
    pub(super) fn gather(self, shape: Vec<usize>, places: impl Iterator<Item = usize>) -> Value<T> {
        match self {
            Elements::Real(data) => Value::Real(Tensor::new(shape, places.map(|i| data[i]).collect())),
            Elements::Int(data) => Value::Int(Tensor::new(shape, places.map(|i| data[i]).collect())),
        }
    }

    /// A tensor of this shape with the elements of all parts, one after another.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for parts of different kinds.
    pub(super) fn concatenated(shape: Vec<usize>, parts: &[Self]) -> Result<Value<T>, RunError> {
        Ok(match parts.first() {
            Some(Elements::Int(_)) => {
                let parts = parts.iter().map(|part| part.int()).collect::<Result<Vec<_>, _>>()?;
                Value::Int(Tensor::new(shape, parts.concat()))
            }
            Some(Elements::Real(_)) | None => {
                let parts = parts.iter().map(|part| part.real()).collect::<Result<Vec<_>, _>>()?;
                Value::Real(Tensor::new(shape, parts.concat()))
            }
        })
    }
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

impl ResultSpec<'_> {
    /// The stride of each dimension of `ty` in the result; zero for those that it lacks.
    pub(super) fn strides_in(&self, ty: &TensorType) -> Vec<usize> {
        strides_in((self.ty, &self.region), &ty.dims)
    }

    /// The result of `op` in its shape.
    pub(super) fn tensor<E: Copy>(&self, op: &Op, data: Vec<E>) -> Result<Tensor<E>, RunError> {
        let shape = extents(&self.region);
        if shape.iter().product::<usize>() == data.len() {
            return Ok(Tensor::new(shape, data));
        }
        Err(RunError::invalid(format!("`{}` gives another shape than its type", op.name())))
    }
}

/// The part of a tensor on a rank: its type and the global indices.
pub type OperandRegion<'a> = (&'a TensorType, &'a Region);

impl<'a, T: Real> Operand<'a, T> {
    /// The local shape.
    pub fn shape(&self) -> Vec<usize> {
        extents(&self.region)
    }

    /// The elements, of a float type.
    ///
    /// # Errors
    /// As [`Elements::real`].
    pub fn real(&self) -> Result<&'a [T], RunError> {
        self.elements.real()
    }

    /// The elements, integers.
    ///
    /// # Errors
    /// As [`Elements::int`].
    pub fn int(&self) -> Result<&'a [i32], RunError> {
        self.elements.int()
    }

    /// The type, and the indices held.
    pub fn held(&self) -> OperandRegion<'_> {
        (self.ty, &self.region)
    }

    /// The stride of each dimension of `ty`; zero for those that the operand lacks.
    pub fn strides_in(&self, ty: &TensorType) -> Vec<usize> {
        strides_in(self.held(), &ty.dims)
    }
}

/// The stride of each of `dims` in a rank's part of a tensor; zero for those that it lacks.
pub(super) fn strides_in((own, region): OperandRegion<'_>, dims: &[DimId]) -> Vec<usize> {
    let steps = strides(&extents(region));
    dims.iter().map(|&d| own.position(d).map_or(0, |i| steps[i])).collect()
}

/// An operation on the parts of one rank, which has the operands that it needs and a result.
pub(super) struct LocalOp<'a, T> {
    pub(super) space: &'a Space,
    pub(super) op: &'a Op,
    pub(super) operands: &'a [Operand<'a, T>],
    pub(super) results: &'a [ResultSpec<'a>],
}

impl<'a, T: Real> LocalOp<'a, T> {
    /// The elements of operand `i`, of a float type.
    pub(super) fn real(&self, i: usize) -> Result<&'a [T], RunError> {
        self.operands[i].real()
    }

    /// The elements of operand `i`, integers.
    pub(super) fn int(&self, i: usize) -> Result<&'a [i32], RunError> {
        self.operands[i].int()
    }

    /// The first result.
    pub(super) fn result(&self) -> &'a ResultSpec<'a> {
        &self.results[0]
    }

    /// The elements that the rank computes of the first result, by dimension.
    pub(super) fn shape(&self) -> Vec<usize> {
        extents(&self.result().region)
    }

    /// The result of this number.
    pub(super) fn result_at(&self, i: usize) -> Result<&'a ResultSpec<'a>, RunError> {
        self.results.get(i).ok_or_else(|| self.invalid(&format!("has no result {i}")))
    }

    /// A result in its shape.
    pub(super) fn tensor<E: Copy>(&self, i: usize, data: Vec<E>) -> Result<Tensor<E>, RunError> {
        self.result_at(i)?.tensor(self.op, data)
    }

    /// The error of an operation that contradicts its operands or results.
    pub(super) fn invalid(&self, why: &str) -> RunError {
        RunError::invalid(format!("`{}` {why}", self.op.name()))
    }
}
