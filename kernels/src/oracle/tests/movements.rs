//! Texts of the rarer movements: parts by rank, explicit scores, queries that travel, gradients of fetches.

use super::distributed::{Case, Kind, agree, module, tensors};
use super::noise;
use crate::Tensor;
use crate::oracle::{run, run_ranks, step};
use crate::storage::Storage;
use crate::store::Tensors;

const DIMS: &str = "dim b = 2\ndim h = 4 granule 2\ndim k = 2\ndim d = 3\ndim e = 2\n";
const CAUSAL: Kind = Kind { mask: "causal", extra: "", bias: false };

/// Two queries on twelve keys that ranks share, each rank's part told apart by a dimension.
fn reduce() -> (String, String) {
    let kind = Kind { mask: "causal(queries=2, keys=12)", extra: "softcap=1.1, ", bias: false };
    let head = |level: &str, mesh: &str, s: &str, k: &str| {
        format!(
            "ithaca 1 {level}\nmodel \"reduce\"\n{mesh}{DIMS}dim t = 2\ndim s = {s}\ndim p = 4\n\nfunc @main() {{\n  \
             %q = input {{name=\"q1\"}} : f32[b t h d]\n  %k = input {{name=\"k\"}} : f32[b {k} k d]\n  \
             %v = input {{name=\"v\"}} : f32[b {k} k e]\n"
        )
    };
    let (with_lse, part) =
        (kind.attrs("t", "s", "returns=with_lse"), kind.attrs("t", "s", "returns=part, parts=p"));
    let whole = format!(
        "{}  %o, %lse = attention %q, %k, %v {{{with_lse}}} : f32[b t h e], f32[b t h]\n  return o = %o, lse = %lse\n}}\n",
        head("program", "", "12", "s")
    );
    let ranks = format!(
        "{}  %x, %y = attention %q, %k, %v {{{part}}} : f32[p@cp b t h e], f32[p@cp b t h]\n  \
         %xx = all_gather %x {{axis=cp, dim=p}} : f32[p b t h e]\n  \
         %yy = all_gather %y {{axis=cp, dim=p}} : f32[p b t h]\n  \
         %o, %lse = merge_parts %xx, %yy {{over=p}} : f32[b t h e], f32[b t h]\n  return o = %o, lse = %lse\n}}\n",
        head("per_rank", "mesh cp=4\n", "12 order striped(4, 1)", "s@cp")
    );
    (whole, ranks)
}

/// The operands of self-attention on twelve tokens.
fn inputs(s: &str) -> String {
    format!(
        "  %q = input {{name=\"q\"}} : f32[b {s} h d]\n  %k = input {{name=\"k\"}} : f32[b {s} k d]\n  \
         %v = input {{name=\"v\"}} : f32[b {s} k e]\n"
    )
}

fn whole() -> String {
    let attrs = CAUSAL.attrs("s", "s", "returns=with_lse");
    format!(
        "ithaca 1 program\nmodel \"whole\"\n{DIMS}dim s = 12\n\nfunc @main() {{\n{}  \
         %o, %lse = attention %q, %k, %v {{{attrs}}} : f32[b s h e], f32[b s h]\n  return o = %o, lse = %lse\n}}\n",
        inputs("s")
    )
}

/// Keys travel to complete rows of scores, then values do: two ranks.
fn two_pass(s: &str) -> String {
    let attrs = CAUSAL.attrs("s", "s", "columns=c");
    let row = "f32[b s@ring h]";
    format!(
        "ithaca 1 per_rank\nmodel \"two pass\"\nmesh ring=2\n{DIMS}dim s = {s}\ndim c = 6\n\nfunc @main() {{\n{}  \
         %k1 = permute %k : f32[b s@ring+1 k d]\n  %v1 = permute %v : f32[b s@ring+1 k e]\n  \
         %s0 = scores %q, %k {{{attrs}}} : f32[b s@ring h c]\n  \
         %s1 = scores %q, %k1 {{{attrs}}} : f32[b s@ring h c]\n  \
         %l0 = row_lse %s0 {{over=c}} : {row}\n  %l1 = row_lse %s1 {{over=c}} : {row}\n  \
         %lse = log_add_exp %l0, %l1 : {row}\n  \
         %o0 = weigh %s0, %lse, %v {{{attrs}}} : f32[b s@ring h e]\n  \
         %o1 = weigh %s1, %lse, %v1 {{{attrs}}} : f32[b s@ring h e]\n  \
         %o = accumulate %o0, %o1 : f32[b s@ring h e]\n  return o = %o, lse = %lse\n}}\n",
        inputs("s@ring")
    )
}

