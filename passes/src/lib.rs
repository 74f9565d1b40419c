//! passes

pub mod cluster;
pub mod cost;
pub mod simulate;
