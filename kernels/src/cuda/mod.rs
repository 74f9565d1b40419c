//! Device code in CUDA C++, as text.
//!
//! Every kernel is plain C++ over a grid-stride loop: no shared memory and no warp intrinsics yet, so that a host
//! compiler can run the very same source. Kernels know local extents and strides only; who computes those is the host
//! side of an emitted program.

/// The device code, by file name; each includes `numeric.cuh`, and none needs more than the CUDA runtime's headers.
pub const SOURCES: &[(&str, &str)] = &[
    ("numeric.cuh", include_str!("../cuda/numeric.cuh")),
    ("elementwise.cuh", include_str!("../cuda/elementwise.cuh")),
    ("copy.cuh", include_str!("../cuda/copy.cuh")),
    ("norm.cuh", include_str!("../cuda/norm.cuh")),
    ("rotary.cuh", include_str!("../cuda/rotary.cuh")),
    ("sequence.cuh", include_str!("../cuda/sequence.cuh")),
    ("random.cuh", include_str!("../cuda/random.cuh")),
    ("score.cuh", include_str!("../cuda/score.cuh")),
    ("attention.cuh", include_str!("../cuda/attention.cuh")),
    ("attention_backward.cuh", include_str!("../cuda/attention_backward.cuh")),
    ("partial.cuh", include_str!("../cuda/partial.cuh")),
    ("experts.cuh", include_str!("../cuda/experts.cuh")),
    ("einsum.cuh", include_str!("../cuda/einsum.cuh")),
    ("sum.cuh", include_str!("../cuda/sum.cuh")),
    ("gradient.cuh", include_str!("../cuda/gradient.cuh")),
    ("norm_backward.cuh", include_str!("../cuda/norm_backward.cuh")),
    ("loss.cuh", include_str!("../cuda/loss.cuh")),
    ("optimizer.cuh", include_str!("../cuda/optimizer.cuh")),
];
