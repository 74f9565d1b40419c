//! Random programs under random layouts compute what the whole program does: in double precision on virtual ranks, with
//! reshards and without, and as a schedule.

use ithaca_ir::{DType, Module, schedule, text, verify};
use ithaca_kernels::compare::{Comparison, Mismatch, Verdict};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Outputs, Real, compare, cpu, oracle};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::reshard::LowerReshards;

use crate::fuzz::Choices;
use crate::generate::{Precision, distribute, mesh, program};
use crate::tier;

/// An error beside that of single precision on one device: sums are taken in another order.
const OTHER_ORDER: f64 = 1000.0;

/// Half the distance of neighbouring numbers, relative to them.
const SINGLE: f64 = 1.0 / (1 << 24) as f64;
const DOUBLE: f64 = SINGLE * SINGLE / 32.0;

/// How well each output of a program can be computed: its relative error in single precision on one device, by the oracle
/// and by the kernels of this machine, whichever is larger. Programs drawn at random may cancel or divide by little, and
/// magnify every rounding.
struct Conditions<'a> {
    module: &'a Module,
    exact: &'a Outputs<f64>,
    single: [Outputs<f32>; 2],
}

impl Conditions<'_> {
    /// Compares outputs of a program of numbers that are rounded by `unit`.
    fn check<T: Real>(&self, found: &Outputs<T>, unit: f64) {
        let errors = self.single.each_ref().map(|single| compare::outputs(single, self.exact));
        for (i, comparison) in compare::outputs(found, self.exact).iter().enumerate() {
            let error = |of: &[Comparison]| match of[i].verdict {
                Verdict::Distance { max_abs, relative, scale } => Some(relative.max(max_abs / scale)),
                // A random program may overflow; then it has no error.
                Verdict::Mismatch(Mismatch::NotFinite { .. }) => None,
                Verdict::Mismatch(Mismatch::Shape { .. } | Mismatch::Missing) => panic!("{:?}", of[i]),
            };
            let [Some(by_oracle), Some(by_kernels)] = errors.each_ref().map(|of| error(of)) else { continue };
            let tolerance = OTHER_ORDER * unit * (1.0 + by_oracle.max(by_kernels) / SINGLE);
            let near = comparison.verdict.within(tolerance);
            assert!(
                near,
                "{} within {tolerance:.1e}: {:?}\n{}",
                comparison.name,
                comparison.verdict,
                text::print(self.module)
            );
        }
    }
}

fn distributed_is_whole(choices: &mut Choices) {
    let mesh = mesh(choices);
    let whole = program(choices, Precision::Only(DType::F32));
    let sharded = distribute(&whole, mesh, choices);
    let tensors = RandomTensors::of_module(&whole, 1);
    let exact = oracle::run::<f64>(&whole, &tensors, &tensors).unwrap();
    let alone = lower(verify::verify(&whole).unwrap()).unwrap();
    let by_kernels = cpu::execute(&alone, &tensors, &tensors, &cpu::Options::default()).unwrap().outputs;
    let single = [oracle::run::<f32>(&whole, &tensors, &tensors).unwrap(), by_kernels];
    let conditions = Conditions { module: &sharded, exact: &exact, single };
    conditions.check(&oracle::run_ranks::<f64>(&sharded, &tensors, &tensors).unwrap(), DOUBLE);

    let mut cx = Context::new(&Volume);
    let passes: [Box<dyn ithaca_passes::pass::Pass>; 1] = [Box::new(LowerReshards)];
    let per_rank = run_passes(sharded.clone(), &passes, &mut cx, &mut Unwatched).unwrap();
    let verified = verify::verify(&per_rank).unwrap_or_else(|d| panic!("{d:#?}"));
    conditions.check(&oracle::run_ranks::<f64>(&per_rank, &tensors, &tensors).unwrap(), DOUBLE);

    let lowered = lower(verified).unwrap();
    if let Err(diagnostics) = schedule::verify(&lowered) {
        panic!("{diagnostics:#?}\n{}", schedule::print(&lowered));
    }
    let printed = schedule::print(&lowered);
    let parsed = schedule::parse(&printed).unwrap_or_else(|d| panic!("{d:#?}\n{printed}"));
    assert_eq!(parsed, lowered);

    let execution = cpu::execute(&lowered, &tensors, &tensors, &cpu::Options::default()).unwrap();
    conditions.check(&execution.outputs, SINGLE);
}

#[test]
fn distributed_equals_whole() {
    tier::check(64, 400, distributed_is_whole);
}
