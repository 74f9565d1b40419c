//! passes

pub mod cluster;
