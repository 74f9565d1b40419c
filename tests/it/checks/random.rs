//! Random schedules run to their end: of random programs under random layouts, tasks in random orders that the checks
//! accept, and broken ones that are refused or do no harm. A watchdog ends a run that hangs.

use std::sync::mpsc;
use std::time::Duration;

use ithaca_ir::schedule::{self, FrameId, Schedule, Work};
use ithaca_ir::{DType, Module, verify};
use ithaca_kernels::store::RandomTensors;
use ithaca_kernels::{Outputs, cpu};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::reshard::LowerReshards;

use super::corpus::Case;
use super::mutants::judge;
use super::mutators::MUTATORS;
use crate::fuzz::Choices;
use crate::generate::{Precision, distribute, mesh, program};
use crate::tier;

/// How long a run of a schedule that takes milliseconds may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A random program laid out at random, and its schedule.
fn case(choices: &mut Choices) -> Case {
    let mesh = mesh(choices);
    let whole = program(choices, Precision::Only(DType::F32));
    let sharded = distribute(&whole, mesh, choices);
    let mut cx = Context::new(&Volume);
    let per_rank = run_passes(sharded, &[Box::new(LowerReshards)], &mut cx, &mut Unwatched).unwrap();
    let schedule = lower(verify::verify(&per_rank).unwrap()).unwrap();
    Case { title: "random".to_owned(), per_rank, schedule }
}

/// Swaps neighbours as long as the checks agree; gives how many.
fn reorder(case: &mut Case, choices: &mut Choices) -> usize {
    let mut swapped = 0;
    for _ in 0..8 {
        let frames: Vec<FrameId> =
            case.schedule.frames.iter().filter(|(_, f)| f.tasks.len() > 1).map(|(id, _)| id).collect();
        if frames.is_empty() {
            break;
        }
        let frame = choices.one_of(&frames);
        let i = choices.below(case.schedule.frames[frame].tasks.len() - 1);
        let mut other = case.schedule.clone();
        other.frames[frame].tasks.swap(i, i + 1);
        if judge(&other, case).is_none() {
            case.schedule = other;
            swapped += 1;
        }
    }
    swapped
}

/// Runs a schedule in a thread of its own.
fn run(title: &str, module: &Module, schedule: &Schedule) -> Result<Outputs<f32>, String> {
    let (send, receive) = mpsc::channel();
    let (module, schedule) = (module.clone(), schedule.clone());
    std::thread::spawn(move || {
        let tensors = RandomTensors::of_module(&module, 1);
        let result = cpu::execute(&schedule, &tensors, &tensors, &cpu::Options::default());
        // Nobody listens any more if it took too long.
        let _ = send.send(result.map(|run| run.outputs).map_err(|e| e.to_string()));
    });
    receive.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{title} hangs"))
}

fn bits(outputs: &Outputs<f32>) -> Vec<(String, Vec<u32>)> {
    let of = |(name, t): (&String, &ithaca_kernels::tensor::Tensor<f32>)| {
        (name.clone(), t.data.iter().map(|x| x.to_bits()).collect())
    };
    outputs.iter().map(of).collect()
}

#[test]
fn random_schedules_end_and_broken_ones_are_refused_or_do_no_harm() {
    let (mut communicate, mut swapped, mut refused, mut harmless) = (0, 0, 0, 0);
    let draws = tier::draws(120, 1000);
    for seed in draws.clone() {
        let mut choices = Choices::from_seed(seed.wrapping_mul(0x9e37_79b9) + 17);
        let mut case = case(&mut choices);
        // The program may have used its choices up.
        let mut choices = Choices::from_seed(!seed);
        let title = format!("ITHACA_SEED={seed}..{}", seed + 1);
        let refusal = judge(&case.schedule, &case);
        assert!(refusal.is_none(), "{title}: {refusal:?}\n{}", schedule::print(&case.schedule));
        let exchanges = |s: &Schedule| {
            s.frames.values().flat_map(|f| &f.tasks).any(|t| matches!(t.work, Work::Exchange(_)))
        };
        communicate += usize::from(exchanges(&case.schedule));
        let first = case.schedule.clone();
        // Each in its turn: as it is, in another order, and broken.
        let other = match seed % 4 {
            0 => {
                run(&title, &case.per_rank, &first).unwrap_or_else(|e| panic!("{title}: {e}"));
                continue;
            }
            1 | 2 => {
                swapped += reorder(&mut case, &mut choices);
                if case.schedule == first {
                    run(&title, &case.per_rank, &first).unwrap_or_else(|e| panic!("{title}: {e}"));
                    continue;
                }
                case.schedule.clone()
            }
            _ => {
                let (_, mutate) = choices.one_of(MUTATORS);
                match mutate(&first, &mut choices) {
                    Some(mutant) if judge(&mutant.schedule, &case).is_none() => {
                        harmless += usize::from(mutant.schedule != first);
                        mutant.schedule
                    }
                    Some(_) => {
                        refused += 1;
                        continue;
                    }
                    None => continue,
                }
            }
        };
        let expected = run(&title, &case.per_rank, &first).unwrap_or_else(|e| panic!("{title}: {e}"));
        let found = run(&title, &case.per_rank, &other)
            .unwrap_or_else(|e| panic!("{title}: {e}\n{}", schedule::print(&other)));
        assert_eq!(bits(&found), bits(&expected), "{title}\n{}", schedule::print(&other));
    }
    if tier::is_replay() {
        return;
    }
    let n = draws.count();
    assert!(communicate > n / 10 && swapped > n / 10, "{communicate} communicate, {swapped} swaps");
    assert!(refused > n / 100 && harmless <= n, "{refused} refused, {harmless} harmless");
}
