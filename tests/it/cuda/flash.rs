//! Attention on tensor cores, on the host: blocks of threads that take turns, products of matrices as the PTX manual lays
//! them out (`tests/cuda/host/thread_block.h`). Every width, masks of all kinds, orders, padding, heads in groups.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::process::Command;
use std::sync::Arc;

use ithaca_ir::schedule::Place;
use ithaca_ir::verify::verify;
use ithaca_ir::{DType, Module};
use ithaca_kernels::cuda::collectives::InProcess;
use ithaca_kernels::cuda::{self, Host, Options};
use ithaca_kernels::oracle;
use ithaca_kernels::store::Tensors;
use ithaca_kernels::tensor::Tensor;
use ithaca_passes::fuse::Fusion;
use ithaca_passes::lower::lower;
use ithaca_passes::shard::ShardOptions;

use super::device;
use super::distributed::{check, module};
use super::{can_run, can_run_in_full, compiler, options, root};
use crate::tier;

/// The options of a program's attention.
struct Case {
    /// Elements of a query and of a value.
    widths: [usize; 2],
    /// Tokens, and how many of them are padding.
    tokens: usize,
    padding: usize,
    /// Behind the sequence's size.
    order: &'static str,
    /// Query heads and key/value heads.
    heads: [usize; 2],
    mask: &'static str,
    /// More attributes.
    extra: &'static str,
}

const CAUSAL: Case =
    Case { widths: [64, 64], tokens: 150, padding: 0, order: "", heads: [2, 2], mask: "causal", extra: "" };

/// A program of one attention and its gradients, and its inputs: numbers that have few digits, so that storing them
/// rounds nothing.
fn program(dtype: DType, case: &Case) -> (Module, Tensors) {
    let Case { widths: [d, e], tokens, padding, order, heads: [h, k], mask, extra } = *case;
    let valid = tokens - padding;
    let attrs = format!(
        "{{heads=h, kv_heads=k, queries=s, keys=s, width=d, mask={mask}, {extra}scale=0.125, returns=with_lse}}"
    );
    let mut text = format!("ithaca 1 program\nmodel \"flash\"\ndim b = 2\ndim h = {h} granule {}\n", h / k);
    write!(
        text,
        "dim k = {k}\ndim d = {d}\ndim e = {e}\ndim s = {tokens} valid {valid}{order}\n\nfunc @main() {{\n  \
         %q = input {{name=\"q\"}} : {dtype}[b s h d]\n  %k = input {{name=\"k\"}} : {dtype}[b s k d]\n  \
         %v = input {{name=\"v\"}} : {dtype}[b s k e]\n  %g = input {{name=\"g\"}} : {dtype}[b s h e]\n  \
         %o, %l = attention %q, %k, %v {attrs} : {dtype}[b s h e], f32[b s h]\n  \
         %gw = cast %g {{to=f32}} : f32[b s h e]\n  %ow = cast %o {{to=f32}} : f32[b s h e]\n  \
         %t = einsum %gw, %ow : f32[b s h]\n  \
         %x, %y, %z = attention_backward %q, %k, %v, %g, %l, %t {attrs} \
         : {dtype}[b s h d], {dtype}[b s k d], {dtype}[b s k e]\n  \
         return o = %o, lse = %l, dq = %x, dk = %y, dv = %z\n}}\n"
    )
    .unwrap();
    let tensors = [("q", h, d, 1), ("k", k, d, 2), ("v", k, e, 3), ("g", h, e, 4)];
    let tensors = tensors.map(|(name, heads, width, seed)| (name, digits(&[2, valid, heads, width], seed)));
    (module(&text), tensors.into_iter().collect())
}

/// Multiples of 1/32 between -2 and 2.
fn digits(shape: &[usize], seed: u64) -> Tensor<f64> {
    let n: usize = shape.iter().product();
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 129) as f64 / 32.0 - 2.0
    };
    Tensor::new(shape.to_vec(), (0..n).map(|_| next()).collect())
}

/// Every width on one kind of mask, and every kind on some.
fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = [[64, 64], [96, 96], [128, 128], [192, 128], [192, 192], [256, 256]]
        .into_iter()
        .map(|widths| Case { widths, ..CAUSAL })
        .collect();
    let empty =
        "documents(0, 70, 145) & blocks(size=40, rows=[[0, 1], [1], [], [0, 3]]) & window(left=90, right=30)";
    cases.extend([
        // Narrower than any kernel, and of two widths.
        Case { widths: [40, 56], mask: "full", heads: [4, 2], ..CAUSAL },
        Case {
            widths: [64, 80],
            mask: "window(left=70, right=0) | sinks(3)",
            extra: "softcap=1.5, ",
            ..CAUSAL
        },
        Case { tokens: 156, padding: 7, order: " order zigzag(3)", heads: [6, 2], ..CAUSAL },
        Case { tokens: 160, padding: 5, order: " order striped(4)", widths: [128, 128], ..CAUSAL },
        Case { tokens: 148, padding: 3, mask: empty, heads: [2, 1], ..CAUSAL },
        Case {
            mask: "causal & documents(0, 64, 66, 150)",
            extra: "dropout=uniform(rate=0.4, seed=7, keyed=position), ",
            ..CAUSAL
        },
        Case {
            mask: "causal & documents(0, 30, 128, 150)",
            widths: [256, 256],
            extra: "softcap=20.0, ",
            ..CAUSAL
        },
        Case { tokens: 9, ..CAUSAL },
        // Fewer bytes of keys than heads that share them.
        Case { tokens: 2, widths: [8, 8], heads: [72, 1], ..CAUSAL },
    ]);
    cases
}

