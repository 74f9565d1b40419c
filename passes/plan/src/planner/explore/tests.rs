//! The search of training steps beside steps that are compiled whole.

use std::sync::Arc;

use ithaca_differentiate::{Offload, Training};
use ithaca_import::{self as import, Mode, Workload};
use ithaca_ir::verify::{VerifiedModule, verify};
use serde_json::{Value, json};

use super::*;
use crate::plan::Narrowing;
use crate::planner::compiler::Program;
use crate::planner::model_tests::llama;
use crate::planner::request::Steps;

/// Everything that a search may choose.
const OPEN: [Choice; 5] =
    [Choice::Zero, Choice::Recompute, Choice::MicroBatches, Choice::Pipeline, Choice::LossChunks];

/// Layers of two kinds, dense ones and mixtures of experts, with weights of the same names.
fn experts() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/deepseek-v3/config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for (key, value) in [("num_hidden_layers", 8), ("n_routed_experts", 64), ("hidden_size", 2048)] {
        config[key] = json!(value);
    }
    config
}

/// What `f` makes of a search of steps of `batch` sequences of `tokens`.
fn searched<T>(
    config: &Value,
    (batch, tokens): (u64, u64),
    request: &Request,
    f: impl FnOnce(&Search<'_>) -> T,
) -> T {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let workload = Workload { mode: Mode::Train, ..Workload::prefill(batch, tokens) };
    let of_step = |batch: u64, training: &Training| {
        let step = Workload { batch, training: training.clone(), ..workload.clone() };
        VerifiedModule::new(import::program(config, "model", &step)?).map(Arc::new)
    };
    let forward = import::import(config, "model", &workload).unwrap();
    let module = import::program(config, "model", &workload).unwrap();
    let program = Program {
        of_step: Some(&of_step),
        forward: Some(&forward),
        ..Program::new(verify(&module).unwrap(), &cluster)
    };
    f(&Search::new(&program, &cluster, request, &Blocks::default()))
}

fn request(gpus: u64, batch: u64, only: &[&str]) -> Request {
    let narrowing =
        Narrowing { only: only.iter().map(|&name| name.to_owned()).collect(), ..Narrowing::default() };
    let steps = Some(Steps { training: Training::default(), open: OPEN.to_vec() });
    Request { batch, narrowing, chooses_fusion: true, steps, ..Request::new(gpus) }
}

fn is_full() -> bool {
    std::env::var("ITHACA_TESTS").is_ok_and(|tier| tier == "full")
}

/// Every estimate that leads to a compiled step, beside the step.
#[test]
fn estimates_are_near_what_is_compiled() {
    let small = llama(2048, 8192, 16, 32, 8);
    let large = llama(8192, 28672, 80, 64, 8);
    let experts = experts();
    let mut corpus = vec![(&small, 8, (16, 4096)), (&experts, 8, (8, 4096))];
    if is_full() {
        corpus.extend([
            (&experts, 64, (64, 4096)),
            (&small, 16, (64, 8192)),
            (&large, 64, (64, 8192)),
            (&large, 128, (32, 32_768)),
        ]);
    }
    let (mut of_time, mut of_memory) = (Vec::new(), Vec::new());
    for (config, gpus, (batch, tokens)) in corpus {
        searched(config, (batch, tokens), &request(gpus, batch, &[]), |search| {
            let (insides, candidates) = search.candidates(&mut Outcomes::default());
            let estimated = search.estimated(&insides, &candidates, &mut Outcomes::default());
            for candidate in estimated.iter().take(12) {
                let step = search.whole(&insides[candidate.inside], candidate);
                let Ok(priced) = search.priced(&step) else { continue };
                let (seconds, memory) = (priced.simulation.seconds, priced.memory.total as f64);
                of_time.push((candidate.estimate.seconds / seconds).ln().abs());
                of_memory.push((candidate.estimate.memory as f64 / memory).ln().abs());
            }
        });
    }
    let mean = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
    let (time, memory) = (mean(&of_time), mean(&of_memory));
    assert!(time < 0.05 && memory < 0.02, "time {time:.4} {of_time:.3?}, memory {memory:.4} {of_memory:.3?}");
}

/// Coarse estimates decide what is estimated: none of a kind may be so far off that the others of its kind are never reached.
#[test]
fn first_looks_are_near_estimates() {
    let mut corpus = vec![(llama(8192, 28672, 80, 64, 8), 64, 64)];
    if is_full() {
        corpus.push((llama(16384, 53248, 124, 128, 8), 256, 256));
    }
    for (config, gpus, batch) in corpus {
        let request = request(gpus, batch, &[]);
        searched(&config, (batch, 8192), &request, |search| {
            let (insides, candidates) = search.candidates(&mut Outcomes::default());
            let estimated = search.estimated(&insides, &candidates, &mut Outcomes::default());
            let mut of_kind: BTreeMap<String, Vec<[f64; 2]>> = BTreeMap::new();
            for candidate in estimated {
                let same = |first: &&Candidate| {
                    let Candidate { inside, data, zero, recompute, loss_chunks, shape, .. } = **first;
                    (inside, data, zero, recompute)
                        == (candidate.inside, candidate.data, candidate.zero, candidate.recompute)
                        && (loss_chunks, shape) == (candidate.loss_chunks, candidate.shape)
                };
                let first = candidates.iter().find(same).unwrap();
                let kind = format!(
                    "ZeRO {}, {}, staged {}",
                    candidate.zero,
                    candidate.recompute,
                    candidate.shape.stages > 1
                );
                let seconds = candidate.estimate.seconds / first.estimate.seconds;
                let memory = candidate.estimate.memory as f64 / first.estimate.memory as f64;
                of_kind.entry(kind).or_default().push([seconds, memory]);
            }
            assert!(of_kind.len() >= 3, "{of_kind:?}");
            for (kind, ratios) in of_kind {
                for part in [0, 1] {
                    let mut ratios: Vec<f64> = ratios.iter().map(|ratio| ratio[part]).collect();
                    ratios.sort_by(f64::total_cmp);
                    let median = ratios[ratios.len() / 2];
                    assert!((0.9..1.1).contains(&median), "{kind}, {part}: {median:.3} of {}", ratios.len());
                }
            }
        });
    }
}

/// Layers of two kinds by turns are calls of their own, and hold two parts of one stored tensor.
#[test]
fn steps_of_layers_by_turns_are_estimated() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/gpt-oss-20b/config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    config["num_hidden_layers"] = json!(12);
    config["layer_types"].as_array_mut().unwrap().truncate(12);
    let request = Request { experts: 32, ..request(8, 16, &[]) };
    searched(&config, (16, 8192), &request, |search| {
        let (insides, candidates) = search.candidates(&mut Outcomes::default());
        let estimated = search.estimated(&insides, &candidates, &mut Outcomes::default());
        let (mut of_time, mut of_memory) = (Vec::new(), Vec::new());
        for candidate in estimated.iter().take(6) {
            let Ok(priced) = search.priced(&search.whole(&insides[candidate.inside], candidate)) else {
                continue;
            };
            of_time.push((candidate.estimate.seconds / priced.simulation.seconds).ln().abs());
            of_memory.push((candidate.estimate.memory as f64 / priced.memory.total as f64).ln().abs());
        }
        let mean = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
        let (time, memory) = (mean(&of_time), mean(&of_memory));
        assert!(
            time < 0.05 && memory < 0.02,
            "time {time:.4} {of_time:.3?}, memory {memory:.4} {of_memory:.3?}"
        );
    });
}

