//! Movements of others: steps in which a block of keys meets a block of queries not at all or twice are refused, on any mesh.

use ithaca::ir::text;
use ithaca::passes::compile::compile_by;
use ithaca::passes::lower::Packing;
use ithaca::passes::movement::{Movement, Site, Step, Visits};
use ithaca::passes::pass::{Unwatched, Volume};
use ithaca::passes::pipeline::parse_with;
use ithaca::passes::registry::Registry;

/// A ring whose steps are so many hops.
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
        let offset = |hops| if hops == 0 { Step::default() } else { Step::keys(site.offset(&[hops])) };
        Visits::Steps((self.1)(site.blocks()).into_iter().map(offset).collect())
    }
}

const WHOLE: Hops = Hops("whole", |n| (0..n).collect());
const SHORT: Hops = Hops("short", |n| (0..n - 1).collect());
const TWICE: Hops = Hops("twice", |n| (0..n).chain([1]).collect());

#[test]
fn wrong_steps_are_refused_on_any_mesh() {
    let source = include_str!("../../examples/attention.ith");
    let registry = Registry::default().with_movement(&WHOLE).with_movement(&SHORT).with_movement(&TWICE);
    for ranks in [3, 64, 65, 130] {
        let module = text::parse(&source.replace("dim s = 120", &format!("dim s = {}", 2 * ranks))).unwrap();
        let compiled = |movement: &str| {
            let shard = format!("shard{{strategy=ring,ring={ranks},movement={movement}}}");
            let passes = parse_with(&registry, &format!("{shard},lower-movements,lower-reshards")).unwrap();
            compile_by(&passes, Packing::Apart, &module, &Volume, &mut Unwatched)
        };
        assert!(compiled("whole").is_ok());
        // Tokens are dealt in zigzag, so every block sees every other.
        for (movement, why) in [
            ("short", format!("queries of block 0 see keys of block {}, and meet them 0 times", ranks - 1)),
            ("twice", "queries of block 0 see keys of block 1, and meet them 2 times".to_owned()),
        ] {
            let refusal = &compiled(movement).unwrap_err()[0];
            assert_eq!(refusal.code, "P48", "{refusal}");
            assert!(refusal.message.contains(&why), "{movement} on {ranks}: {refusal}");
        }
    }
}
