//! The declarations of operations, a file for each family: variants, attributes with their types and defaults, classes,
//! costs and documentation.
//!
//! Architecture invariant: declarations know no functions and no inference, so that everything else may depend on them.

pub(crate) mod attention;
pub(crate) mod cache;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod fused;
pub(crate) mod op;
pub(crate) mod random;
pub(crate) mod rotary;
pub(crate) mod source;
pub(crate) mod structure;
pub(crate) mod training;
pub(crate) mod window;
