//! In `bf16` a distributed attention is as exact as one device is: partial results and gradients are kept in `f32` on
//! their way.

use ithaca_ir::{DType, Mask, Module, verify};
use ithaca_kernels::storage::Storage;
use ithaca_kernels::store::{RandomTensors, TensorSource, Tensors};
use ithaca_kernels::{Outputs, cpu, oracle};
use ithaca_passes::lower::lower;

use super::case::{Case, Extent};

/// Tokens of the sequences.
const TOKENS: u64 = 64;

/// Bytes of a rounding error that no output is expected to stay below: `f32` results pass through a few operations.
const SINGLE: f64 = 1e-6;

/// The tensors that a module reads, as `bf16` keeps them.
fn rounded(module: &Module, seed: u64) -> Tensors {
    let random = RandomTensors::of_module(module, seed);
    let round = |name: String| {
        let mut tensor = random.read(&name).unwrap();
        Storage::AsTyped.keep(DType::BF16, &mut tensor.data);
        (name, tensor)
    };
    random.names().into_iter().map(round).collect()
}

/// `‖found − expected‖ / ‖expected‖` of each output.
fn errors(found: &Outputs<f32>, expected: &Outputs<f64>) -> Vec<(String, f64)> {
    let error = |(name, expected): (&String, &ithaca_kernels::Tensor<f64>)| {
        let pairs = || found[name].data.iter().zip(&expected.data).filter(|(_, b)| b.is_finite());
        let difference: f64 = pairs().map(|(&a, &b)| (f64::from(a) - b).powi(2)).sum();
        let norm: f64 = pairs().map(|(_, &b)| b * b).sum();
        (name.clone(), (difference / norm).sqrt())
    };
    expected.iter().map(error).collect()
}

/// The errors of a run in which every value is kept as its type has it.
fn errors_in_bf16(
    case: &Case,
    whole: &Module,
    tensors: &Tensors,
    expected: &Outputs<f64>,
) -> Vec<(String, f64)> {
    let module = case.per_rank(whole).unwrap_or_else(|d| panic!("{}: {d:?}", case.pipeline()));
    let schedule = lower(verify::verify(&module).unwrap()).unwrap();
    let options = cpu::Options { storage: Storage::AsTyped, ..cpu::Options::default() };
    let run = cpu::execute(&schedule, tensors, tensors, &options).unwrap();
    errors(&run.outputs, expected)
}

/// A strategy, its mesh, and more options.
type Layout<'a> = (&'a str, Vec<(&'static str, u64)>, Vec<&'static str>);

/// Checks each strategy against one device, on a program that differs from causal self-attention by `change`.
fn check(change: impl Fn(&mut Case), layouts: &[Layout<'_>]) {
    let mut whole_case = Case {
        dtype: DType::BF16,
        kv_heads: 16,
        group: 1,
        width: 8,
        scale: 2.0,
        ..Case::new("single", &[], TOKENS)
    };
    change(&mut whole_case);
    let whole = whole_case.whole();
    let mut worse = Vec::new();
    for seed in 0..2 {
        let tensors = rounded(&whole, seed);
        let expected = oracle::run::<f64>(&whole, &tensors, &tensors).unwrap();
        let one_device = errors_in_bf16(&whole_case, &whole, &tensors, &expected);
        assert!(one_device.iter().any(|(_, error)| *error > 1e-4), "numbers are rounded: {one_device:?}");
        for (strategy, mesh, options) in layouts {
            let case = Case {
                strategy: (*strategy).to_owned(),
                mesh: mesh.clone(),
                options: options.clone(),
                ..whole_case.clone()
            };
            let found = errors_in_bf16(&case, &whole, &tensors, &expected);
            for ((name, error), (_, one)) in found.into_iter().zip(&one_device) {
                if error > (2.0 * one).max(SINGLE) {
                    worse.push(format!(
                        "{} seed {seed}: `{name}` is off by {error:e}, one device by {one:e}",
                        case.pipeline()
                    ));
                }
            }
        }
    }
    assert!(worse.is_empty(), "{worse:#?}");
}

#[test]
fn bf16_is_as_exact_on_many_devices_as_on_one() {
    let mut layouts = Vec::new();
    for ranks in [2, 4, 8, 16] {
        for (strategy, axis) in [
            ("ulysses", "ulysses"),
            ("ring", "ring"),
            ("megatron-cp-allgather", "cp"),
            ("megatron-cp-p2p", "cp"),
            ("megatron-cp-a2a", "cp"),
            ("rsa", "ring"),
            ("dist-flash", "ring"),
            ("sparse-fetch", "ring"),
            ("pass-q", "ring"),
            ("megatron-tp", "tp"),
        ] {
            layouts.push((strategy, vec![(axis, ranks)], vec![]));
        }
        for order in ["order=contiguous", "order=zigzag", "order=striped"] {
            layouts.push(("ring", vec![("ring", ranks)], vec![order]));
        }
        let half = ranks / 2;
        layouts.push(("usp", vec![("ring", half), ("ulysses", 2)], vec![]));
        layouts.push(("usp", vec![("ulysses", half), ("ring", 2)], vec![]));
        layouts.push(("loongtrain", vec![("outer", half), ("ring", 2), ("ulysses", 1)], vec![]));
        layouts.push(("loongtrain", vec![("ulysses", 1), ("outer", 2), ("ring", half)], vec![]));
        layouts.push(("megatron-cp-a2a-p2p", vec![("cp", half), ("ulysses", 2)], vec![]));
        layouts.push(("gspmd-2d", vec![("cp", half), ("tp", 2)], vec![]));
    }
    check(|_| {}, &layouts);
}

#[test]
fn bf16_is_as_exact_with_what_is_fetched_or_merged() {
    let ranks = [2, 4, 8, 16];
    let on = |strategy: &'static str, axis: &'static str| -> Vec<_> {
        ranks.map(|n| (strategy, vec![(axis, n)], vec![])).to_vec()
    };
    let window = Mask::Window { left: Some(11), right: Some(0) };
    let fetches = [on("window-halo", "ring"), on("sparse-fetch", "ring"), on("ring", "ring")].concat();
    check(|case| case.mask = window.clone(), &fetches);

    let sinks = Mask::All(vec![Mask::Causal, Mask::Any(vec![window.clone(), Mask::Sinks(3)])]);
    check(|case| case.mask = sinks.clone(), &[on("streaming", "ring"), on("ring", "ring")].concat());

    let decode = |case: &mut Case| {
        case.keys = Some(TOKENS);
        case.queries = 4;
        case.mask = Mask::CausalAtEnd { queries: 4, keys: TOKENS };
        case.extent = Extent::Backward;
    };
    check(decode, &on("decode-reduce", "cp"));
}