/// States in host memory take the time of their copies, and the working buffers of an update.
#[test]
fn steps_whose_states_are_in_host_memory_are_estimated() {
    let config = llama(2048, 8192, 16, 32, 8);
    let training = Training { offload: Offload::Optimizer, ..Training::default() };
    let (mut of_time, mut of_memory) = (Vec::new(), Vec::new());
    for (gpus, tokens) in [(4, 4096), (8, 512)] {
        let steps = Some(Steps { training: training.clone(), open: OPEN.to_vec() });
        let request = Request { steps, ..request(gpus, 8, &[]) };
        searched(&config, (8, tokens), &request, |search| {
            let (insides, candidates) = search.candidates(&mut Outcomes::default());
            let estimated = search.estimated(&insides, &candidates, &mut Outcomes::default());
            for candidate in estimated.iter().take(12) {
                let step = search.whole(&insides[candidate.inside], candidate);
                let Ok(priced) = search.priced(&step) else { continue };
                let host = candidate.estimate.host as f64 / priced.memory.host as f64;
                assert!((host - 1.0).abs() < 0.02, "{host}");
                of_time.push((candidate.estimate.seconds / priced.simulation.seconds).ln().abs());
                of_memory.push((candidate.estimate.memory as f64 / priced.memory.total as f64).ln().abs());
            }
        });
    }
    let mean = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
    let (time, memory) = (mean(&of_time), mean(&of_memory));
    assert!(time < 0.05 && memory < 0.02, "time {time:.4} {of_time:.3?}, memory {memory:.4} {of_memory:.3?}");
}

