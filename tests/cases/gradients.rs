//! Loss and gradients of models of the HuggingFace library, against those that PyTorch computed: on one device under every
//! policy of recomputation, in groups of layers and parts of the loss, and under every strategy.

use ithaca_ir::{Diagnostics, Module, diagnostic};
use ithaca_kernels::store::{Renamed, TensorSource};
use ithaca_kernels::tensor::Tensor;
use ithaca_kernels::{Outputs, Storage, oracle};
use ithaca_passes::compile::passes;
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::import::{Mode, Workload, program};
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::{HeadSplit, OrderChoice, SequenceFit, ShardOptions, Zero, parse_mesh};
use libtest_mimic::Trial;

use crate::golden::{self, Golden};
use crate::{is_chosen, open, report, trial};

/// Largest accepted error of a loss, relative to it, and of an element of a gradient, relative to the largest of all
/// gradients, beside another implementation.
const GRADIENT: f64 = 1e-4;

impl Golden {
    /// A training step on the golden's batch, or why there is none.
    pub(crate) fn step(&self, training: Training) -> Result<Module, Diagnostics> {
        let workload = Workload { mode: Mode::Train, training, ..golden::workload(&self.io) };
        program(&self.config, &self.name, &workload)
    }

    /// The names of the gradients that the library computed.
    pub(crate) fn gradients(&self) -> Vec<String> {
        self.io.names().into_iter().filter(|name| name.starts_with("grad.")).collect()
    }

    /// What differs between the library's loss and gradients and those of a step, by name.
    ///
    /// Experts of a file may be fused, so names are those of the step; that all gradients of the file were met shows in
    /// the number of their elements.
    pub(crate) fn differences(&self, outputs: &Outputs<f64>, kept: &Outputs<f64>) -> Vec<String> {
        let mut wrong = Vec::new();
        let elements = |shape: Vec<u64>| shape.iter().product::<u64>();
        let mut unmet: u64 =
            self.gradients().iter().filter_map(|name| self.io.shape(name)).map(elements).sum();
        let fused = Renamed::new(&self.io, &[]);
        let largest = self.gradients().into_iter().map(|name| magnitude(&self.io.read(&name).unwrap()));
        let largest = largest.fold(0.0, f64::max);
        let found =
            kept.iter().chain(outputs).filter(|(name, _)| name.starts_with("grad.") || *name == "loss");
        for (name, found) in found {
            let Ok(expected) = fused.read(name) else { continue };
            if name != "loss" {
                unmet = unmet.saturating_sub(expected.data.len() as u64);
            }
            let scale = if name == "loss" { magnitude(&expected) } else { largest };
            let errors = found.data.iter().zip(&expected.data).map(|(a, b)| (a - b).abs() / scale);
            let worst = errors.fold(0.0, |a: f64, b| if b <= a { a } else { b });
            if worst > GRADIENT || worst.is_nan() || found.data.len() != expected.data.len() {
                wrong.push(format!("{name}: {worst:.1e}"));
            }
        }
        if unmet > 0 || !outputs.contains_key("loss") {
            wrong.push(format!("{unmet} elements of gradients, or the loss, are missing"));
        }
        wrong
    }
}

/// The magnitude of the largest element.
fn magnitude(tensor: &Tensor<f64>) -> f64 {
    tensor.data.iter().fold(0.0, |largest, x| x.abs().max(largest))
}

/// A way to take a step: the training, the layout, and the codes with which it may be refused.
#[derive(Clone)]
struct Way {
    training: Training,
    layout: Option<ShardOptions>,
    refusals: &'static [&'static str],
}

/// The goldens that have gradients.
pub(crate) fn names() -> Vec<String> {
    let names = golden::names().into_iter().filter(|name| !open(name).gradients().is_empty());
    let names: Vec<String> = names.collect();
    assert!(names.len() >= 30, "goldens with gradients are committed with the repository");
    names
}

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (g, name) in names().iter().enumerate() {
        for (_, (title, way)) in ways().into_iter().enumerate().filter(|(w, _)| is_chosen(name, g, *w)) {
            trials
                .push(trial(name, format!("gradients::{name}::{title}"), move |golden| check(golden, &way)));
        }
        trials.push(trial(name, format!("gradients::{name}::pipeline+ulysses"), check_stages));
    }
    trials
}

fn layout(strategy: &str, mesh: &str) -> ShardOptions {
    ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
}

/// What does not divide may be refused, and what a movement is not for.
const OF_LAYOUTS: &[&str] = &["P2", "P4"];

