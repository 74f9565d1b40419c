//! Tests of several crates of passes at once.

mod differentiate;
mod pipeline;
mod roles;
