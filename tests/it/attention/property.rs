//! Random attentions under random strategies: the ranks together compute what one device does, in double precision, forward
//! and backward; and some of them run as schedules that send what the program says.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ithaca_ir::{DType, Diagnostics, Dim, Module, Order, text, verify};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Outputs, oracle};

use super::case::{Case, Extent};
use super::{check, dense, draw};
use crate::tier;

/// Cases of the suite, shared by its tests.
const CASES: u64 = 1200;

/// Cases that the full tier runs before its own draws: always the same, of which the shares and features are known.
const KNOWN: u64 = 6000;

/// Tests that share them, for as many cores.
const SHARES: u64 = 4;

/// Every so many accepted cases one runs as a schedule too.
const AS_SCHEDULE: u64 = 3;

/// Features that [`features`] tells apart.
const FEATURES: usize = 21;

/// What became of the cases of one strategy.
#[derive(Default)]
struct Tally {
    /// On more than one rank.
    accepted: u64,
    refused: BTreeMap<String, u64>,
}

/// A refusal by the rules, by its code; anything else that is wrong, in words.
fn refusal(diagnostics: &Diagnostics) -> Result<String, String> {
    let first = &diagnostics[0];
    let internal = ["P01", "P02", "P03", "P04"].contains(&first.code);
    if first.code.starts_with('P') && !internal {
        Ok(first.code.to_owned())
    } else {
        Err(format!("{}: {}", first.code, first.message))
    }
}

/// What makes an accepted case more than plain attention on contiguous shards.
fn features(case: &Case, per_rank: &Module, expected: &Outputs<f64>) -> Vec<&'static str> {
    let space = &per_rank.space;
    let any = |f: &dyn Fn(&Dim) -> bool| space.dims.values().any(f);
    let axes = space.mesh.axes.values().filter(|axis| axis.size > 1).count();
    let lse = expected.get("lse").map_or(&[][..], |lse| &lse.data);
    let found = [
        (case.keys.is_some(), "cross-attention"),
        (case.group > 1, "grouped heads"),
        (case.softcap.is_some(), "softcap"),
        (case.bias.is_some(), "bias"),
        (case.dropout.is_some(), "dropout"),
        (case.sink, "learned sink"),
        (lse.contains(&f64::NEG_INFINITY), "queries that see nothing"),
        (any(&|dim| dim.copies.is_some()), "copied heads"),
        (any(&|dim| dim.uneven), "uneven heads"),
        (any(&|dim| dim.valid < dim.size), "padding"),
        (any(&|dim| matches!(dim.order, Order::Zigzag { .. })), "zigzag"),
        (any(&|dim| matches!(dim.order, Order::Striped { .. })), "striped"),
        (any(&|dim| matches!(dim.order, Order::Table(_))), "order by a table"),
        (axes > 1, "two axes"),
        (axes > 2, "three axes"),
        (space.mesh.ranks() > 8, "more than 8 ranks"),
        (case.extent == Extent::Backward, "gradients"),
        (case.dtype == DType::BF16, "bf16"),
        (any(&|dim| dim.part.is_some()), "gathered in groups of heads"),
        (case.options.iter().any(|o| o.starts_with("sequence.s=")), "keys on axes of their own"),
        (case.keys.is_some() && any(&|dim| dim.name == "parts"), "merged partial results"),
    ];
    found.into_iter().filter(|f| f.0).map(|f| f.1).collect()
}

