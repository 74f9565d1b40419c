//! Integration tests, in one binary.

mod goldens;