#[test]
fn tensor_cores_agree_with_the_oracle() {
    if !can_run() {
        return;
    }
    let mut programs = Vec::new();
    for case in tier::one_in(12, cases()) {
        let (whole, tensors) = program(DType::BF16, &case);
        programs.push((case, lower(verify(&whole).unwrap()).unwrap(), whole, tensors));
    }
    let (whole, tensors) = program(DType::F16, &CAUSAL);
    programs.push((CAUSAL, lower(verify(&whole).unwrap()).unwrap(), whole, tensors));
    let mut kernels = BTreeSet::new();
    for (case, schedule, ..) in &programs {
        let of_case = cuda::kernels_of(schedule, &cuda::Options::default()).unwrap();
        let named = |name: &str| of_case.iter().any(|kernel| kernel.starts_with(name));
        let all = ["flash<", "flash_backward_queries<", "flash_backward_keys<"];
        assert!(all.into_iter().all(named), "{:?} {}: {of_case:?}", case.widths, case.mask);
        assert!(!named("attention"), "{:?} {}: {of_case:?}", case.widths, case.mask);
        kernels.extend(of_case);
    }
    // Warp products (mma), and warpgroup products (wgmma) as on sm_90a.
    let kernels = [&[][..], &["ITHACA_WARPGROUPS"]].map(|macros| device::compile_with(&kernels, macros));
    for ((case, schedule, whole, tensors), kernels) in
        programs.iter().flat_map(|program| kernels.iter().map(move |kernels| (program, kernels)))
    {
        let host = Host::new(Arc::clone(kernels));
        let collectives = InProcess::new(&host, 1).unwrap();
        let run = cuda::execute_on(schedule, &host, &collectives, (tensors, tensors), &Options::default());
        let found = run.unwrap().outputs;
        for (output, expected) in oracle::run::<f64>(whole, tensors, tensors).unwrap() {
            let distance = device::distance(&found[&output].map(f64::from), &expected);
            // The logarithms are in single precision and show every weight; the rest is rounded where it is stored, and
            // weights and the gradients of scores on their way.
            let tolerance = if output == "lse" { 1e-6 } else { 8e-3 };
            let Case { widths, mask, order, .. } = *case;
            assert!(distance < tolerance, "{widths:?} {mask}{order}: {output} is {distance:.1e} off");
        }
    }
}

/// Emitted programs choose the same kernels as the runtime, and give the same numbers.
#[test]
fn tensor_cores_on_several_ranks() {
    if !can_run_in_full() {
        return;
    }
    let case = Case { widths: [16, 24], tokens: 64, heads: [6, 3], ..CAUSAL };
    let (whole, tensors) = program(DType::BF16, &case);
    // Rows that lie in messages.
    let (more, of_more) = program(DType::BF16, &Case { heads: [8, 4], ..case });
    let folded = ShardOptions { fusion: Fusion::PACK.folded(), ..options("ulysses", &[("ulysses", "2")]) };
    let schedules = check(&[
        (&whole, &tensors, options("ring", &[("ring", "4"), ("order", "zigzag")])),
        (&whole, &tensors, options("ulysses", &[("ulysses", "2"), ("heads", "uneven")])),
        (&more, &of_more, folded),
    ]);
    let buffers = schedules[2].frames.values().flat_map(|frame| frame.buffers.values());
    assert!(buffers.filter(|buffer| matches!(buffer.place, Place::Inside { .. })).count() > 3);
}

/// Compares the classes of a mask's tiles with every pair of a query and a key.
#[test]
fn tiles_of_masks_are_what_their_pairs_are() {
    if !can_run() {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let program = out.path().join("mask_tile");
    let compile = Command::new(compiler())
        .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-isystem"])
        .arg(root().join("tests/cuda/host"))
        .arg("-I")
        .arg(root().join("kernels/device/cuda"))
        .arg("-o")
        .arg(&program)
        .arg(root().join("tests/cuda/mask_tile.cpp"))
        .output()
        .unwrap();
    assert!(compile.status.success(), "{}", String::from_utf8_lossy(&compile.stderr));
    let run = Command::new(&program).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
}
