//! Goldens whose weights travel a layer ahead and whose gradients are reduced a layer behind: loss and gradients are those
//! that PyTorch computed, by the program of the ranks and by its schedule.

use ithaca_ir::{diagnostic, traffic};
use ithaca_kernels::store::SafeTensorsFile;
use ithaca_kernels::{Storage, cpu, oracle};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::compile;
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::pass::Prices;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use serde_json::Value;

use super::goldens;
use crate::goldens::workload;
use crate::prefetch::SlowLinks;

/// Largest accepted difference of a loss in single precision.
const CLOSE: f64 = 1e-4;

#[test]
fn goldens_agree_where_layers_work_for_their_neighbours() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let layouts = [
        ("data-parallel", "dp=2"),
        ("ulysses", "ulysses=2"),
        ("ring", "ring=2"),
        ("data-parallel+ring", "dp=2,ring=2"),
    ];
    let forms =
        [(Recompute::FULL, 1), (Recompute::Full { every: 2 }, 1), (Recompute::None, 1), (Recompute::FULL, 2)];
    let (mut turned, mut report) = (0, String::new());
    for (name, dir) in goldens::with_gradients() {
        let io = SafeTensorsFile::open(dir.join("io.safetensors")).unwrap();
        let weights = SafeTensorsFile::open(dir.join("model.safetensors")).unwrap();
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        for (n, (recompute, micro_batches)) in forms.into_iter().enumerate() {
            let training = Training { recompute, micro_batches, ..Training::default() };
            let workload = Workload { mode: Mode::Train, training, ..workload(&io) };
            let Ok(module) = program(&config, &name, &workload) else { continue };
            for (i, (strategy, mesh)) in layouts.into_iter().enumerate() {
                let what = format!("{name}, {strategy} {mesh}, {recompute}, {micro_batches} micro-batches");
                let prices: &dyn Prices = if (i + n).is_multiple_of(2) { &cluster } else { &SlowLinks };
                let of = |fusion: &str| {
                    let options = ShardOptions {
                        zero: Zero::Parameters,
                        fusion: Fusion::parse(fusion).unwrap(),
                        ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
                    };
                    compile(&module, &options, prices)
                };
                let Ok(plain) = of("pack") else { continue };
                let ahead = match of("prefetch+pack") {
                    Ok(ahead) => ahead,
                    Err(refusal) => {
                        report.push_str(&format!("{what}: {}\n", diagnostic::render(&refusal, None)));
                        continue;
                    }
                };
                let names = || ahead.per_rank.functions.values().map(|f| f.name.as_str());
                turned += usize::from(names().any(|name| name.contains(".last")));
                match oracle::step::<f64>(&ahead.per_rank, &weights, &io, Storage::Wide) {
                    Err(error) => report.push_str(&format!("{what}: {error}\n")),
                    Ok(step) => {
                        for difference in goldens::differences(&io, &step.outputs, &step.kept) {
                            report.push_str(&format!("{what}: {difference}\n"));
                        }
                        let run = cpu::execute(&ahead.schedule, &weights, &io, &cpu::Options::default());
                        let run = run.unwrap_or_else(|error| panic!("{what}: {error}"));
                        let [found, expected] =
                            [f64::from(run.outputs["loss"].data[0]), step.outputs["loss"].data[0]];
                        if (found - expected).abs() > CLOSE {
                            report.push_str(&format!(
                                "{what}: the schedule's loss is {found}, not {expected}\n"
                            ));
                        }
                        if run.traffic != traffic::of_module(&plain.per_rank) {
                            report.push_str(&format!("{what}: something else was sent\n"));
                        }
                    }
                }
            }
        }
    }
    assert!(report.is_empty(), "{report}");
    assert!(turned > 100, "only {turned} plans had layers that work for their neighbours");
}
