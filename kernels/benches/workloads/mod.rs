//! What is timed, by a name that says its sizes; `kernels/benches/against.py` gives PyTorch the same.

use std::hint::black_box;

use half::bf16;
use ithaca_ir::Mask;
use ithaca_kernels::cpu::dense::{self, DenseAttention, Element, Shape};
use ithaca_kernels::cpu::threads::Threads;

/// `matmul M K N`, and `forward` or `training` (both passes) of causal attention with
/// `BATCH TOKENS HEADS KV_HEADS WIDTH`, numbers stored as said.
pub(crate) const NAMES: &[&str] = &[
    "matmul f32 2048 2048 2048",
    "matmul f32 1024 512 512",
    "matmul f32 1024 512 2048",
    "matmul f32 1024 2048 512",
    "matmul f32 4096 768 3072",
    "forward f32 1 4096 8 8 64",
    "training f32 1 4096 8 8 64",
    "forward f32 1 4096 32 8 128",
    "forward bf16 1 4096 8 8 64",
    "training bf16 1 4096 8 8 64",
];

/// Something to be timed.
pub(crate) enum Workload {
    Matmul { sizes: (usize, usize, usize), a: Vec<f32>, b: Vec<f32>, c: Vec<f32> },
    Attention { attention: Box<DenseAttention>, numbers: Numbers, passes: Passes },
}

/// q, k, v and the gradient of the output.
pub(crate) enum Numbers {
    F32([Vec<f32>; 4]),
    Bf16([Vec<bf16>; 4]),
}

/// Which passes are timed.
pub(crate) enum Passes {
    Forward,
    Both,
}

impl Workload {
    /// The workload of a name; none for a name that says none.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let mut words = name.split(' ');
        let (what, storage) = (words.next()?, words.next()?);
        let sizes: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        let passes = match (what, sizes.as_slice()) {
            ("matmul", &[m, k, n]) => {
                let length = |x: u64, y: u64| usize::try_from(x * y).ok();
                let (a, b) = (noise(length(m, k)?, 1), noise(length(k, n)?, 2));
                let sizes = (length(m, 1)?, length(k, 1)?, length(n, 1)?);
                return Some(Workload::Matmul { sizes, a, b, c: vec![0.0; length(m, n)?] });
            }
            ("forward", _) => Passes::Forward,
            ("training", _) => Passes::Both,
            _ => return None,
        };
        let &[batch, tokens, heads, kv_heads, width] = sizes.as_slice() else { return None };
        let shape = Shape { batch, tokens, heads, kv_heads, width };
        let attention = DenseAttention::new(shape, Mask::Causal).ok()?;
        let (of_queries, of_keys) = attention.lengths();
        let lengths = [(of_queries, 1), (of_keys, 2), (of_keys, 3), (of_queries, 4)];
        let numbers = lengths.map(|(n, seed)| noise(n, seed));
        let numbers = match storage {
            "f32" => Numbers::F32(numbers),
            "bf16" => Numbers::Bf16(numbers.map(|x| x.into_iter().map(bf16::from_f32).collect())),
            _ => return None,
        };
        Some(Workload::Attention { attention: Box::new(attention), numbers, passes })
    }

    /// Does it once, with all cores.
    pub(crate) fn run(&mut self) {
        let threads = Threads::beside(1);
        match self {
            Workload::Matmul { sizes, a, b, c } => dense::matmul(*sizes, a, b, black_box(c), threads),
            Workload::Attention { attention, numbers: Numbers::F32(numbers), passes } => {
                attend(attention, numbers, passes, threads);
            }
            Workload::Attention { attention, numbers: Numbers::Bf16(numbers), passes } => {
                attend(attention, numbers, passes, threads);
            }
        }
    }
}

fn attend<E: Element>(
    attention: &DenseAttention,
    [q, k, v, d_o]: &[Vec<E>; 4],
    passes: &Passes,
    threads: Threads,
) {
    let tensors = [&q[..], k, v];
    let forward = attention.forward(tensors, threads);
    if let Passes::Both = passes {
        black_box(attention.backward(tensors, &forward, d_o, threads));
    }
    black_box(forward);
}

/// Numbers around zero with a variance near one, the same every time.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        (x as f32 / u32::MAX as f32 - 0.5) * 3.46
    };
    (0..n).map(|_| next()).collect()
}
