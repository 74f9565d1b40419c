//! The context of inference.

use smallvec::SmallVec;

use crate::entity::Arena;
use crate::handles::FuncId;
use crate::module::Function;
use crate::ops::attr::Names;
use crate::space::Space;
use crate::types::TensorType;

/// The program around an operation, as inference sees it.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Dimensions and mesh.
    pub space: &'a Space,
    /// The functions that a call may name.
    pub functions: &'a Arena<FuncId, Function>,
}

impl<'a> Context<'a> {
    /// The names that attributes refer to.
    pub fn names(self) -> Names<'a> {
        Names { space: self.space, functions: self.functions }
    }
}

/// Result types of one node.
pub type Types = SmallVec<[TensorType; 1]>;
