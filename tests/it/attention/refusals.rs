//! What no movement computes is refused with the rule and repairs, and nothing is computed in its place.

use std::fmt::Write;

use ithaca_ir::ops::{Dropout, Keyed, Sides};
use ithaca_ir::{Mask, diagnostic};

use super::case::{Buckets, Case};

/// The refusal of a case, as a person reads it.
fn refusal(case: &Case) -> String {
    let whole = case.whole();
    match case.per_rank(&whole) {
        Err(diagnostics) => diagnostic::render(&diagnostics, None),
        Ok(_) => panic!("{} {:?} is accepted", case.pipeline(), case.mask),
    }
}

#[test]
fn illegal_combinations_are_refused_with_the_rule() {
    let window = Mask::Window { left: Some(2), right: Some(0) };
    let ring = || Case::new("ring", &[("ring", 4)], 16);
    let on = |strategy: &str, axis: &'static str| Case::new(strategy, &[(axis, 4)], 16);
    let crossing = |options: &[&'static str]| Case {
        keys: Some(8),
        mask: Mask::Full,
        options: options.to_vec(),
        ..Case::new("ring", &[("ring", 2), ("enc", 2)], 16)
    };
    let dropout = |keyed| Some(Dropout { rate: 0.5, seed: 1, keyed });
    let bias = Some(Buckets { n: 4, max_distance: 8, sides: Sides::Both });
    let cases = [
        (
            "weights dropped as a device happens to compute",
            Case { dropout: dropout(Keyed::Stream), ..ring() },
        ),
        (
            "a window, and blocks outside it may not travel",
            Case {
                mask: window.clone(),
                options: vec!["prune=required"],
                ..on("megatron-cp-allgather", "cp")
            },
        ),
        (
            "half of a stripe",
            Case { queries: 14, options: vec!["order=striped", "sequence=uneven"], ..ring() },
        ),
        ("helpers for a mask that is not causal", Case { mask: Mask::Full, ..on("dist-flash", "ring") }),
        ("helpers in zigzag order", Case { options: vec!["order=zigzag"], ..on("dist-flash", "ring") }),
        ("a halo of a mask without bounds", on("window-halo", "ring")),
        (
            "a halo in striped order",
            Case { mask: window.clone(), options: vec!["order=striped"], ..on("window-halo", "ring") },
        ),
        ("sinks that are not there", Case { mask: window, ..on("streaming", "ring") }),
        ("a bias on plain rows of scores", Case { bias, ..on("rsa", "ring") }),
        ("a cache that is none", on("decode-reduce", "cp")),
        ("fewer tokens than ranks", Case { queries: 3, options: vec!["sequence=uneven"], ..ring() }),
        (
            "heads that do not divide",
            Case { kv_heads: 3, ..Case::new("usp", &[("ring", 2), ("ulysses", 2)], 16) },
        ),
        (
            "groups that the heads of a rank do not make",
            Case {
                kv_heads: 6,
                options: vec!["movement=gather(groups=2)"],
                ..Case::new("gspmd-2d", &[("cp", 2), ("tp", 2)], 16)
            },
        ),
        ("an option that a movement has not", Case { options: vec!["movement=rotate(groups=2)"], ..ring() }),
        ("a movement that is none", Case { options: vec!["movement=gather(groups)"], ..ring() }),
        ("a ring of keys that the queries are not on", crossing(&["sequence.s=enc"])),
        (
            "results to merge of ranks that have the same keys",
            crossing(&["sequence.s=ring", "sequence.t=enc+ring", "cross-movement=reduce"]),
        ),
        (
            "keys that stay split and no movement",
            Case {
                strategy: "megatron-cp-a2a".to_owned(),
                mesh: vec![("cp", 2), ("enc", 2)],
                ..crossing(&["sequence.s=enc"])
            },
        ),
        ("axes of a sequence that is none", crossing(&["sequence.h=enc"])),
        ("an axis that the mesh lacks", crossing(&["sequence.s=other"])),
        (
            "one axis for tokens and weights",
            Case {
                strategy: "megatron-tp".to_owned(),
                mesh: vec![("tp", 2)],
                ..crossing(&["sequence.s=tp"])
            },
        ),
        ("an order that is none", Case { options: vec!["order=random"], ..ring() }),
        ("a mesh without the outer ring", Case::new("loongtrain", &[("ring", 2), ("ulysses", 2)], 16)),
    ];
    let mut refusals = String::new();
    for (what, case) in cases {
        writeln!(refusals, "{what}: {}\n{}", case.pipeline(), refusal(&case)).unwrap();
    }
    insta::assert_snapshot!("refusals", refusals);
}
