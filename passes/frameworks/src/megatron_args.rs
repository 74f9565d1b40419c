//! Megatron arguments.
