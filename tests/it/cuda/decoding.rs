//! Decoding on devices, on the host: attention whose queries stand behind tokens of a cache.

use std::collections::BTreeSet;
use std::sync::Arc;

use ithaca_ir::verify::verify;
use ithaca_ir::{DType, Module};
use ithaca_kernels::cuda::collectives::InProcess;
use ithaca_kernels::cuda::{self, Host, Options};
use ithaca_kernels::oracle;
use ithaca_kernels::store::Tensors;
use ithaca_kernels::tensor::Tensor;
use ithaca_passes::lower::lower;

use super::distributed::{module, noise};
use super::{can_run, device};

/// An attention over a cache.
#[derive(Clone, Copy)]
struct Case {
    dtype: DType,
    queries: usize,
    /// Tokens of the cache, and behind them their order.
    keys: &'static str,
    /// Query heads and key/value heads.
    heads: [usize; 2],
    /// Elements of a key and of a value.
    widths: [usize; 2],
    mask: &'static str,
    /// More attributes.
    extra: &'static str,
    /// The kernel that computes it.
    kernel: &'static str,
}

const STEP: Case = Case {
    dtype: DType::F32,
    queries: 3,
    keys: "200",
    heads: [4, 2],
    widths: [16, 16],
    mask: "causal",
    extra: "",
    kernel: "attention<",
};

/// Sequences of these tokens before the step.
const STARTS: [f64; 3] = [0.0, 41.0, 190.0];

fn program(case: &Case) -> (Module, Tensors) {
    let Case { dtype, queries, keys, heads: [h, k], widths: [d, e], mask, extra, .. } = *case;
    let text = format!(
        "ithaca 1 program\nmodel \"cache\"\ndim b = 3\ndim t = {queries}\ndim h = {h} granule {}\ndim k = {k}\ndim d = {d}\n\
         dim e = {e}\ndim c = {keys}\n\nfunc @main() {{\n  %q = input {{name=\"q\"}} : {dtype}[b t h d]\n  \
         %k = input {{name=\"k\"}} : {dtype}[b c k d]\n  %v = input {{name=\"v\"}} : {dtype}[b c k e]\n  \
         %start = input {{name=\"start\"}} : i32[b]\n  \
         %o, %l = attention %q, %k, %v, %start {{heads=h, kv_heads=k, queries=t, keys=c, width=d, mask={mask}, {extra}\
         scale=0.3, starts=true, returns=with_lse}} : {dtype}[b t h e], f32[b t h]\n  return o = %o, lse = %l\n}}\n",
        h / k
    );
    let keys: usize = keys.split(' ').next().unwrap().parse().unwrap();
    let tensors = [
        ("q", noise(&[3, queries, h, d], 1)),
        ("k", noise(&[3, keys, k, d], 2)),
        ("v", noise(&[3, keys, k, e], 3)),
        ("start", Tensor::new(vec![3], STARTS.to_vec())),
    ];
    (module(&text), tensors.into_iter().collect())
}

#[test]
fn attention_over_caches_agrees_with_the_oracle() {
    if !can_run() {
        return;
    }
    let bf16 = Case { dtype: DType::BF16, ..STEP };
    let cases = [
        STEP,
        Case { keys: "208 order striped(16)", mask: "window(left=30, right=0)", ..STEP },
        Case { widths: [6, 5], extra: "softcap=1.5, ", ..STEP },
        Case { queries: 10, widths: [64, 64], kernel: "flash<", ..bf16 },
        Case {
            queries: 7,
            widths: [40, 56],
            keys: "200 order zigzag(5)",
            heads: [2, 2],
            kernel: "flash<",
            ..bf16
        },
        Case { widths: [64, 64], mask: "window(left=50, right=0)", kernel: "flash<", ..bf16 },
    ];
    let programs = cases.map(|case| {
        let (whole, tensors) = program(&case);
        let schedule = lower(verify(&whole).unwrap()).unwrap();
        (case, schedule, whole, tensors)
    });
    let mut kernels = BTreeSet::new();
    for (case, schedule, ..) in &programs {
        let of_case = cuda::kernels_of(schedule, &cuda::Options::default()).unwrap();
        assert!(of_case.iter().any(|kernel| kernel.starts_with(case.kernel)), "{}: {of_case:?}", case.kernel);
        kernels.extend(of_case);
    }
    let kernels = device::compile(&kernels);
    for (case, schedule, whole, tensors) in &programs {
        let host = Host::new(Arc::clone(&kernels));
        let collectives = InProcess::new(&host, 1).unwrap();
        let run = cuda::execute_on(schedule, &host, &collectives, (tensors, tensors), &Options::default());
        let found = run.unwrap().outputs;
        for (output, expected) in oracle::run::<f64>(whole, tensors, tensors).unwrap() {
            let distance = device::distance(&found[&output].map(f64::from), &expected);
            let tolerance = if case.dtype == DType::F32 { 1e-6 } else { 1e-2 };
            let Case { dtype, queries, keys, mask, .. } = case;
            assert!(
                distance < tolerance,
                "{queries} of {keys}, {mask} in {dtype}: {output} is {distance:.1e} off"
            );
        }
    }
}
