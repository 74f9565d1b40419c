//! Sums, gradients, the loss and the optimizer in emitted programs on the host, on one rank and on several, against the
//! whole program in double precision.

use ithaca_ir::Module;
use ithaca_ir::ops::Unary;
use ithaca_ir::verify::verify;
use ithaca_kernels::oracle;
use ithaca_kernels::store::Tensors;
use ithaca_kernels::tensor::Tensor;
use ithaca_passes::lower::lower;

use super::can_run;
use super::distributed::{assert_close, module, noise};
use super::together::{self, Case, Sources};
use crate::tier;

/// The inputs of a program by split dimension: `s`, `v` and `b`, with their axes.
struct Splits {
    level: &'static str,
    mesh: &'static str,
    b: &'static str,
    v: &'static str,
    /// Behind sums over `b` and behind those over `v`.
    partial: [&'static str; 2],
    /// How a sum over an axis is taken; nothing on one rank.
    sums: [&'static str; 2],
}

const WHOLE: Splits =
    Splits { level: "program", mesh: "", b: "b", v: "v", partial: ["", ""], sums: ["", ""] };
const RANKS: Splits = Splits {
    level: "per_rank",
    mesh: "mesh x=2,y=2\n",
    b: "b@x",
    v: "v@y",
    partial: [" partial(x)", " partial(y)"],
    sums: ["x", "y"],
};

/// Every operation of training once, of numbers of type `t`; tokens and the vocabulary have padding.
fn program(splits: &Splits, t: &str) -> Module {
    let Splits { level, mesh, b, v, partial: [over_b, over_v], sums } = splits;
    let mut text = format!(
        "ithaca 1 {level}\nmodel \"training\"\n{mesh}dim b = 4\ndim s = 6 valid 5 order zigzag(3)\ndim m = 6\ndim h = 2\n\
         dim d = 4\ndim v = 8 valid 7\n\nfunc @main() {{\n"
    );
    let mut add = |line: String| text += &format!("  {line}\n");
    for (name, ty) in [
        ("x", format!("{t}[{b} s m]")),
        ("g", format!("{t}[{b} s m]")),
        ("w", format!("{t}[m]")),
        ("c", format!("{t}[m]")),
        ("r", format!("{t}[{b} s h d]")),
        ("gr", format!("{t}[{b} s h d]")),
        ("wr", format!("{t}[h d]")),
        ("logits", format!("{t}[{b} s v]")),
        ("turned", format!("{t}[v {b} s]")),
        ("part", format!("{t}[{b} s {v}]")),
        ("ids", format!("i32[{b} s]")),
        ("labels", format!("i32[{b} s]")),
        ("lse", format!("f32[{b} s h]")),
        ("sinks", "f32[h]".to_owned()),
        ("u", format!("{t}[h d m]")),
        ("u2", format!("{t}[h d m]")),
        ("rows_bias", format!("{t}[s]")),
        ("w0", "f32[m]".to_owned()),
        ("m0", "f32[m]".to_owned()),
        ("v0", "f32[m]".to_owned()),
    ] {
        add(format!("%{name} = input {{name=\"{name}\"}} : {ty}"));
    }
    let mut outputs = Vec::new();
    // A result, its sum over the axis that it is pending over, and the output.
    let mut result = |text: &mut String, name: &str, axis: &str, ty: &str| match axis {
        "" => outputs.push(format!("{name} = %{name}")),
        axis => {
            *text += &format!("  %{name}_all = all_reduce %{name} {{axis={axis}}} : {ty}\n");
            outputs.push(format!("{name} = %{name}_all"));
        }
    };
    let [x, y] = sums;
    for f in Unary::ALL.map(|f| f.name()) {
        text += &format!("  %{f} = unary_backward %x, %g {{of={f}}} : {t}[{b} s m]\n");
        result(&mut text, f, "", "");
        text += &format!(
            "  %{f}_gated = gated %x, %g {{of={f}}} : {t}[{b} s m]\n  \
             %{f}_dx, %{f}_dy = gated_backward %x, %g, %x {{of={f}}} : {t}[{b} s m], {t}[{b} s m]\n"
        );
        ["gated", "dx", "dy"].iter().for_each(|name| result(&mut text, &format!("{f}_{name}"), "", ""));
    }
    text += &format!(
        "  %one = fill {{value=1.0}} : {t}[]\n  \
         %bounded = gated %x, %g, %one {{of=quick_gelu, limit=0.25}} : {t}[{b} s m]\n  \
         %bounded_dx, %bounded_dy = gated_backward %x, %g, %x, %one {{of=quick_gelu, limit=0.25}} : {t}[{b} s m], {t}[{b} s m]\n"
    );
    ["bounded", "bounded_dx", "bounded_dy"].iter().for_each(|name| result(&mut text, name, "", ""));
    text += &format!(
        "  %rms_sum, %rms_of_sum = add_rms_norm %x, %g, %w {{over=m, eps=0.01, offset=1.0}} : {t}[{b} s m], {t}[{b} s m]\n  \
         %ln_sum, %ln_of_sum = add_layer_norm %x, %g, %w, %w {{over=m, eps=0.01}} : {t}[{b} s m], {t}[{b} s m]\n"
    );
    ["rms_sum", "rms_of_sum", "ln_sum", "ln_of_sum"].iter().for_each(|name| result(&mut text, name, "", ""));
    // The functions that a device's products have, and others; biases along columns, and along rows.
    for (name, more) in [
        ("biased", "%wr"),
        ("biased_sum", "%wr, %r"),
        ("biased_relu", "%wr {of=relu}"),
        ("biased_gelu_tanh", "%wr, %r {of=gelu_tanh}"),
        ("biased_gelu", "%wr {of=gelu}"),
        ("biased_rows", "%rows_bias, %r {of=silu}"),
    ] {
        text += &format!("  %{name} = bias_product %x, %u, {more} : {t}[{b} s h d]\n");
        result(&mut text, name, "", "");
    }
    text += &format!("  %pair, %pair2 = product_pair %x, %u, %u2 : {t}[{b} s h d], {t}[{b} s h d]\n");
    ["pair", "pair2"].iter().for_each(|name| result(&mut text, name, "", ""));
    text += &format!("  %total = sum %x : {t}[s m]{over_b}\n");
    result(&mut text, "total", x, &format!("{t}[s m]"));
    text += &format!("  %wide = expand %c : {t}[s m]\n");
    result(&mut text, "wide", "", "");
    text +=
        &format!("  %half = fill {{value=0.5}} : {t}[{b} s]\n  %quotient = div %x, %half : {t}[{b} s m]\n");
    result(&mut text, "quotient", "", "");
    text += &format!("  %d_table = embed_backward %ids, %g {{over=v}} : {t}[v m]{over_b}\n");
    result(&mut text, "d_table", x, &format!("{t}[v m]"));
    text += &format!(
        "  %rms, %rms_w = rms_norm_backward %x, %w, %g {{over=m, eps=0.01, offset=1.0}} : {t}[{b} s m], {t}[m]{over_b}\n"
    );
    result(&mut text, "rms", "", "");
    result(&mut text, "rms_w", x, &format!("{t}[m]"));
    text += &format!(
        "  %heads, %heads_w = rms_norm_backward %r, %wr, %gr {{over=d, eps=0.01}} : {t}[{b} s h d], {t}[h d]{over_b}\n"
    );
    result(&mut text, "heads", "", "");
    result(&mut text, "heads_w", x, &format!("{t}[h d]"));
    text += &format!(
        "  %ln, %ln_w, %ln_c = layer_norm_backward %x, %w, %g {{over=m, eps=0.01}} : {t}[{b} s m], {t}[m]{over_b}, {t}[m]{over_b}\n"
    );
    result(&mut text, "ln", "", "");
    result(&mut text, "ln_w", x, &format!("{t}[m]"));
    result(&mut text, "ln_c", x, &format!("{t}[m]"));
    text += &format!(
        "  %rw = cast %r {{to=f32}} : f32[{b} s h d]\n  %squares = einsum %rw, %rw : f32[{b} s]\n  \
         %rs, %rs_q, %rs_w = rms_scale_backward %r, %squares, %wr, %gr {{over=[h, d], eps=0.01}} : {t}[{b} s h d], f32[{b} s], {t}[h d]{over_b}\n"
    );
    result(&mut text, "rs", "", "");
    result(&mut text, "rs_q", "", "");
    result(&mut text, "rs_w", x, &format!("{t}[h d]"));
    text += &format!(
        "  %o, %l = sink %r, %lse, %sinks : {t}[{b} s h d], f32[{b} s h]\n  \
         %so, %sl, %sc = sink_backward %o, %gr, %lse, %l : {t}[{b} s h d], f32[{b} s h], f32[h]{over_b}\n"
    );
    result(&mut text, "so", "", "");
    result(&mut text, "sl", "", "");
    result(&mut text, "sc", x, "f32[h]");
    for (i, logits) in ["logits", "turned"].into_iter().enumerate() {
        let ty = if i == 0 { format!("{t}[{b} s v]") } else { format!("{t}[v {b} s]") };
        text += &format!(
            "  %nll{i}, %all{i} = cross_entropy %{logits}, %labels {{over=v, ignore=-100}} : f32[{b} s], f32[{b} s]\n  \
             %d_nll{i} = fill {{value=0.25}} : f32[{b} s]\n  \
             %dl{i} = cross_entropy_backward %{logits}, %labels, %all{i}, %d_nll{i} {{over=v, ignore=-100}} : {ty}\n"
        );
        for name in [format!("nll{i}"), format!("all{i}"), format!("dl{i}")] {
            result(&mut text, &name, "", "");
        }
    }
    text += &format!("  %picked = pick %part, %labels {{over=v, ignore=-100}} : f32[{b} s]{over_v}\n");
    result(&mut text, "picked", y, &format!("f32[{b} s]"));
    text += &format!(
        "  %counts = valid %labels {{ignore=-100}} : f32[{b} s]\n  %rows = row_lse %logits {{over=v}} : f32[{b} s]\n"
    );
    result(&mut text, "counts", "", "");
    result(&mut text, "rows", "", "");
    text += &format!(
        "  %p = positions : i32[s]\n  \
         %back = rotary %r, %p {{over=d, width=2, theta=10.0, scaling=none, turn=back}} : {t}[{b} s h d]\n"
    );
    result(&mut text, "back", "", "");
    text += "  %norm = einsum %w0, %w0 : f32[]\n  %clip = clip_factor %norm {max_norm=0.5} : f32[]\n  \
             %step = fill {value=3.0} : f32[]\n  %second = mul %v0, %v0 : f32[m]\n";
    text += "  %w1, %m1, %v1 = adamw %w0, %c, %m0, %second, %step, %clip {lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1} \
             : f32[m], f32[m], f32[m]\n";
    for name in ["clip", "w1", "m1", "v1"] {
        result(&mut text, name, "", "");
    }
    text += &format!(
        "  %soft = softmax %x {{over=m}} : {t}[{b} s m]\n  \
         %d_soft = softmax_backward %soft, %g {{over=m}} : {t}[{b} s m]\n  \
         %first = key {{seed=3}} : i32[]\n  %key = fold_in %first, %step : i32[]\n  \
         %layer = layer_key %key : i32[]\n  %again = fold_in %key, %layer : i32[]\n  \
         %mask = dropout_mask %again {{rate=0.4, seed=5}} : bool[{b} s m]\n  \
         %dropped = dropout %x, %mask {{rate=0.4}} : {t}[{b} s m]\n  \
         %mixed = attention %r, %r, %r, %layer {{heads=h, kv_heads=h, queries=s, keys=s, width=d, mask=causal, scale=0.5, \
         dropout=uniform(rate=0.3, seed=1, keyed=position)}} : {t}[{b} s h d]\n"
    );
    for name in ["soft", "d_soft", "dropped", "mixed"] {
        result(&mut text, name, "", "");
    }
    text += &format!("  return {}\n}}\n", outputs.join(", "));
    module(&text)
}

fn tensors() -> Tensors {
    let shapes: [(&str, &[usize]); 18] = [
        ("x", &[4, 5, 6]),
        ("g", &[4, 5, 6]),
        ("w", &[6]),
        ("c", &[6]),
        ("r", &[4, 5, 2, 4]),
        ("gr", &[4, 5, 2, 4]),
        ("wr", &[2, 4]),
        ("logits", &[4, 5, 7]),
        ("turned", &[7, 4, 5]),
        ("part", &[4, 5, 7]),
        ("lse", &[4, 5, 2]),
        ("sinks", &[2]),
        ("u", &[2, 4, 6]),
        ("u2", &[2, 4, 6]),
        ("rows_bias", &[5]),
        ("w0", &[6]),
        ("m0", &[6]),
        ("v0", &[6]),
    ];
    let mut tensors: Tensors =
        shapes.iter().enumerate().map(|(i, (name, shape))| (*name, noise(shape, i))).collect();
    let tokens = |f: fn(usize) -> f64| Tensor::new(vec![4, 5], (0..20).map(f).collect());
    tensors.insert("ids", tokens(|i| (i * 3 % 7) as f64));
    tensors.insert("labels", tokens(|i| if i % 3 == 1 { -100.0 } else { (i * 5 % 7) as f64 }));
    tensors
}

#[test]
fn operations_of_training_on_the_host() {
    if !can_run() {
        return;
    }
    let tensors = tensors();
    for (t, tolerance) in tier::one_in(2, [("f32", 2e-5), ("bf16", 0.15)]) {
        let expected = oracle::run::<f64>(&program(&WHOLE, t), &tensors, &tensors).unwrap();
        let cases = [("whole", &WHOLE), ("ranks", &RANKS)].map(|(name, splits)| Case {
            name: format!("{name} in {t}"),
            schedule: lower(verify(&program(splits, t)).unwrap()).unwrap(),
            reference: None,
            sources: Sources::of(&tensors),
            steps: 1,
        });
        let (_out, outputs) = together::run(&cases);
        for (case, outputs) in cases.iter().zip(&outputs) {
            assert_close(&case.name, outputs, &expected, tolerance);
        }
    }
}
