//! Ithaca.
fn main() {}
