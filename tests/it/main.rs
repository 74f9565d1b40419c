//! One binary for all integration tests.

mod equivalence;
mod errors;
mod filetests;
mod generate;
mod goldens;
mod random;
mod reference;
mod text;
