//! Wrong results fail: programs, data, messages and results with one thing changed.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Mutex;

use ithaca_ir::Rank;
use ithaca_ir::ops::state;
use ithaca_ir::schedule::Stream;
use ithaca_kernels::cpu::{Communicator, Mailboxes};
use ithaca_kernels::oracle::{self, Results};
use ithaca_kernels::step_checker::StepChecker;
use ithaca_kernels::store::{Layered, StoreError, TensorSource, Tensors};
use ithaca_kernels::tensor::Tensor;
use ithaca_kernels::{Outputs, RunError, Storage, cpu};
use ithaca_passes::import::{Mode, Workload};
use ithaca_passes::shard::{ShardOptions, Zero, parse_mesh};
use rayon::prelude::*;
use serde_json::json;

use super::changes::{CHANGES, Change, program};
use super::{Case, config};
use crate::fuzz::Choices;
use crate::tier;

/// A source of which one tensor is changed, or two are swapped.
struct Changed<'a> {
    source: &'a dyn TensorSource,
    names: [String; 2],
    change: fn(&mut Vec<f64>),
}

impl TensorSource for Changed<'_> {
    fn description(&self) -> String {
        self.source.description()
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.source.shape(name)
    }

    fn read(&self, name: &str) -> Result<Tensor<f64>, StoreError> {
        let Some(at) = self.names.iter().position(|changed| changed == name) else {
            return self.source.read(name);
        };
        let mut tensor = self.source.read(&self.names[1 - at])?;
        (self.change)(&mut tensor.data);
        Ok(tensor)
    }
}

/// Messages in memory, of which those of a rank are changed.
struct Tampered {
    mailboxes: Mailboxes,
    from: Rank,
    change: fn(Option<&Vec<f32>>, &mut Vec<f32>),
    before: Mutex<BTreeMap<(Stream, Rank), Vec<f32>>>,
}

impl Communicator for Tampered {
    fn send(&self, stream: Stream, from: Rank, to: Rank, mut block: Vec<f32>) -> Result<(), RunError> {
        if from == self.from {
            let right = block.clone();
            let mut before = self.before.lock().unwrap();
            (self.change)(before.get(&(stream, to)), &mut block);
            before.insert((stream, to), right);
        }
        self.mailboxes.send(stream, from, to, block)
    }

    fn receive(&self, stream: Stream, to: Rank, from: Rank) -> Result<Vec<f32>, RunError> {
        self.mailboxes.receive(stream, to, from)
    }

    fn check(&self) -> Result<(), RunError> {
        self.mailboxes.check()
    }

    fn finish(&self, rank: Rank) {
        self.mailboxes.finish(rank);
    }

    fn fail(&self, rank: Rank, error: &RunError) {
        self.mailboxes.fail(rank, error);
    }
}

/// What became of a change.
#[derive(Debug, PartialEq)]
enum Fate {
    /// There is nothing to change, or the changed program is refused.
    Nothing,
    /// The results are the right ones, bit for bit or but for rounding.
    Same,
    /// The ranks noticed it themselves.
    Error,
    Failed,
    Passed(String),
}

/// A case that ran.
struct Ran {
    /// The weights and states with which the last step began, where they are not those of the first.
    kept: Tensors,
    right: Results<f32>,
}

impl Ran {
    fn of(case: &Case) -> Ran {
        let mut kept = Tensors::new();
        for _ in 1..case.steps {
            kept = Tensors::from(&case.run(&Layered::new(&kept, &case.tensors), &case.tensors).unwrap().kept);
        }
        let right = case.run(&Layered::new(&kept, &case.tensors), &case.tensors).unwrap();
        Ran { kept, right }
    }
}

