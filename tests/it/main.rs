//! The integration tests, one binary.

mod errors;
mod filetests;
mod reference;
