//! Wrong results fail: programs, data, messages and results with one thing changed.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Mutex;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Node, Value};
use ithaca_ir::ops::{Binary, Gradient, Optimizer, Unary, state};
use ithaca_ir::schedule::Stream;
use ithaca_ir::verify::verify;
use ithaca_ir::{Arena, DType, FuncId, Mask, Module, Op, Rank, ValueId};
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

use super::{Case, config};
use crate::fuzz::Choices;
use crate::tier;

/// A way to change something; which of the places where it can is a choice.
enum Change {
    /// An operation, where it gives whether it can.
    Op(fn(&mut Op) -> bool),
    /// The result of an operation goes through others, of which each keeps the layout.
    After(fn(&Op) -> bool, fn(DType) -> Vec<Op>),
    /// An operation is left out: its first operand is its result.
    Skip(fn(&Op) -> bool),
    /// A tensor that the ranks read, by name.
    Read(fn(&str) -> bool, fn(&mut Vec<f64>)),
    /// Two tensors that the ranks read, by parts of their names.
    Swapped(&'static str, &'static str),
    /// The blocks that one rank sends: the block before to the same rank, if any, and the block.
    Sent(fn(Option<&Vec<f32>>, &mut Vec<f32>)),
    /// A tensor of the results.
    Result(fn(&str) -> bool, fn(&mut Vec<f32>)),
    /// A tensor of the results that stays as it was before the step.
    Kept(fn(&str) -> bool),
}

fn any(_: &str) -> bool {
    true
}

fn is_weight(name: &str) -> bool {
    name.ends_with("weight") && ![state::GRADIENT, state::OPTIMIZER].iter().any(|p| name.starts_with(p))
}

fn is_gradient(name: &str) -> bool {
    name.starts_with(state::GRADIENT)
}

fn is_product(op: &Op) -> bool {
    matches!(op, Op::Einsum)
}

fn is_attention(op: &Op) -> bool {
    matches!(op, Op::Attention(_))
}

fn is_add(op: &Op) -> bool {
    matches!(op, Op::Binary(Binary::Add))
}

fn scaled(_: DType) -> Vec<Op> {
    vec![Op::Scale { factor: 1.01 }]
}

fn another(f: Unary) -> Unary {
    if f == Unary::Gelu { Unary::GeluTanh } else { Unary::Gelu }
}

fn through_bf16(dtype: DType) -> Vec<Op> {
    vec![Op::Cast { to: DType::BF16 }, Op::Cast { to: dtype }]
}

/// Changes operations of a pattern.
macro_rules! edit {
    ($pattern:pat $(if $guard:expr)? => $edit:expr) => {
        Change::Op(|op| match op {
            $pattern $(if $guard)? => {
                $edit;
                true
            }
            _ => false,
        })
    };
}