/// Changes the last step of a case.
fn fate(case: &Case, ran: &Ran, change: &Change, choices: &mut Choices) -> Fate {
    let Ran { kept, right } = ran;
    let before = Layered::new(kept, &case.tensors);
    let one = |names: Vec<&String>, choices: &mut Choices| {
        (!names.is_empty()).then(|| names[choices.below(names.len())].clone())
    };
    let mut found = right.clone();
    let mut changed = None;
    match change {
        Change::Op(_) | Change::After(..) | Change::Skip(_) => {
            let Some(program) = program(&case.job.program, change, choices) else { return Fate::Nothing };
            let job = ithaca::job::Job { program, ..case.job.clone() };
            let Ok(compiled) = job.compile() else { return Fate::Nothing };
            changed = Some(job.program);
            let options = cpu::Options { storage: case.storage, ..cpu::Options::default() };
            match cpu::execute(&compiled.schedule, &before, &case.tensors, &options) {
                Ok(ran) => found = Results { outputs: ran.outputs, kept: ran.kept },
                Err(_) => return Fate::Error,
            }
        }
        Change::Read(wanted, change) => {
            let names = case.tensors.names();
            let Some(name) = one(names.iter().filter(|name| wanted(name)).collect(), choices) else {
                return Fate::Nothing;
            };
            let source = Changed { source: &before, names: [name.clone(), name], change: *change };
            match case.run(&source, &source) {
                Ok(results) => found = results,
                Err(_) => return Fate::Error,
            }
        }
        Change::Swapped(a, b) => {
            let names = case.tensors.names();
            let has_both = |name: &&String| {
                let other = name.replacen(a, b, 1);
                name.contains(a) && case.tensors.shape(name) == case.tensors.shape(&other)
            };
            let Some(name) = one(names.iter().filter(has_both).collect(), choices) else {
                return Fate::Nothing;
            };
            let names = [name.replacen(a, b, 1), name];
            let source = Changed { source: &before, names, change: |_| {} };
            found = case.run(&source, &case.tensors).unwrap();
        }
        Change::Sent(change) => {
            let schedule = &case.compiled.schedule;
            let ranks: Vec<Rank> = schedule.space.mesh.iter_ranks().collect();
            let job = cpu::Job::of(schedule).unwrap();
            let options = cpu::Options { storage: case.storage, ..cpu::Options::default() };
            let loaded = job.load(&ranks, &before, &case.tensors, &options).unwrap();
            let mailboxes = Mailboxes::new(ranks.len() as u64, Stream::COUNT, None);
            let from = ranks[choices.below(ranks.len())];
            let tampered = Tampered { mailboxes, from, change: *change, before: Mutex::default() };
            let Ok(parts) = loaded.run(&tampered) else { return Fate::Error };
            match job.assemble(&parts, &before, 0) {
                Ok(ran) => found = Results { outputs: ran.outputs, kept: ran.kept },
                Err(_) => return Fate::Error,
            }
        }
        Change::Result(wanted, change) => {
            let names: Vec<String> = found.outputs.keys().chain(found.kept.keys()).cloned().collect();
            let is_judged = |name: &&String| wanted(name) && is_of_whole(name);
            let Some(name) = one(names.iter().filter(is_judged).collect(), choices) else {
                return Fate::Nothing;
            };
            change(&mut tensor(&mut found, &name).data);
        }
        Change::Kept(wanted) => {
            let names = found.kept.keys().filter(|name| wanted(name) && is_of_whole(name)).collect();
            let Some(name) = one(names, choices) else { return Fate::Nothing };
            let old = match before.shape(&name) {
                Some(_) => before.read(&name).unwrap().map(|x| x as f32),
                None => found.kept[&name].map(|_| 0.0),
            };
            tensor(&mut found, &name).data = old.data;
        }
    }
    if same(&found.outputs, &right.outputs) && same(&found.kept, &right.kept) {
        return Fate::Same;
    }
    let checker = case.checker();
    let rows = checker.step((&before, &case.tensors), &found).unwrap();
    if rows.iter().all(|row| checker.accepts(row)) {
        // A softmax does not see the bias of keys: with the other sign too, the results are the right ones.
        let is_same = changed.is_some_and(|program| {
            let exact = oracle::step::<f64>(&program, &before, &case.tensors, Storage::Wide).unwrap();
            let wide = StepChecker { storage: Storage::Wide, ..checker };
            wide.step((&before, &case.tensors), &exact).unwrap().iter().all(|row| wide.accepts(row))
        });
        if is_same {
            return Fate::Same;
        }
        let worst = rows.iter().max_by(|a, b| a.ratio().total_cmp(&b.ratio())).unwrap();
        return Fate::Passed(format!("{:.2} of {:.1}: {worst:?}", worst.ratio(), checker.proportion()));
    }
    Fate::Failed
}

