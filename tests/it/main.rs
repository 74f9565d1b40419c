//! The integration tests, one binary.

mod cli;
mod equivalence;
mod errors;
mod examples;
mod filetests;
mod generate;
mod goldens;
mod random;
mod reference;
mod text;
