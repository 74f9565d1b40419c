//! nccl
