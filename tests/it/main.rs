//! The integration tests, one binary.

mod cli;
mod cuda;
mod equivalence;
mod errors;
mod examples;
mod filetests;
mod generate;
mod goldens;
mod masks;
mod random;
mod readme;
mod reference;
mod text;
