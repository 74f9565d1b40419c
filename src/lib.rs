//! ithaca