/// A loss in parts has no backward call of its own, and layers that are computed again together are calls in a call.
#[test]
fn steps_of_other_forms_are_estimated() {
    let config = llama(2048, 8192, 4, 32, 8);
    for (training, closed) in [
        (Training { loss_chunks: 4, ..Training::default() }, Choice::LossChunks),
        (Training { recompute: Recompute::Full { every: 2 }, ..Training::default() }, Choice::Recompute),
    ] {
        let open = OPEN.into_iter().filter(|choice| *choice != closed).collect();
        let steps = Some(Steps { training: training.clone(), open });
        let request = Request { steps, ..request(2, 4, &["data-parallel"]) };
        searched(&config, (4, 4096), &request, |search| {
            let (insides, candidates) = search.candidates(&mut Outcomes::default());
            let best = search.estimated(&insides, &candidates, &mut Outcomes::default()).remove(0);
            let exact = search.priced(&search.whole(&insides[best.inside], &best)).unwrap();
            let time = best.estimate.seconds / exact.simulation.seconds - 1.0;
            let memory = best.estimate.memory as f64 / exact.memory.total as f64 - 1.0;
            // Weights that groups of layers gather ahead are not estimated.
            let is_grouped = matches!(training.recompute, Recompute::Full { every: 2.. });
            assert!((is_grouped || time.abs() < 0.05) && memory.abs() < 0.1, "{training:?}: {time} {memory}");
        });
    }
}

#[test]
fn steps_with_persistent_weights_are_estimated() {
    let config = llama(2048, 8192, 8, 32, 8);
    let training = Training { micro_batches: 4, ..Training::default() };
    let steps = Steps { training, open: vec![Choice::Recompute, Choice::LossChunks] };
    let request = Request { steps: Some(steps), ..request(8, 32, &["data-parallel"]) };
    for zero in [0, 1 << 20, 1 << 22].map(Zero::ParametersAbove) {
        let options = ShardOptions { zero, fusion: zero.usual_fusion(), ..request.options.clone() };
        searched(&config, (32, 2048), &Request { options, ..request.clone() }, |search| {
            let (insides, candidates) = search.candidates(&mut Outcomes::default());
            let best = search.estimated(&insides, &candidates, &mut Outcomes::default()).remove(0);
            let exact = search.priced(&search.whole(&insides[best.inside], &best)).unwrap();
            let time = best.estimate.seconds / exact.simulation.seconds - 1.0;
            let memory = best.estimate.memory as f64 / exact.memory.total as f64 - 1.0;
            assert!(time.abs() < 0.05 && memory.abs() < 0.02, "{zero}: {time} {memory}");
        });
    }
}