/// Every way, with its name.
const CHANGES: &[(&str, Change)] = &[
    ("scores 1.01 times as large", edit!(Op::Attention(a) => a.scale *= 1.01)),
    ("scores 1.01 times as large backwards", edit!(Op::AttentionBackward(a) => a.scale *= 1.01)),
    (
        "a mask shifted by one",
        edit!(Op::Attention(a) if a.mask == Mask::Causal => a.mask = Mask::Window { left: None, right: Some(1) }),
    ),
    (
        "a mask without the token itself's last neighbour",
        edit!(Op::Attention(a) if a.mask == Mask::Causal => a.mask = Mask::Window { left: Some(6), right: Some(0) }),
    ),
    ("no mask", edit!(Op::Attention(a) if a.mask != Mask::Full => a.mask = Mask::Full)),
    ("another epsilon of a norm", edit!(Op::RmsNorm { eps, .. } | Op::LayerNorm { eps, .. } => *eps += 1e-2)),
    (
        "another epsilon of a norm backwards",
        edit!(Op::Gradient(Gradient::RmsNorm { eps, .. } | Gradient::LayerNorm { eps, .. }) => *eps += 1e-2),
    ),
    ("another base of rotary angles", edit!(Op::Rotary(rotary) => rotary.theta *= 1.1)),
    ("another activation", edit!(Op::Unary(f) => *f = another(*f))),
    ("the slope of another activation", edit!(Op::Gradient(Gradient::Unary(f)) => *f = another(*f))),
    ("a difference for a sum", edit!(Op::Binary(f @ Binary::Add) => *f = Binary::Sub)),
    ("a sum for a product", edit!(Op::Binary(f @ Binary::Mul) => *f = Binary::Add)),
    ("a factor 1.01 times as large", edit!(Op::Scale { factor } => *factor *= 1.01)),
    (
        "a learning rate 1.01 times as large",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.lr *= 1.01),
    ),
    (
        "another decay of the first moment",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.beta1 = 0.91),
    ),
    (
        "another decay of the second moment",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.beta2 = 0.99),
    ),
    ("another epsilon of the optimizer", edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.eps = 1e-3)),
    (
        "twice the decay of weights",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.weight_decay *= 2.0),
    ),
    (
        "an optimizer that goes the other way",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.lr = -adamw.lr),
    ),
    ("a product 1.01 times as large", Change::After(is_product, scaled)),
    ("an attention 1.01 times as large", Change::After(is_attention, scaled)),
    ("a product rounded to bf16", Change::After(is_product, through_bf16)),
    ("an attention rounded to bf16", Change::After(is_attention, through_bf16)),
    ("a sum rounded to bf16", Change::After(is_add, through_bf16)),
    ("a summand left out", Change::Skip(is_add)),
    ("a norm left out", Change::Skip(|op| matches!(op, Op::RmsNorm { .. } | Op::LayerNorm { .. }))),
    ("a rotation left out", Change::Skip(|op| matches!(op, Op::Rotary(_)))),
    ("an activation left out", Change::Skip(|op| matches!(op, Op::Unary(_)))),
    ("labels shifted by one", Change::Read(|name| name == "labels", |data| data.rotate_right(1))),
    (
        "one label of another token",
        Change::Read(
            |name| name == "labels",
            |data| {
                let last = data.len() - 2;
                data[last] = if data[last] > 0.0 { 0.0 } else { 1.0 };
            },
        ),
    ),
    (
        "another token",
        Change::Read(
            |name| name == "input_ids",
            |data| {
                data[3] = if data[3] > 0.0 { 0.0 } else { 1.0 };
            },
        ),
    ),
    ("tokens shifted by one", Change::Read(|name| name == "input_ids", |data| data.rotate_left(1))),
    (
        // All of it would be nothing where a norm follows.
        "every second element of a weight 1.01 times as large",
        Change::Read(is_weight, |data| data.iter_mut().step_by(2).for_each(|x| *x *= 1.01)),
    ),
    (
        "a weight with a row of zeros",
        Change::Read(is_weight, |data| {
            let n = (data.len() / 8).max(1);
            data[..n].fill(0.0);
        }),
    ),
    (
        "a weight in bf16",
        Change::Read(is_weight, |data| {
            Storage::AsTyped.keep(DType::BF16, data);
        }),
    ),
    ("weights of two layers swapped", Change::Swapped(".0.", ".1.")),
    ("a part of a rank missing", Change::Sent(|_, block| block.fill(0.0))),
    (
        "a stale block",
        Change::Sent(|before, block| {
            if let Some(before) = before.filter(|before| before.len() == block.len()) {
                block.clone_from(before);
            }
        }),
    ),
    (
        "a block in bf16",
        Change::Sent(|_, block| {
            Storage::AsTyped.keep(DType::BF16, block);
        }),
    ),
    ("a block 1.01 times as large", Change::Sent(|_, block| block.iter_mut().for_each(|x| *x *= 1.01))),
    ("a block twice", Change::Sent(|_, block| block.iter_mut().for_each(|x| *x += *x))),
    ("a block in another order", Change::Sent(|_, block| block.reverse())),
    (
        "one element of a block lost",
        Change::Sent(|_, block| {
            if let Some(x) = block.iter_mut().max_by(|a, b| a.abs().total_cmp(&b.abs())) {
                *x = 0.0;
            }
        }),
    ),
    ("a result 1.001 times as large", Change::Result(any, |data| data.iter_mut().for_each(|x| *x *= 1.001))),
    (
        "one element a thousandth off",
        Change::Result(any, |data| {
            let largest = data.iter().fold(0f32, |a, x| a.max(x.abs()));
            data[0] += 1e-3 * largest;
        }),
    ),
    (
        "a quarter of a result zero",
        Change::Result(any, |data| {
            let n = data.len().div_ceil(4);
            data[..n].fill(0.0);
        }),
    ),
    ("the other sign", Change::Result(any, |data| data.iter_mut().for_each(|x| *x = -*x))),
    (
        "a result in bf16",
        Change::Result(any, |data| {
            Storage::AsTyped.keep(DType::BF16, data);
        }),
    ),
    ("not a number", Change::Result(any, |data| data[0] = f32::NAN)),
    ("a gradient twice", Change::Result(is_gradient, |data| data.iter_mut().for_each(|x| *x += *x))),
    ("a weight that is not updated", Change::Kept(is_weight)),
    ("a moment that is not updated", Change::Kept(|name| name.starts_with(state::FIRST_MOMENT))),
    ("a step that is not counted", Change::Kept(|name| name == state::STEP)),
];

