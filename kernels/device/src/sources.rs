//! The kernels' source text.

/// The device code, by file name; each includes `numeric.cuh` and otherwise only headers of the CUDA runtime.
pub const SOURCES: &[(&str, &str)] = &[
    ("numeric.cuh", include_str!("../cuda/numeric.cuh")),
    ("elementwise.cuh", include_str!("../cuda/elementwise.cuh")),
    ("copy.cuh", include_str!("../cuda/copy.cuh")),
    ("norm.cuh", include_str!("../cuda/norm.cuh")),
    ("fused.cuh", include_str!("../cuda/fused.cuh")),
    ("rotary.cuh", include_str!("../cuda/rotary.cuh")),
    ("sequence.cuh", include_str!("../cuda/sequence.cuh")),
    ("random.cuh", include_str!("../cuda/random.cuh")),
    ("score.cuh", include_str!("../cuda/score.cuh")),
    ("attention.cuh", include_str!("../cuda/attention.cuh")),
    ("attention_backward.cuh", include_str!("../cuda/attention_backward.cuh")),
    ("tensor_core.cuh", include_str!("../cuda/tensor_core.cuh")),
    ("tile.cuh", include_str!("../cuda/tile.cuh")),
    ("mask_tile.cuh", include_str!("../cuda/mask_tile.cuh")),
    ("flash.cuh", include_str!("../cuda/flash.cuh")),
    ("flash_backward.cuh", include_str!("../cuda/flash_backward.cuh")),
    ("partial.cuh", include_str!("../cuda/partial.cuh")),
    ("experts.cuh", include_str!("../cuda/experts.cuh")),
    ("einsum.cuh", include_str!("../cuda/einsum.cuh")),
    ("sum.cuh", include_str!("../cuda/sum.cuh")),
    ("gradient.cuh", include_str!("../cuda/gradient.cuh")),
    ("norm_backward.cuh", include_str!("../cuda/norm_backward.cuh")),
    ("loss.cuh", include_str!("../cuda/loss.cuh")),
    ("optimizer.cuh", include_str!("../cuda/optimizer.cuh")),
];
