//! Attention over ranks, forward and backward, in emitted programs on the host: every movement against the whole program
//! in double precision.

use std::fmt::Write as _;

use ithaca_codegen::cuda;
use ithaca_ir::schedule::{self, Schedule, Task, Work};
use ithaca_ir::verify::verify;
use ithaca_ir::{DType, Module, Op, text};
use ithaca_kernels::oracle;
use ithaca_kernels::store::{SafeTensorsFile, TensorSource, Tensors};
use ithaca_kernels::tensor::Tensor;
use ithaca_passes::compile::compile;
use ithaca_passes::lower::lower;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::ShardOptions;

use super::together::{self, Case, Sources};
use super::{can_run, can_run_in_full, compare, options};
use crate::tier;

/// Tokens of a sequence; some of the last ones may be padding.
const TOKENS: usize = 16;

/// The options of an attention.
#[derive(Clone, Copy)]
struct Kind {
    mask: &'static str,
    /// More attributes.
    extra: &'static str,
}

const fn kind(mask: &'static str, extra: &'static str) -> Kind {
    Kind { mask, extra }
}

/// Masks that are bands and tables, caps, biases of both kinds, dropout; some queries see nothing.
const KINDS: [Kind; 4] = [
    kind("causal", ""),
    kind("window(left=5, right=0) | sinks(2)", "softcap=1.5, "),
    kind(
        "causal & documents(0, 6, 16)",
        "softcap=2.0, bias=relative(buckets=u, max_distance=4, sides=before), dropout=uniform(rate=0.4, seed=7, keyed=position), ",
    ),
    kind(
        "documents(0, 7, 16) & blocks(size=8, rows=[[0, 1], [1]]) & window(left=9, right=1)",
        "bias=relative(buckets=u, max_distance=6, sides=both), ",
    ),
];

impl Kind {
    fn attrs(&self, keys: &str, returns: &str) -> String {
        let Kind { mask, extra } = self;
        format!(
            "heads=h, kv_heads=k, queries=s, keys={keys}, width=d, mask={mask}, {extra}scale=0.6, returns={returns}"
        )
    }

    fn bias(&self) -> &'static str {
        if self.extra.contains("bias") { ", %bias" } else { "" }
    }
}

/// Self-attention of each kind with its gradients, of which the first has a learned sink.
fn program(kinds: &[Kind]) -> Module {
    program_in(DType::F32, kinds)
}

fn program_in(dtype: DType, kinds: &[Kind]) -> Module {
    let mut text = format!(
        "ithaca 1 program\nmodel \"attention\"\ndim b = 2\ndim h = 4 granule 2\ndim k = 2\ndim d = 3\ndim e = 2\n\
         dim u = 6\ndim s = {TOKENS}\n\nfunc @main() {{\n  %q = input {{name=\"q\"}} : {dtype}[b s h d]\n  \
         %k = input {{name=\"k\"}} : {dtype}[b s k d]\n  %v = input {{name=\"v\"}} : {dtype}[b s k e]\n  \
         %g = input {{name=\"g\"}} : {dtype}[b s h e]\n  %bias = param {{name=\"bias\"}} : {dtype}[u h]\n  \
         %sink = param {{name=\"sink\"}} : {dtype}[h]\n"
    );
    let mut outputs = Vec::new();
    for (i, kind) in kinds.iter().enumerate() {
        let (bias, rows) = (kind.bias(), format!("{dtype}[b s h e], f32[b s h]"));
        let (forward, backward) = (kind.attrs("s", "with_lse"), kind.attrs("s", "output"));
        let mut add = |line: String| writeln!(text, "  {line}").unwrap();
        add(format!("%a{i}, %c{i} = attention %q, %k, %v{bias} {{{forward}}} : {rows}"));
        let (o, lse) = match i {
            0 => {
                add(format!("%o{i}, %l{i} = sink %a{i}, %c{i}, %sink : {rows}"));
                (format!("%o{i}"), format!("%l{i}"))
            }
            _ => (format!("%a{i}"), format!("%c{i}")),
        };
        add(format!("%t{i} = einsum %g, {o} : {dtype}[b s h]"));
        let (name, ty, output) = if bias.is_empty() {
            Default::default()
        } else {
            (format!(", %w{i}"), ", f32[u h]", format!(", dbias{i} = %w{i}"))
        };
        add(format!(
            "%x{i}, %y{i}, %z{i}{name} = attention_backward %q, %k, %v, %g, {lse}, %t{i}{bias} {{{backward}}} \
             : {dtype}[b s h d], {dtype}[b s k d], {dtype}[b s k e]{ty}"
        ));
        outputs
            .push(format!("o{i} = {o}, lse{i} = {lse}, dq{i} = %x{i}, dk{i} = %y{i}, dv{i} = %z{i}{output}"));
    }
    writeln!(text, "  return {}\n}}", outputs.join(", ")).unwrap();
    module(&text)
}

