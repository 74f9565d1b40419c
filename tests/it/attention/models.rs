//! Models whose sequence is split inside attention: rotary angles, positions, masks and biases follow the tokens in every
//! order, and layers of other kinds agree on it.

use ithaca_kernels::oracle;
use ithaca_passes::compile::compile;
use ithaca_passes::pass::Volume;
use ithaca_passes::pipeline::parse_stages;
use ithaca_passes::shard::{OrderChoice, ShardOptions, parse_mesh};

use super::check;
use crate::equivalence::{Golden, goldens};

const LAYOUTS: [(&str, &str, Option<OrderChoice>); 15] = [
    ("ring", "ring=4", None),
    ("ring", "ring=2", Some(OrderChoice::Zigzag)),
    ("ring", "ring=4", Some(OrderChoice::Striped(1))),
    ("ring", "ring=2", Some(OrderChoice::Striped(2))),
    ("ring+megatron-tp-sp", "ring=2,tp=2", None),
    ("megatron-cp-allgather", "cp=4", Some(OrderChoice::Zigzag)),
    ("megatron-cp-a2a-p2p", "cp=2,ulysses=2", None),
    ("rsa", "ring=2", Some(OrderChoice::Zigzag)),
    ("dist-flash", "ring=4", None),
    ("usp", "ulysses=2,ring=2", Some(OrderChoice::Striped(1))),
    ("loongtrain", "outer=2,ring=2,ulysses=2", None),
    ("gspmd-2d", "cp=2,tp=2", None),
    ("sparse-fetch", "ring=4", Some(OrderChoice::Zigzag)),
    ("window-halo", "ring=4", None),
    ("pass-q+data-parallel", "dp=2,ring=2", None),
];

/// Rules that a golden may break: what does not divide, and masks or biases that a movement is not for.
fn is_rule(code: &str) -> bool {
    ["P20", "P21", "P22", "P23", "P25", "P26"].contains(&code) || code.starts_with("P4")
}

#[test]
fn goldens_with_a_split_sequence() {
    let mut failures = Vec::new();
    let mut ran = [0; LAYOUTS.len()];
    for Golden { name, module, weights, io } in goldens() {
        let expected = oracle::run::<f64>(&module, weights.as_ref(), io.as_ref()).unwrap();
        for (i, (strategy, mesh, order)) in LAYOUTS.into_iter().enumerate() {
            let options = ShardOptions { order, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
            let mut fail = |what: String| failures.push(format!("{name}, {strategy} {mesh}: {what}"));
            match compile(&module, &options, &Volume) {
                Err(refusal) if is_rule(refusal[0].code) => {}
                Err(refusal) => fail(format!("{:?}", refusal[0])),
                Ok(compiled) => {
                    ran[i] += 1;
                    let outcome =
                        check::on_these(&compiled.per_rank, weights.as_ref(), io.as_ref(), &expected);
                    outcome.unwrap_or_else(fail);
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    for ((strategy, mesh, _), ran) in LAYOUTS.iter().zip(ran) {
        let few = if *strategy == "window-halo" { 1 } else { 4 };
        assert!(ran >= few, "only {ran} goldens ran under {strategy} {mesh}");
    }
}

/// Layouts of an encoder and a decoder on axes of their own, as options of `shard`.
const OWN_AXES: [&str; 9] = [
    "strategy=ring,ring=2,enc=2,cross-movement=gather,sequence.s=enc",
    "strategy=ring,enc=4,ring=2,cross-movement=reduce,sequence.s=enc",
    "strategy=ring,ring=2,enc=2,cross-movement=gather(groups=2),sequence.s=ring+enc",
    "strategy=ring,ring=2,enc=2,cross-movement=reduce,sequence.s=enc+ring",
    "strategy=megatron-cp-allgather,cp=4,movement=gather(groups=2),sequence.t=none",
    "strategy=usp,ring=2,enc=2,ulysses=2,cross-movement=reduce,sequence.s=enc+ulysses",
    "strategy=ulysses,ulysses=2,enc=2,movement=rotate,cross-movement=gather,sequence.s=enc",
    "strategy=ring+megatron-tp-sp,ring=2,enc=2,tp=2,cross-movement=reduce,sequence.s=enc",
    "strategy=megatron-tp,enc=2,tp=2,movement=gather,cross-movement=reduce,sequence.s=enc",
];

/// The encoder's sequence is `s`, the decoder's `t`: each split by its own axes, and keys of the one come to queries of
/// the other.
#[test]
fn encoders_and_decoders_on_axes_of_their_own() {
    let mut ran = 0;
    let encoders_and_decoders = goldens().into_iter().filter(|g| g.module.space.dim("t").is_some());
    for Golden { name, module, weights, io } in encoders_and_decoders {
        let expected = oracle::run::<f64>(&module, weights.as_ref(), io.as_ref()).unwrap();
        for text in OWN_AXES {
            let stages = parse_stages(&format!("shard{{{text},sequence=pad}}")).unwrap();
            let options = ShardOptions::from_pipeline(&stages[0].options).unwrap();
            let compiled =
                compile(&module, &options, &Volume).unwrap_or_else(|d| panic!("{name}, {text}: {d:?}"));
            let outcome = check::on_these(&compiled.per_rank, weights.as_ref(), io.as_ref(), &expected);
            outcome.unwrap_or_else(|e| panic!("{name}, {text}: {e}"));
            ran += 1;
        }
    }
    assert_eq!(ran, 2 * OWN_AXES.len());
}
