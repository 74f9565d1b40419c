//! Random programs under random layouts compute what the whole program does: in double precision on virtual ranks, with
//! reshards and without, and as a schedule.

use ithaca_ir::{DType, Module, schedule, text, verify};
use ithaca_kernels::Outputs;
use ithaca_kernels::compare::Verdict;
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Real, compare, cpu, oracle};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::reshard::LowerReshards;
use proptest::prelude::*;

use crate::generate::{Choices, Precision, distribute, mesh, program};

fn assert_near<A: Real, B: Real>(found: &Outputs<A>, expected: &Outputs<B>, tolerance: f64, module: &Module) {
    for comparison in compare::outputs(found, expected) {
        // A random program may well overflow; then nothing can be said.
        let said_nothing = matches!(comparison.verdict, Verdict::NotFinite { .. });
        let near = said_nothing || comparison.verdict.within(tolerance);
        assert!(near, "{}: {:?}\n{}", comparison.name, comparison.verdict, text::print(module));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn distributed_equals_whole(mut choices in Choices::strategy()) {
        let mesh = mesh(&mut choices);
        let whole = program(&mut choices, Precision::Only(DType::F32));
        let sharded = distribute(&whole, mesh, &mut choices);
        let tensors = RandomTensors::of_module(&whole, 1);
        let expected = oracle::run::<f64>(&whole, &tensors, &tensors).unwrap();

        let found = oracle::run_ranks::<f64>(&sharded, &tensors, &tensors).unwrap();
        assert_near(&found, &expected, 1e-9, &sharded);

        let mut cx = Context::new(&Volume);
        let per_rank = run_passes(sharded, &[Box::new(LowerReshards)], &mut cx, &mut Unwatched).unwrap();
        let verified = verify::verify(&per_rank).unwrap_or_else(|d| panic!("{d:#?}"));
        let found = oracle::run_ranks::<f64>(&per_rank, &tensors, &tensors).unwrap();
        assert_near(&found, &expected, 1e-9, &per_rank);

        let lowered = lower(verified).unwrap();
        if let Err(diagnostics) = schedule::verify(&lowered) {
            panic!("{diagnostics:#?}\n{}", schedule::print(&lowered));
        }
        let printed = schedule::print(&lowered);
        let parsed = schedule::parse(&printed).unwrap_or_else(|d| panic!("{d:#?}\n{printed}"));
        prop_assert_eq!(&parsed, &lowered);

        let execution = cpu::execute(&lowered, &tensors, &tensors, &cpu::Options::default()).unwrap();
        let single = oracle::run_ranks::<f32>(&per_rank, &tensors, &tensors).unwrap();
        assert_near(&execution.outputs, &single, 1e-3, &per_rank);
    }
}