/// What became of a case.
enum Fate {
    /// It was laid out over so many ranks, and is right.
    Accepted(u64, Vec<&'static str>),
    /// It was refused with this code.
    Refused(String),
}

/// Runs a case.
fn run(seed: u64, case: &Case) -> Result<Fate, String> {
    let whole = case.whole();
    if let Err(d) = verify::verify(&whole) {
        return Err(format!("the drawn program is wrong: {d:?}"));
    }
    let tensors = RandomTensors::of_module(&whole, seed);
    let expected = oracle::run::<f64>(&whole, &tensors, &tensors).map_err(|e| e.to_string())?;
    check::exact(&expected, &dense::run(case, &tensors)).map_err(|e| format!("the oracle itself: {e}"))?;

    let per_rank = match case.per_rank(&whole) {
        Ok(module) => module,
        Err(diagnostics) => return refusal(&diagnostics).map(Fate::Refused),
    };
    check::on_ranks(&per_rank, &tensors, &expected)?;
    if (seed / draw::strategies().len() as u64).is_multiple_of(AS_SCHEDULE) {
        check::as_schedule(&per_rank, &tensors, &expected).map_err(|e| format!("as a schedule: {e}"))?;
    }
    Ok(Fate::Accepted(per_rank.space.mesh.ranks(), features(case, &per_rank, &expected)))
}

fn run_caught(seed: u64, case: &Case) -> Result<Fate, String> {
    catch_unwind(AssertUnwindSafe(|| run(seed, case))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panicked: {}", text.unwrap_or("without a message")))
    })
}

/// The share's cases: every strategy is drawn as often as any other. What became of them is printed, for people.
#[expect(clippy::print_stderr, reason = "shown with --nocapture")]
fn check_share(share: u64) {
    let whole_suite = tier::is_full() && !tier::is_replay();
    let known = if whole_suite { 0..KNOWN } else { 0..0 };
    let seeds = known.chain(tier::draws(CASES / 2, CASES));
    let mut tallies: BTreeMap<&str, Tally> = BTreeMap::new();
    let mut featured: BTreeMap<&str, u64> = BTreeMap::new();
    let mut failures: Vec<(u64, Case, String)> = Vec::new();
    let period = draw::strategies().len() as u64;
    for seed in seeds.filter(|seed| seed / period % SHARES == share) {
        let case = draw::case(seed);
        let tally = tallies.entry(draw::strategies()[(seed % period) as usize].name()).or_default();
        match run_caught(seed, &case) {
            Ok(Fate::Accepted(ranks, features)) => {
                tally.accepted += u64::from(ranks > 1 || case.strategy == "single");
                features.into_iter().for_each(|feature| *featured.entry(feature).or_default() += 1);
            }
            Ok(Fate::Refused(code)) => *tally.refused.entry(code).or_default() += 1,
            Err(what) => failures.push((seed, case, what)),
        }
    }
    let mut report = String::new();
    for (strategy, Tally { accepted, refused }) in &tallies {
        writeln!(report, "{strategy}: {accepted} accepted, refused {refused:?}").unwrap();
    }
    writeln!(report, "accepted with {featured:?}").unwrap();
    for (seed, case, what) in &failures {
        writeln!(report, "ITHACA_SEED={seed}..{} {} {:?}: {what}", seed + 1, case.pipeline(), case.mask)
            .unwrap();
    }
    if let [(_, case, _)] = failures.as_slice() {
        writeln!(report, "{case:#?}\n{}", text::print(&case.whole())).unwrap();
    }
    assert!(failures.is_empty(), "{} cases failed\n{report}", failures.len());
    if whole_suite {
        assert_eq!(tallies.len(), draw::strategies().len());
        for (strategy, Tally { accepted, refused }) in &tallies {
            let refused: u64 = refused.values().sum();
            assert!(*accepted > refused / 2, "{strategy} refuses nearly everything\n{report}");
        }
        assert_eq!(featured.len(), FEATURES, "some features are never drawn\n{report}");
        assert!(featured.values().all(|&n| n >= 5), "some features are hardly drawn\n{report}");
    }
    eprintln!("{report}");
}

#[test]
fn distributed_attention_is_the_whole_one_1() {
    check_share(0);
}

#[test]
fn distributed_attention_is_the_whole_one_2() {
    check_share(1);
}

#[test]
fn distributed_attention_is_the_whole_one_3() {
    check_share(2);
}

#[test]
fn distributed_attention_is_the_whole_one_4() {
    check_share(3);
}
