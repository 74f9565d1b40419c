//! Attention over ranks in every way that the language can say, against the whole.
//!
//! Cases are pairs of texts, so that the oracle and the runtime are put to the same ones.

use std::fmt::Write;

use ithaca_ir::{Module, text, verify};

use super::noise;
use crate::oracle::{run, run_ranks};
use crate::store::Tensors;
use crate::tensor::Tensor;

/// A program, and programs of ranks (or sharded ones) that must compute the same.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) whole: Module,
    pub(crate) ranks: Module,
}

/// The variant of an attention.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) mask: &'static str,
    /// More attributes.
    pub(crate) extra: &'static str,
    /// Whether there is a bias.
    pub(crate) bias: bool,
}

pub(crate) const KINDS: [Kind; 5] = [
    Kind { mask: "causal", extra: "", bias: false },
    Kind { mask: "window(left=4, right=0) | sinks(2)", extra: "softcap=1.5, ", bias: false },
    Kind { mask: "full", extra: "bias=relative(buckets=u, max_distance=6, sides=both), ", bias: true },
    // The first query of each document sees itself only, and those of the second block of the table nothing.
    Kind {
        mask: "documents(0, 5, 12) & blocks(size=6, rows=[[0, 1], []])",
        extra: "dropout=uniform(rate=0.4, seed=7, keyed=position), ",
        bias: false,
    },
    Kind {
        mask: "causal & documents(0, 4, 12)",
        extra: "softcap=2.0, bias=relative(buckets=u, max_distance=4, sides=before), ",
        bias: true,
    },
];

const DIMS: &str = "dim b = 2\ndim h = 4 granule 2\ndim k = 2\ndim d = 3\ndim e = 2\ndim u = 6\n";

impl Kind {
    /// The attributes between braces, for queries and keys of these names.
    pub(crate) fn attrs(&self, queries: &str, keys: &str, more: &str) -> String {
        let Kind { mask, extra, .. } = self;
        let comma = if more.is_empty() { "" } else { ", " };
        format!(
            "heads=h, kv_heads=k, queries={queries}, keys={keys}, width=d, mask={mask}, {extra}scale=0.6{comma}{more}"
        )
    }