/// Stages of a pipeline keep tensors that the whole program does not have.
fn is_of_whole(name: &str) -> bool {
    !name.starts_with("stage") && !name.starts_with(state::SUM)
}

fn tensor<'a>(results: &'a mut Results<f32>, name: &str) -> &'a mut Tensor<f32> {
    match results.outputs.get_mut(name) {
        Some(tensor) => tensor,
        None => results.kept.get_mut(name).unwrap(),
    }
}

/// Whether tensors are equal bit for bit.
fn same(a: &Outputs<f32>, b: &Outputs<f32>) -> bool {
    let bits = |t: &Tensor<f32>| t.data.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    a.iter().zip(b).all(|((_, a), (_, b))| bits(a) == bits(b))
}

/// Cases of several families and strategies.
fn cases() -> Vec<Case> {
    let case = |name: &str, strategy: &str, mesh: &str, mode: Mode, zero: Zero| {
        let mut config = config(name);
        config["torch_dtype"] = json!("float32");
        let workload = Workload { mode, ..Workload::prefill(4, 16) };
        let options = ShardOptions { zero, ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap()) };
        let steps = if mode == Mode::Train { 2 } else { 1 };
        // Rounds what a change stores in bf16.
        Case::of((&config, &workload, &options), (Storage::AsTyped, steps, 3)).unwrap()
    };
    let all = [
        ("llama-gqa", "ring", "ring=2", Mode::Train, Zero::Off),
        ("gpt2", "ulysses", "ulysses=2", Mode::Train, Zero::Off),
        ("qwen2", "data-parallel", "dp=2", Mode::Train, Zero::Parameters),
        ("gemma2", "megatron-tp-sp", "tp=2", Mode::Train, Zero::Off),
        ("olmo2", "megatron-tp", "tp=2", Mode::Prefill, Zero::Off),
        ("gpt-neox", "usp", "ring=2,ulysses=2", Mode::Train, Zero::Off),
        ("bert-masked-lm", "megatron-tp", "tp=2", Mode::Train, Zero::Off),
        ("mistral-swa", "megatron-cp-allgather", "cp=2", Mode::Train, Zero::Off),
        ("qwen3-head-dim", "data-parallel+ulysses", "dp=2,ulysses=2", Mode::Train, Zero::Gradients),
        ("phi3-fused", "ring", "ring=4", Mode::Prefill, Zero::Off),
    ];
    all.into_iter().map(|(n, s, m, mode, zero)| case(n, s, m, mode, zero)).collect()
}

#[test]
fn wrong_results_fail() {
    let cases: Vec<_> = cases().into_par_iter().map(|case| (Ran::of(&case), case)).collect();
    let fates_of = |(k, (what, change)): (usize, &(&'static str, Change))| {
        let ([mut failed, mut errors, mut unchanged], mut passed) = ([0; 3], Vec::new());
        for c in 0..cases.len() {
            // By default each change is made to one case.
            if !tier::is_full() && failed > 0 {
                continue;
            }
            let (ran, case) = &cases[(c + k) % cases.len()];
            match fate(case, ran, change, &mut Choices::from_seed(k as u64)) {
                Fate::Failed => failed += 1,
                Fate::Error => errors += 1,
                Fate::Nothing | Fate::Same => unchanged += 1,
                Fate::Passed(why) => passed.push(format!("{what}: {}: {why}", case.title)),
            }
        }
        (*what, [failed, errors, unchanged], passed)
    };
    let (mut passed, mut fates) = (Vec::new(), BTreeMap::new());
    for (what, fate, called_right) in CHANGES.par_iter().enumerate().map(fates_of).collect::<Vec<_>>() {
        passed.extend(called_right);
        fates.insert(what, fate);
    }
    let [failed, errors] = [0, 1].map(|i| fates.values().map(|fates| fates[i]).sum::<u64>());
    writeln!(std::io::stderr(), "{failed} changes failed, {errors} ended with an error: {fates:?}").unwrap();
    assert!(passed.is_empty(), "{} called right:\n{}", passed.len(), passed.join("\n"));
    for (what, [failed, ..]) in fates {
        assert!(failed > 0, "`{what}` never failed");
    }
}
