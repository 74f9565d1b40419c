//! The oracle: an interpreter in plain loops, for whole programs and for per-rank programs on virtual ranks.
//!
//! All other results are compared with it, so it must be obviously right: one loop nest per operation
//! ([`eval`](mod@eval)), one assembly per collective ([`collective`]), nothing clever. A per-rank operation is the
//! same operation on a box of global indices, so both levels share the loops; a whole program is a per-rank program
//! on one rank.
//!
//! Real numbers of every element type are held as `T`: a value typed `bf16` is not rounded to `bf16`, unless
//! [`Storage::AsTyped`](crate::Storage::AsTyped) asks for that. Integers are held exactly.

pub mod attention;
mod cache;
pub mod collective;
pub mod eval;
mod experts;

mod assigned;
mod fused;
pub(crate) mod gradients;
mod interpret;
pub(crate) mod loss;
mod merge;
mod movement;
mod norms;
mod optimizer;
pub(crate) mod pages;
mod parts;
pub(crate) mod products;
pub(crate) mod random;
mod ranks;
mod rotate_append;
mod rows;
mod run;
pub(crate) mod unary;
mod value;
mod window;

#[cfg(test)]
pub(crate) mod tests;

pub use crate::assemble::assemble;
pub use interpret::{Results, StepOptions};
pub use run::{Interpreted, run, run_ranks, step, step_with};
pub use value::{Elements, Operand, OperandRegion, ResultSpec, Value};
