//! Passes: from a model's description to a program for every rank.

pub mod import;
