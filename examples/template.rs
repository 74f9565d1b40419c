//! A strategy to start from: copy this file to `examples/NAME.rs` and change what is marked with "change".
//!
//! `cargo run --example NAME -- list strategies` is then an `ithaca` that knows it, and `cargo test --example NAME` runs
//! the test below. `docs/book/src/guide/your-first-sharding-pass.md` explains every part.

use std::process::ExitCode;

use ithaca::ir::mesh::AxisId;
use ithaca::passes::movement::{Movement, Site, Step, Visits};
use ithaca::passes::registry::Registry;
use ithaca::passes::shard::{Placement, Strategy};

/// How keys and queries meet: change the name and the steps.
struct MyMovement;

impl Movement for MyMovement {
    fn name(&self) -> &'static str {
        "my-movement"
    }
    fn summary(&self) -> &'static str {
        "change: one sentence, with its source"
    }
    fn legality(&self) -> &'static str {
        "change: tokens % P = 0"
    }
    /// Change: every block of keys must meet every block of queries once; the first step is at home.
    fn visits(&self, site: &Site<'_>) -> Visits {
        let home = std::iter::once(Step::default());
        let away = (1..site.blocks()).map(|hops| Step::keys(site.offset(&[hops])));
        Visits::Steps(home.chain(away).collect())
    }
}

/// Which axes split what: change the name, the axes and the placement.
struct MyStrategy;

impl Strategy for MyStrategy {
    fn name(&self) -> &'static str {
        "my-strategy"
    }
    fn summary(&self) -> &'static str {
        "change: one sentence, with its source"
    }
    fn legality(&self) -> &'static str {
        "change: tokens % P = 0"
    }
    fn axes(&self) -> &'static [&'static str] {
        &["ring"]
    }
    fn place(&self, axes: &[AxisId], placement: &mut Placement) {
        placement.sequence_inside(axes, "my-movement");
    }
}

fn registry() -> Registry {
    Registry::default().with_movement(&MyMovement).with_strategy(&MyStrategy)
}

fn main() -> ExitCode {
    ithaca::shell::main(&registry())
}

#[cfg(test)]
mod tests {
    use ithaca::ir::text;
    use ithaca::kernels::store::RandomTensors;
    use ithaca::kernels::{compare, oracle};
    use ithaca::passes::compile::compile_with;
    use ithaca::passes::pass::Volume;
    use ithaca::passes::shard::{ShardOptions, parse_mesh};

    #[test]
    fn computes_what_one_device_does() {
        let source = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/attention.ith"));
        let whole = text::parse(source).unwrap();
        let random = RandomTensors::of_module(&whole, 1);
        let expected = oracle::run::<f64>(&whole, &random, &random).unwrap();
        for ranks in [1, 2, 3, 4, 5, 8] {
            let mesh = parse_mesh(&format!("ring={ranks}")).unwrap();
            let options = ShardOptions::new("my-strategy", mesh);
            let compiled = compile_with(&super::registry(), &whole, &options, &Volume).unwrap();
            let found = oracle::run_ranks::<f64>(&compiled.per_rank, &random, &random).unwrap();
            for comparison in compare::outputs(&found, &expected) {
                assert!(comparison.verdict.within(1e-9), "{ranks} ranks: {comparison:?}");
            }
        }
    }
}