/// The late rank's queries are answered by the early one, and come home as a part that one rank alone holds.
fn helper() -> String {
    let part = CAUSAL.attrs("s", "s", "returns=part");
    format!(
        "ithaca 1 per_rank\nmodel \"helper\"\nmesh ring=2\n{DIMS}dim s = 12\n\nfunc @main() {{\n{}  \
         %q1 = permute %q : f32[b s@ring+1(0..1) h d]\n  \
         %o0, %l0 = attention %q, %k, %v {{{part}}} : f32[b s@ring h e], f32[b s@ring h]\n  \
         %o1, %l1 = attention %q1, %k, %v {{{part}}} : f32[b s@ring+1(0..1) h e], f32[b s@ring+1(0..1) h]\n  \
         %o2 = permute %o1 : f32[b s@ring+0(1..2) h e]\n  %l2 = permute %l1 : f32[b s@ring+0(1..2) h]\n  \
         %o, %lse = merge %o0, %l0, %o2, %l2 : f32[b s@ring h e], f32[b s@ring h]\n  return o = %o, lse = %lse\n}}\n",
        inputs("s@ring")
    )
}

/// Parts go round and come back; a gradient that some ranks have is added where it belongs.
fn round_trip() -> (String, String) {
    let program = format!(
        "ithaca 1 program\nmodel \"there\"\n{DIMS}dim s = 12\n\nfunc @main() {{\n  \
         %k = input {{name=\"k\"}} : f32[b s k d]\n  return k = %k\n}}\n"
    );
    let ranks = format!(
        "ithaca 1 per_rank\nmodel \"there and back\"\nmesh outer=2,ring=3\n{DIMS}dim s = 12 order zigzag(6)\n\nfunc @main() {{\n  \
         %k = input {{name=\"k\"}} : f32[b s@(outer,ring) k d]\n  \
         %a = permute %k : f32[b s@(outer,ring+2) k d]\n  \
         %b = permute %a : f32[b s@(outer+1,ring+1) k d]\n  \
         %c = permute %b : f32[b s@(outer,ring) k d]\n  return k = %c\n}}\n"
    );
    (program, ranks)
}

/// Every case that the runtime runs as well.
pub(crate) fn cases() -> Vec<Case> {
    let case = |name: &str, whole: &str, ranks: &str| Case {
        name: name.to_owned(),
        whole: module(whole),
        ranks: module(ranks),
    };
    let (one, many) = reduce();
    let (there, back) = round_trip();
    let mut cases = vec![
        case("reduce", &one, &many),
        case("helper", &whole(), &helper()),
        case("round trip", &there, &back),
    ];
    for s in ["12", "12 order zigzag(2)", "12 order striped(2, 3)"] {
        cases.push(case(s, &whole(), &two_pass(s)));
    }
    cases
}

#[test]
fn rarer_movements_compute_the_whole() {
    let tensors = tensors(12);
    for case in cases() {
        let expected = run::<f64>(&case.whole, &tensors, &tensors).unwrap();
        let found = run_ranks::<f64>(&case.ranks, &tensors, &tensors)
            .unwrap_or_else(|e| panic!("{}: {e}", case.name));
        agree(&case.name, &found, &expected, 1e-12);
    }
}

#[test]
fn a_fetch_and_its_sum_are_adjoint() {
    for order in ["", " order zigzag(4)", " order striped(4, 1)"] {
        let module = module(&format!(
            "ithaca 1 per_rank\nmodel \"fetch\"\nmesh cp=4\ndim d = 2\ndim s = 8{order}\n\
                 dim f = 17 fetches s [[0..2], [0..1, 2..8], [4..6], [0..4, 6..8]]\n\nfunc @main() {{\n  \
                 %x = input {{name=\"x\"}} : f64[s@cp d]\n  %y = input {{name=\"y\"}} : f64[f@cp d]\n  \
                 %fx = fetch %x {{to=f}} : f64[f@cp d]\n  %gy = fetch_sum %y {{from=f}} : f64[s@cp d]\n  \
                 return fx = %fx, gy = %gy\n}}\n"
        ));
        let (x, y) = (noise(16, 1), noise(34, 2));
        let tensors: Tensors =
            [("x", Tensor::new(vec![8, 2], x.clone())), ("y", Tensor::new(vec![17, 2], y.clone()))]
                .into_iter()
                .collect();
        let found = run_ranks::<f64>(&module, &tensors, &tensors).unwrap();
        let inner = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let (left, right) = (inner(&found["fx"].data, &y), inner(&x, &found["gy"].data));
        assert!((left - right).abs() < 1e-13, "{left} is not {right}");
    }
}