fn ways() -> Vec<(String, Way)> {
    let mut ways = Vec::new();
    for recompute in Recompute::ALL {
        let training = Training { recompute, ..Training::default() };
        ways.push((format!("recompute={recompute}"), Way { training, layout: None, refusals: &[] }));
    }
    for (strategy, mesh, zero) in [
        ("data-parallel", "dp=2", Zero::Off),
        ("ulysses", "ulysses=4", Zero::Off),
        ("ring", "ring=4", Zero::Off),
        ("megatron-tp-sp", "tp=4", Zero::Off),
        ("usp", "ring=2,ulysses=2", Zero::Off),
        ("ulysses+megatron-tp", "tp=2,ulysses=2", Zero::Off),
        ("sparse-fetch", "ring=2", Zero::Off),
        ("rsa", "ring=2", Zero::Off),
        ("data-parallel+ulysses", "dp=2,ulysses=2", Zero::Off),
        ("data-parallel+ulysses", "dp=2,ulysses=2", Zero::Optimizer),
        ("data-parallel+ulysses", "dp=2,ulysses=2", Zero::Gradients),
        ("data-parallel+ulysses", "dp=2,ulysses=2", Zero::Parameters),
        ("data-parallel+ulysses", "dp=2,ulysses=2", Zero::ParametersAbove(0)),
    ] {
        let layout = Some(ShardOptions { zero, ..layout(strategy, mesh) });
        let title = format!("{strategy} {mesh} zero={zero}");
        ways.push((title, Way { training: Training::default(), layout, refusals: OF_LAYOUTS }));
    }
    for (strategy, mesh) in [("megatron-tp", "tp=6"), ("ulysses", "ulysses=6")] {
        let layout = layout(strategy, mesh);
        let layout = Some(ShardOptions { heads: HeadSplit::Pad, sequence: SequenceFit::Pad, ..layout });
        let title = format!("{strategy} {mesh} padded");
        ways.push((title, Way { training: Training::default(), layout, refusals: OF_LAYOUTS }));
    }
    let groups = [2, 3].map(|every| Training { recompute: Recompute::Full { every }, ..Training::default() });
    let parts = [2, 4].map(|loss_chunks| Training { loss_chunks, ..Training::default() });
    for training in groups.into_iter().chain(parts) {
        let layouts = [
            None,
            Some(layout("ulysses", "ulysses=4")),
            Some(ShardOptions { order: Some(OrderChoice::Zigzag), ..layout("ring", "ring=4") }),
            Some(layout("megatron-tp-sp", "tp=4")),
            Some(ShardOptions {
                zero: Zero::Parameters,
                ..layout("data-parallel+ulysses", "dp=2,ulysses=2")
            }),
        ];
        for layout in layouts {
            let at = layout.as_ref().map_or("whole", |options| &options.strategy);
            let title = format!("recompute={} chunks={} {at}", training.recompute, training.loss_chunks);
            // Lengths that do not divide into parts of the loss.
            let refusals = if layout.is_some() { &["P2", "P4", "P57"][..] } else { &["P57"] };
            ways.push((title, Way { training: training.clone(), layout, refusals }));
        }
    }
    ways
}

/// What every rank runs.
fn per_rank(module: &Module, options: &ShardOptions) -> Result<Module, Diagnostics> {
    run_passes(
        module.clone(),
        &passes(&Registry::default(), options),
        &mut Context::new(&Volume),
        &mut Unwatched,
    )
}

fn check(golden: &Golden, way: &Way) -> Result<(), String> {
    let module = golden.step(way.training.clone());
    let module = module.and_then(|module| match &way.layout {
        Some(options) => per_rank(&module, options),
        None => Ok(module),
    });
    match module {
        Ok(module) => compare(golden, &module),
        Err(refusal) => {
            let may_be = |d: &ithaca_ir::Diagnostic| way.refusals.iter().any(|code| d.code.starts_with(code));
            if refusal.iter().all(may_be) { Ok(()) } else { Err(diagnostic::render(&refusal, None)) }
        }
    }
}

/// Compares a step with the library's.
fn compare(golden: &Golden, module: &Module) -> Result<(), String> {
    let step = oracle::step::<f64>(module, &golden.weights, &golden.io, Storage::Wide);
    let step = step.map_err(|error| error.to_string())?;
    report(&golden.differences(&step.outputs, &step.kept))
}

/// Two stages, a micro-batch for each sequence.
fn check_stages(golden: &Golden) -> Result<(), String> {
    let micro_batches = golden::workload(&golden.io).batch;
    let module = match golden.step(Training { stages: 2, micro_batches, ..Training::default() }) {
        Ok(module) => module,
        // One layer makes no two stages.
        Err(refusal) if refusal[0].code == "P53" => return Ok(()),
        Err(refusal) => return Err(diagnostic::render(&refusal, None)),
    };
    let options = ShardOptions { sequence: SequenceFit::Pad, ..layout("pipeline+ulysses", "pp=2,ulysses=2") };
    let ranks = per_rank(&module, &options).map_err(|refusal| diagnostic::render(&refusal, None))?;
    compare(golden, &ranks)
}
