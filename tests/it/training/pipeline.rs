//! Pipelines: a step in stages is the step of one device, on virtual ranks and as a schedule, in every order and beside
//! every other form of parallelism.

use ithaca_ir::layout::At;
use ithaca_ir::schedule::{Place, Schedule, Task};
use ithaca_ir::{Module, diagnostic, schedule, text};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Outputs, Storage, compare, cpu, oracle};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::differentiate::{PipelineOrder, Recompute, Training};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use ithaca_passes::simulate::simulate_ranks;
use ithaca_passes::{lower, memory};
use serde_json::{Value, json};

use super::sharded::per_rank;

/// What double precision leaves of the order of summation.
const EXACT: f64 = 1e-9;

/// What single precision does.
const SINGLE: f64 = 2e-4;

pub(super) fn llama(layers: u64, tied: bool) -> Value {
    json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": tied,
    })
}

fn step(config: &Value, training: Training) -> Module {
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(8, 16) };
    program(config, "m", &workload).unwrap_or_else(|d| panic!("{}", diagnostic::render(&d, None)))
}

pub(super) fn staged(stages: u64, pipeline: PipelineOrder, micro_batches: u64) -> Training {
    Training { stages, pipeline, micro_batches, clip: Some(0.1), ..Training::default() }
}

pub(super) fn options(strategy: &str, mesh: &str) -> ShardOptions {
    ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
}

/// What of `expected` is found otherwise; what stages keep apart is theirs.
fn differences(found: &Outputs<f64>, expected: &Outputs<f64>, tolerance: f64) -> Vec<String> {
    let found: Outputs<f64> = found
        .iter()
        .filter(|(name, _)| !name.starts_with("stage"))
        .map(|(name, t)| (name.clone(), t.clone()))
        .collect();
    let all = compare::outputs(&found, expected);
    all.iter().filter(|c| !c.verdict.within(tolerance)).map(|c| format!("{c:?}")).collect()
}

/// What differs between a step in stages, laid out and lowered, and the step of one device.
pub(super) fn against_whole(config: &Value, training: Training, options: &ShardOptions) -> Vec<String> {
    let title = format!("{} {} {training:?}", options.strategy, options.mesh);
    let named = |all: Vec<String>, what: &str| -> Vec<String> {
        all.into_iter().map(|d| format!("{title}, {what}: {d}")).collect()
    };
    let one = Training {
        stages: 1,
        micro_batches: 1,
        recompute: Recompute::None,
        loss_chunks: 1,
        ..training.clone()
    };
    let whole = step(config, one);
    let staged = step(config, training.clone());
    assert_eq!(text::parse(&text::print(&staged)).unwrap(), staged, "{title}");
    let random = RandomTensors::of_module(&whole, 7);
    let run = |module: &Module| oracle::step::<f64>(module, &random, &random, Storage::Wide);
    let expected = run(&whole).unwrap();
    let found = run(&staged).unwrap();
    let mut wrong = named(differences(&found.outputs, &expected.outputs, EXACT), "in stages");
    wrong.extend(named(differences(&found.kept, &expected.kept, EXACT), "in stages"));

    let ranks = match per_rank(&staged, options) {
        Ok(ranks) => ranks,
        Err(refusal) => return named(vec![refusal], "laid out"),
    };
    assert_eq!(text::parse(&text::print(&ranks)).unwrap(), ranks, "{title}");
    let found = run(&ranks).unwrap_or_else(|e| panic!("{title}: {e}"));
    wrong.extend(named(differences(&found.outputs, &expected.outputs, EXACT), "on ranks"));
    wrong.extend(named(differences(&found.kept, &expected.kept, EXACT), "on ranks"));

    let verified = ithaca_ir::verify::verify(&ranks).unwrap();
    let lowered = lower::lower(verified).unwrap();
    schedule::verify(&lowered).unwrap_or_else(|d| panic!("{title}: {}", diagnostic::render(&d, None)));
    assert_eq!(schedule::parse(&schedule::print(&lowered)).unwrap(), lowered, "{title}");
    let found = cpu::execute(&lowered, &random, &random, &cpu::Options::default())
        .unwrap_or_else(|e| panic!("{title}: {e}"));
    let wide = |outputs: &Outputs<f32>| -> Outputs<f64> {
        outputs.iter().map(|(name, t)| (name.clone(), t.map(f64::from))).collect()
    };
    wrong.extend(named(differences(&wide(&found.outputs), &expected.outputs, SINGLE), "executed"));
    wrong.extend(named(differences(&wide(&found.kept), &expected.kept, SINGLE), "executed"));
    let promised = ithaca_ir::traffic::of_module(&ranks);
    if !ithaca_ir::traffic::agree(&promised, &found.traffic) {
        wrong.push(format!("{title}: sent {:?}, promised {promised:?}", found.traffic));
    }
    wrong
}

