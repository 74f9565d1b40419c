//! Random schedules run to their end: models, strategies, meshes and options drawn at random, in forward passes and training
//! steps, on two streams a rank, with a limit on waiting, NaN looked for and every byte counted.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;

use ithaca_ir::Module;
use ithaca_ir::schedule::{self, BufferId, Schedule, Stream};
use ithaca_kernels::cpu::{self, LookForNan};
use ithaca_kernels::store::RandomTensors;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::Training;
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Workload, program};
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};

use crate::fuzz::{Choices, request};
use crate::tier;
use crate::training::sharded;

/// Schedules of the suite: by default, and of the full tier.
const SCHEDULES: [u64; 2] = [40, 200];

#[test]
fn random_schedules_come_to_their_end() {
    let [few, all] = SCHEDULES;
    let seeds = tier::draws(few, all);
    let n = seeds.end - seeds.start;
    let (mut ran, mut refused, mut wrong) = (0, BTreeMap::new(), Vec::new());
    for seed in seeds {
        match request::check(&request::draw(seed as usize, &mut Choices::from_seed(seed)), seed) {
            Ok(None) => ran += 1,
            Ok(Some(code)) => *refused.entry(code).or_insert(0) += 1,
            Err(what) => wrong.push(format!("ITHACA_SEED={seed}..{} {what}", seed + 1)),
        }
    }
    let mut tally = format!("{ran} of {n} random schedules ran");
    write!(tally, ", refused: {refused:?}").unwrap();
    writeln!(std::io::stderr(), "{tally}").unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(n < 100 || 3 * ran > n, "{tally}");
}

/// A step, laid out.
fn compiled(strategy: &str, mesh: &str, fusion: Fusion) -> (Module, Schedule) {
    let training = Training { clip: Some(0.1), ..Training::default() };
    let module = sharded::step(&sharded::llama(4, 2, false), training);
    let options = ShardOptions {
        fusion,
        zero: Zero::Gradients,
        ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
    };
    let schedule = compile(&module, &options, &Volume).unwrap().schedule;
    (module, schedule)
}

/// A transfer takes as long as its result is not needed: that of an outer ring a round of the inner one.
#[test]
fn kernels_of_rings_wait_for_transfers_that_they_read_alone() {
    for (strategy, mesh) in [("ring", "ring=4"), ("loongtrain", "outer=2,ring=4,ulysses=1")] {
        let module = program(&sharded::llama(8, 4, false), "model", &Workload::prefill(1, 64)).unwrap();
        let options =
            ShardOptions { fusion: Fusion::PACK, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
        let schedule = compile(&module, &options, &Volume).unwrap().schedule;
        for frame in schedule.frames.values() {
            for task in frame.tasks.iter().filter(|task| task.stream == Stream::Compute) {
                let holders = |ids: &[BufferId]| ids.iter().map(|&id| frame.holder(id)).collect::<Vec<_>>();
                let reads = holders(&task.reads);
                let awaited =
                    frame.tasks.iter().filter(|t| t.records.is_some_and(|e| task.waits.contains(&e)));
                for transfer in awaited.filter(|t| t.stream != Stream::Compute) {
                    let is_read = holders(&transfer.writes).iter().any(|b| reads.contains(b));
                    assert!(is_read, "{strategy}: {:?} waits for {:?}", task.work, transfer.work);
                }
            }
        }
    }
}

#[test]
fn every_wait_that_is_dropped_is_noticed() {
    let (mut dropped, mut noticed) = (0, 0);
    for (strategy, mesh, fusion) in [
        ("ulysses", "ulysses=2", Fusion::overlap(2)),
        ("ring", "ring=2", Fusion::PACK),
        ("data-parallel+megatron-tp-sp", "dp=2,tp=2", Fusion::PACK),
    ] {
        let (module, good) = compiled(strategy, mesh, fusion);
        let tensors = RandomTensors::of_module(&module, 7);
        let expected = cpu::execute(&good, &tensors, &tensors, &request::options()).unwrap();
        for id in good.frames.ids() {
            for task in 0..good.frames[id].tasks.len() {
                for wait in 0..good.frames[id].tasks[task].waits.len() {
                    let mut mutant = good.clone();
                    mutant.frames[id].tasks[task].waits.remove(wait);
                    assert!(schedule::verify(&mutant).is_err(), "{strategy}: task {task} need not wait");
                    dropped += 1;
                    // What is read too early is NaN, and a rank may notice that first where it is looked for.
                    let options = cpu::Options { look_for_nan: LookForNan::Off, ..request::options() };
                    match cpu::execute(&mutant, &tensors, &tensors, &options) {
                        Err(error) => {
                            let error = error.to_string();
                            assert!(error.contains("nothing orders the two"), "{strategy}: {error}");
                            noticed += 1;
                        }
                        // The verifier asks for order where buffers of some rank could meet; here none do.
                        Ok(run) => assert_eq!(run.outputs, expected.outputs, "{strategy}"),
                    }
                }
            }
        }
    }
    assert!(dropped > 50 && 10 * noticed > 9 * dropped, "{noticed} of {dropped}");
}
