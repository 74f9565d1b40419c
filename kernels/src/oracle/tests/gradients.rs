//! Gradients of attention against finite differences, and rows that see nothing.

use super::distributed::{KINDS, Kind, module, tensors};
use crate::oracle::run;
use crate::store::{TensorSource, Tensors};

/// Attention of queries on other keys, of other lengths.
fn cross(kind: &Kind, more: &str) -> String {
    let (bias, dc, ty, out) =
        if kind.bias { (", %bias", ", %dc", ", f32[u h]", ", dbias = %dc") } else { ("", "", "", "") };
    let forward = kind.attrs("s", "t", "returns=with_lse");
    let backward = kind.attrs("s", "t", "");
    format!(
        "ithaca 1 program\nmodel \"cross\"\ndim b = 2\ndim h = 4 granule 2\ndim k = 2\ndim d = 3\ndim e = 2\n\
         dim u = 6\ndim s = 2\ndim t = 12\n\nfunc @main() {{\n  %q = input {{name=\"q1\"}} : f64[b s h d]\n  \
         %k = input {{name=\"k\"}} : f64[b t k d]\n  %v = input {{name=\"v\"}} : f64[b t k e]\n  \
         %g = input {{name=\"g1\"}} : f64[b s h e]\n  %bias = param {{name=\"bias\"}} : f64[u h]\n  \
         %sink = param {{name=\"sink\"}} : f64[h]\n  \
         %a, %c = attention %q, %k, %v{bias} {{{forward}}} : f64[b s h e], f32[b s h]\n{more}  \
         %delta = einsum %g, %o : f64[b s h]\n  \
         %dq, %dk, %dv{dc} = attention_backward %q, %k, %v, %g, %lse, %delta{bias} {{{backward}}} \
         : f64[b s h d], f64[b t k d], f64[b t k e]{ty}\n  \
         return o = %o, lse = %lse, dq = %dq, dk = %dk, dv = %dv{out}\n}}\n"
    )
}

/// The output after `sink`; without one, the output itself.
const WITH_SINK: &str = "  %o, %lse = sink %a, %c, %sink : f64[b s h e], f32[b s h]\n";
const WITHOUT: &str =
    "  %o = scale %a {factor=1.0} : f64[b s h e]\n  %lse = scale %c {factor=1.0} : f32[b s h]\n";

fn with_gradient() -> Tensors {
    let mut tensors = tensors(12);
    let shape = vec![2, 2, 4, 2];
    tensors.insert("g1", crate::Tensor::new(shape, super::noise(32, 9)));
    tensors
}

fn check_against_differences(kind: &Kind, more: &str) {
    let module = module(&cross(kind, more));
    let tensors = with_gradient();
    let gradient = tensors.read("g1").unwrap();
    let loss = |tensors: &Tensors| -> f64 {
        let o = &run::<f64>(&module, tensors, tensors).unwrap()["o"].data;
        o.iter().zip(&gradient.data).map(|(x, y)| x * y).sum()
    };
    let found = run::<f64>(&module, &tensors, &tensors).unwrap();
    let of_bias = kind.bias.then_some(("bias", "dbias"));
    for (input, output) in [("q1", "dq"), ("k", "dk"), ("v", "dv")].into_iter().chain(of_bias) {
        let x = tensors.read(input).unwrap();
        for i in (0..x.data.len()).step_by(5) {
            let moved = |by: f64| {
                let (mut x, mut tensors) = (x.clone(), tensors.clone());
                x.data[i] += by;
                tensors.insert(input, x);
                loss(&tensors)
            };
            let step = 1e-4;
            let slope = (moved(step) - moved(-step)) / (2.0 * step);
            let computed = found[output].data[i];
            assert!((slope - computed).abs() < 1e-6, "{output}[{i}]: {computed} is not {slope}");
        }
    }
}

#[test]
fn gradients_are_slopes() {
    let more = [
        Kind { mask: "causal(queries=2, keys=12)", extra: "softcap=0.7, ", bias: false },
        Kind { mask: "full", extra: "dropout=uniform(rate=0.5, seed=3, keyed=position), ", bias: false },
    ];
    // Masks of one sequence belong to self-attention.
    let alone = |kind: &&Kind| kind.mask == "causal" || kind.mask.contains("documents");
    for kind in KINDS.iter().filter(|kind| !alone(kind)).chain(&more) {
        check_against_differences(kind, WITHOUT);
        check_against_differences(kind, WITH_SINK);
    }
}

#[test]
fn rows_that_see_nothing_are_finite_forward_and_backward() {
    // The first query sees two keys, the second sees no key.
    let kind = Kind { mask: "blocks(size=1, rows=[[1, 4], []])", extra: "", bias: false };
    let tensors = with_gradient();
    let alone = run::<f64>(&module(&cross(&kind, WITHOUT)), &tensors, &tensors).unwrap();
    for (i, &lse) in alone["lse"].data.iter().enumerate() {
        let second = i / 4 % 2 == 1;
        assert_eq!(lse == f64::NEG_INFINITY, second, "lse of row {i} is {lse}");
        let o = &alone["o"].data[2 * i..2 * i + 2];
        assert_eq!(o == [0.0, 0.0], second);
    }
    let sunk = run::<f64>(&module(&cross(&kind, WITH_SINK)), &tensors, &tensors).unwrap();
    let sink = tensors.read("sink").unwrap().data;
    assert_eq!(sunk["lse"].data[4..8], sink[..], "a row of nothing but the sink");
    assert_eq!(sunk["o"].data[8..16], [0.0; 8]);
    for outputs in [alone, sunk] {
        for name in ["o", "dq", "dk", "dv"] {
            assert!(outputs[name].data.iter().all(|x| x.is_finite()), "{name}");
        }
        assert!(outputs["dk"].data.iter().any(|&x| x != 0.0));
    }
}

#[test]
fn dropout_by_a_stream_is_refused() {
    let kind = Kind { mask: "full", extra: "dropout=uniform(rate=0.5, seed=3, keyed=stream), ", bias: false };
    let tensors = with_gradient();
    let error = run::<f64>(&module(&cross(&kind, WITHOUT)), &tensors, &tensors).unwrap_err();
    assert!(matches!(error, crate::RunError::Unsupported(_)), "{error}");
}
