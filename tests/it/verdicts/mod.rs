//! The verdict of `run` and `verify`: right results pass, of every model, layout, precision and number of steps; wrong ones fail.

mod changes;
mod wrong;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use ithaca::error::Failure;
use ithaca::job::{Job, Large};
use ithaca_ir::Module;
use ithaca_ir::diagnostic::counted;
use ithaca_kernels::oracle::{self, Interpreted, Results};
use ithaca_kernels::step_checker::{StepChecker, TensorResult};
use ithaca_kernels::store::{Layered, RandomTensors, TensorSource, Tensors};
use ithaca_kernels::{RunError, Storage, cpu};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::Compiled;
use ithaca_passes::import::{Mode, Workload};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use serde_json::{Value, json};

use crate::fuzz::{Choices, request};
use crate::training::sharded::LAYOUTS;
use crate::{golden, tier};

/// Right cases: by default, and of the full tier.
const RIGHT: [u64; 2] = [20, 200];

/// A program under a layout, and how it is run.
struct Case {
    title: String,
    job: Job,
    compiled: Compiled,
    storage: Storage,
    steps: u64,
    tensors: RandomTensors,
}

/// The refusal of a case.
#[derive(Debug)]
struct Refused(&'static str);

impl Case {
    fn of(
        (config, workload, options): (&Value, &Workload, &ShardOptions),
        (storage, steps, seed): (Storage, u64, u64),
    ) -> Result<Case, Refused> {
        let large = Large { config, name: "m", workload };
        let code = |failure: Failure| Refused(failure.diagnostics[0].code);
        let layout = (options.clone(), Cluster::named("dgx-h100").unwrap());
        let job = large.job(&Registry::default(), layout).map_err(code)?;
        let compiled = job.compile().map_err(code)?;
        let tensors = RandomTensors::of_module(&job.program, seed);
        let title = format!(
            "{} {} {:?} on {} {} zero={} {storage:?}, {}",
            config["model_type"],
            config["torch_dtype"],
            workload.mode,
            options.strategy,
            options.mesh,
            options.zero.stage(),
            counted(steps, "step")
        );
        Ok(Case { title, job, compiled, storage, steps, tensors })
    }

    fn checker(&self) -> StepChecker<'_> {
        let parts = self.compiled.per_rank.space.mesh.ranks();
        StepChecker { program: self.job.reference(), storage: self.storage, parts }
    }

    /// A step of the schedule.
    fn run(&self, weights: &dyn TensorSource, inputs: &dyn TensorSource) -> Result<Results<f32>, RunError> {
        let options = cpu::Options { storage: self.storage, ..cpu::Options::default() };
        let ran = cpu::execute(&self.compiled.schedule, weights, inputs, &options)?;
        Ok(Results { outputs: ran.outputs, kept: ran.kept })
    }
}

/// Takes the steps of a case and checks each; returns the tensor with the largest ratio of its error to its tolerance.
fn worst<T: Interpreted>(
    checker: &StepChecker<'_>,
    (steps, tensors): (u64, &RandomTensors),
    step: impl Fn(&dyn TensorSource) -> Result<Results<T>, RunError>,
) -> (f64, TensorResult) {
    let mut kept = Tensors::new();
    let mut rows = Vec::new();
    for _ in 0..steps {
        let before = Layered::new(&kept, tensors);
        let found = step(&before).unwrap();
        rows.extend(checker.step((&before, tensors), &found).unwrap());
        kept = Tensors::from(&found.kept);
    }
    let part = |row: &TensorResult| row.ratio() / checker.proportion();
    let worst = rows.into_iter().max_by(|a, b| part(a).total_cmp(&part(b))).expect("a step has results");
    (part(&worst), worst)
}

/// A model of the library under a layout of the list, or a random model under a random layout.
fn draw(seed: u64) -> Result<Case, Refused> {
    let choices = &mut Choices::from_seed(seed);
    let dtype = choices.one_of(&["float32", "bfloat16", "float16"]);
    let typed = dtype != "float32" && choices.once_in(2);
    let how = (if typed { Storage::AsTyped } else { Storage::Wide }, 1 + choices.below(3) as u64, seed);
    if choices.once_in(2) {
        let request::Drawn { mut config, workload, options } =
            request::draw(seed as usize, &mut Choices::from_seed(seed));
        config["torch_dtype"] = json!(dtype);
        let steps = if workload.mode == Mode::Train { how.1 } else { 1 };
        return Case::of((&config, &workload, &options), (how.0, steps, seed));
    }
    let names = golden::names();
    let mut config = config(&choices.one_of(&names));
    config["torch_dtype"] = json!(dtype);
    let (strategy, mesh) = choices.one_of(&LAYOUTS);
    let mode = choices.one_of(&[Mode::Train, Mode::Train, Mode::Prefill]);
    let workload = Workload { mode, ..Workload::prefill(4, choices.one_of(&[16, 24, 16])) };
    let zero = if mode == Mode::Train { choices.one_of(&Zero::ALL) } else { Zero::Off };
    let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
    let steps = if mode == Mode::Train { how.1 } else { 1 };
    Case::of((&config, &workload, &options), (how.0, steps, seed))
}

/// The configuration of a golden.
fn config(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name).join("config.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn right_results_pass() {
    let [few, all] = RIGHT;
    let (mut ran, mut refused, mut wrong) = (0u64, BTreeMap::new(), Vec::new());
    let mut largest: BTreeMap<String, (f64, String)> = BTreeMap::new();
    for seed in tier::draws(few, all) {
        let case = match draw(seed) {
            Ok(case) => case,
            Err(Refused(code)) => {
                *refused.entry(code).or_insert(0) += 1;
                continue;
            }
        };
        let checker = case.checker();
        let by_schedule =
            worst(&checker, (case.steps, &case.tensors), |weights| case.run(weights, &case.tensors));
        let mut found = vec![(format!("{:?}", case.storage), by_schedule)];
        if seed % 4 == 0 && case.storage == Storage::Wide {
            let per_rank: &Module = &case.compiled.per_rank;
            let step = |weights: &dyn TensorSource| {
                oracle::step::<f64>(per_rank, weights, &case.tensors, Storage::Wide)
            };
            found.push(("double".to_owned(), worst(&checker, (case.steps, &case.tensors), step)));
        }
        ran += 1;
        for (precision, (part, row)) in found {
            let what =
                format!("ITHACA_SEED={seed}..{} {precision} {}: {part:.2} {row:?}", seed + 1, case.title);
            if part.is_nan() || part > 1.0 {
                wrong.push(what.clone());
            }
            let known = largest.entry(precision).or_insert((0.0, String::new()));
            if part > known.0 {
                *known = (part, what);
            }
        }
    }
    let mut tally = format!("{ran} right cases, {} called wrong, refused: {refused:?}", wrong.len());
    for (_, what) in largest.values() {
        write!(tally, "\n  {what}").unwrap();
    }
    writeln!(std::io::stderr(), "{tally}").unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
