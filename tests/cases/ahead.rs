//! Goldens whose weights travel a layer ahead and whose gradients are reduced a layer behind: loss and gradients are those
//! that PyTorch computed, by the program of the ranks and by its schedule.

use ithaca_ir::{diagnostic, traffic};
use ithaca_kernels::{Storage, cpu, oracle};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::pass::Prices;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use libtest_mimic::Trial;

use crate::golden::Golden;
use crate::slow_links::SlowLinks;
use crate::{gradients, is_chosen, report, trial};

/// Largest accepted difference of a loss in single precision, relative to it.
const CLOSE: f64 = 1e-4;

const LAYOUTS: [(&str, &str); 4] = [
    ("data-parallel", "dp=2"),
    ("ulysses", "ulysses=2"),
    ("ring", "ring=2"),
    ("data-parallel+ring", "dp=2,ring=2"),
];

const FORMS: [(Recompute, u64); 4] =
    [(Recompute::FULL, 1), (Recompute::Full { every: 2 }, 1), (Recompute::None, 1), (Recompute::FULL, 2)];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (g, name) in gradients::names().iter().enumerate() {
        for (f, form) in FORMS.into_iter().enumerate() {
            for (l, layout) in LAYOUTS.into_iter().enumerate() {
                if is_chosen(name, g, f * LAYOUTS.len() + l) {
                    let ((strategy, mesh), (recompute, micro_batches)) = (layout, form);
                    let title = format!(
                        "ahead::{name}::{strategy} {mesh} recompute={recompute} micro={micro_batches}"
                    );
                    let is_slow = (f + l) % 2 == 1;
                    trials.push(trial(name, title, move |golden| check(golden, form, layout, is_slow)));
                }
            }
        }
    }
    trials
}

fn check(
    golden: &Golden,
    (recompute, micro_batches): (Recompute, u64),
    (strategy, mesh): (&str, &str),
    is_slow: bool,
) -> Result<(), String> {
    // What is not legal as it is, is not legal ahead.
    let Ok(module) = golden.step(Training { recompute, micro_batches, ..Training::default() }) else {
        return Ok(());
    };
    let cluster = Cluster::named("dgx-h100").unwrap();
    let prices: &dyn Prices = if is_slow { &SlowLinks } else { &cluster };
    let of = |fusion: &str| {
        let options = ShardOptions {
            zero: Zero::Parameters,
            fusion: Fusion::parse(fusion).unwrap(),
            ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
        };
        compile(&module, &options, prices)
    };
    let Ok(plain) = of("pack") else { return Ok(()) };
    let ahead = of("prefetch+pack").map_err(|refusal| diagnostic::render(&refusal, None))?;
    let mut wrong = Vec::new();
    let step = oracle::step::<f64>(&ahead.per_rank, &golden.weights, &golden.io, Storage::Wide);
    let step = step.map_err(|error| error.to_string())?;
    wrong.extend(golden.differences(&step.outputs, &step.kept));
    let run = cpu::execute(&ahead.schedule, &golden.weights, &golden.io, &cpu::Options::default());
    let run = run.map_err(|error| error.to_string())?;
    let [found, expected] = [f64::from(run.outputs["loss"].data[0]), step.outputs["loss"].data[0]];
    if (found - expected).abs() > CLOSE * expected.abs() {
        wrong.push(format!("the schedule's loss is {found}, not {expected}"));
    }
    if !traffic::agree(&traffic::of_module(&plain.per_rank), &run.traffic) {
        wrong.push("something else was sent".to_owned());
    }
    report(&wrong)
}
