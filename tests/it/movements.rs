//! Movements of others: steps in which a block of keys meets a block of queries not at all or twice are refused, on any mesh.

use ithaca::ir::text;
use ithaca::passes::compile::compile_by;
use ithaca::passes::lower::Packing;
use ithaca::passes::movement::{Movement, Site, Step, Visits};
use ithaca::passes::pass::{Unwatched, Volume};
use ithaca::passes::pipeline::parse_with;
use ithaca::passes::registry::Registry;

/// A ring, or rings in rings, whose steps are so many hops; the innermost ring is the first to be gone round.
struct Hops(&'static str, fn(u64) -> Vec<u64>);

impl Movement for Hops {
    fn name(&self) -> &'static str {
        self.0
    }
    fn summary(&self) -> &'static str {
        "for a test"
    }
    fn legality(&self) -> &'static str {
        "tokens % P = 0"
    }
    fn visits(&self, site: &Site<'_>) -> Visits {
        let step = |hops| {
            let mut by: Vec<u64> = Vec::new();
            let innermost_first = site.axes.iter().rev().map(|&axis| site.space.mesh.size(axis));
            innermost_first.fold(hops, |rest, size| {
                by.insert(0, rest % size);
                rest / size
            });
            Step::keys(site.offset(&by))
        };
        Visits::Steps((self.1)(site.blocks()).into_iter().map(step).collect())
    }
}

const WHOLE: Hops = Hops("whole", |n| (0..n).collect());
const SHORT: Hops = Hops("short", |n| (0..n - 1).collect());
const TWICE: Hops = Hops("twice", |n| (0..n).chain([1]).collect());

#[test]
fn wrong_steps_are_refused_on_any_mesh() {
    let source = include_str!("../../examples/attention.ith");
    let registry = Registry::default().with_movement(&WHOLE).with_movement(&SHORT).with_movement(&TWICE);
    let ring = |ranks: u64| (ranks, format!("strategy=ring,ring={ranks}"));
    let rings = (91, "strategy=loongtrain,outer=13,ring=7,ulysses=1".to_owned());
    for (ranks, layout) in [ring(3), ring(64), ring(65), ring(130), rings] {
        let module = text::parse(&source.replace("dim s = 120", &format!("dim s = {}", 2 * ranks))).unwrap();
        let compiled = |movement: &str| {
            let shard = format!("shard{{{layout},movement={movement}}}");
            let passes = parse_with(&registry, &format!("{shard},lower-movements,lower-reshards")).unwrap();
            compile_by(&passes, Packing::Apart, &module, &Volume, &mut Unwatched)
        };
        assert!(compiled("whole").is_ok(), "{layout}");
        // Tokens are dealt in zigzag, so every block sees every other.
        for (movement, why) in [
            ("short", format!("queries of block 0 see keys of block {}, and meet them 0 times", ranks - 1)),
            ("twice", "queries of block 0 see keys of block 1, and meet them 2 times".to_owned()),
        ] {
            let refusal = &compiled(movement).unwrap_err()[0];
            assert_eq!(refusal.code, "P48", "{refusal}");
            assert!(refusal.message.contains(&why), "{movement}, {layout}: {refusal}");
        }
    }
}