pub(super) fn module(text: &str) -> Module {
    let module = text::parse(text).unwrap_or_else(|e| panic!("{}\n{text}", e[0].render(None)));
    if let Err(errors) = verify(&module) {
        panic!("{}\n{text}", errors[0].render(None));
    }
    module
}

/// Numbers between -1 and 1 that repeat nowhere soon.
pub(super) fn noise(shape: &[usize], seed: usize) -> Tensor<f64> {
    let n: usize = shape.iter().product();
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f64 / 1001.0 - 1.0;
    // Files store single precision; the whole program must start from the same numbers.
    Tensor::new(shape.to_vec(), (0..n).map(|i| f64::from(number(i) as f32)).collect())
}

fn tensors(keys: usize) -> Tensors {
    [
        ("q", noise(&[2, TOKENS, 4, 3], 1)),
        ("k", noise(&[2, keys, 2, 3], 2)),
        ("v", noise(&[2, keys, 2, 2], 3)),
        ("g", noise(&[2, TOKENS, 4, 2], 4)),
        ("bias", noise(&[6, 4], 5)),
        ("sink", noise(&[4], 6)),
    ]
    .into_iter()
    .collect()
}

/// Runs a schedule on the host with inputs in single precision.
fn outputs_on_host(
    name: &str,
    schedule: Schedule,
    tensors: &Tensors,
) -> (tempfile::TempDir, SafeTensorsFile) {
    let case =
        Case { name: name.to_owned(), schedule, reference: None, sources: Sources::of(tensors), steps: 1 };
    let (out, mut outputs) = together::run(&[case]);
    (out, outputs.remove(0))
}

/// Compares every output with the oracle's.
pub(super) fn assert_close(
    name: &str,
    outputs: &SafeTensorsFile,
    expected: &ithaca_kernels::Outputs<f64>,
    tolerance: f64,
) {
    for (output, expected) in expected {
        let found = outputs.read(output).unwrap();
        // Rows that see nothing have −∞ on both sides, and −∞ − −∞ is no number.
        let hidden = |t: &Tensor<f64>| t.data.iter().map(|x| *x == f64::NEG_INFINITY).collect::<Vec<_>>();
        assert_eq!(hidden(&found), hidden(expected), "{name}: {output}");
        let finite = |t: &Tensor<f64>| {
            let data = t.data.iter().map(|x| if *x == f64::NEG_INFINITY { 0.0 } else { *x });
            Tensor::new(t.shape.clone(), data.collect())
        };
        let error = compare(&finite(&found), &finite(expected));
        assert!(error < tolerance, "{name}: error of {output} {error:.3e}");
    }
}

/// A program, its weights and inputs, and its layout.
pub(super) type Layout<'a> = (&'a Module, &'a Tensors, ShardOptions);