    /// `, %bias` where there is one.
    fn operand(&self) -> &'static str {
        if self.bias { ", %bias" } else { "" }
    }

    /// The gradient of the bias after the others, by this name, and its type, pending over these axes.
    fn gradient(&self, name: &str, pending: &str) -> (String, String) {
        if self.bias {
            (format!(", %{name}"), format!(", f32[u h]{pending}"))
        } else {
            (String::new(), String::new())
        }
    }

    /// The output of the gradient of the bias, where there is one.
    fn output(&self) -> &'static str {
        if self.bias { ", dbias = %dc" } else { "" }
    }

    /// The sum of a gradient of the bias over the ranks.
    fn total(&self, name: &str, axis: &str) -> String {
        if self.bias {
            format!("  %dc = all_reduce %{name} {{axis={axis}}} : f32[u h]\n")
        } else {
            String::new()
        }
    }

    /// The operands, split as `s` says, with the gradient of the output.
    fn inputs(&self, q: &str, k: &str) -> String {
        format!(
            "  %q = input {{name=\"q\"}} : f32[b {q} h d]\n  %k = input {{name=\"k\"}} : f32[b {k} k d]\n  \
             %v = input {{name=\"v\"}} : f32[b {k} k e]\n  %g = input {{name=\"g\"}} : f32[b {q} h e]\n  \
             %bias = param {{name=\"bias\"}} : f32[u h]\n"
        )
    }

    /// Forward and backward in one piece.
    pub(crate) fn whole(&self, n: u64) -> String {
        let (bias, inputs) = (self.operand(), self.inputs("s", "s"));
        let (forward, backward) = (self.attrs("s", "s", "returns=with_lse"), self.attrs("s", "s", ""));
        let ((dc, ty), out) = (self.gradient("dc", ""), self.output());
        format!(
            "ithaca 1 program\nmodel \"whole\"\n{DIMS}dim s = {n}\n\nfunc @main() {{\n{inputs}  \
             %o, %lse = attention %q, %k, %v{bias} {{{forward}}} : f32[b s h e], f32[b s h]\n  \
             %delta = einsum %g, %o : f32[b s h]\n  \
             %dq, %dk, %dv{dc} = attention_backward %q, %k, %v, %g, %lse, %delta{bias} {{{backward}}} \
             : f32[b s h d], f32[b s k d], f32[b s k e]{ty}\n  \
             return o = %o, lse = %lse, dq = %dq, dk = %dk, dv = %dv{out}\n}}\n"
        )
    }

    /// Keys and values, and then their gradients, go round a ring.
    pub(crate) fn ring(&self, s: &str, p: u64) -> String {
        let bias = self.operand();
        let part = self.attrs("s", "s", "returns=part");
        let seat = |i: u64| if i.is_multiple_of(p) { "s@ring".to_owned() } else { format!("s@ring+{i}") };
        let mut t = format!(
            "ithaca 1 per_rank\nmodel \"ring\"\nmesh ring={p}\n{DIMS}dim s = {s}\n\nfunc @main() {{\n{}",
            self.inputs("s@ring", "s@ring")
        );
        let rows = "f32[b s@ring h e], f32[b s@ring h]";
        for i in 0..p {
            let (k, v) =
                if i == 0 { ("%k".into(), "%v".into()) } else { (format!("%k{i}"), format!("%v{i}")) };
            let (k, v): (String, String) = (k, v);
            writeln!(t, "  %o{i}, %l{i} = attention %q, {k}, {v}{bias} {{{part}}} : {rows}").unwrap();
            if i > 0 {
                let (o, l) = if i == 1 {
                    ("%o0".into(), "%l0".into())
                } else {
                    (format!("%m{}", i - 1), format!("%n{}", i - 1))
                };
                let (o, l): (String, String) = (o, l);
                writeln!(t, "  %m{i}, %n{i} = merge {o}, {l}, %o{i}, %l{i} : {rows}").unwrap();
            }
            if i + 1 < p {
                let (j, to) = (i + 1, seat(i + 1));
                writeln!(t, "  %k{j} = permute {k} : f32[b {to} k d]").unwrap();
                writeln!(t, "  %v{j} = permute {v} : f32[b {to} k e]").unwrap();
            }
        }
        let last = p - 1;
        writeln!(t, "  %delta = einsum %g, %m{last} : f32[b s@ring h]").unwrap();
        for i in 0..p {
            let (k, v) = if i == 0 {
                ("%k".to_owned(), "%v".to_owned())
            } else {
                (format!("%k{i}"), format!("%v{i}"))
            };
            let (here, next) = (seat(i), seat(i + 1));
            let (dc, ty) = self.gradient(&format!("e{i}"), " partial(ring)");
            writeln!(
                t,
                "  %a{i}, %b{i}, %c{i}{dc} = attention_backward %q, {k}, {v}, %g, %n{last}, %delta{bias} {{{part}}} \
                 : f32[b s@ring h d], f32[b {here} k d], f32[b {here} k e]{ty}"
            )
            .unwrap();
            let (mut a, mut b, mut c) = (format!("%a{i}"), format!("%b{i}"), format!("%c{i}"));
            if i > 0 {
                let before = if i == 1 { "%a0".to_owned() } else { format!("%x{}", i - 1) };
                writeln!(t, "  %x{i} = accumulate {before}, {a} : f32[b s@ring h d]").unwrap();
                writeln!(t, "  %y{i} = accumulate %py{i}, {b} : f32[b {here} k d]").unwrap();
                writeln!(t, "  %z{i} = accumulate %pz{i}, {c} : f32[b {here} k e]").unwrap();
                if self.bias {
                    let before = if i == 1 { "%e0".to_owned() } else { format!("%w{}", i - 1) };
                    writeln!(t, "  %w{i} = accumulate {before}, %e{i} : f32[u h] partial(ring)").unwrap();
                }
                (a, b, c) = (format!("%x{i}"), format!("%y{i}"), format!("%z{i}"));
            }
            let j = i + 1;
            writeln!(t, "  %py{j} = permute {b} : f32[b {next} k d]").unwrap();
            writeln!(t, "  %pz{j} = permute {c} : f32[b {next} k e]").unwrap();
            if j == p {
                t += &self.total(&format!("w{i}"), "ring");
                let out = self.output();
                writeln!(
                    t,
                    "  return o = %m{last}, lse = %n{last}, dq = {a}, dk = %py{j}, dv = %pz{j}{out}\n}}"
                )
                .unwrap();
            }
        }
        t
    }

    /// Queries are split, keys gathered; the gradients of keys are summed and scattered.
    fn gather(&self, s: &str, p: u64) -> String {
        let (bias, inputs) = (self.operand(), self.inputs("s@cp", "s@cp"));
        let (forward, backward) = (self.attrs("s", "s", "returns=with_lse"), self.attrs("s", "s", ""));
        let ((dc, ty), out) = (self.gradient("pc", " partial(cp)"), self.output());
        let total = self.total("pc", "cp");
        format!(
            "ithaca 1 per_rank\nmodel \"gather\"\nmesh cp={p}\n{DIMS}dim s = {s}\n\nfunc @main() {{\n{inputs}  \
             %kk = all_gather %k {{axis=cp, dim=s}} : f32[b s k d]\n  \
             %vv = all_gather %v {{axis=cp, dim=s}} : f32[b s k e]\n  \
             %o, %lse = attention %q, %kk, %vv{bias} {{{forward}}} : f32[b s@cp h e], f32[b s@cp h]\n  \
             %delta = einsum %g, %o : f32[b s@cp h]\n  \
             %dq, %pk, %pv{dc} = attention_backward %q, %kk, %vv, %g, %lse, %delta{bias} {{{backward}}} \
             : f32[b s@cp h d], f32[b s k d] partial(cp), f32[b s k e] partial(cp){ty}\n{total}  \
             %dk = reduce_scatter %pk {{axis=cp, dim=s}} : f32[b s@cp k d]\n  \
             %dv = reduce_scatter %pv {{axis=cp, dim=s}} : f32[b s@cp k e]\n  \
             return o = %o, lse = %lse, dq = %dq, dk = %dk, dv = %dv{out}\n}}\n"
        )
    }

    /// Every rank fetches keys; their gradients go back and are summed.
    fn fetch(&self, s: &str, p: u64, fetches: &str) -> String {
        let (bias, inputs) = (self.operand(), self.inputs("s@cp", "s@cp"));
        let (forward, backward) = (self.attrs("s", "f", "returns=with_lse"), self.attrs("s", "f", ""));
        let ((dc, ty), out) = (self.gradient("pc", " partial(cp)"), self.output());
        let total = self.total("pc", "cp");
        format!(
            "ithaca 1 per_rank\nmodel \"fetch\"\nmesh cp={p}\n{DIMS}dim s = {s}\ndim f = {fetches}\n\nfunc @main() {{\n{inputs}  \
             %kk = fetch %k {{to=f}} : f32[b f@cp k d]\n  \
             %vv = fetch %v {{to=f}} : f32[b f@cp k e]\n  \
             %o, %lse = attention %q, %kk, %vv{bias} {{{forward}}} : f32[b s@cp h e], f32[b s@cp h]\n  \
             %delta = einsum %g, %o : f32[b s@cp h]\n  \
             %dq, %pk, %pv{dc} = attention_backward %q, %kk, %vv, %g, %lse, %delta{bias} {{{backward}}} \
             : f32[b s@cp h d], f32[b f@cp k d], f32[b f@cp k e]{ty}\n{total}  \
             %dk = fetch_sum %pk {{from=f}} : f32[b s@cp k d]\n  \
             %dv = fetch_sum %pv {{from=f}} : f32[b s@cp k e]\n  \
             return o = %o, lse = %lse, dq = %dq, dk = %dk, dv = %dv{out}\n}}\n"
        )
    }

    /// A sharded program whose attention has a movement that is yet to be carried out.
    fn sharded(&self, s: &str, p: u64) -> String {
        let (bias, inputs) = (self.operand(), self.inputs("s@ring", "s@ring"));
        let forward = self.attrs("s", "s", "returns=with_lse, movement=rotate");
        let backward = self.attrs("s", "s", "movement=rotate");
        let ((dc, ty), out) = (self.gradient("pc", " partial(ring)"), self.output());
        let total = self.total("pc", "ring").replace("all_reduce %pc {axis=ring}", "reshard %pc");
        format!(
            "ithaca 1 sharded\nmodel \"sharded\"\nmesh ring={p}\n{DIMS}dim s = {s}\n\nfunc @main() {{\n{inputs}  \
             %o, %lse = attention %q, %k, %v{bias} {{{forward}}} : f32[b s@ring h e], f32[b s@ring h]\n  \
             %delta = einsum %g, %o : f32[b s@ring h]\n  \
             %dq, %dk, %dv{dc} = attention_backward %q, %k, %v, %g, %lse, %delta{bias} {{{backward}}} \
             : f32[b s@ring h d], f32[b s@ring k d], f32[b s@ring k e]{ty}\n{total}  \
             return o = %o, lse = %lse, dq = %dq, dk = %dk, dv = %dv{out}\n}}\n"
        )
    }
}