#[test]
fn positions_follow_the_order_and_what_is_fetched() {
    let module = module(
        "ithaca 1 per_rank\nmodel \"positions\"\nmesh cp=2\ndim s = 8 valid 7 order zigzag(2)\n\
             dim f = 6 fetches s [[0..2], [1..3, 6..8]]\n\nfunc @main() {\n  \
             %p = positions : i32[s@cp]\n  %q = positions : i32[f@cp]\n  %r = fetch %p {to=f} : i32[f@cp]\n  \
             return p = %p, q = %q, r = %r\n}\n",
    );
    let none = Tensors::new();
    let found = run_ranks::<f64>(&module, &none, &none).unwrap();
    assert_eq!(found["p"].data, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    // Indices are positions 0, 1, 6, 7, 2, 3, 4, 5, of which the last one is padding.
    assert_eq!(found["q"].data, [0.0, 1.0, 1.0, 6.0, 4.0, 5.0]);
    assert_eq!(found["r"].data, found["q"].data);
}

#[test]
fn typed_storage_rounds_what_is_written() {
    let module = module(
        "ithaca 1 program\nmodel \"narrow\"\ndim i = 2\n\nfunc @main() {\n  \
             %x = input {name=\"x\"} : bf16[i]\n  %y = mul %x, %x : bf16[i]\n  %z = cast %x {to=f32} : f32[i]\n  \
             %w = mul %z, %z : f32[i]\n  return y = %y, w = %w\n}\n",
    );
    let x: Tensors =
        [("x", Tensor::new(vec![2], vec![1.0 + 1.0 / 128.0, 1.0 + 1.0 / 512.0]))].into_iter().collect();
    let wide = step::<f64>(&module, &x, &x, Storage::Wide).unwrap().outputs;
    let typed = step::<f64>(&module, &x, &x, Storage::AsTyped).unwrap().outputs;
    assert_eq!(wide["y"].data, wide["w"].data);
    // The second input is no bf16 and becomes one; the square of the first is rounded in bf16 and kept in f32.
    assert_eq!(typed["w"].data, [(129.0 / 128.0f64).powi(2), 1.0]);
    assert_eq!(typed["y"].data, [1.0 + 2.0 / 128.0, 1.0]);
}

/// Attention whose tensors are bf16, whole or going round a ring with parts in f32.
fn narrow(p: u64, n: u64) -> String {
    let seat = |i: u64| if i == 0 { "s@ring".to_owned() } else { format!("s@ring+{i}") };
    let (level, mesh, s) = match p {
        1 => ("program", String::new(), "s".to_owned()),
        _ => ("per_rank", format!("mesh ring={p}\n"), seat(0)),
    };
    let order = if p == 1 { String::new() } else { format!(" order zigzag({p})") };
    let mut t = format!(
        "ithaca 1 {level}\nmodel \"narrow\"\n{mesh}{DIMS}dim s = {n}{order}\n\nfunc @main() {{\n{}",
        inputs(&s).replace("f32", "bf16").replace("%k =", "%k0 =").replace("%v =", "%v0 =")
    );
    let part = CAUSAL.attrs("s", "s", "returns=part");
    let rows = format!("f32[b {s} h e], f32[b {s} h]");
    for i in 0..p {
        let o = if i == 0 { ["o", "l"] } else { ["p", "r"] };
        let [o, l] = o.map(|name| format!("%{name}{i}"));
        t += &format!("  {o}, {l} = attention %q, %k{i}, %v{i} {{{part}}} : {rows}\n");
        if i > 0 {
            t += &format!("  %o{i}, %l{i} = merge %o{j}, %l{j}, {o}, {l} : {rows}\n", j = i - 1);
        }
        if i + 1 < p {
            let (j, to) = (i + 1, seat(i + 1));
            t += &format!(
                "  %k{j} = permute %k{i} : bf16[b {to} k d]\n  %v{j} = permute %v{i} : bf16[b {to} k e]\n"
            );
        }
    }
    t + &format!("  %o = cast %o{} {{to=bf16}} : bf16[b {s} h e]\n  return o = %o\n}}\n", p - 1)
}

#[test]
fn parts_in_f32_lose_no_more_than_one_device_does() {
    let tensors = tensors(64);
    let exact = run::<f64>(&module(&narrow(1, 64)), &tensors, &tensors).unwrap();
    let error = |p: u64| {
        let found =
            step::<f32>(&module(&narrow(p, 64)), &tensors, &tensors, Storage::AsTyped).unwrap().outputs;
        match crate::compare::tensors(&found["o"], &exact["o"]) {
            crate::compare::Verdict::Distance { relative, .. } => relative,
            crate::compare::Verdict::Mismatch(mismatch) => panic!("{mismatch:?}"),
        }
    };
    let alone = error(1);
    assert!((1e-4..1e-2).contains(&alone), "bf16 rounds: {alone}");
    for p in [2, 4, 8, 16] {
        assert!(error(p) <= 2.0 * alone, "{} on {p} ranks, {alone} on one", error(p));
    }
}