/// Compiles programs under layouts and checks them; returns their schedules.
pub(super) fn check(layouts: &[Layout<'_>]) -> Vec<Schedule> {
    let cases: Vec<Case> = layouts
        .iter()
        .map(|(whole, tensors, options)| {
            let name = format!("{} {}", options.strategy, options.mesh);
            let compiled =
                compile(whole, options, &Volume).unwrap_or_else(|e| panic!("{name}: {}", e[0].render(None)));
            let reference = Some(lower(verify(whole).unwrap()).unwrap());
            Case { name, schedule: compiled.schedule, reference, sources: Sources::of(*tensors), steps: 1 }
        })
        .collect();
    let (_out, outputs) = together::run(&cases);
    for (((whole, tensors, _), case), outputs) in layouts.iter().zip(&cases).zip(&outputs) {
        let halves = whole.functions.values().flat_map(|f| f.values.values()).any(|v| v.ty.dtype.bytes() < 4);
        let expected = oracle::run::<f64>(whole, *tensors, *tensors).unwrap();
        assert_close(&case.name, outputs, &expected, if halves { 0.1 } else { 2e-5 });
    }
    cases.into_iter().map(|case| case.schedule).collect()
}

#[test]
fn rings_and_gathers_of_every_order() {
    if !can_run() {
        return;
    }
    let (whole, tensors) = (program(&KINDS), tensors(TOKENS));
    let layouts = [
        ("ring", &[("ring", "4"), ("order", "zigzag")][..]),
        ("ring", &[("ring", "4"), ("order", "striped:2")]),
        ("pass-q", &[("ring", "4"), ("order", "contiguous")]),
        ("megatron-cp-allgather", &[("cp", "2"), ("order", "zigzag")]),
        ("megatron-cp-allgather", &[("cp", "2"), ("order", "zigzag"), ("movement", "gather(groups=2)")]),
        ("loongtrain", &[("outer", "2"), ("ring", "2"), ("ulysses", "2")]),
    ];
    // One ring and one gather by default, and a fetch beside them.
    let mut layouts = tier::one_in(6, layouts);
    layouts.push(("sparse-fetch", &[("ring", "4"), ("order", "zigzag")]));
    let layouts = layouts.into_iter().map(|(strategy, axes)| (&whole, &tensors, options(strategy, axes)));
    check(&layouts.collect::<Vec<_>>());
}

#[test]
fn fetches_of_what_masks_leave() {
    if !can_run_in_full() {
        return;
    }
    let tensors = tensors(TOKENS);
    let window =
        program(&[kind("window(left=5, right=0)", "softcap=1.5, "), kind("window(left=3, right=0)", "")]);
    let sinks = program(&[kind("window(left=3, right=0) | sinks(2)", "")]);
    let whole = program(&KINDS);
    let schedules = check(&[
        (&window, &tensors, options("window-halo", &[("ring", "4")])),
        (&sinks, &tensors, options("streaming", &[("ring", "4")])),
        (&whole, &tensors, options("sparse-fetch", &[("ring", "4"), ("order", "zigzag")])),
    ]);
    // The adjoint of a fetch sums gradients of many ranks.
    let sums = |t: &Task| match &t.work {
        Work::Unpack(transfer) => matches!(transfer.first().op, Op::FetchSum { .. }),
        _ => false,
    };
    assert!(schedules[2].frames.values().flat_map(|f| &f.tasks).any(sums));
}

#[test]
fn rows_of_scores_and_helpers() {
    if !can_run_in_full() {
        return;
    }
    let tensors = tensors(TOKENS);
    let rows = program(&[kind("causal", ""), kind("window(left=5, right=0) | sinks(2)", "softcap=1.5, ")]);
    let causal = program(&[
        kind("causal", "dropout=uniform(rate=0.4, seed=7, keyed=position), "),
        kind("causal", "softcap=2.0, bias=relative(buckets=u, max_distance=4, sides=before), "),
    ]);
    check(&[
        (&rows, &tensors, options("rsa", &[("ring", "4")])),
        (&causal, &tensors, options("dist-flash", &[("ring", "4")])),
    ]);
}

#[test]
fn heads_that_are_copied_and_sequences_that_do_not_divide() {
    if !can_run_in_full() {
        return;
    }
    let (whole, tensors) = (program(&KINDS), tensors(TOKENS));
    let copied = options("usp", &[("ring", "2"), ("ulysses", "4"), ("order", "zigzag")]);
    let padded = options("ring", &[("ring", "3"), ("sequence", "pad"), ("order", "zigzag")]);
    check(&[(&whole, &tensors, copied), (&whole, &tensors, padded)]);
    let uneven = |strategy: &str, axes: &[(&str, &str)]| {
        options(strategy, &[axes, &[("sequence", "uneven")]].concat())
    };
    check(&[
        (&whole, &tensors, uneven("ring", &[("ring", "3")])),
        (&whole, &tensors, uneven("megatron-cp-allgather", &[("cp", "3")])),
        (&whole, &tensors, uneven("usp", &[("ring", "3"), ("ulysses", "2")])),
        (&whole, &tensors, uneven("sparse-fetch", &[("ring", "3")])),
    ]);
}

/// A table of positions, padding, two axes at once, parts that move along both, and a fetch with its adjoint.
#[test]
fn tables_of_tokens_over_two_axes() {
    if !can_run_in_full() {
        return;
    }
    let ranks = module(
        "ithaca 1 per_rank\nmodel \"tables\"\nmesh outer=2,ring=2\ndim b = 2\ndim h = 4 granule 2\ndim k = 2\ndim d = 3\n\
         dim e = 2\ndim s = 16 valid 14 order [5..7, 0..5, 7..16]\n\
         dim f = 26 fetches s [[0..4, 5..7], [0..8], [1..2, 7..12], [10..16]]\n\nfunc @main() {\n  \
         %q = input {name=\"q\"} : f32[b s@(outer,ring) h d]\n  %k = input {name=\"k\"} : f32[b s@(outer,ring) k d]\n  \
         %v = input {name=\"v\"} : f32[b s@(outer,ring) k e]\n  %p = positions : i32[s@(outer,ring)]\n  \
         %kf = fetch %k {to=f} : f32[b f@(outer,ring) k d]\n  %vf = fetch %v {to=f} : f32[b f@(outer,ring) k e]\n  \
         %o = attention %q, %kf, %vf {heads=h, kv_heads=k, queries=s, keys=f, width=d, \
         mask=window(left=2, right=0), scale=0.6} : f32[b s@(outer,ring) h e]\n  \
         %back = fetch_sum %kf {from=f} : f32[b s@(outer,ring) k d]\n  \
         %away = permute %k : f32[b s@(outer+1,ring+1) k d]\n  %twice = scale %away {factor=2.0} : f32[b s@(outer+1,ring+1) k d]\n  \
         %home = permute %twice : f32[b s@(outer,ring) k d]\n  \
         %few = permute %k : f32[b s@(outer,ring+1(0..1)) k d]\n  %moved = permute %k : f32[b s@(outer,ring+1) k d]\n  \
         %more = accumulate %moved, %few : f32[b s@(outer,ring+1) k d]\n  \
         return o = %o, p = %p, back = %back, home = %home, more = %more\n}\n",
    );
    let tensors =
        [("q", noise(&[2, 14, 4, 3], 1)), ("k", noise(&[2, 14, 2, 3], 2)), ("v", noise(&[2, 14, 2, 2], 3))];
    let tensors: Tensors = tensors.into_iter().collect();
    let schedule = lower(verify(&ranks).unwrap()).unwrap();
    let (_out, outputs) = outputs_on_host("tables", schedule, &tensors);
    let expected = oracle::run_ranks::<f64>(&ranks, &tensors, &tensors).unwrap();
    assert_eq!(expected["p"].data, (0..14).map(f64::from).collect::<Vec<_>>());
    assert_close("tables", &outputs, &expected, 2e-5);
}

/// Every rank takes parts of its own heads, and dropout knows which they are among all.
#[test]
fn parts_of_the_heads_of_each_rank() {
    if !can_run_in_full() {
        return;
    }
    let (mut nodes, mut dims) = (String::new(), String::new());
    for i in 0..2 {
        writeln!(
            dims,
            "dim h{i} = 4 granule 2 part {i} of 2 of h in 2 runs\ndim k{i} = 2 part {i} of 2 of k in 2 runs"
        )
        .unwrap();
        for (name, to, of, last) in [("q", "h", "h", "d"), ("k", "k", "k", "d"), ("v", "k", "k", "e")] {
            writeln!(nodes, "  %{name}{i} = take %{name} {{to={to}{i}}} : f32[b s {of}{i}@tp {last}]")
                .unwrap();
        }
        writeln!(
            nodes,
            "  %o{i}, %l{i} = attention %q{i}, %k{i}, %v{i} {{heads=h{i}, kv_heads=k{i}, queries=s, keys=s, width=d, \
             mask=causal, scale=0.6, dropout=uniform(rate=0.4, seed=7, keyed=position), returns=with_lse}} \
             : f32[b s h{i}@tp e], f32[b s h{i}@tp]"
        )
        .unwrap();
    }
    let ranks = module(&format!(
        "ithaca 1 per_rank\nmodel \"parts\"\nmesh tp=2\ndim b = 2\ndim h = 8 granule 2\ndim k = 4\ndim d = 3\n\
         dim e = 2\ndim s = 16\n{dims}\nfunc @main() {{\n  %q = input {{name=\"q\"}} : f32[b s h@tp d]\n  \
         %k = input {{name=\"k\"}} : f32[b s k@tp d]\n  %v = input {{name=\"v\"}} : f32[b s k@tp e]\n{nodes}  \
         %o = join %o0, %o1 {{to=h}} : f32[b s h@tp e]\n  %l = join %l0, %l1 {{to=h}} : f32[b s h@tp]\n  \
         return o = %o, l = %l\n}}\n"
    ));
    let tensors =
        [("q", noise(&[2, 16, 8, 3], 1)), ("k", noise(&[2, 16, 4, 3], 2)), ("v", noise(&[2, 16, 4, 2], 3))];
    let tensors: Tensors = tensors.into_iter().collect();
    let schedule = lower(verify(&ranks).unwrap()).unwrap();
    let (_out, outputs) = outputs_on_host("parts", schedule, &tensors);
    let expected = oracle::run_ranks::<f64>(&ranks, &tensors, &tensors).unwrap();
    assert_close("parts", &outputs, &expected, 2e-5);
}

#[test]
fn storage_of_other_widths() {
    if !can_run_in_full() {
        return;
    }
    let (whole, tensors) = (program_in(DType::BF16, &KINDS[..2]), tensors(TOKENS));
    // Parts are in single precision whatever the operands are.
    let wide = program_in(DType::F64, &KINDS);
    check(&[
        (&whole, &tensors, options("ring", &[("ring", "4"), ("order", "zigzag")])),
        (&whole, &tensors, options("sparse-fetch", &[("ring", "4")])),
    ]);
    // Compiled alone: programs that are compiled as one use the tolerance of the narrowest of them.
    check(&[(&wide, &tensors, options("ring", &[("ring", "2"), ("order", "zigzag")]))]);
}

#[test]
fn a_cache_that_is_split() {
    if !can_run_in_full() {
        return;
    }
    let whole = module(&format!(
        "ithaca 1 program\nmodel \"decode\"\ndim b = 2\ndim h = 4 granule 2\ndim k = 2\ndim d = 3\ndim e = 2\n\
         dim u = 6\ndim s = {TOKENS}\ndim t = 24\n\nfunc @main() {{\n  %q = input {{name=\"q\"}} : f32[b s h d]\n  \
         %k = input {{name=\"k\"}} : f32[b t k d]\n  %v = input {{name=\"v\"}} : f32[b t k e]\n  \
         %bias = param {{name=\"bias\"}} : f32[u h]\n  \
         %o = attention %q, %k, %v, %bias {{{}}} : f32[b s h e]\n  return o = %o\n}}\n",
        kind(
            "causal(queries=16, keys=24)",
            "bias=relative(buckets=u, max_distance=6, sides=both), dropout=uniform(rate=0.3, seed=5, keyed=position), "
        )
        .attrs("t", "output")
    ));
    // Queries on one axis, keys on another.
    let axes = [("ring", "2"), ("enc", "2"), ("sequence.t", "enc"), ("cross-movement", "reduce")];
    let tensors = tensors(24);
    check(&[
        (&whole, &tensors, options("decode-reduce", &[("cp", "4")])),
        (&whole, &tensors, options("ring", &axes)),
    ]);
}

#[test]
fn dropout_that_follows_a_device_is_refused() {
    let stream = "dropout=uniform(rate=0.4, seed=7, keyed=stream), ";
    let whole = lower(verify(&program(&[kind("causal", stream)])).unwrap()).unwrap();
    let refused = cuda::emit(schedule::verify(&whole).unwrap(), None).unwrap_err();
    assert_eq!(refused[0].code, "S42");
}
