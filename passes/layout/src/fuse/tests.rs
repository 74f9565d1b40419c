//! `pack` on programs in text form.

use ithaca_ir::{Module, Op, text};
use ithaca_pass::{Context, Pass, Unwatched, Volume, run_passes};

use super::Pack;

fn packed(pass: Pack, lines: &str) -> Module {
    let program = format!(
        "ithaca 1 per_rank\nmodel \"m\"\nmesh u=2,t=2\ndim a = 4\ndim b = 8\n\nfunc @main() {{\n{lines}}}\n"
    );
    let module = text::parse(&program).unwrap_or_else(|e| panic!("{e:?}\n{program}"));
    let passes: Vec<Box<dyn Pass>> = vec![Box::new(pass)];
    run_passes(module, &passes, &mut Context::new(&Volume), &mut Unwatched).unwrap()
}

/// The operations of `main` without sources; for messages the number of tensors.
fn operations(module: &Module) -> Vec<String> {
    let main = &module.functions[module.main().unwrap()];
    let shown = |op: &Op| match op {
        Op::Coalesced(members) => format!("{}×{}", op.collective_name(), members.len()),
        _ => op.name().to_owned(),
    };
    main.nodes.iter().filter(|n| !matches!(n.op, Op::Input(_) | Op::Param(_))).map(|n| shown(&n.op)).collect()
}

const QK: &str = "%x = input {name=\"x\"} : f32[a@u b]\n%q = scale %x {factor=2.0} : f32[a@u b]\n\
                  %q2 = all_to_all %q {axis=u, split=b, concat=a} : f32[a b@u]\n\
                  %k = scale %x {factor=3.0} : f32[a@u b]\n\
                  %k2 = all_to_all %k {axis=u, split=b, concat=a} : f32[a b@u]\n";

#[test]
fn independent_collectives_are_coalesced_when_the_last_operand_is_ready() {
    let module = packed(Pack::default(), &format!("{QK}%o = add %q2, %k2 : f32[a b@u]\nreturn o = %o\n"));
    assert_eq!(operations(&module), ["scale", "scale", "all_to_all×2", "add"]);
}

#[test]
fn dependent_collectives_stay_separate() {
    let lines = "%x = input {name=\"x\"} : f32[a@u b]\n\
                 %y = all_to_all %x {axis=u, split=b, concat=a} : f32[a b@u]\n\
                 %z = all_to_all %y {axis=u, split=a, concat=b} : f32[a@u b]\nreturn z = %z\n";
    assert_eq!(operations(&packed(Pack::default(), lines)), ["all_to_all", "all_to_all"]);
}

#[test]
fn work_is_not_held_up() {
    // The product needs the first collective. If the second joined, the product would also wait for its operand.
    let lines = format!(
        "%w = input {{name=\"w\"}} : f32[a b@u]\n{}",
        QK.replace("%k = scale %x {factor=3.0}", "%p = einsum %q2, %w : f32[] partial(u)\n%k = add %x, %x")
            + "return q = %q2, k = %k2\n"
    );
    let lines = lines.replace("return q = %q2", "%r = all_reduce %p {axis=u} : f32[]\nreturn r = %r");
    let found = operations(&packed(Pack::default(), &lines));
    assert!(!found.iter().any(|op| op.contains('×')), "{found:?}");
}

#[test]
fn gathers_are_in_buckets_one_ahead_of_their_use() {
    let gather = |n: usize| {
        format!(
            "%w{n} = param {{name=\"w{n}\"}} : f32[a@u b]\n%g{n} = all_gather %w{n} {{axis=u, dim=a}} : f32[a b]\n\
             %y{} = mul %y{n}, %g{n} : f32[a b]\n",
            n + 1
        )
    };
    let lines = (0..4).map(gather).collect::<String>();
    let lines = format!("%y0 = input {{name=\"y\"}} : f32[a b]\n{lines}return y = %y4\n");
    let pass = Pack { bytes: 2 * 4 * 8 * 4, ..Pack::default() };
    let found = operations(&packed(pass, &lines));
    assert_eq!(found, ["all_gather×2", "all_gather×2", "mul", "mul", "mul", "mul"]);
}

#[test]
fn kernels_do_not_wait_for_the_cast_of_a_reduced_tensor() {
    let lines = "%x = input {name=\"x\"} : f32[a b@u]\n%y = input {name=\"y\"} : f32[a b]\n\
                 %p = einsum %x, %x : f32[a] partial(u)\n%r = all_reduce %p {axis=u} : f32[a]\n\
                 %c = cast %r {to=bf16} : bf16[a]\n%e = mul %y, %y : f32[a b]\n\
                 %n = softmax %e {over=b} : f32[a b]\nreturn c = %c, n = %n\n";
    let found = operations(&packed(Pack::default(), lines));
    assert_eq!(found, ["einsum", "all_reduce", "mul", "softmax", "cast"]);
}
