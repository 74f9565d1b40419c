//! A bidirectional ring: blocks of keys go both ways round, and the last arrives after ⌊P/2⌋ hops.

use std::collections::BTreeMap;
use std::process::ExitCode;

use ithaca::ir::mesh::AxisId;
use ithaca::ir::verify::Verified;
use ithaca::ir::{Diagnostics, Module, Op};
use ithaca::passes::movement::{Movement, Site, Step, Visits};
use ithaca::passes::pass::{Context, Pass};
use ithaca::passes::rebuild::rebuild;
use ithaca::passes::registry::Registry;
use ithaca::passes::shard::{Placement, Strategy};

/// Blocks of keys and values come from the left and from the right in turn.
struct BothWays;

impl Movement for BothWays {
    fn name(&self) -> &'static str {
        "both-ways"
    }
    fn summary(&self) -> &'static str {
        "keys and values pass around a ring both ways, half of the blocks each; results merge by online softmax"
    }
    fn legality(&self) -> &'static str {
        "one axis; tokens % P = 0; zigzag: tokens % 2P = 0"
    }
    fn visits(&self, site: &Site<'_>) -> Visits {
        let n = site.blocks();
        let mut steps = vec![Step::default()];
        for hops in 1..=n / 2 {
            steps.push(Step::keys(site.offset(&[n - hops])));
            // Of an even number of ranks the farthest is as far both ways, and its block comes once.
            if 2 * hops < n {
                steps.push(Step::keys(site.offset(&[hops])));
            }
        }
        Visits::Steps(steps)
    }
}

/// Tokens split everywhere, keys go both ways.
struct Bidirectional;

impl Strategy for Bidirectional {
    fn name(&self) -> &'static str {
        "bidirectional"
    }
    fn summary(&self) -> &'static str {
        "sequence split everywhere, keys and values pass around a ring both ways"
    }
    fn legality(&self) -> &'static str {
        "tokens % P = 0; zigzag: tokens % 2P = 0"
    }
    fn axes(&self) -> &'static [&'static str] {
        &["ring"]
    }
    fn place(&self, axes: &[AxisId], placement: &mut Placement) {
        placement.sequence_inside(axes, "both-ways");
    }
}

/// A block that has arrived once is kept: memory for bytes.
struct KeepArrived;

impl Pass for KeepArrived {
    fn name(&self) -> &'static str {
        "keep-arrived"
    }
    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let mut arrived = BTreeMap::new();
        rebuild(module.module(), |b, function, node, operands| {
            if node.op != Op::Permute {
                return Ok(None);
            }
            let ty = function.ty(node.result());
            let key = (function.name.clone(), operands[0], ty.layout.clone());
            if let Some(&value) = arrived.get(&key)
                && cx.rewrite()
            {
                return Ok(Some(vec![value]));
            }
            let value = b.push_as(Op::Permute, operands, ty.clone())?;
            arrived.insert(key, value);
            Ok(Some(vec![value]))
        })
    }
}

/// What comes with Ithaca, and what is above.
pub(crate) fn registry() -> Registry {
    Registry::default().with_movement(&BothWays).with_strategy(&Bidirectional).with_pass(&KeepArrived)
}

fn main() -> ExitCode {
    ithaca::shell::main(&registry())
}

#[cfg(test)]
mod tests {
    use ithaca::ir::{Module, text, traffic};
    use ithaca::kernels::store::RandomTensors;
    use ithaca::kernels::{compare, cpu, oracle};
    use ithaca::passes::compile::compile_by;
    use ithaca::passes::lower::Packing;
    use ithaca::passes::pass::{Unwatched, Volume};
    use ithaca::passes::pipeline::parse_with;

    /// Transfers of what `passes` make of an attention, which is seen to compute what one device does.
    fn transfers(passes: &str) -> u64 {
        let source = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/attention.ith"));
        let whole: Module = text::parse(source).unwrap();
        let passes = parse_with(&super::registry(), passes).unwrap();
        let compiled = compile_by(&passes, Packing::Apart, &whole, &Volume, &mut Unwatched).unwrap();
        let random = RandomTensors::of_module(&whole, 1);

        // In double precision, against the whole.
        let expected = oracle::run::<f64>(&whole, &random, &random).unwrap();
        let found = oracle::run_ranks::<f64>(&compiled.per_rank, &random, &random).unwrap();
        for comparison in compare::outputs(&found, &expected) {
            assert!(comparison.verdict.within(1e-9), "{comparison:?}");
        }
        // As it would run, with every byte as promised.
        let run = cpu::execute(&compiled.schedule, &random, &random, &cpu::Options::default()).unwrap();
        for comparison in compare::outputs(&run.outputs, &expected) {
            assert!(comparison.verdict.within(1e-4), "{comparison:?}");
        }
        let promised = traffic::of_module(&compiled.per_rank);
        assert_eq!(run.traffic, promised);
        promised.iter().map(|row| row.count).sum()
    }

    #[test]
    fn computes_what_one_device_does() {
        for ranks in [2, 3, 4, 5, 6, 8] {
            let shard = format!("shard{{strategy=bidirectional,ring={ranks}}}");
            // Keys and values P − 1 times forward and backward, gradients of both P times.
            let expected = 4 * (ranks - 1) + 2 * ranks;
            assert_eq!(transfers(&format!("{shard},lower-movements,lower-reshards")), expected);
        }
    }

    #[test]
    fn what_has_arrived_is_kept() {
        let shard = "shard{strategy=bidirectional,ring=5},lower-movements";
        assert_eq!(transfers(&format!("{shard},lower-reshards")), 26);
        assert_eq!(transfers(&format!("{shard},keep-arrived,lower-reshards")), 18);
    }
}