/// In a space that is small enough to compile every step, the search finds one within 1 % of the best.
#[test]
fn the_best_of_a_small_space_is_found() {
    let config = llama(2048, 8192, 8, 32, 8);
    let only: &[&str] = if is_full() {
        &["single", "data-parallel", "pipeline", "megatron-tp-sp", "ring", "ulysses"]
    } else {
        &["single", "data-parallel", "pipeline"]
    };
    let (gpus, batch) = if is_full() { (4, 8) } else { (2, 4) };
    searched(&config, (batch, 4096), &request(gpus, batch, only), |search| {
        let mut tried = Outcomes::default();
        let (insides, candidates) = search.candidates(&mut tried);
        let all = candidates.par_iter().filter_map(|candidate| {
            let priced = search.priced(&search.whole(&insides[candidate.inside], candidate)).ok()?;
            priced.memory.over().is_none().then_some(priced.simulation.seconds)
        });
        let best = all.reduce(|| f64::INFINITY, f64::min);
        let estimated = search.estimated(&insides, &candidates, &mut tried);
        search.exact(&insides, estimated, EXACT, &mut tried);
        let found = tried.fits.iter().map(|priced| priced.simulation.seconds).fold(f64::INFINITY, f64::min);
        assert!(found <= 1.01 * best, "{found} is found, and {best} is best");
    });
}

/// Six ranks of a node of eight are on two nodes by turns, so experts are split over two and three as well.
#[test]
fn experts_are_split_over_ranks_that_divide_a_node() {
    let config = llama(2048, 8192, 8, 32, 8);
    let request = Request { experts: 6, ..request(24, 24, &["data-parallel-ep"]) };
    searched(&config, (24, 4096), &request, |search| {
        let meshes = search.of_size(1).into_iter().filter_map(|(options, _)| {
            let mesh = options.mesh;
            (mesh.ranks() == 24).then(|| mesh.axis(EXPERT_AXIS).map_or(1, |axis| mesh.size(axis)))
        });
        assert_eq!(meshes.filter(|&ranks| ranks > 1).collect::<BTreeSet<u64>>(), BTreeSet::from([2, 3, 6]));
    });
}

/// A stage 3 that is stated gathers weights once a step, as far as memory allows; of one micro-batch it stays as it is.
#[test]
fn a_stated_stage_has_persistent_weights_for_several_micro_batches() {
    let config = llama(2048, 8192, 8, 32, 8);
    for (micro_batches, is_changed) in [(8, true), (1, false)] {
        let training = Training { micro_batches, ..Training::default() };
        let steps = Some(Steps { training, open: vec![Choice::Persistent] });
        let mut request = Request { steps, mesh: Some(Mesh::new([("dp", 8)])), ..request(8, 64, &[]) };
        request.strategy = Some("data-parallel".to_owned());
        request.options.zero = Zero::Parameters;
        searched(&config, (64, 1024), &request, |search| {
            let tried = explored(search, 1, Answer::Ranked).unwrap();
            let zero = tried.fits[0].options.zero;
            assert_eq!(zero != Zero::Parameters, is_changed, "{micro_batches} micro-batches: {zero}");
            assert_eq!(
                tried.fits[0].flags,
                if is_changed { format!("--zero {zero}") } else { String::new() }
            );
        });
    }
}

