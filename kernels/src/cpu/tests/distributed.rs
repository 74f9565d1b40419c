//! The runtime put to the same cases of attention over ranks as the oracle.

use ithaca_ir::traffic;

use super::{Options, execute, lower};
use crate::oracle::run;
use crate::oracle::tests::distributed::{self, KINDS, agree, module, tensors};
use crate::oracle::tests::movements;

#[test]
fn ranks_compute_what_the_whole_does() {
    let tensors = tensors(12);
    for case in distributed::cases().into_iter().chain(movements::cases()) {
        let expected = run::<f64>(&case.whole, &tensors, &tensors).unwrap();
        let execution = execute(&lower(&case.ranks), &tensors, &tensors, &Options::default())
            .unwrap_or_else(|e| panic!("{}: {e}", case.name));
        agree(&case.name, &execution.outputs, &expected, 3e-5);
        assert_eq!(execution.traffic, traffic::of_module(&case.ranks), "{}", case.name);
    }
}

#[test]
fn many_blocks_of_queries_agree_with_plain_loops() {
    let tensors = tensors(160);
    // The other kinds are of twelve tokens.
    for kind in &KINDS[..3] {
        let whole = module(&kind.whole(160));
        let expected = run::<f64>(&whole, &tensors, &tensors).unwrap();
        let rings = ["160 order zigzag(2)", "160 order striped(2, 1)"].map(|s| module(&kind.ring(s, 2)));
        for module in rings.iter().chain([&whole]) {
            let execution = execute(&lower(module), &tensors, &tensors, &Options::default()).unwrap();
            agree(&module.name, &execution.outputs, &expected, 2e-4);
        }
    }
}

#[test]
fn gradients_agree_with_plain_loops() {
    crate::oracle::tests::adjoints::each(|name, _, with_gradients, tensors| {
        let expected = run::<f64>(with_gradients, tensors, tensors).unwrap();
        let schedule = lower(with_gradients);
        if let Err(d) = ithaca_ir::schedule::verify(&schedule) {
            panic!("{name}: {d:?}");
        }
        let execution = execute(&schedule, tensors, tensors, &Options::default())
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        // Gradients of quotients reach thousands, where an ulp is more than a ten-thousandth.
        agree(name, &execution.outputs, &expected, 2e-4);
    });
}
