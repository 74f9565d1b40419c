//! ithaca
fn main() {}