/// The same program of ranks with heads and the batch split as well.
fn on_more_axes(ranks: &str) -> String {
    let split = [
        ("partial(ring)", "partial(y,ring)"),
        (
            "{axis=ring} : f32[u h]",
            "{axis=ring} : f32[u h] partial(y)\n  %dd = all_reduce %dc {axis=y} : f32[u h]",
        ),
        ("dbias = %dc", "dbias = %dd"),
        ("mesh ", "mesh x=2,y=2,"),
        (" h d]", " h@x d]"),
        (" h e]", " h@x e]"),
        (" h]", " h@x]"),
        (" k d]", " k@x d]"),
        (" k e]", " k@x e]"),
        ("[b ", "[b@y "),
    ];
    split.iter().fold(ranks.to_owned(), |text, (from, to)| text.replace(from, to))
}

pub(crate) fn module(text: &str) -> Module {
    let module = text::parse(text).unwrap_or_else(|d| panic!("{d:?}\n{text}"));
    if let Err(d) = verify::verify(&module) {
        panic!("{d:?}\n{text}");
    }
    module
}

/// Inputs and weights of the cases, for a sequence of `n` tokens.
pub(crate) fn tensors(n: u64) -> Tensors {
    let n = n as usize;
    let shapes = [
        ("q", vec![2, n, 4, 3]),
        ("k", vec![2, n, 2, 3]),
        ("v", vec![2, n, 2, 2]),
        ("g", vec![2, n, 4, 2]),
        ("bias", vec![6, 4]),
        ("sink", vec![4]),
        ("q1", vec![2, 2, 4, 3]),
    ];
    let fill = |(i, (name, shape)): (usize, (&'static str, Vec<usize>))| {
        let data = noise(shape.iter().product(), i as u64).into_iter().map(|x| 2.0 * x).collect();
        (name, Tensor::new(shape, data))
    };
    shapes.into_iter().enumerate().map(fill).collect()
}

/// Orders of 12 tokens, the last with padding: the size and the order.
const ORDERS: [&str; 5] = [
    "12",
    "12 order zigzag(2)",
    "12 order striped(2, 1)",
    "12 order [7..9, 0..4, 11..12, 4..7, 9..11]",
    "16 valid 12 order zigzag(4)",
];

/// Every case that the runtime runs as well.
pub(crate) fn cases() -> Vec<Case> {
    let mut out = Vec::new();
    let mut add = |name: String, whole: &Module, ranks: &str| {
        out.push(Case { name, whole: whole.clone(), ranks: module(ranks) });
    };
    for (i, kind) in KINDS.iter().enumerate() {
        let whole = module(&kind.whole(12));
        for order in ORDERS {
            for p in [2, 4] {
                add(format!("ring of {p}, {order}, kind {i}"), &whole, &kind.ring(order, p));
                add(format!("gather of {p}, {order}, kind {i}"), &whole, &kind.gather(order, p));
            }
            let ring = kind.ring(order, 2);
            add(format!("ring of 2 with heads, {order}, kind {i}"), &whole, &on_more_axes(&ring));
            let size = if order.starts_with("16") { 16 } else { 12 };
            let all = format!("{} fetches s [[0..{size}], [0..{size}]]", 2 * size);
            add(format!("fetch, {order}, kind {i}"), &whole, &kind.fetch(order, 2, &all));
        }
    }
    let window = Kind { mask: "window(left=2, right=0)", extra: "", bias: false };
    let whole = module(&window.whole(12));
    let halo = "18 fetches s [[0..3], [1..6], [4..9], [7..12]]";
    add("halo".into(), &whole, &window.fetch("12", 4, halo));
    out
}

#[test]
fn ranks_compute_what_the_whole_does() {
    let tensors = tensors(12);
    for case in cases() {
        let expected = run::<f64>(&case.whole, &tensors, &tensors).unwrap();
        let found = run_ranks::<f64>(&case.ranks, &tensors, &tensors)
            .unwrap_or_else(|e| panic!("{}: {e}", case.name));
        agree(&case.name, &found, &expected, 1e-11);
        assert!(expected["dk"].data.iter().any(|&x| x != 0.0));
    }
}

#[test]
fn a_movement_that_is_yet_to_be_carried_out_computes_the_whole() {
    let tensors = tensors(12);
    for kind in KINDS {
        let expected = run::<f64>(&module(&kind.whole(12)), &tensors, &tensors).unwrap();
        for order in ORDERS {
            let found = run_ranks::<f64>(&module(&kind.sharded(order, 4)), &tensors, &tensors).unwrap();
            agree(order, &found, &expected, 1e-11);
        }
    }
}

pub(crate) fn agree<T: crate::Real>(
    name: &str,
    found: &crate::Outputs<T>,
    expected: &crate::Outputs<f64>,
    tolerance: f64,
) {
    for comparison in crate::compare::outputs(found, expected) {
        assert!(comparison.verdict.within(tolerance), "{name}: {comparison:?}");
    }
}