/// A node of a module, chosen among those that are wanted.
fn chosen(
    module: &Module,
    choices: &mut Choices,
    wanted: impl Fn(&Function, &Node) -> bool,
) -> Option<(FuncId, usize)> {
    let all = module.functions.iter().flat_map(|(id, f)| {
        let wanted = &wanted;
        f.nodes.iter().enumerate().filter(move |(_, node)| wanted(f, node)).map(move |(i, _)| (id, i))
    });
    let all: Vec<_> = all.collect();
    (!all.is_empty()).then(|| all[choices.below(all.len())])
}

/// Replaces the uses of a value after a node.
fn replace(function: &mut Function, from: usize, old: ValueId, new: ValueId) {
    let nodes = function.nodes.iter_mut().skip(from).flat_map(|node| &mut node.operands);
    let outputs = function.outputs.iter_mut().map(|output| &mut output.value);
    nodes.chain(outputs).filter(|value| **value == old).for_each(|value| *value = new);
}

/// The changed program; nothing where it cannot be changed so.
fn program(module: &Module, change: &Change, choices: &mut Choices) -> Option<Module> {
    let mut module = module.clone();
    let is_float =
        |f: &Function, node: &Node| node.results.first().is_some_and(|&v| f.ty(v).dtype == DType::F32);
    match change {
        Change::Op(change) => {
            let (f, i) = chosen(&module, choices, |_, node| change(&mut node.op.clone()))?;
            change(&mut module.functions[f].nodes[i].op);
        }
        Change::After(wanted, ops) => {
            let (f, i) = chosen(&module, choices, |f, node| wanted(&node.op) && is_float(f, node))?;
            let function = &mut module.functions[f];
            let result = function.nodes[i].results[0];
            let mut ty = function.ty(result).clone();
            // Values are numbered in order of their definition.
            let first = function.nodes[i].results.iter().map(|v| v.index()).max().unwrap() + 1;
            let ops = ops(ty.dtype);
            let moved = |v: ValueId| if v.index() < first { v } else { ValueId::new(v.index() + ops.len()) };
            let mut values: Vec<Value> = function.values.values().cloned().collect();
            for node in &mut function.nodes {
                node.operands.iter_mut().chain(&mut node.results).for_each(|v| *v = moved(*v));
            }
            function.outputs.iter_mut().for_each(|output| output.value = moved(output.value));
            let mut last = result;
            let mut nodes = Vec::new();
            for (k, op) in ops.into_iter().enumerate() {
                if let Op::Cast { to } = op {
                    ty.dtype = to;
                }
                let (span, new) = (function.span, ValueId::new(first + k));
                values.insert(first + k, Value { ty: ty.clone().into(), name: None, span });
                let (operands, results) = ([last].into_iter().collect(), [new].into_iter().collect());
                nodes.push(Node { op, operands, results, span });
                last = new;
            }
            let mut arena = Arena::new();
            for value in values {
                arena.push(value);
            }
            function.values = arena;
            replace(function, i + 1, result, last);
            function.nodes.splice(i + 1..i + 1, nodes);
        }
        Change::Skip(wanted) => {
            let (f, i) = chosen(&module, choices, |f, node| {
                wanted(&node.op) && is_float(f, node) && f.ty(node.operands[0]) == f.ty(node.results[0])
            })?;
            let function = &mut module.functions[f];
            let Node { operands, results, .. } = function.nodes[i].clone();
            replace(function, i + 1, results[0], operands[0]);
        }
        _ => return None,
    }
    verify(&module).is_ok().then_some(module)
}

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
