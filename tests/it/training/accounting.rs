//! What a training step sends.
