//! Models whose sequence is split inside attention: rotary angles, positions, masks and biases follow the tokens in every
//! order, and layers of other kinds agree on it.

use ithaca_kernels::oracle;
use ithaca_passes::compile::compile;
use ithaca_passes::pass::Volume;
use ithaca_passes::pipeline::parse_stages;
use ithaca_passes::shard::ShardOptions;

use super::check;
use crate::golden::{self, Golden};

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
    let encoders_and_decoders = golden::names().into_iter().map(|name| Golden::open(&name));
    let encoders_and_decoders = encoders_and_decoders.filter(|g| g.module.space.dim("t").is_some());
    for Golden { name, module, weights, io, .. } in encoders_and_decoders {
        let expected = oracle::run::<f64>(&module, &weights, &io).unwrap();
        for text in OWN_AXES {
            let stages = parse_stages(&format!("shard{{{text},sequence=pad}}")).unwrap();
            let options = ShardOptions::from_pipeline(&stages[0].options).unwrap();
            let compiled =
                compile(&module, &options, &Volume).unwrap_or_else(|d| panic!("{name}, {text}: {d:?}"));
            let outcome = check::on_these(&compiled.per_rank, &weights, &io, &expected);
            outcome.unwrap_or_else(|e| panic!("{name}, {text}: {e}"));
            ran += 1;
        }
    }
    assert_eq!(ran, 2 * OWN_AXES.len());
}