/// With memory to spare weights of layers stay whole too, as many as fit.
#[test]
fn persistent_weights_make_the_best_steps_faster_where_they_fit() {
    let config = llama(2048, 8192, 8, 32, 8);
    let steps = Steps {
        training: Training { micro_batches: 8, ..Training::default() },
        open: vec![Choice::Zero, Choice::LossChunks],
    };
    let mesh = Some(Mesh::new([("dp", 8)]));
    let strategy = Some("data-parallel".to_owned());
    let request = Request { steps: Some(steps), mesh, strategy, ..request(8, 64, &[]) };
    searched(&config, (64, 1024), &request, |search| {
        let (insides, candidates) = search.candidates(&mut Outcomes::default());
        let candidates = candidates.into_iter();
        let split: Vec<Candidate> =
            candidates.filter(|candidate| candidate.zero == Zero::Parameters).collect();
        let estimated = search.estimated(&insides, &split, &mut Outcomes::default());
        let mut tried = Outcomes::default();
        search.exact(&insides, estimated, 1, &mut tried);
        let before = tried.fits[0].clone();
        search.in_other_forms(&mut tried);
        let after = &tried.fits[0];
        assert!(matches!(after.options.zero, Zero::ParametersAbove(1..)), "{}", after.options.zero);
        assert!(after.flags.contains("--zero 3:"), "{}", after.flags);
        assert!(after.simulation.seconds < 0.95 * before.simulation.seconds);
        assert!(after.memory.total > before.memory.total && after.memory.over().is_none());
    });
}

/// A request whose layout and step are stated.
fn stated((strategy, mesh): (&str, Mesh), batch: u64, zero: Zero, training: Training) -> Request {
    let steps = Some(Steps { training, open: Vec::new() });
    let mut request = Request { steps, ..request(mesh.ranks(), batch, &[]) };
    request.options.zero = zero;
    Request { strategy: Some(strategy.to_owned()), mesh: Some(mesh), ..request }
}

/// Sums of gradients over ranks of a sequence are one message with those over data-parallel ranks, and nothing waits behind them in a
/// coarse estimate, where these ranks are on two nodes.
#[test]
fn a_first_look_at_a_sequence_over_two_nodes_is_near_its_estimate() {
    let mesh = Mesh::new([("pp", 4), ("cp", 2), ("tp", 8)]);
    let layout = ("pipeline+megatron-tp-sp+megatron-cp-allgather", mesh);
    let training = Training { micro_batches: 16, stages: 4, ..Training::default() };
    let request = stated(layout, 16, Zero::Optimizer, training);
    searched(&llama(8192, 28672, 16, 64, 8), (16, 8192), &request, |search| {
        let (insides, candidates) = search.candidates(&mut Outcomes::default());
        let candidate = candidates[0].estimate.seconds;
        let estimated = search.estimated(&insides, &candidates, &mut Outcomes::default())[0].estimate.seconds;
        assert!(
            (candidate / estimated - 1.0).abs() < 0.1,
            "{candidate} by the coarse estimate, and {estimated} estimated"
        );
    });
}

/// Weights are gathered in larger buckets where messages take longer than kernels, and the step is faster for that; where kernels
/// take longer, buckets stay as they are.
#[test]
fn steps_that_wait_for_weights_gather_them_in_larger_buckets() {
    let config = llama(8192, 28672, 8, 64, 8);
    for (mesh, batch, micro_batches, waits) in [
        (Mesh::new([("dp", 128), ("cp", 4)]), 1024, 8, true),
        (Mesh::new([("dp", 32), ("cp", 4)]), 128, 1, false),
    ] {
        let training = Training { micro_batches, ..Training::default() };
        let request =
            stated(("data-parallel+megatron-cp-allgather", mesh), batch, Zero::Parameters, training);
        searched(&config, (batch, 8192), &request, |search| {
            let tried = explored(search, 1, Answer::Ranked).unwrap();
            let best = &tried.fits[0];
            assert_eq!(best.options.fusion.bucket.is_some(), waits, "{micro_batches} micro-batches");
            if waits {
                let fusion = Fusion { bucket: None, ..best.options.fusion };
                let options = ShardOptions { fusion, ..best.options.clone() };
                let step = chosen::Chosen { options, training: best.training.clone().unwrap() };
                let usual = search.priced(&step).unwrap().simulation.seconds;
                assert!(best.simulation.seconds < 0.95 * usual, "{} of {usual}", best.simulation.seconds);
            }
        });
    }
}