#[test]
fn every_order_makes_the_same_step() {
    let mut wrong = Vec::new();
    for (order, tied) in PipelineOrder::ALL.into_iter().zip([true, false, true, true]) {
        for (strategy, mesh) in [("pipeline", "pp=2"), ("pipeline+ulysses", "pp=2,ulysses=2")] {
            wrong.extend(against_whole(&llama(4, tied), staged(2, order, 4), &options(strategy, mesh)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn stages_compose_with_every_form_of_parallelism() {
    let mut wrong = Vec::new();
    for (strategy, mesh) in [
        ("pipeline+data-parallel", "dp=2,pp=2"),
        ("pipeline+megatron-tp", "pp=2,tp=2"),
        ("pipeline+megatron-tp-sp", "pp=2,tp=2"),
        ("pipeline+ring", "pp=2,ring=2"),
        ("data-parallel+pipeline+usp", "dp=2,pp=2,ring=2,ulysses=2"),
        // Heads change from one order of axes to another, by a permute within each stage.
        ("megatron-cp-a2a+pipeline+ulysses", "cp=2,pp=2,ulysses=2"),
    ] {
        let training = staged(2, PipelineOrder::OneForwardOneBackward, 2);
        wrong.extend(against_whole(&llama(2, true), training, &options(strategy, mesh)));
    }
    for (strategy, mesh) in [
        ("pipeline+data-parallel", "dp=2,pp=2"),
        ("pipeline+megatron-tp-sp", "pp=2,tp=2"),
        ("pipeline+ring", "pp=2,ring=2"),
    ] {
        let training = staged(2, PipelineOrder::ZbH1, 2);
        wrong.extend(against_whole(&llama(4, false), training, &options(strategy, mesh)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn stages_shard_states_and_recompute() {
    let mut wrong = Vec::new();
    for zero in Zero::ALL {
        let options =
            ShardOptions { zero, ..options("pipeline+data-parallel+ulysses", "pp=2,dp=2,ulysses=2") };
        for order in [PipelineOrder::OneForwardOneBackward, PipelineOrder::ZbH1] {
            wrong.extend(against_whole(&llama(2, true), staged(2, order, 2), &options));
        }
    }
    let ulysses = options("pipeline+ulysses", "pp=2,ulysses=2");
    for recompute in Recompute::ALL {
        let training = Training { recompute, ..staged(2, PipelineOrder::OneForwardOneBackward, 2) };
        wrong.extend(against_whole(&llama(4, false), training, &ulysses));
    }
    for recompute in [Recompute::Selective, Recompute::FULL, Recompute::Full { every: 2 }] {
        let training = Training { recompute, loss_chunks: 2, ..staged(2, PipelineOrder::ZbH1, 2) };
        wrong.extend(against_whole(&llama(6, false), training, &ulysses));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn more_stages_chunks_that_do_not_divide_and_one_micro_batch() {
    let mut wrong = Vec::new();
    for (layers, stages, order, micro_batches) in [
        (3, 3, PipelineOrder::Gpipe, 2),
        (5, 4, PipelineOrder::OneForwardOneBackward, 8),
        (7, 3, PipelineOrder::OneForwardOneBackward, 2),
        (9, 4, PipelineOrder::Interleaved, 8),
        (5, 4, PipelineOrder::ZbH1, 8),
        (7, 3, PipelineOrder::ZbH1, 2),
        (2, 2, PipelineOrder::OneForwardOneBackward, 1),
    ] {
        let training = staged(stages, order, micro_batches);
        let options = options("pipeline", &format!("pp={stages}"));
        wrong.extend(against_whole(&llama(layers, true), training, &options));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// With as many chunks as there are layers, embedding and head, the ends of a pipeline have no layer.
#[test]
fn embedding_and_head_are_chunks_of_their_own() {
    let mut wrong = Vec::new();
    for (layers, tied, stages, order, strategy, mesh) in [
        (2, true, 4, PipelineOrder::OneForwardOneBackward, "pipeline", "pp=4"),
        (1, false, 3, PipelineOrder::ZbH1, "pipeline", "pp=3"),
        (2, false, 2, PipelineOrder::Interleaved, "pipeline+data-parallel", "pp=2,dp=2"),
        (2, true, 2, PipelineOrder::Interleaved, "pipeline+megatron-tp-sp", "pp=2,tp=2"),
        (2, true, 4, PipelineOrder::Gpipe, "pipeline+data-parallel", "pp=4,dp=2"),
    ] {
        let training = staged(stages, order, 4);
        for zero in [Zero::Off, Zero::Optimizer, Zero::Parameters] {
            if zero == Zero::Off || strategy.contains("data-parallel") {
                let options = ShardOptions { zero, ..options(strategy, mesh) };
                wrong.extend(against_whole(&llama(layers, tied), training.clone(), &options));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn lowered(config: &Value, training: Training, batch: u64, options: &ShardOptions) -> Schedule {
    let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(batch, 16) };
    let module = program(config, "m", &workload).unwrap_or_else(|d| panic!("{d:?}"));
    let ranks = per_rank(&module, options).unwrap();
    lower::lower(ithaca_ir::verify::verify(&ranks).unwrap()).unwrap()
}

/// For each stage the most bytes of `main` that are alive at once on its ranks.
fn alive(schedule: &Schedule) -> Vec<u64> {
    let frame = &schedule.frames[schedule.main().unwrap()];
    let most = |at: At| {
        let own = frame.buffers.ids().filter(|&b| frame.at(b) == Some(at));
        let own = own.filter(|&b| matches!(frame.buffers[b].place, Place::Frame(_)));
        let mut held = vec![0; frame.tasks.len()];
        for buffer in own {
            let touches = |t: &Task| t.reads.contains(&buffer) || t.writes.contains(&buffer);
            let first = frame.tasks.iter().position(touches).unwrap();
            let last = frame.tasks.iter().rposition(touches).unwrap();
            held[first..=last].iter_mut().for_each(|n| *n += frame.buffers[buffer].bytes(&schedule.space));
        }
        held.into_iter().max().unwrap()
    };
    frame.stages().into_iter().map(most).collect()
}

#[test]
fn one_forward_one_backward_holds_no_more_than_stages_of_micro_batches() {
    const STAGES: u64 = 4;
    let options = options("pipeline", "pp=4");
    let of = |order, micro_batches| {
        let training = Training { clip: None, ..staged(STAGES, order, micro_batches) };
        lowered(&llama(8, false), training, micro_batches, &options)
    };
    let (all, few) = (of(PipelineOrder::Gpipe, 8), of(PipelineOrder::OneForwardOneBackward, 8));
    let (all_of, few_of) = (alive(&all), alive(&few));
    for (stage, (all, few)) in (0..STAGES).zip(all_of.iter().zip(&few_of)) {
        // Beside what is kept there is what is passed on: less than half of what one micro-batch keeps.
        let each = all / 8;
        assert!(*few <= (STAGES - stage) * each + each / 2, "stage {stage}: {few} of {all}");
        assert!(*few + each / 2 >= (STAGES - stage) * each, "stage {stage}: {few} of {all}");
    }
    assert!(2 * few.arena_bytes() < all.arena_bytes() + all.arena_bytes() / 2);
    // More micro-batches take no more memory, but where all of them are held.
    let sixteen = of(PipelineOrder::OneForwardOneBackward, 16);
    assert!(sixteen.arena_bytes() <= few.arena_bytes() + few.arena_bytes() / 50);
    assert!(of(PipelineOrder::Gpipe, 16).arena_bytes() > all.arena_bytes() * 3 / 2);
}

#[test]
fn a_stage_loads_its_own_layers_only() {
    let training = staged(2, PipelineOrder::OneForwardOneBackward, 2);
    let cluster = Cluster::named("dgx-h100").unwrap();
    let of =
        |training, options| memory::of_schedule(&cluster, &lowered(&llama(8, false), training, 2, &options));
    let whole = of(Training { stages: 1, ..training.clone() }, options("single", ""));
    let half = of(training, options("pipeline", "pp=2"));
    assert!(half.parameters < whole.parameters * 2 / 3, "{} of {}", half.parameters, whole.parameters);
    assert!(half.gradients < whole.gradients * 2 / 3, "{} of {}", half.gradients, whole.gradients);
    assert!(half.optimizer < whole.optimizer * 2 / 3, "{} of {}", half.optimizer, whole.optimizer);
}

#[test]
fn the_bubble_of_equal_stages_shows() {
    const STAGES: u64 = 4;
    const MICRO_BATCHES: u64 = 8;
    let mut source = String::from(
        "ithaca 1 program\nmodel \"m\"\ndim t = 4096\ndim m = 4096\ndim n = 65536\n\n\
         func @layer(%x: bf16[t m]) {\n  %up = param {name=\"{layer}.up\"} : bf16[n m]\n  \
         %down = param {name=\"{layer}.down\"} : bf16[m n]\n  %y = einsum %x, %up : bf16[t n]\n  \
         %z = einsum %y, %down : bf16[t m]\n  return %z\n}\n\nfunc @main() {\n",
    );
    for micro in 0..MICRO_BATCHES {
        source += &format!("  %x{micro}_0 = input {{name=\"x{micro}\"}} : bf16[t m]\n");
    }
    for tick in 0..MICRO_BATCHES + STAGES - 1 {
        for stage in 0..STAGES {
            if let Some(micro) = tick.checked_sub(stage).filter(|&micro| micro < MICRO_BATCHES) {
                source += &format!(
                    "  %x{micro}_{} = call %x{micro}_{stage} {{callee=@layer, layers={stage}..{}, stage={stage}}} : bf16[t m]\n",
                    stage + 1,
                    stage + 1
                );
            }
        }
    }
    source += "  return y = %x0_4\n}\n";
    let module = text::parse(&source).unwrap_or_else(|d| panic!("{d:?}"));
    let ranks = per_rank(&module, &options("pipeline", "pp=4")).unwrap();
    let schedule = lower::lower(ithaca_ir::verify::verify(&ranks).unwrap()).unwrap();
    let cluster = Cluster::named("dgx-h100").unwrap();
    let times = simulate_ranks(&cluster, &schedule);
    assert_eq!(times.len() as u64, STAGES);
    let ideal = times.iter().map(|(_, t)| t.compute).fold(0.0, f64::max);
    let last = times.iter().map(|(_, t)| t.seconds).fold(0.0, f64::max);
    let bubble = (MICRO_BATCHES + STAGES - 1) as f64 / MICRO_BATCHES as f64;
    let found = last / ideal;
    assert!((found / bubble - 1.0).abs() < 0.05, "{found:.3} of the ideal time, not {bubble:.3}");
}

#[test]
fn what_is_no_pipeline_is_refused() {
    let refused = |layers: u64, training: Training| {
        let workload = Workload { mode: Mode::Train, training, ..Workload::prefill(8, 16) };
        let found = program(&llama(layers, false), "m", &workload).unwrap_err();
        (found[0].code, found[0].message.clone())
    };
    let (code, message) = refused(1, staged(4, PipelineOrder::Gpipe, 4));
    assert_eq!(
        (code, message.as_str()),
        (
            "P53",
            "4 chunks of a pipeline are more than the model has: 1 layer, or 3 parts with embedding and head"
        )
    );
    let (code, message) = refused(8, staged(4, PipelineOrder::Interleaved, 2));
    assert_eq!(code, "P53");
    assert!(message.contains("2 micro-batches") && message.contains("4 stages"), "{message}");
    let (code, _) = refused(8, staged(4, PipelineOrder::Gpipe, 3));
    assert_eq!(code, "P52");

    let two = step(&llama(2, false), staged(2, PipelineOrder::Gpipe, 4));
    let refused =
        |module: &Module, strategy: &str, mesh: &str| per_rank(module, &options(strategy, mesh)).unwrap_err();
    assert!(refused(&two, "pipeline", "pp=4").contains("a program of 2 stages does not fit `pp=4`"));
    assert!(refused(&two, "ulysses", "ulysses=2").contains("without a pipeline"));
    let one = step(&llama(2, false), Training::default());
    assert!(refused(&one, "pipeline", "pp=2").contains("no stages"));
}

#[test]
fn what_is_in_two_places_is_refused() {
    let module = |body: &str| {
        let source = format!(
            "ithaca 1 per_rank\nmodel \"m\"\nmesh pp=3\ndim t = 4\n\nfunc @id(%x: f32[t]) {{\n  \
             %y = scale %x {{factor=2.0}} : f32[t]\n  return %y\n}}\n\nfunc @main() {{\n  \
             %x = input {{name=\"x\"}} : f32[t]\n  \
             %a = call %x {{callee=@id, layers=0..1, stage=0, along=pp}} : f32[t] on pp=0\n  \
             %b = call %x {{callee=@id, layers=0..1, stage=1, along=pp}} : f32[t] on pp=1\n{body}}}\n"
        );
        let module = text::parse(&source).unwrap_or_else(|d| panic!("{d:?}"));
        match ithaca_ir::verify::verify(&module) {
            Ok(_) => Ok(()),
            Err(found) => Err(found[0].code),
        }
    };
    let sum = "  %c = add %a, %b : f32[t] on pp=1\n  return y = %c\n";
    assert_eq!(module(sum), Err("V33"));
    let sent = "  %s = permute %a : f32[t] on pp=1\n  %c = add %s, %b : f32[t] on pp=1\n  \
                %w = permute %c : f32[t]\n  return y = %w\n";
    assert_eq!(module(sent), Ok(()));
    let elsewhere =
        "  %c = call %a {callee=@id, layers=0..1, stage=1, along=pp} : f32[t] on pp=1\n  return y = %c\n";
    assert_eq!(module(elsewhere), Err("V33"));
    let nowhere =
        "  %c = call %x {callee=@id, layers=0..1, stage=3, along=pp} : f32[t] on pp=3\n  return y = %c\n";
    assert_eq!(module(nowhere), Err("V33"));
    let from_all = "  %c = permute %x : f32[t] on pp=1\n  return y = %c\n";
    assert_eq!(module(from_all), Err("V16"));
}
