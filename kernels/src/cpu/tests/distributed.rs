//! The runtime put to the same cases of attention over ranks as the oracle.

use super::{Options, execute, lower};
use crate::oracle::run;
use crate::oracle::tests::distributed::{self, agree, tensors};
use crate::oracle::tests::movements;
use ithaca_ir::traffic;

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
