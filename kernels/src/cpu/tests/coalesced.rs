//! Coalesced collectives give the results of separate ones, on the oracle and on the runtime.

use ithaca_ir::{Module, text, traffic};

use super::{Options, execute, lower};
use crate::oracle::run_ranks;
use crate::store::RandomTensors;

/// A per-rank program of these lines.
pub(super) fn module(lines: &str) -> Module {
    let program = format!(
        "ithaca 1 per_rank\nmodel \"m\"\nmesh u=2,t=2\ndim i = 5 valid 4 uneven\ndim j = 3 uneven\ndim k = 4\ndim l = 2\n\n\
         func @main() {{\n{lines}}}\n"
    );
    let module = text::parse(&program).unwrap_or_else(|e| panic!("{e:?}\n{program}"));
    if let Err(e) = ithaca_ir::verify::verify(&module) {
        panic!("{e:?}\n{program}");
    }
    module
}

/// Runs both programs; results must be the same to the last bit, and bytes the promised ones.
fn same(alone: &str, together: &str) {
    let [alone, together] = [alone, together].map(module);
    let tensors = RandomTensors::of_module(&alone, 3);
    let expected = run_ranks::<f64>(&alone, &tensors, &tensors).unwrap();
    assert_eq!(run_ranks::<f64>(&together, &tensors, &tensors).unwrap(), expected);
    let [one, all] = [&alone, &together].map(|module| {
        let schedule = lower(module);
        let text = ithaca_ir::schedule::print(&schedule);
        assert_eq!(ithaca_ir::schedule::parse(&text).unwrap(), schedule, "{text}");
        let run = execute(&schedule, &tensors, &tensors, &Options::default()).unwrap();
        assert_eq!(run.traffic, traffic::of_module(module));
        run
    });
    assert_eq!(one.outputs, all.outputs);
    assert_eq!(one.traffic.len(), 1);
    assert_eq!(all.traffic.len(), 1);
    assert_eq!((all.traffic[0].count, one.traffic[0].count), (1, 2));
    assert_eq!(all.traffic[0].kind, one.traffic[0].kind);
}

#[test]
fn all_to_alls_of_different_splits() {
    let given = "%x = input {name=\"x\"} : f32[i@u j k]\n%y = input {name=\"y\"} : f32[k l@u]\n";
    let end = "return p = %p, q = %q\n";
    same(
        &format!(
            "{given}%p = all_to_all %x {{axis=u, split=j, concat=i}} : f32[i j@u k]\n\
             %q = all_to_all %y {{axis=u, split=k, concat=l}} : f32[k@u l]\n{end}"
        ),
        &format!(
            "{given}%p, %q = coalesced %x, %y \
             {{ops=[all_to_all(axis=u, split=j, concat=i), all_to_all(axis=u, split=k, concat=l)]}} \
             : f32[i j@u k], f32[k@u l]\n{end}"
        ),
    );
}

#[test]
fn gathers_with_uneven_parts() {
    let given = "%x = input {name=\"x\"} : f32[k i@(t,u)]\n%y = input {name=\"y\"} : f32[j@u l]\n";
    let end = "return p = %p, q = %q\n";
    same(
        &format!(
            "{given}%p = all_gather %x {{axis=u, dim=i}} : f32[k i@t]\n%q = all_gather %y {{axis=u, dim=j}} : f32[j l]\n{end}"
        ),
        &format!(
            "{given}%p, %q = coalesced %x, %y {{ops=[all_gather(axis=u, dim=i), all_gather(axis=u, dim=j)]}} \
             : f32[k i@t], f32[j l]\n{end}"
        ),
    );
}

#[test]
fn sums_that_are_scattered() {
    let given = "%a = input {name=\"a\"} : f32[k l@u]\n%b = input {name=\"b\"} : f32[j l@u]\n\
                 %x = sum %a : f32[k] partial(u)\n%y = sum %b : f32[j] partial(u)\n";
    let end = "return p = %p, q = %q\n";
    same(
        &format!(
            "{given}%p = reduce_scatter %x {{axis=u, dim=k}} : f32[k@u]\n%q = reduce_scatter %y {{axis=u, dim=j}} : f32[j@u]\n{end}"
        ),
        &format!(
            "{given}%p, %q = coalesced %x, %y {{ops=[reduce_scatter(axis=u, dim=k), reduce_scatter(axis=u, dim=j)]}} \
             : f32[k@u], f32[j@u]\n{end}"
        ),
    );
}

#[test]
fn permutes_by_the_same_step() {
    let given = "%x = input {name=\"x\"} : f32[k@u l]\n%y = input {name=\"y\"} : f32[j k@u]\n";
    let end = "%r = permute %p : f32[k@u l]\n%s = permute %q : f32[j k@u]\nreturn r = %r, s = %s\n";
    let back = "%r, %s = coalesced %p, %q {ops=[permute, permute]} : f32[k@u l], f32[j k@u]\nreturn r = %r, s = %s\n";
    let alone = format!("{given}%p = permute %x : f32[k@u+1 l]\n%q = permute %y : f32[j k@u+1]\n{end}");
    let both = format!(
        "{given}%p, %q = coalesced %x, %y {{ops=[permute, permute]}} : f32[k@u+1 l], f32[j k@u+1]\n{back}"
    );
    let [alone, both] = [alone, both].map(|text| module(&text));
    let tensors = RandomTensors::of_module(&alone, 4);
    let run = |module: &Module| execute(&lower(module), &tensors, &tensors, &Options::default()).unwrap();
    let (one, all) = (run(&alone), run(&both));
    assert_eq!(one.outputs, all.outputs);
    assert_eq!((one.traffic[0].count, all.traffic[0].count), (4, 2));
    assert_eq!(all.traffic, traffic::of_module(&both));
    assert_eq!(one.traffic[0].bytes_sent_per_rank, all.traffic[0].bytes_sent_per_rank);
}

/// Seven numbers over two ranks are chunks of four and three together; alone, of two and two, and of two and one.
#[test]
fn a_bucket_of_sums_is_cut_as_one_tensor() {
    let given = "%a = input {name=\"a\"} : f32[k l@u]\n%b = input {name=\"b\"} : f32[j l@u]\n\
                 %x = sum %a : f32[k] partial(u)\n%y = sum %b : f32[j] partial(u)\n";
    let end = "return p = %p, q = %q\n";
    let alone = format!(
        "{given}%p = all_reduce %x {{axis=u}} : f32[k]\n%q = all_reduce %y {{axis=u}} : f32[j]\n{end}"
    );
    let both = format!(
        "{given}%p, %q = coalesced %x, %y {{ops=[all_reduce(axis=u), all_reduce(axis=u)]}} : f32[k], f32[j]\n{end}"
    );
    same(&alone, &both);
    let bytes = |text: &str| traffic::of_module(&module(text))[0].bytes_sent_per_rank;
    assert_eq!((bytes(&alone), bytes(&both)), (4 * (4 + 3), 4 * 7));
}
