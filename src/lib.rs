//! Ithaca.
