//! One binary for all integration tests.

mod equivalence;
//! The integration tests, one binary.

mod errors;
mod filetests;
mod generate;
mod reference;
mod text;
mod goldens;
