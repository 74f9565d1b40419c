//! The integration tests, one binary.

mod errors;
mod filetests;
mod generate;
mod reference;
mod text;
