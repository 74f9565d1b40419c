//! Adjoints of mixtures of experts and of parts of dimensions, against finite differences in `f64`.

use super::adjoints::{check_slopes, differentiated, parse, tensors};

const SIZES: &str = "dim b = 2\ndim s = 4\ndim m = 3\ndim f = 5\ndim e = 4\ndim r = 4\ndim n = 2\ndim g = 2\ndim c = 1\ndim o = 1\ndim a = 2\n\
                     dim u = 3\ndim w = 3\ndim h = 2\ndim p = 2\ndim q = 3\ndim d = 5\n";

// Drawn numbers come again after three, so of four experts two would be chosen alike: the mixture has three.
const CASES: &[(&str, &str)] = &[
    (
        "route by softmax, shares",
        "%x = X[b s r]\n%z, %i = route %x {over=r, top=n, scoring=softmax, gates=shares} : f64[b s n], i32[b s n]\nreturn z = %z",
    ),
    (
        "route by softmax, scores",
        "%x = X[b s r]\n%z, %i = route %x {over=r, top=n, scoring=softmax, gates=scores} : f64[b s n], i32[b s n]\nreturn z = %z",
    ),
    (
        "route in groups with a bias",
        "%x = X[b s r]\n%c = X[r]\n%z, %i = route %x, %c {over=r, top=n, scoring=sigmoid, gates=shares, scale=2.5, groups=best(1, 2)} : f64[b s n], i32[b s n]\nreturn z = %z",
    ),
    (
        "dispatch",
        "%j = I[b s n]\n%i = deal %j {experts=e, top=n, shared=groups(batch=b, batches=o, sequence=s, groups=g, slots=a)} : i32[b s n]\n%x = X[b s m]\n%z = dispatch %i, %x {experts=e, top=n, shared=groups(batch=b, batches=o, sequence=s, groups=g, slots=a)} : f64[e o g a m]\nreturn z = %z",
    ),
    (
        "dispatch of weighed tokens within a capacity",
        "%j = I[b s n]\n%i = deal %j {experts=e, top=n, shared=groups(batch=b, batches=b, sequence=s, groups=g, slots=c)} : i32[b s n]\n%x = X[b s m]\n%w = X[b s n]\n%z = dispatch %i, %x, %w {experts=e, top=n, shared=groups(batch=b, batches=b, sequence=s, groups=g, slots=c)} : f64[e b g c m]\nreturn z = %z",
    ),
    (
        "combine",
        "%j = I[b s n]\n%i = deal %j {experts=e, top=n, shared=groups(batch=b, batches=o, sequence=s, groups=g, slots=a)} : i32[b s n]\n%x = X[e o g a m]\n%w = X[b s n]\n%z = combine %i, %x, %w {experts=e, top=n, shared=groups(batch=b, batches=o, sequence=s, groups=g, slots=a)} : f64[b s m]\nreturn z = %z",
    ),
    (
        "combine within a capacity",
        "%j = I[b s n]\n%i = deal %j {experts=e, top=n, shared=groups(batch=b, batches=b, sequence=s, groups=g, slots=c)} : i32[b s n]\n%x = X[e b g c m]\n%w = X[b s n]\n%z = combine %i, %x, %w {experts=e, top=n, shared=groups(batch=b, batches=b, sequence=s, groups=g, slots=c)} : f64[b s m]\nreturn z = %z",
    ),
    (
        "slot_products",
        "%j = I[b s n]\n%i = deal %j {experts=e, top=n, shared=groups(batch=b, batches=o, sequence=s, groups=g, slots=a)} : i32[b s n]\n%x = X[e o g a m]\n%y = X[b s m]\n%z = slot_products %i, %x, %y {experts=e, top=n, shared=groups(batch=b, batches=o, sequence=s, groups=g, slots=a)} : f64[b s n]\nreturn z = %z",
    ),
    (
        "a mixture",
        "%x = X[b s m]\n%wr = X[u m]\n%l = einsum %x, %wr : f64[b s u]\n%a, %j = route %l {over=u, top=n, scoring=softmax, gates=shares} : f64[b s n], i32[b s n]\n%i = deal %j {experts=w, top=n, shared=groups(batch=b, batches=b, sequence=s, groups=g, slots=c)} : i32[b s n]\n%t = dispatch %i, %x {experts=w, top=n, shared=groups(batch=b, batches=b, sequence=s, groups=g, slots=c)} : f64[w b g c m]\n%wu = X[w f m]\n%u = einsum %t, %wu : f64[w b g c f]\n%o = silu %u : f64[w b g c f]\n%wd = X[w m f]\n%y = einsum %o, %wd : f64[w b g c m]\n%z = combine %i, %y, %a {experts=w, top=n, shared=groups(batch=b, batches=b, sequence=s, groups=g, slots=c)} : f64[b s m]\nreturn z = %z",
    ),
    ("concat", "%x = X[b s h p]\n%y = X[b s q]\n%z = concat %x, %y {over=d} : f64[b s h d]\nreturn z = %z"),
    (
        "rotary of neighbours",
        "%x = X[b s h d]\n%p = positions : i32[s]\n%z = rotary %x, %p {over=d, width=4, theta=10.0, scaling=none, pairs=neighbours} : f64[b s h d]\nreturn z = %z",
    ),
];

#[test]
fn adjoints_are_slopes() {
    for (name, body) in CASES {
        let program = parse(SIZES, body);
        let with_gradients = differentiated(&program);
        if let Err(d) = ithaca_ir::verify::verify(&with_gradients) {
            panic!("{name}: {d:?}\n{}", ithaca_ir::text::print(&with_gradients));
        }
        check_slopes(name, &program, &with_gradients, &tensors(&with_gradients, 1.0));
    }
}
